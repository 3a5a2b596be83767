"""A sweep over budgets as a table, for people."""

from collections.abc import Sequence

from ebbtide.commands.columns import align_columns
from ebbtide.commands.plan_report import gap_of
from ebbtide.sweep import SweepPoint

NOTHING = "-"


def write_sweep(points: Sequence[SweepPoint]) -> list[str]:
    """Return one line a budget; a column for the disk only where a plan uses it."""
    has_disk = any(point.outcome.plan and point.outcome.plan.disk_bytes for point in points)
    titles = ["budget GiB", "step ms", "bound ms", "gap", "peak GiB", "host GiB"]
    rows = [[*titles, "disk GiB"] if has_disk else titles]
    for point in points:
        plan = point.outcome.plan
        budget = f"{point.budget_bytes / 2**30:.2f}"
        if plan is None:
            rows.append([budget, *[NOTHING] * (len(rows[0]) - 1)])
            continue
        sizes = [plan.peak_bytes, plan.host_bytes, *([plan.disk_bytes] if has_disk else [])]
        rows.append(
            [
                budget,
                f"{plan.predicted_step_ns / 1e6:.1f}",
                f"{plan.bound_step_ns / 1e6:.1f}",
                f"{gap_of(plan):.2%}",
                *(f"{size / 2**30:.2f}" for size in sizes),
            ]
        )
    return align_columns(rows)
