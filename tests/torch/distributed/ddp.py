"""Train replicas with `DistributedDataParallel`: one rank of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.torch.distributed.ranks import SOME_PLANS, Case, rank_of, run_case
from tests.torch.models import WIDTH, Gated, Stack, features


def step(model: nn.Module, index: int) -> Tensor:
    """Train towards small outputs, each rank on features of its own."""
    torch.manual_seed(1000 * index + distributed.get_rank())
    loss = model(features()).square().mean()
    loss.backward()
    return loss


def accumulating_step(model: nn.Module, index: int) -> Tensor:
    """Two micro-batches without exchanging gradients, and a third one with."""
    torch.manual_seed(1000 * index + distributed.get_rank())
    wrapper: Any = model
    with wrapper.no_sync():
        for _ in range(2):
            model(features()).square().mean().backward()
    loss = model(features()).square().mean()
    loss.backward()
    return loss


class Skipping(nn.Module):
    """A stack beside a layer that rank 0 alone uses, in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(Gated)
        self.aside = nn.Linear(WIDTH, WIDTH)
        self.num_forwards = 0

    def forward(self, h_BTD: Tensor) -> Tensor:
        h_BTD = self.stack(h_BTD)
        self.num_forwards += 1
        is_used = self.num_forwards % 2 == 1 and distributed.get_rank() == 0
        return self.aside(h_BTD) if is_used else h_BTD


def replicated(**options: Any) -> Any:
    """Return what builds a replica with these options of DDP."""
    return lambda: DistributedDataParallel(Stack(Gated), **options)


def module_of(model: nn.Module) -> tuple[nn.Module]:
    """Return what a wrapper wraps."""
    return (model.get_submodule("module"),)


CASES = (
    Case(name="plain", build=replicated(), step=step, inner=module_of, has_budget=True),
    Case(
        name="gradients are views of buckets",
        build=replicated(gradient_as_bucket_view=True),
        step=step,
        inner=module_of,
        plans=SOME_PLANS,
    ),
    Case(
        name="static graph and small buckets",
        build=replicated(static_graph=True, bucket_cap_mb=0.02),
        step=step,
        inner=module_of,
        plans=SOME_PLANS,
    ),
    Case(
        name="unused parameters",
        build=lambda: DistributedDataParallel(Skipping(), find_unused_parameters=True),
        step=step,
        inner=module_of,
        plans=SOME_PLANS,
    ),
    Case(
        name="accumulation",
        build=replicated(),
        step=accumulating_step,
        inner=module_of,
        plans=SOME_PLANS,
        has_budget=True,
    ),
    Case(
        name="attached to the wrapper",
        build=replicated(),
        step=step,
        plans=SOME_PLANS,
        has_budget=True,
    ),
)


if __name__ == "__main__":
    with rank_of():
        for case in CASES:
            run_case(case)
