"""What `ebbtide plan --json` prints: sizes in GiB (2**30 bytes), times in seconds."""

from collections.abc import Sequence

from ebbtide.check import CheckReport
from ebbtide.commands.plan_report import gap_of
from ebbtide.plan import Plan
from ebbtide.planner.endurance import bytes_per_day
from ebbtide.planner.result import Outcome
from ebbtide.sweep import SweepPoint


def describe_outcome(outcome: Outcome, *, budget_bytes: int, planning_ns: int) -> dict[str, object]:
    """Return the object for one budget."""
    about: dict[str, object] = {
        "outcome": outcome.code.value,
        "message": outcome.message,
        "planner": outcome.planner,
        "budget_gib": _gib(budget_bytes),
        "planning_ms": planning_ns / 1e6,
    }
    plan = outcome.plan
    if plan is None:
        return {**about, "smallest_budget_gib": _gib(outcome.smallest_budget_bytes)}
    return {
        **about,
        **_describe_cost(plan),
        "decisions": {name: decision.value for name, decision in plan.decisions.items()},
        "release_at": dict(plan.release_at),
        "fetch_at": dict(plan.fetch_at),
    }


def describe_sweep(points: Sequence[SweepPoint]) -> dict[str, object]:
    """Return the object for many budgets; without decisions, which would fill megabytes."""
    return {
        "points": [
            {
                "outcome": point.outcome.code.value,
                "planner": point.outcome.planner,
                "budget_gib": _gib(point.budget_bytes),
                **({} if point.outcome.plan is None else _describe_cost(point.outcome.plan)),
            }
            for point in points
        ]
    }


def describe_check(report: CheckReport) -> dict[str, object]:
    """Return the object for a plan that was checked."""
    return {
        "is_sound": report.is_sound,
        "faults": list(report.faults),
        "peak_gib": _gib(report.peak_bytes),
        "peak_moment": report.peak_moment,
        "holders_gib": {name: _gib(num_bytes) for name, num_bytes in report.holders},
        "host_gib": _gib(report.host_bytes),
        "disk_gib": _gib(report.disk_bytes),
    }


def _describe_cost(plan: Plan) -> dict[str, object]:
    return {
        "predicted_step_s": plan.predicted_step_ns / 1e9,
        "bound_step_s": plan.bound_step_ns / 1e9,
        "gap": gap_of(plan),
        "peak_gib": _gib(plan.peak_bytes),
        "host_gib": _gib(plan.host_bytes),
        "disk_gib": _gib(plan.disk_bytes),
        "disk_written_gib_per_day": _gib(bytes_per_day(plan.disk_bytes, plan.predicted_step_ns)),
    }


def _gib(num_bytes: int) -> float:
    return num_bytes / 2**30
