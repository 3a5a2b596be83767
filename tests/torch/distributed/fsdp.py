"""Train models that `fully_shard` shards: one rank of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from ebbtide.torch import attach
from tests.torch.distributed.ranks import SOME_PLANS, Case, rank_of, run_case, say
from tests.torch.models import Gated, Stack, features, llama, tokens
from tests.torch.training import NUM_STEPS, attach_here, seeded


def step(model: nn.Module, index: int) -> Tensor:
    """Train towards small outputs, each rank on features of its own."""
    torch.manual_seed(1000 * index + distributed.get_rank())
    loss = model(features()).float().square().mean()
    loss.backward()
    return loss


def accumulating_step(model: nn.Module, index: int) -> Tensor:
    """Two micro-batches without exchanging gradients, and a third one with."""
    torch.manual_seed(1000 * index + distributed.get_rank())
    sharded: Any = model
    for is_last in (False, False, True):
        sharded.set_requires_gradient_sync(is_last)
        loss = model(features()).square().mean()
        loss.backward()
    return loss


def language_step(model: nn.Module, index: int) -> Tensor:
    """Train a language model, each rank on tokens of its own."""
    torch.manual_seed(1000 * index + distributed.get_rank())
    ids = tokens()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


def sharded(
    mesh: DeviceMesh, make_model: Callable[[], nn.Module] = lambda: Stack(Gated), **options: Any
) -> Callable[[], nn.Module]:
    """Return what builds a model of which each block and the root is sharded."""

    def build() -> nn.Module:
        model = make_model()
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        return model

    return build


def sharded_inside(mesh: DeviceMesh) -> nn.Module:
    """Shard two parts of each block on their own: their parameters are freed inside the block."""
    model = Stack(Gated)
    for block in model.blocks:
        fully_shard(block.get_submodule("gate"), mesh=mesh)
        fully_shard(block.get_submodule("down"), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated modules of a stack or of a language model."""
    path = "blocks" if isinstance(model, Stack) else "model.layers"
    return list(model.get_submodule(path).children())


class Freed(nn.Module):
    """A sharded stack that counts which gathered parameters are still there after its forward."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.stack = sharded(mesh)()
        self.gathered: list[torch.UntypedStorage] = []
        for block in blocks_of(self.stack):
            block.get_submodule("gate").register_forward_hook(self._note)

    def _note(self, module: nn.Module, *_: Any) -> None:
        weight = module.get_parameter("weight")
        assert weight.untyped_storage().nbytes() > 0
        self.gathered.append(weight.untyped_storage())

    def forward(self, h_BTD: Tensor) -> Tensor:
        self.gathered.clear()
        return self.stack(h_BTD)


def say_what_is_freed(mesh: DeviceMesh) -> None:
    """Say how many bytes of gathered weights are left between forward and backward."""
    for plan in ("recompute", "balanced"):
        model = seeded(lambda: Freed(mesh))
        with tempfile.TemporaryDirectory() as folder, attach_here(model, plan, folder):
            left_bytes: list[list[int]] = []
            for _ in range(NUM_STEPS):
                assert isinstance(model, Freed)
                loss = model(features()).square().mean()
                left_bytes.append([storage.nbytes() for storage in model.gathered])
                loss.backward()
        say(case="freed", plan=plan, left_bytes=left_bytes)


def say_why_it_is_kept(mesh: DeviceMesh) -> None:
    """Say why something of blocks with groups inside stays on the device."""
    model = seeded(lambda: sharded_inside(mesh))
    with attach(model, "recompute") as tide:
        for index in range(2):
            step(model, index)
        reasons = [reason for reason, _ in tide.statistics().num_kept_not_understood]
    say(case="why it is kept", plan="recompute", reasons=reasons)


def main() -> None:
    """Run all cases."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    in_host_memory = CPUOffloadPolicy(pin_memory=False)
    cases = (
        Case(name="blocks", build=sharded(mesh), step=step, has_budget=True),
        Case(name="bf16", build=sharded(mesh, mp_policy=bf16), step=step, plans=SOME_PLANS),
        Case(
            name="not resharded",
            build=sharded(mesh, reshard_after_forward=False),
            step=step,
            plans=SOME_PLANS,
        ),
        Case(
            name="offloaded parameters",
            build=sharded(mesh, offload_policy=in_host_memory),
            step=step,
            plans=SOME_PLANS,
        ),
        Case(
            name="accumulation",
            build=sharded(mesh),
            step=accumulating_step,
            plans=SOME_PLANS,
            has_budget=True,
        ),
        Case(name="groups inside", build=lambda: sharded_inside(mesh), step=step, plans=SOME_PLANS),
        Case(
            name="llama in bf16",
            build=sharded(mesh, llama, mp_policy=bf16),
            step=language_step,
            plans=("balanced",),
            has_budget=True,
        ),
    )
    for case in cases:
        run_case(case)
    say_what_is_freed(mesh)
    say_why_it_is_kept(mesh)


if __name__ == "__main__":
    with rank_of():
        main()
