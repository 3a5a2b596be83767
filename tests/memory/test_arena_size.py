"""The arena of a plan is as small as the most that the plan holds at once.

All that a step evicts is held from its forward to its backward, so all of it is held at the turn:
no order of offsets takes less than the sum, and best fit takes no more. So offsets need not be
assigned ahead of the step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ebbtide.memory.arena import ALIGNMENT_BYTES, Arena, Region
from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import NAMED_PLANS, named_plan
from ebbtide.planner.result import Code
from ebbtide.planner.solve import plan_for_budget
from ebbtide.simulate import simulate
from ebbtide.timeline import Lane
from ebbtide.workload import Workload
from tests.corpus import CORPUS
from tests.corpus.machines import budget_of, machine_with

MACHINE = machine_with(50)
NUM_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """When one evicted activation needs its place: from its copy out to the end of its copy in."""

    num_bytes: int
    first_ns: int
    last_ns: int


def lives_of(plan: Plan, workload: Workload) -> list[Life]:
    """Return the shortest lives that a runtime could give the places of a plan."""
    spans = simulate(plan, workload, MACHINE).spans
    ends = {s.name: s.end_ns for s in spans if s.lane is Lane.COPY_IN}
    return [
        Life(num_bytes=s.num_bytes, first_ns=s.start_ns, last_ns=ends[s.name])
        for s in spans
        if s.lane is Lane.COPY_OUT
    ]


def peak_of(lives: list[Life]) -> int:
    """Return the most bytes that are alive at once: no arena is smaller."""
    changes = [(life.first_ns, 1, life.num_bytes) for life in lives]
    changes += [(life.last_ns, 0, -life.num_bytes) for life in lives]
    held_bytes = peak_bytes = 0
    for _, _, change in sorted(changes):
        held_bytes += change
        peak_bytes = max(peak_bytes, held_bytes)
    return peak_bytes


def arena_bytes(plan: Plan) -> int:
    """Return what the runtime takes for a plan."""
    num_moved = sum(1 for d in plan.decisions.values() if d is Decision.HOST)
    return plan.host_bytes + ALIGNMENT_BYTES * num_moved


def check(plan: Plan, workload: Workload) -> float:
    """Run steps on an arena of that size; return it as a multiple of the peak of what is held."""
    lives = lives_of(plan, workload)
    peak_bytes = peak_of(lives)
    assert peak_bytes == plan.host_bytes > 0
    arena = Arena(arena_bytes(plan))
    moments = [(life.first_ns, 1, i) for i, life in enumerate(lives)]
    moments += [(life.last_ns, 0, i) for i, life in enumerate(lives)]
    for _ in range(NUM_STEPS):
        taken: dict[int, Region] = {}
        for _, is_start, i in sorted(moments):
            if is_start:
                region = arena.take(lives[i].num_bytes)
                assert region is not None
                taken[i] = region
            else:
                arena.give_back(taken.pop(i))
        assert taken == {}
    statistics = arena.statistics()
    assert (statistics.num_refused, statistics.held_bytes) == (0, 0)
    assert peak_bytes <= statistics.peak_taken_bytes <= arena_bytes(plan)
    return arena_bytes(plan) / peak_bytes


@pytest.fixture(scope="module")
def ratios() -> Iterator[dict[str, list[float]]]:
    """Collects arena size / peak held, by planner, and prints them in the end: pytest -s."""
    seen: dict[str, list[float]] = {}
    yield seen
    for name, found in sorted(seen.items()):
        print(f"\n{name:16} {len(found):3} plans, arena / peak held at most {max(found):.6f}")


@pytest.mark.parametrize("name", CORPUS)
def test_named_plans_take_what_they_hold_and_no_more(
    name: str, ratios: dict[str, list[float]]
) -> None:
    workload = CORPUS[name]
    for family in (n.replace("K", "2") for n in NAMED_PLANS[2:]):
        ratio = check(named_plan(family, workload), workload)
        ratios.setdefault(family, []).append(ratio)
        assert ratio < 1.0001


@pytest.mark.parametrize("name", CORPUS)
def test_plans_for_a_budget_take_what_they_hold_and_no_more(
    name: str, ratios: dict[str, list[float]]
) -> None:
    workload = CORPUS[name]
    for planner, share in (("greedy", 0.12), ("greedy", 0.5), ("lp", 0.25)):
        if planner == "lp" and len(workload.blocks) > 32:
            continue  # takes seconds
        outcome = plan_for_budget(
            workload, MACHINE, budget_bytes=budget_of(workload, share), planner=planner
        )
        if outcome.code is Code.NOTHING_FITS or outcome.plan is None:
            continue
        if outcome.plan.host_bytes == 0:
            continue
        ratio = check(outcome.plan, workload)
        ratios.setdefault(planner, []).append(ratio)
        assert ratio < 1.0001


def test_lives_that_do_not_meet_would_share_bytes() -> None:
    """The check can fail: a peak below the sum is seen as such."""
    apart = [
        Life(num_bytes=100, first_ns=0, last_ns=10),
        Life(num_bytes=70, first_ns=10, last_ns=20),
        Life(num_bytes=50, first_ns=15, last_ns=30),
    ]
    assert peak_of(apart) == 120
