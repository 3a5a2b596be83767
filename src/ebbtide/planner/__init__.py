"""Planners: from a Workload to a Plan."""

from ebbtide.planner.explain import Explanation, explain
from ebbtide.planner.named import (
    NAMED_PLANS,
    PlanFamily,
    PlanName,
    missing,
    named_plan,
    needed,
    parse_plan_name,
)
from ebbtide.planner.result import Code, Outcome
from ebbtide.planner.solve import BUDGET_PLANNERS, plan_for_budget
from ebbtide.planner.spill import spill_to_disk

__all__ = [
    "BUDGET_PLANNERS",
    "NAMED_PLANS",
    "Code",
    "Explanation",
    "Outcome",
    "PlanFamily",
    "PlanName",
    "explain",
    "missing",
    "named_plan",
    "needed",
    "parse_plan_name",
    "plan_for_budget",
    "spill_to_disk",
]
