"""Run training cases in every rank of a process group, plain and attached, and say what differs.

A program of this folder is one rank. It trains each of its models without ebbtide and then under
each plan, and prints one JSON line for each of them. `run_ranks` starts one process a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from ebbtide.machine import Machine
from ebbtide.plan import Decision
from ebbtide.planner.solve import plan_for_budget
from ebbtide.torch import Tide, attach
from tests.torch.training import (
    NUM_STEPS,
    PLANS,
    Step,
    Trace,
    differences,
    learn_at_once,
    run_step,
    seeded,
    sgd,
)

ROOT = Path(__file__).parents[3]

SOME_PLANS = ("recompute", "balanced")
"""For what is a variant of another case: one that makes all again, one that does all there is."""

COLLECTIVE_TIMEOUT_S = 240
"""A collective that some rank does not come to fails after this time."""

RANKS_TIMEOUT_S = 900
"""All processes together; they take a tenth of it on two idle cores."""

NUM_TENSORS = 25
"""Least number of gradients and other tensors that a step leaves, of three small blocks."""

NUM_BUDGET_STEPS = 5
"""One observes, one measures, one checks the plan, one runs it, one follows the scripts."""

MACHINE = Machine(
    name="a test",
    device_bytes=2**40,
    host_bytes=0,
    out_bytes_per_s=0,
    in_bytes_per_s=0,
    both_bytes_per_s=0,
    disk_bytes=2**30,
    disk_write_bytes_per_s=100_000_000_000,
    disk_read_bytes_per_s=100_000_000_000,
)
"""What budgets plan for: no test depends on how fast the disk at hand is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model, and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    """Makes the model that is trained, with weights from the seed that is set."""
    step: Step
    """Runs forward and backward and returns the loss."""
    inner: Callable[[nn.Module], tuple[nn.Module, ...]] = lambda model: (model,)
    """Gives what to attach to, each on its own."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of `attach`."""
    plans: Sequence[str] = PLANS
    has_budget: bool = False
    """Also train under a budget that not everything fits."""

    @property
    def all_plans(self) -> tuple[str, ...]:
        """The plans by name, and the budget as one more."""
        return (*self.plans, *(["budget"] if self.has_budget else []))


def num_collectives() -> int:
    """Return how many collectives this rank has started in the default group."""
    group: Any = distributed.group.WORLD
    return group._get_sequence_number_for_group()


def train_here(
    model: nn.Module, step: Step, num_steps: int, tides: Sequence[Tide] = ()
) -> tuple[Trace, list[int]]:
    """Train for some steps; returns what they left, and the collectives of each.

    Afterwards the statistics are those of the last step alone.
    """
    trace, optimizer, collectives = Trace(), sgd(model), list[int]()
    for index in range(num_steps):
        if index == num_steps - 1:
            for tide in tides:
                tide.reset_statistics()
        before = num_collectives()
        run_step(model, step, index, trace, optimizer)
        collectives.append(num_collectives() - before)
    return trace, collectives


def kept_bytes(tide: Tide) -> int:
    """Return what the plan leaves on the device of each forward."""
    plan, workload = tide.plan, tide.workload
    assert plan is not None and workload is not None
    activations = [a for block in workload.blocks for a in block.activations]
    return sum(a.num_bytes for a in activations if plan.decision(a.name) is Decision.KEEP)


def tight_budget_bytes(case: Case) -> int:
    """Return a budget a third of the way from the smallest to where everything fits."""
    model = seeded(case.build)
    (inner,) = case.inner(model)
    with attach(inner, budget=MACHINE.device_bytes, **case.options) as tide:
        train_here(model, case.step, NUM_BUDGET_STEPS)
        assert tide.workload is not None and tide.plan is not None
        nothing = plan_for_budget(tide.workload, MACHINE, budget_bytes=0, min_bytes=1024)
        smallest = nothing.smallest_budget_bytes
        return smallest + (tide.plan.peak_bytes - smallest) // 3


def run_case(case: Case) -> None:
    """Print a line for each plan of a case."""
    most_steps = NUM_BUDGET_STEPS if case.has_budget else NUM_STEPS
    wanted, wanted_collectives = train_here(seeded(case.build), case.step, most_steps)
    for plan in case.all_plans:
        num_steps = NUM_BUDGET_STEPS if plan == "budget" else NUM_STEPS
        model = seeded(case.build)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            options: dict[str, Any] = {"disk": f"{folder}:200MiB", "min_bytes": 1024}
            options |= case.options
            if plan == "budget":
                options["budget"] = tight_budget_bytes(case)
            else:
                options["plan"] = plan
            stack.enter_context(learn_at_once())
            tides = [stack.enter_context(attach(m, **options)) for m in case.inner(model)]
            trace, collectives = train_here(model, case.step, num_steps, tides)
            counts = [tide.statistics() for tide in tides]
            plans = [tide.plan for tide in tides]
        names = [n for n in wanted.tensors if int(n.split(":")[0]) < num_steps]
        first = Trace(tensors={n: wanted.tensors[n] for n in names})
        say(
            case=case.name,
            plan=plan,
            different=differences(trace, first),
            num_compared=len(names),
            collectives=collectives,
            wanted_collectives=wanted_collectives[:num_steps],
            planned_bytes=sum(0 if made is None else made.disk_bytes for made in plans),
            moved_out_bytes=sum(count.moved_out_bytes for count in counts),
            moved_in_bytes=sum(count.moved_in_bytes for count in counts),
            num_recomputed_ops=sum(count.num_recomputed_ops for count in counts),
            budget_bytes=options.get("budget", 0),
            peak_bytes=sum(0 if made is None else made.peak_bytes for made in plans),
            num_graphs=max(tide.num_graphs for tide in tides),
            kept_bytes=sum(kept_bytes(tide) for tide in tides),
            not_understood=[reason for c in counts for reason, _ in c.num_kept_not_understood],
        )


def say(**result: object) -> None:
    """Print one result for the test."""
    print(json.dumps({"rank": distributed.get_rank(), **result}), flush=True)


@contextlib.contextmanager
def rank_of(arguments: Sequence[str] | None = None) -> Generator[None]:
    """Be one rank of a group, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("num_ranks", type=int)
    parser.add_argument("store")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    budgets: Any = import_module("ebbtide.torch.budgets")
    budgets.probe_machine = lambda *_, **__: MACHINE
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{given.store}",
        rank=given.rank,
        world_size=given.num_ranks,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    try:
        yield
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def run_ranks(program: str, folder: Path, *, num_ranks: int = 2) -> list[dict[str, Any]]:
    """Run a program of this folder in some processes; returns what all of them said."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(num_ranks):
            command = [sys.executable, "-m", f"tests.torch.distributed.{program}"]
            process = subprocess.Popen(
                [*command, str(rank), str(num_ranks), str(folder / "store")],
                cwd=ROOT,
                env=environment,
                stdout=stack.enter_context((folder / f"out-{rank}").open("w")),
                stderr=stack.enter_context((folder / f"err-{rank}").open("w")),
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        codes = [process.wait(timeout=RANKS_TIMEOUT_S) for process in processes]
    errors = [(folder / f"err-{rank}").read_text()[-4000:] for rank in range(num_ranks)]
    assert codes == [0] * num_ranks, "\n".join(errors)
    texts = [(folder / f"out-{rank}").read_text() for rank in range(num_ranks)]
    return [json.loads(line) for text in texts for line in text.splitlines() if line[:1] == "{"]


def by_case(results: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Group what the ranks said by case and plan, in the order of the ranks."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda result: result["rank"]):
        grouped.setdefault((result["case"], result["plan"]), []).append(result)
    return grouped


def assert_trained_alike(of_ranks: list[dict[str, Any]], *, num_ranks: int = 2) -> None:
    """Check that every rank left the bits of plain training, by the same collectives."""
    assert [result["rank"] for result in of_ranks] == list(range(num_ranks))
    for result in of_ranks:
        assert result["different"] == []
        assert result["num_compared"] >= NUM_STEPS * NUM_TENSORS
        # Nothing that a rank waits for is sent a second time, and nothing is sent beside it.
        assert result["collectives"] == result["wanted_collectives"]


def assert_plan_was_run(
    of_ranks: list[dict[str, Any]], plan: str, *, num_micro_batches: int = 1
) -> None:
    """Check that every rank moved and recomputed what its plan says, in the last step."""
    for result in of_ranks:
        planned_bytes = num_micro_batches * result["planned_bytes"]
        assert result["moved_out_bytes"] == result["moved_in_bytes"] == planned_bytes
        assert (planned_bytes > 0) == (plan != "recompute")
        if plan != "budget":
            assert (result["num_recomputed_ops"] > 0) == (plan != "offload-last:2")
        assert result["not_understood"] == []
