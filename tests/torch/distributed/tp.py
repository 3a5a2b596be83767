"""Train models whose tensors are split over the ranks as DTensors: one rank of it."""

# B batch, T tokens, D model width

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ebbtide.torch import attach
from tests.torch.distributed.ranks import SOME_PLANS, Case, rank_of, run_case, say
from tests.torch.models import NUM_BLOCKS, WIDTH, Gated, Stack, features, llama
from tests.torch.training import language_step, seeded


def step(model: nn.Module, index: int) -> Tensor:
    """Train towards small outputs, all ranks on the same features."""
    del index
    loss = model(features()).square().mean()
    loss.backward()
    return loss


def split(mesh: DeviceMesh) -> nn.Module:
    """Split the products: DTensors inside the blocks, plain tensors between them."""
    model = Stack(Gated)
    for block in model.blocks:
        styles: dict[str, ParallelStyle] = {
            "gate": ColwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, styles)
    return model


def split_and_sharded(mesh: DeviceMesh) -> nn.Module:
    """Split the products, and gather each block's parameters around it."""
    model = split(mesh["tensor"])
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def split_llama(mesh: DeviceMesh) -> nn.Module:
    """Split a language model as its users do."""
    model = llama()
    for block in model.get_submodule("model.layers").children():
        styles: dict[str, ParallelStyle] = {
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(block, mesh, styles)
    return model


class SplitSequence(nn.Module):
    """Splits the products, and the sequence between them: all is a DTensor between two blocks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.stack = Stack(Gated)
        for block in self.stack.blocks:
            styles: dict[str, ParallelStyle] = {
                "norm": SequenceParallel(),
                "gate": ColwiseParallel(input_layouts=Shard(1)),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
            parallelize_module(block, mesh, styles)
        split_input = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False
        )
        parallelize_module(self.stack, mesh, split_input)
        self.mesh = mesh

    def forward(self, h_BTD: Tensor) -> Tensor:
        return self.stack(distribute_tensor(h_BTD, self.mesh, [Shard(1)])).full_tensor()


class Shifted(nn.Module):
    """Adds a table first, so that no operator saves what the block is given."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = Gated()
        self.register_buffer("table_D", torch.linspace(0, 1, WIDTH))

    def forward(self, h_BTD: Tensor) -> Tensor:
        return self.gated(h_BTD + self.get_buffer("table_D"))


class Written(nn.Module):
    """Blocks of DTensors alone, each added in place to the stream that it is given."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shifted() for _ in range(NUM_BLOCKS))
        self.mesh = mesh
        distribute_module(self, mesh)

    def forward(self, h_BTD: Tensor) -> Tensor:
        h_BTD = distribute_tensor(h_BTD, self.mesh, [Shard(0)]).clone()
        for block in self.blocks:
            h_BTD += block(h_BTD)
        assert isinstance(h_BTD, DTensor)
        return h_BTD.full_tensor()


def say_what_a_write_does(mesh: DeviceMesh) -> None:
    """Write to a DTensor that autograd saved, before backward."""
    for plan in ("plain", "recompute"):
        model = seeded(lambda: Stack(Gated))
        distribute_module(model, mesh)
        given_BTD = distribute_tensor(features(), mesh, [Shard(0)])
        tide = None if plan == "plain" else attach(model, plan)
        message = ""
        for _ in range(2):
            h_BTD = given_BTD.clone()
            loss = model(h_BTD).square().mean()
            h_BTD.add_(1.0)
            try:
                loss.backward()
            except RuntimeError as error:
                message = str(error)
        if tide is not None:
            tide.close()
        say(case="written between forward and backward", plan=plan, message=message)


def main() -> None:
    """Run all cases."""
    num_ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,))
    mesh_2d = init_device_mesh("cpu", (1, num_ranks), mesh_dim_names=("data", "tensor"))
    cases = (
        Case(name="products", build=lambda: split(mesh), step=step, has_budget=True),
        Case(name="sequence", build=lambda: SplitSequence(mesh), step=step, has_budget=True),
        Case(
            name="products of gathered parameters",
            build=lambda: split_and_sharded(mesh_2d),
            step=step,
            plans=SOME_PLANS,
        ),
        Case(name="written in place", build=lambda: Written(mesh), step=step, plans=SOME_PLANS),
        Case(
            name="llama", build=lambda: split_llama(mesh), step=language_step, plans=("balanced",)
        ),
    )
    for case in cases:
        run_case(case)
    say_what_a_write_does(mesh)


if __name__ == "__main__":
    with rank_of():
        main()
