"""Planners: from a Workload to a Plan."""

from ebbtide.planner.named import (
    NAMED_PLANS,
    PlanFamily,
    PlanName,
    missing,
    named_plan,
    needed,
    parse_plan_name,
)
from ebbtide.planner.spill import spill_to_disk

__all__ = [
    "NAMED_PLANS",
    "PlanFamily",
    "PlanName",
    "missing",
    "named_plan",
    "needed",
    "parse_plan_name",
    "spill_to_disk",
]
