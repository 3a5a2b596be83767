"""Draw step time against budget, with the bound under it."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ebbtide.errors import MissingExtraError
from ebbtide.sweep import SweepPoint


def check_can_draw() -> None:
    """Refuse before anything is computed.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError.for_extra("report", needed_by="ebbtide plan --plot")


def draw_sweep(points: Sequence[SweepPoint], path: Path, *, title: str) -> None:
    """Draw all points that have a plan at `path`, in the format of its suffix.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_can_draw()
    # Drawn through the object interface: pyplot would choose a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [
        (point.budget_bytes / 2**30, point.outcome.plan)
        for point in points
        if point.outcome.plan is not None
    ]
    budgets = [budget for budget, _ in drawn]
    figure = Figure(figsize=(8.0, 5.0), dpi=120, layout="tight")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
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
    figure.savefig(path)
