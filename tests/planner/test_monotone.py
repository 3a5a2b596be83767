"""Twenty budgets in a row: a larger one is never slower, a smaller one never takes more."""

from functools import cache
from itertools import pairwise

import pytest

from ebbtide.plan import Plan
from ebbtide.planner.solve import BUDGET_PLANNERS, plan_for_budget
from tests.corpus import CORPUS
from tests.corpus.machines import machine_with

NUM_BUDGETS = 20


@cache
def sweep(name: str, planner: str, link_gb_per_s: int, num_budgets: int) -> dict[int, Plan | None]:
    """Budget to plan; the last has room for all that autograd saves, the others for parts of it."""
    workload = CORPUS[name]
    outside = workload.outside
    assert outside is not None
    least = outside.resident_bytes + max(
        outside.constant_bytes + outside.turn_bytes, outside.ends_bytes
    )
    budgets = [
        least + workload.num_bytes_saved * k // num_budgets for k in range(1, num_budgets + 1)
    ]
    machine = machine_with(link_gb_per_s)
    return {
        budget_bytes: plan_for_budget(
            workload, machine, budget_bytes=budget_bytes, planner=planner
        ).plan
        for budget_bytes in budgets
    }


def check_sweep(name: str, planner: str, link_gb_per_s: int, num_budgets: int) -> None:
    plans = sweep(name, planner, link_gb_per_s, num_budgets)
    found = {budget_bytes: plan for budget_bytes, plan in plans.items() if plan is not None}
    # What fits a budget fits every larger one, and the last one has room for everything.
    assert list(found) == list(plans)[len(plans) - len(found) :]
    assert found
    for (less, slow), (more, fast) in pairwise(found.items()):
        assert fast.predicted_step_ns <= slow.predicted_step_ns, (less, more)
        assert slow.peak_bytes <= fast.peak_bytes, (less, more)
        assert fast.peak_bytes <= more


@pytest.mark.parametrize("planner", BUDGET_PLANNERS)
def test_a_larger_budget_is_never_slower_and_a_smaller_one_takes_no_more(planner: str) -> None:
    check_sweep("llama-8b-x8/8k", planner, 50, NUM_BUDGETS)


SWEEPS = (
    ("gpt2/8k", 25, NUM_BUDGETS),
    ("gpt2/8k", 180, NUM_BUDGETS),
    ("gpt2/32k", 180, NUM_BUDGETS),
    ("llama-8b-x8/8k", 25, NUM_BUDGETS),
    ("llama-8b-x8/8k", 180, NUM_BUDGETS),
    ("llama-8b-x8/32k", 25, NUM_BUDGETS),
    ("llama-8b-x12/32k", 50, NUM_BUDGETS),
    ("llama-8b/8k", 50, NUM_BUDGETS),
    ("llama-70b/8k", 50, 6),
    ("deepseek/8k", 50, 6),
)


@pytest.mark.slow
@pytest.mark.parametrize("planner", BUDGET_PLANNERS)
@pytest.mark.parametrize(("name", "link_gb_per_s", "num_budgets"), SWEEPS)
def test_every_sweep_is_monotone(
    name: str, link_gb_per_s: int, num_budgets: int, planner: str
) -> None:
    check_sweep(name, planner, link_gb_per_s, num_budgets)


def test_a_sweep_reaches_from_nothing_much_to_everything() -> None:
    plans = sweep("llama-8b-x8/8k", "lp", 50, NUM_BUDGETS)
    steps = [plan.predicted_step_ns for plan in plans.values() if plan is not None]
    peaks = [plan.peak_bytes for plan in plans.values() if plan is not None]
    assert steps[0] > 1.05 * steps[-1]
    assert peaks[-1] - peaks[0] > CORPUS["llama-8b-x8/8k"].num_bytes_saved * 8 // 10


@pytest.mark.parametrize("planner", ["lp", "greedy"])
def test_a_budget_of_a_plans_own_peak_gets_no_slower_plan(planner: str) -> None:
    name = "llama-8b-x8/8k"
    plans = [p for p in sweep(name, planner, 50, NUM_BUDGETS).values() if p is not None]
    for plan in plans[::4]:
        again = plan_for_budget(
            CORPUS[name], machine_with(50), budget_bytes=plan.peak_bytes, planner=planner
        ).plan
        assert again is not None
        assert again.peak_bytes <= plan.peak_bytes
        assert again.predicted_step_ns <= plan.predicted_step_ns, plan.peak_bytes
