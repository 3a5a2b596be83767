"""A limit on what a day writes to disk is one on what a step writes."""

from dataclasses import replace

import pytest

from ebbtide.check import check_plan
from ebbtide.plan import Decision, Plan
from ebbtide.planner import plan_for_budget
from ebbtide.planner.chain import compile_chain
from ebbtide.planner.endurance import DAY_NS, bytes_per_day, most_bytes_in_step
from tests.corpus import CORPUS
from tests.corpus.machines import budget_of, machine_with

WORKLOAD = CORPUS["llama-8b-x8/8k"]
BUDGET = budget_of(WORKLOAD, 0.5)
MACHINE = replace(
    machine_with(50),
    host_bytes=2**20,
    disk_bytes=2**40,
    disk_write_bytes_per_s=6 * 10**9,
    disk_read_bytes_per_s=6 * 10**9,
)
STEP_NS = compile_chain(WORKLOAD).base_ns


def written_bytes(plan: Plan) -> int:
    sizes = {a.name: a.num_bytes for block in WORKLOAD.blocks for a in block.activations}
    return sum(sizes[name] for name, d in plan.decisions.items() if d is Decision.DISK)


def test_a_day_of_steps() -> None:
    assert DAY_NS == 86_400_000_000_000
    # 43,200 steps of two seconds.
    assert bytes_per_day(1000, 2 * 10**9) == 43_200_000
    assert most_bytes_in_step(43_200_000, 2 * 10**9) == 1000
    assert most_bytes_in_step(43_199_999, 2 * 10**9) == 999
    assert bytes_per_day(1000, 0) == 0


@pytest.mark.parametrize("planner", ["lp", "greedy", "offload", "offload-inputs"])
def test_plans_write_no_more_than_a_day_may(planner: str) -> None:
    free = plan_for_budget(WORKLOAD, MACHINE, budget_bytes=BUDGET, planner=planner).plan
    assert free is not None
    written = written_bytes(free)
    assert written > 2**27
    daily = bytes_per_day(written // 2, STEP_NS)
    limited = replace(MACHINE, disk_write_bytes_per_day=daily)
    outcome = plan_for_budget(WORKLOAD, limited, budget_bytes=BUDGET, planner=planner)
    if outcome.plan is not None:
        plan = outcome.plan
        assert written_bytes(plan) <= written // 2
        assert bytes_per_day(plan.disk_bytes, plan.predicted_step_ns) <= daily
        assert plan.predicted_step_ns >= free.predicted_step_ns
        assert check_plan(plan, WORKLOAD, limited, budget_bytes=BUDGET).is_sound
    else:
        assert planner not in ("lp", "greedy")
    # The oracle sees what the other plan writes.
    report = check_plan(free, WORKLOAD, limited, budget_bytes=BUDGET)
    (fault,) = report.faults
    assert fault == (
        f"each step writes {written} bytes to disk, and steps of {STEP_NS} ns, the fastest that "
        f"there are, may write {daily * STEP_NS // DAY_NS} to stay within the machine's "
        f"disk_write_bytes_per_day of {daily}. Evict less to disk, or raise the limit."
    )


def test_a_limit_that_nothing_reaches_changes_nothing() -> None:
    free = plan_for_budget(WORKLOAD, MACHINE, budget_bytes=BUDGET)
    wide = replace(MACHINE, disk_write_bytes_per_day=2**60)
    assert plan_for_budget(WORKLOAD, wide, budget_bytes=BUDGET).plan == free.plan
