"""One workload planned for many budgets: what memory costs in time."""

from collections.abc import Mapping
from dataclasses import dataclass

from ebbtide.machine import Machine
from ebbtide.plan import Decision
from ebbtide.planner.result import Outcome
from ebbtide.planner.solve import plan_for_budget
from ebbtide.workload import Workload

# More than any device has: the plan keeps everything, and its peak is what that takes.
_ENDLESS_BYTES = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """What a planner answers to one budget."""

    budget_bytes: int
    """Most device memory at every moment of the step."""
    outcome: Outcome
    """Its plan, or why there is none."""


def sweep_budgets(
    workload: Workload,
    machine: Machine,
    num: int,
    planner: str = "lp",
    *,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    decide: Mapping[str, str | Decision] | None = None,
) -> tuple[SweepPoint, ...]:
    """Plan for budgets at equal distances, from the smallest that fits to all that is kept.

    As pure as `plan_for_budget`, and `num` times its cost.

    Args:
        workload: A timed one.
        machine: The links, and what the tiers can hold. The device's own size does not matter.
        num: Budgets, 2 or more; fewer are returned where two of them are the same bytes.
        planner: One of `BUDGET_PLANNERS`.
        host_bytes: Most pinned host memory of this rank. Default: its share of the machine's.
        disk_bytes: Most bytes on disk. Default: the machine's.
        decide: Decisions to keep to, by pattern over activation names.

    Returns:
        One point a budget, the smallest first. The last one keeps everything, unless `decide`
        says otherwise.

    Raises:
        PlanError: As `plan_for_budget`.
        ValueError: `num` is below 2.
    """
    if num < 2:
        raise ValueError(f"num is {num}; a sweep has two ends, so it must be 2 or more")

    def plan_for(budget_bytes: int) -> Outcome:
        return plan_for_budget(
            workload,
            machine,
            budget_bytes=budget_bytes,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            planner=planner,
            decide=decide,
        )

    roomy = plan_for(_ENDLESS_BYTES)
    largest = roomy.smallest_budget_bytes if roomy.plan is None else roomy.plan.peak_bytes
    none = plan_for(0)
    smallest = none.smallest_budget_bytes if none.plan is None else 0
    budgets = {smallest + (largest - smallest) * k // (num - 1) for k in range(num)}
    return tuple(
        SweepPoint(budget_bytes=budget, outcome=plan_for(budget)) for budget in sorted(budgets)
    )
