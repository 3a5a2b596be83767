"""Draw peak memory against step time, one labelled point a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebbtide.compare.results import Comparison, Row, take_median, to_gib, to_ms
from ebbtide.drawing import make_axes

# Where a label may sit, in points from its dot, the best place first.
LABEL_OFFSETS_PT = (
    (7.0, 4.0),
    (7.0, -11.0),
    (-7.0, 4.0),
    (-7.0, -11.0),
    (7.0, 18.0),
    (7.0, -25.0),
    (-7.0, 18.0),
    (-7.0, -25.0),
    (7.0, 32.0),
    (7.0, -39.0),
    (-7.0, 32.0),
    (-7.0, -39.0),
)


def draw_memory_against_time(comparison: Comparison, path: Path) -> Path | None:
    """Draw every finished row as a PNG at `path`; return it, or `None` if no row finished."""
    rows = [row for row in comparison.rows if row.step_ns and row.peak_bytes is not None]
    if not rows:
        return None
    facts = comparison.facts
    axes = make_axes(9.0, 6.0)
    for index, row in enumerate(rows):
        axes.scatter([_read_time(row)], [_read_memory(row)], s=45, color=f"C{index}", zorder=3)
    axes.margins(0.25)
    axes.grid(visible=True, alpha=0.3)
    axes.set_xlabel("step time in ms (forward, backward, optimizer)")
    axes.set_ylabel("peak memory in GiB")
    axes.set_title(
        f"{facts.model}\n{facts.dtype}, batch {facts.batch}, {facts.context} tokens, "
        f"{facts.device}",
        fontsize=9,
    )
    _place_labels(axes.figure, axes, rows)
    axes.figure.savefig(path)
    return path


def _place_labels(figure: Any, axes: Any, rows: list[Row]) -> None:
    """Give each dot the first place where its label covers no dot and no earlier label."""
    from matplotlib.transforms import Bbox

    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    dots = [
        Bbox.from_bounds(x - 5, y - 5, 10, 10)
        for x, y in (axes.transData.transform((_read_time(row), _read_memory(row))) for row in rows)
    ]
    taken: list[Any] = []
    for index, row in enumerate(rows):
        best: tuple[int, Any, Any] | None = None
        for offset in LABEL_OFFSETS_PT:
            label = _write_label(axes, row, offset, colour=f"C{index}")
            box = label.get_window_extent(renderer)
            num_covered = sum(box.overlaps(other) for other in (*taken, *dots))
            if best is None or num_covered < best[0]:
                if best:
                    best[1].remove()
                best = (num_covered, label, box)
            else:
                label.remove()
        if best:
            taken.append(best[2])


def _write_label(axes: Any, row: Row, offset: tuple[float, float], *, colour: str) -> Any:
    return axes.annotate(
        row.strategy,
        (_read_time(row), _read_memory(row)),
        xytext=offset,
        textcoords="offset points",
        ha="left" if offset[0] > 0 else "right",
        fontsize=9,
        color=colour,
    )


def _read_time(row: Row) -> float:
    return to_ms(take_median(row.step_ns)) or 0.0


def _read_memory(row: Row) -> float:
    return to_gib(row.peak_bytes) or 0.0
