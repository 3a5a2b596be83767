"""Draw an answer: peaks by holder beside the budget, or step time along a swept axis."""

from collections.abc import Sequence
from pathlib import Path

from ebbtide.drawing import check_can_draw, make_axes
from ebbtide.estimate.answer import Answer
from ebbtide.estimate.strategies import Row, Status, Strategy

GIB = 2**30
NEEDED_BY = "ebbtide estimate --picture"


def draw_answer(answer: Answer, path: Path) -> None:
    """Draw a bar for each strategy that has a plan, its parts by holder, and the budget.

    Args:
        answer: To one question.
        path: Of a PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_can_draw(NEEDED_BY)
    axes = make_axes(9.0, 4.5)
    rows = [row for row in answer.rows if row.holders]
    names = [_label(row) for row in rows]
    held = [0.0] * len(rows)
    for index, holder in enumerate(rows[0].holders if rows else ()):
        sizes = [row.holders[holder] / GIB for row in rows]
        label = holder.replace("_", " ")
        axes.barh(names, sizes, left=held, color=f"C{index}", label=label)
        held = [before + size for before, size in zip(held, sizes, strict=True)]
    budget_gib = answer.limits.budget_bytes / GIB
    axes.axvline(budget_gib, color="black", label=f"budget, {budget_gib:.1f} GiB")
    axes.invert_yaxis()
    axes.set_xlabel("peak of device memory in GiB")
    axes.set_title(_title(answer), fontsize=9)
    axes.legend(fontsize=8)
    axes.figure.savefig(path)


def draw_swept(axis: str, points: Sequence[tuple[float, Answer]], path: Path) -> None:
    """Draw the step time of each strategy along an axis; a cross is one that does not fit.

    Args:
        axis: That was swept.
        points: Its values and what was answered.
        path: Of a PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_can_draw(NEEDED_BY)
    axes = make_axes(9.0, 5.5)
    ordered = sorted(points, key=lambda point: point[0])
    for index, strategy in enumerate(Strategy):
        found = [
            (value, row)
            for value, answer in ordered
            for row in answer.rows
            if row.strategy is strategy and row.step_ns
        ]
        fitting = [(v, r.step_ns / 1e9) for v, r in found if r.status is Status.FITS]
        short = [(v, r.step_ns / 1e9) for v, r in found if r.status is Status.OOM]
        colour = f"C{index}"
        axes.plot(*_columns(fitting), marker="o", color=colour, label=strategy.value)
        axes.plot(*_columns(short), marker="x", linestyle="", color=colour)
    axes.grid(visible=True, alpha=0.3)
    axes.set_xlabel(f"{axis}, times the machine's" if axis == "bandwidth" else axis)
    axes.set_ylabel("step time in seconds (x: does not fit)")
    if points:
        axes.set_title(_title(points[0][1], without=axis), fontsize=9)
    axes.legend(fontsize=8)
    axes.figure.savefig(path)


def _label(row: Row) -> str:
    time = f"{row.step_ns / 1e9:.3g} s" if row.step_ns else ""
    return f"{row.strategy.value}\n{time if row.status is Status.FITS else 'does not fit'}"


def _title(answer: Answer, without: str = "") -> str:
    setup = answer.setup
    parts = [
        f"{setup.shape.name} on {setup.degrees.num_devices} x {answer.machine.name}",
        *([] if without == "batch" else [f"batch {setup.batch}"]),
        *([] if without == "context" else [f"{setup.context} tokens"]),
        f"{setup.dtype.value}, {setup.implementation.value}; estimated",
    ]
    return ", ".join(parts)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
