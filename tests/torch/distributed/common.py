"""Attach with one plan for all ranks, and with what can go wrong in that: one rank of it."""

# B batch, T tokens, D model width

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ebbtide.errors import EbbtideError
from ebbtide.machine import Machine
from ebbtide.torch import attach
from tests.torch.distributed.ranks import (
    MACHINE,
    NUM_BUDGET_STEPS,
    Case,
    rank_of,
    say,
    tight_budget_bytes,
    train_here,
)
from tests.torch.models import BATCH, NUM_TOKENS, WIDTH, Gated, Stack, features
from tests.torch.training import Step, differences, seeded

SLOW = replace(MACHINE, disk_write_bytes_per_s=10_000, disk_read_bytes_per_s=10_000)
DISK_BYTES = 200 * 2**20


def step(model: nn.Module, index: int) -> Tensor:
    """Train towards small outputs, each rank on features of its own."""
    torch.manual_seed(1000 * index + distributed.get_rank())
    loss = model(features()).square().mean()
    loss.backward()
    return loss


def uneven_step(model: nn.Module, index: int) -> Tensor:
    """As `step`, on twice as many tokens in rank 1."""
    torch.manual_seed(1000 * index + distributed.get_rank())
    h_BTD = features(BATCH, (1 + distributed.get_rank()) * NUM_TOKENS, WIDTH)
    loss = model(h_BTD).square().mean()
    loss.backward()
    return loss


def replica() -> nn.Module:
    """Return a replica of a stack."""
    return DistributedDataParallel(Stack(Gated))


def train(
    name: str,
    build: Callable[[], nn.Module],
    train_step: Step,
    machine: Machine = MACHINE,
    **options: Any,
) -> None:
    """Train with one plan for all ranks on a given machine, and say what came of it."""
    budgets: Any = import_module("ebbtide.torch.budgets")
    budgets.probe_machine = lambda *_, **__: machine
    wanted, wanted_collectives = train_here(seeded(build), train_step, NUM_BUDGET_STEPS)
    model = seeded(build)
    with tempfile.TemporaryDirectory() as folder:
        options = {"disk": f"{folder}:{DISK_BYTES}", "min_bytes": 1024, **options}
        with attach(model, **options) as tide:
            try:
                trace, collectives = train_here(model, train_step, NUM_BUDGET_STEPS, [tide])
            except EbbtideError as error:
                say(case=name, error=type(error).__name__, message=str(error))
                return
            plan, counts = tide.plan, tide.statistics()
            assert plan is not None and tide.machine is not None and tide.workload is not None
            runtime = tide.runtime
            tiers = None if runtime is None else runtime.tiers
            disk = None if tiers is None else tiers.disk
            say(
                case=name,
                store_cap_bytes=0 if disk is None else disk.statistics().cap_bytes,
                different=differences(trace, wanted),
                collectives=collectives,
                wanted_collectives=wanted_collectives,
                plan=plan.to_json(),
                workload=tide.workload.to_json(),
                peak_bytes=plan.peak_bytes,
                device_bytes=tide.machine.device_bytes,
                disk_bytes=tide.machine.disk_bytes,
                planned_bytes=plan.disk_bytes,
                moved_out_bytes=counts.moved_out_bytes,
                moved_in_bytes=counts.moved_in_bytes,
                num_recomputed_ops=counts.num_recomputed_ops,
            )


def main() -> None:
    """Run all cases."""
    rank, world = distributed.get_rank(), distributed.group.WORLD
    budget = tight_budget_bytes(Case(name="", build=replica, step=step))
    # Ranks are asked for the same; what they measured of the times differs.
    all_budgets: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(all_budgets, budget)
    budget = max(all_budgets)
    train("equal", replica, step, budget=budget, ranks=world)
    slow = SLOW if rank == 1 else MACHINE
    train("a slow rank", replica, step, slow, budget=budget, ranks=world)
    train("a slow rank, each for itself", replica, step, slow, budget=budget)
    small = replace(MACHINE, device_bytes=2 * budget) if rank == 1 else MACHINE
    train("a small rank", replica, step, small, budget="50%", ranks=world)
    train("uneven batches", replica, uneven_step, budget=budget * 9 // 8, ranks=world)
    train("nothing fits", replica, step, budget=1, ranks=world)
    train("other arguments", lambda: Stack(Gated), step, budget=budget + rank, ranks=world)
    train("other blocks", lambda: Stack(Gated, 3 + rank), step, budget=budget, ranks=world)
    ranks: Any = import_module("ebbtide.torch.ranks")
    ranks.TIMEOUT_S = 2
    group = world if rank == 0 else None
    train("an absent rank", lambda: Stack(Gated), step, budget=budget, ranks=group)


if __name__ == "__main__":
    with rank_of():
        main()
