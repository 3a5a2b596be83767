"""Draw step time against budget, with the bound under it."""

from collections.abc import Sequence
from pathlib import Path

from ebbtide.drawing import check_can_draw, make_axes
from ebbtide.sweep import SweepPoint

NEEDED_BY = "ebbtide plan --plot"


def draw_sweep(points: Sequence[SweepPoint], path: Path, *, title: str) -> None:
    """Draw all points that have a plan at `path`, in the format of its suffix.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_can_draw(NEEDED_BY)
    drawn = [
        (point.budget_bytes / 2**30, point.outcome.plan)
        for point in points
        if point.outcome.plan is not None
    ]
    budgets = [budget for budget, _ in drawn]
    axes = make_axes(8.0, 5.0)
    axes.plot(
        budgets,
        [plan.predicted_step_ns / 1e6 for _, plan in drawn],
        marker="o",
        color="C0",
        label="the plan's step",
    )
    axes.plot(
        budgets,
        [plan.bound_step_ns / 1e6 for _, plan in drawn],
        linestyle="--",
        color="C1",
        label="bound: no plan is faster",
    )
    axes.grid(visible=True, alpha=0.3)
    axes.set_xlabel("budget of device memory in GiB")
    axes.set_ylabel("predicted step time in ms (forward and backward)")
    axes.set_title(title, fontsize=9)
    axes.legend()
    axes.figure.savefig(path)
