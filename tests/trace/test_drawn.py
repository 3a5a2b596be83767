"""What is drawn: whole where there is room, on a grid where there is not, and bounded always."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.timeline import Lane, Span, Timeline
from ebbtide.trace.builder import MemorySeries
from ebbtide.trace.drawn import draw_lanes, draw_memory, merge_marks, share
from ebbtide.trace.overlap import analyse


def times(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def timeline(*spans: tuple[Lane, int, int, str]) -> Timeline:
    made = tuple(Span(lane=lane, start_ns=a, end_ns=b, name=name) for lane, a, b, name in spans)
    return Timeline(source="by hand", spans=made, peak_bytes=0)


def test_few_spans_are_drawn_as_they_are() -> None:
    marks = merge_marks(times(0, 5, 5), times(4, 9, 5), times(1, 2, 3), 3)
    assert marks.cell_ns == marks.num_merged == 0
    assert (*marks.starts_ns, *marks.ends_ns) == (0, 5, 5, 4, 9, 5)


def test_short_neighbours_become_one_mark_and_long_ones_stay() -> None:
    # Cells of 3 ns: [0, 3) has two short spans, [3, 6) one, and one span of 10 ns is long.
    starts, ends = times(0, 2, 3, 4), times(1, 3, 13, 5)
    marks = merge_marks(starts, ends, times(10, 20, 30, 40), 3)
    assert marks.cell_ns == 3
    assert [*marks.starts_ns] == [0, 3, 4]
    assert [*marks.ends_ns] == [3, 13, 5]
    assert [*marks.num_spans] == [2, 1, 1]
    assert [*marks.num_bytes] == [30, 30, 40]
    assert [*marks.first] == [0, 2, 3]
    assert marks.num_merged == 2


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**4)), min_size=1, max_size=200),
    st.integers(1, 50),
)
def test_marks_are_bounded_and_no_nanosecond_is_lost(
    pairs: list[tuple[int, int]], num_marks: int
) -> None:
    pairs.sort()
    starts = np.array([start for start, _ in pairs], np.int64)
    ends = starts + np.array([length for _, length in pairs], np.int64)
    marks = merge_marks(starts, ends, np.ones(len(pairs), np.int64), num_marks)
    assert len(marks.starts_ns) <= num_marks or marks.cell_ns == 0
    assert len(marks.starts_ns) <= max(num_marks, len(pairs))
    assert marks.num_bytes.sum() == marks.num_spans.sum() == len(pairs)
    assert np.all(np.diff(marks.starts_ns) >= 0)
    for start, end in zip(starts, ends, strict=True):
        assert np.any((marks.starts_ns <= start) & (end <= marks.ends_ns))
    merged = marks.num_spans > 1
    assert np.all((marks.ends_ns - marks.starts_ns)[merged] <= 2 * marks.cell_ns)


@pytest.mark.parametrize(
    ("wanted", "total", "shares"),
    [
        ([5, 100, 100], 65, [5, 30, 30]),
        ([1, 2, 3], 100, [1, 2, 3]),
        ([0, 9, 9], 2, [1, 1, 1]),
        ([], 5, []),
    ],
)
def test_shares(wanted: list[int], total: int, shares: list[int]) -> None:
    assert share(wanted, total) == shares


def test_lanes_have_exposed_times_that_are_those_of_the_analysis() -> None:
    drawn = timeline(
        (Lane.COMPUTE, 0, 40, "forward"),
        (Lane.COPY_OUT, 30, 60, "h.0"),
        (Lane.COPY_IN, 50, 70, "h.0"),
        (Lane.COMPUTE, 70, 100, "backward"),
    )
    (lanes,) = draw_lanes([drawn], 100)
    by_lane = {lane.lane: lane for lane in lanes}
    assert list(by_lane) == [Lane.COMPUTE, Lane.COPY_OUT, Lane.COPY_IN]
    out, back = by_lane[Lane.COPY_OUT], by_lane[Lane.COPY_IN]
    assert out.names == ("h.0",)
    assert (*out.exposed.starts_ns, *out.exposed.ends_ns) == (40, 60)
    assert (*back.exposed.starts_ns, *back.exposed.ends_ns) == (50, 70)
    assert len(by_lane[Lane.COMPUTE].exposed.starts_ns) == 0
    found = analyse(drawn)
    assert found.copy_out.exposed_ns == int((out.exposed.ends_ns - out.exposed.starts_ns).sum())


def test_a_lane_with_few_spans_stays_whole_beside_one_with_many() -> None:
    many = [(Lane.COMPUTE, i * 10, i * 10 + 9, f"k{i}") for i in range(1000)]
    few = [(Lane.COPY_IN, i * 1000, i * 1000 + 500, f"h.{i}") for i in range(10)]
    (lanes,) = draw_lanes([timeline(*many, *few)], 220)
    compute, copies = lanes
    assert copies.marks.cell_ns == 0
    assert copies.names == tuple(f"h.{i}" for i in range(10))
    assert 80 <= len(compute.marks.starts_ns) <= 200
    assert compute.marks.num_merged >= 990
    assert sum(len(lane.marks.starts_ns) + len(lane.exposed.starts_ns) for lane in lanes) <= 220


def series(*rows: tuple[int, int, int]) -> MemorySeries:
    columns = np.array(rows, np.int64)
    return MemorySeries(
        times_ns=columns[:, 0], allocated_bytes=columns[:, 1], reserved_bytes=columns[:, 2]
    )


def test_a_long_memory_series_keeps_its_highest_and_lowest_moments() -> None:
    rows = [(i, 100 + i % 7, 200) for i in range(10_000)]
    rows[5003] = (5003, 900, 1000)
    rows[7007] = (7007, 1, 1000)
    drawn = draw_memory(series(*rows), 60)
    assert len(drawn.times_ns) <= 60
    assert drawn.num_moments == 10_000
    assert (int(drawn.allocated_bytes.max()), int(drawn.allocated_bytes.min())) == (900, 1)
    assert int(drawn.reserved_bytes.max()) == 1000
    assert (int(drawn.times_ns[0]), int(drawn.times_ns[-1])) == (0, 9999)
    assert {5003, 7007} <= set(drawn.times_ns.tolist())


def test_a_short_one_is_kept_whole() -> None:
    drawn = draw_memory(series((0, 1, 2), (9, 3, 4)), 6)
    assert (*drawn.times_ns, *drawn.allocated_bytes, *drawn.reserved_bytes) == (0, 9, 1, 3, 2, 4)
