"""Train sharded models in a process of one rank, plain and attached; prints what differs.

Run by `test_traps.py` in a process of its own, since a process group is a global.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tests.torch.models import Gated, Stack, features
from tests.torch.training import PLANS, attach_here, differences, seeded, train, train_attached


def fully_sharded(mesh: DeviceMesh) -> nn.Module:
    """Shard each block and the root: parameters come and go around each block."""
    model = Stack(Gated)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sharded_inside(mesh: DeviceMesh) -> nn.Module:
    """Shard two parts of each block on their own: their parameters are freed inside the block."""
    model = Stack(Gated)
    for block in model.blocks:
        fully_shard(block.get_submodule("gate"), mesh=mesh)
        fully_shard(block.get_submodule("down"), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
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


class Distributed(nn.Module):
    """Runs a stack on DTensors only."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.stack = Stack(Gated)
        self.mesh = mesh
        distribute_module(self.stack, mesh)

    def forward(self, h_BTD: Tensor) -> Tensor:
        return self.stack(distribute_tensor(h_BTD, self.mesh, [Shard(0)])).full_tensor()


BUILDERS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "fully sharded": fully_sharded,
    "sharded inside": sharded_inside,
    "tensor parallel": tensor_parallel,
    "distributed": Distributed,
}


def step(model: nn.Module, index: int) -> Tensor:
    """Train towards small outputs."""
    del index
    loss = model(features()).square().mean()
    loss.backward()
    return loss


def main() -> None:
    """Print one JSON line for each model and plan."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    for name, build in BUILDERS.items():
        wanted = train(seeded(lambda build=build: build(mesh)), step)
        for plan in PLANS:
            model = seeded(lambda build=build: build(mesh))
            with tempfile.TemporaryDirectory() as folder, attach_here(model, plan, folder) as tide:
                try:
                    trace = train_attached(tide, model, step)
                    result: dict[str, object] = {"different": differences(trace, wanted)}
                except RuntimeError as error:
                    result = {"error": str(error)}
                counts = tide.statistics()
                result |= {
                    "model": name,
                    "plan": plan,
                    "planned_bytes": 0 if tide.plan is None else tide.plan.disk_bytes,
                    "moved_out_bytes": counts.moved_out_bytes,
                    "moved_in_bytes": counts.moved_in_bytes,
                    "num_recomputed_ops": counts.num_recomputed_ops,
                    "not_understood": [reason for reason, _ in counts.num_kept_not_understood],
                }
            print(json.dumps(result), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.exit(0)
