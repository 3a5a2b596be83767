"""What a picture of a timeline shows: few enough marks for a browser, and true to a grid.

Where a lane has more spans than may be drawn, a grid is laid over its time. Spans shorter than a
cell that start in the same cell become one mark, from the first start to the last end; longer ones
stay as they are. So no mark is off by more than two cells, and the number of marks is bounded for
any trace. Known weakness: the gaps inside a cell are painted over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from ebbtide.timeline import Lane, Span, Timeline
from ebbtide.trace.builder import MemorySeries
from ebbtide.trace.intervals import Intervals, Times
from ebbtide.trace.overlap import find_exposed

NUM_CELLS_FIRST: Final = 1 << 20
"""The finest grid that is tried has so many cells; each next one has half as many."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marks:
    """What is drawn of one lane, in the order of the starts; all arrays are as long."""

    starts_ns: Times
    ends_ns: Times
    num_spans: Counts
    """So many were made into this mark; 1: it is one of the timeline's own."""
    num_bytes: Counts
    first: Counts
    """Which of the spans that were given is the first in the mark."""
    cell_ns: int
    """The grid; 0: there was no need of one."""

    @property
    def num_merged(self) -> int:
        """How many spans have no mark of their own."""
        return int(self.num_spans[self.num_spans > 1].sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnLane:
    """One lane of a device."""

    lane: Lane
    marks: Marks
    names: tuple[str, ...]
    """Each mark's, or of the first span in it."""
    exposed: Marks
    """When it ran and compute did not; empty for compute."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnMemory:
    """Moments of the allocator, the highest and lowest of each cell among them."""

    times_ns: Times
    allocated_bytes: Times
    reserved_bytes: Times
    num_moments: int
    """Before any were left out."""


def draw_lanes(timelines: Sequence[Timeline], num_marks: int) -> list[list[DrawnLane]]:
    """Return for each timeline its lanes that have spans, with `num_marks` marks in all at most.

    Marks are shared out so that no lane's spans are merged while another's need not be. Lanes
    with few spans are drawn whole. Each set of exposed times counts as a lane.

    Args:
        timelines: Devices, on one clock.
        num_marks: At least one for each lane and each set of exposed times.
    """
    spans = [
        {
            lane: sorted((s for s in timeline.spans if s.lane is lane), key=attrgetter("start_ns"))
            for lane in Lane
        }
        for timeline in timelines
    ]
    exposed = [find_exposed(timeline) for timeline in timelines]
    keys = [
        (number, lane, is_exposed)
        for number in range(len(timelines))
        for lane in Lane
        for is_exposed in (False, True)
        if (lane in exposed[number] if is_exposed else bool(spans[number][lane]))
    ]
    wanted = [
        len(exposed[number][lane].starts_ns) if is_exposed else len(spans[number][lane])
        for number, lane, is_exposed in keys
    ]
    allowed = dict(zip(keys, share(wanted, num_marks), strict=True))
    drawn: list[list[DrawnLane]] = []
    for number, lanes in enumerate(spans):
        rows: list[DrawnLane] = []
        for lane, of in lanes.items():
            if not of:
                continue
            marks = merge_marks(
                _column(of, "start_ns"),
                _column(of, "end_ns"),
                _column(of, "num_bytes"),
                allowed[number, lane, False],
            )
            alone = exposed[number].get(lane, _NOTHING)
            rows.append(
                DrawnLane(
                    lane=lane,
                    marks=marks,
                    names=tuple(of[int(i)].name for i in marks.first),
                    exposed=merge_marks(
                        alone.starts_ns,
                        alone.ends_ns,
                        np.zeros(len(alone.starts_ns), np.int64),
                        allowed.get((number, lane, True), 1),
                    ),
                )
            )
        drawn.append(rows)
    return drawn


def merge_marks(starts_ns: Times, ends_ns: Times, num_bytes: Counts, num_marks: int) -> Marks:
    """Return at most `num_marks` marks, at least 1, on the finest grid that gives so few.

    The starts must be sorted; otherwise the marks overlap in time (unchecked).
    """
    count = len(starts_ns)
    single = Marks(
        starts_ns=starts_ns,
        ends_ns=ends_ns,
        num_spans=np.ones(count, np.int64),
        num_bytes=num_bytes,
        first=np.arange(count),
        cell_ns=0,
    )
    if count <= num_marks:
        return single
    lengths = ends_ns - starts_ns
    since = starts_ns - starts_ns[0]
    cell_ns = _find_cell(since, lengths, max(int(ends_ns.max() - starts_ns[0]), 1), num_marks)
    # A long span has a cell of its own, which no other span is in: negative numbers.
    cells = np.where(lengths < cell_ns, since // cell_ns, -1 - np.arange(count))
    order = np.argsort(cells, kind="stable")
    ordered = cells[order]
    firsts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    first = order[firsts]
    ends = np.maximum.reduceat(ends_ns[order], firsts)
    sizes = np.add.reduceat(num_bytes[order], firsts)
    counts = np.diff(np.append(firsts, count))
    by_start = np.argsort(first, kind="stable")
    return Marks(
        starts_ns=starts_ns[first][by_start],
        ends_ns=ends[by_start],
        num_spans=counts[by_start],
        num_bytes=sizes[by_start],
        first=first[by_start],
        cell_ns=cell_ns,
    )


def _find_cell(since_ns: Times, lengths_ns: Times, span_ns: int, num_marks: int) -> int:
    """Return the smallest cell tried that gives few enough marks."""

    def is_enough(cell_ns: int) -> bool:
        is_short = lengths_ns < cell_ns
        cells = since_ns[is_short] // cell_ns
        num_cells = int(np.count_nonzero(np.diff(cells))) + bool(len(cells))
        return len(lengths_ns) - int(np.count_nonzero(is_short)) + num_cells <= num_marks

    cell_ns = max(span_ns // NUM_CELLS_FIRST, 1)
    while not is_enough(cell_ns):
        cell_ns *= 2
    # Between the last two, so that the room is used.
    between = (cell_ns * eighths // 8 for eighths in (5, 6, 7))
    return next((finer for finer in between if finer and is_enough(finer)), cell_ns)


def draw_memory(series: MemorySeries, num_moments: int) -> DrawnMemory:
    """Return at most `num_moments` of a series' moments, at least 6.

    The highest and the lowest allocation of each cell of an even grid are kept, and where most
    was reserved. So are the first and the last moment.
    """
    count = len(series.times_ns)
    kept = np.arange(count)
    if count > num_moments:
        num_cells = max((num_moments - 2) // 3, 1)
        cell_ns = int(series.times_ns[-1] - series.times_ns[0]) // num_cells + 1
        cells = (series.times_ns - series.times_ns[0]) // cell_ns
        borders = np.flatnonzero(np.concatenate(([True], cells[1:] != cells[:-1])))
        picked = [np.array([0, count - 1])]
        for values in (series.allocated_bytes, -series.allocated_bytes, series.reserved_bytes):
            # Sorted by cell, then by value, the last one of a cell is its highest.
            order = np.lexsort((values, cells))
            picked.append(order[np.append(borders[1:], count) - 1])
        kept = np.unique(np.concatenate(picked))
    return DrawnMemory(
        times_ns=series.times_ns[kept],
        allocated_bytes=series.allocated_bytes[kept],
        reserved_bytes=series.reserved_bytes[kept],
        num_moments=count,
    )


def share(wanted: Sequence[int], total: int) -> list[int]:
    """Share `total` out: who wants little gets it, all others get as much as each other.

    Each gets at least 1, so that the sum may be more than `total` where that is less than one each.
    """
    shares = [0] * len(wanted)
    left = total
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for position, i in enumerate(order):
        fair = left // (len(order) - position)
        shares[i] = max(min(wanted[i], fair), 1)
        left = max(left - shares[i], 0)
    return shares


_NOTHING: Final = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def _column(spans: Sequence[Span], field: str) -> npt.NDArray[np.int64]:
    return np.fromiter(map(attrgetter(field), spans), np.int64, len(spans))
