"""Interval sets against sets of single nanoseconds."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.trace.intervals import Intervals, merge, whole

END_NS = 40
PAIRS = st.lists(
    st.tuples(st.integers(0, END_NS), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=12,
)

Pairs = list[tuple[int, int]]


def merged(pairs: Pairs) -> Intervals:
    return merge(
        np.array([start for start, _ in pairs], np.int64),
        np.array([end for _, end in pairs], np.int64),
    )


def points(pairs: Pairs) -> set[int]:
    """The brute-force form: every nanosecond that any interval has."""
    return {ns for start, end in pairs for ns in range(start, end)}


def pairs_of(intervals: Intervals) -> Pairs:
    starts = intervals.starts_ns.tolist()
    return list(zip(starts, intervals.ends_ns.tolist(), strict=True))


def check(intervals: Intervals, wanted: set[int]) -> None:
    pairs = pairs_of(intervals)
    assert points(pairs) == wanted
    assert intervals.length_ns == len(wanted)
    # Maximal: no interval is empty, and between two there is at least one nanosecond.
    assert all(start < end for start, end in pairs)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(pairs))


@given(PAIRS)
def test_merging_counts_every_nanosecond_once(pairs: Pairs) -> None:
    check(merged(pairs), points(pairs))


@given(PAIRS, PAIRS)
def test_what_is_in_both(some: Pairs, others: Pairs) -> None:
    check(merged(some).intersect(merged(others)), points(some) & points(others))


@given(PAIRS, PAIRS)
def test_what_is_in_the_first_only(some: Pairs, others: Pairs) -> None:
    check(merged(some).subtract(merged(others)), points(some) - points(others))


@given(PAIRS, PAIRS)
def test_overlaps_of_single_intervals(some: Pairs, others: Pairs) -> None:
    overlaps = merged(some).overlap_ns(
        np.array([start for start, _ in others], np.int64),
        np.array([end for _, end in others], np.int64),
    )
    assert overlaps.tolist() == [len(points(some) & points([pair])) for pair in others]


def test_touching_intervals_become_one() -> None:
    assert pairs_of(merged([(5, 9), (0, 5), (9, 9), (11, 12)])) == [(0, 9), (11, 12)]


def test_times_of_today_in_nanoseconds_are_exact() -> None:
    now = 1_790_000_000_123_456_789
    busy = merged([(now, now + 3), (now + 2, now + 7)])
    assert busy.subtract(merged([(now + 1, now + 2)])).length_ns == 6
    assert busy.overlap_of(now - 5, now + 4) == 4


def test_a_span_without_length_is_nothing() -> None:
    assert whole(5, 5).length_ns == 0
    assert whole(7, 5).length_ns == 0
