"""Exact arithmetic on sets of half-open intervals of whole nanoseconds.

Sets are kept as two sorted arrays. All operations are searches in sorted arrays, O(n log n), and
exact: no floating point is involved. Known weakness: times must fit 63 bits.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]
"""Nanoseconds."""

_FAR_NS = np.iinfo(np.int64).max
"""Later than any time of a trace."""


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """A set of nanoseconds, as its maximal half-open intervals `[start, end)`.

    Both arrays are sorted, no interval is empty, and none touches the next. Make one with
    `merge`; an object that breaks these rules gives wrong results (unchecked).
    """

    starts_ns: Times
    ends_ns: Times
    before_ns: Times = field(init=False)
    """How many of its nanoseconds come before each interval, and at last how many there are."""

    def __post_init__(self) -> None:
        # Kept, as thousands of single intervals are held against sets of a million.
        total = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.ends_ns - self.starts_ns)))
        object.__setattr__(self, "before_ns", total)

    @property
    def length_ns(self) -> int:
        """How many nanoseconds the set has."""
        return int(self.before_ns[-1])

    def intersect(self, other: "Intervals") -> "Intervals":
        """Return the nanoseconds that are in both sets."""
        # A part of the result starts where one set starts inside the other, and ends likewise.
        starts = np.concatenate(
            (
                self.starts_ns[other._contains(self.starts_ns)],
                other.starts_ns[self._contains(other.starts_ns)],
            )
        )
        ends = np.concatenate(
            (
                self.ends_ns[other._contains(self.ends_ns - 1)],
                other.ends_ns[self._contains(other.ends_ns - 1)],
            )
        )
        return Intervals(_without_twins(starts), _without_twins(ends))

    def subtract(self, other: "Intervals") -> "Intervals":
        """Return the nanoseconds that are in this set and not in the other."""
        # All other nanoseconds. Their number wraps around; nobody asks for it.
        rest = Intervals(
            np.concatenate((np.array([-_FAR_NS]), other.ends_ns)),
            np.concatenate((other.starts_ns, np.array([_FAR_NS]))),
        )
        return self.intersect(rest)

    def overlap_ns(self, starts_ns: Times, ends_ns: Times) -> Times:
        """Return for each given interval how many of its nanoseconds are in the set."""
        return self._count_before(ends_ns) - self._count_before(starts_ns)

    def overlap_of(self, start_ns: int, end_ns: int) -> int:
        """Return how many nanoseconds of one interval are in the set."""
        return int(self.overlap_ns(np.array([start_ns]), np.array([end_ns]))[0])

    def _contains(self, times_ns: Times) -> npt.NDArray[np.bool_]:
        started = np.searchsorted(self.starts_ns, times_ns, side="right")
        return started > np.searchsorted(self.ends_ns, times_ns, side="right")

    def _count_before(self, times_ns: Times) -> Times:
        num_started = np.searchsorted(self.starts_ns, times_ns, side="left")
        before = self.before_ns[num_started]
        if len(self.starts_ns):
            # Of the last interval that has started, what lies after the time does not count.
            last_end = self.ends_ns[np.maximum(num_started - 1, 0)]
            too_much = np.where(num_started > 0, np.maximum(last_end - times_ns, 0), 0)
            before = before - too_much
        return before


def merge(starts_ns: Times, ends_ns: Times) -> Intervals:
    """Return the set of all nanoseconds in any of the given intervals.

    They may overlap, touch, be empty and come in any order; none may end before it starts.
    """
    is_there = ends_ns > starts_ns
    starts, ends = starts_ns[is_there], ends_ns[is_there]
    if not len(starts):
        return Intervals(np.empty(0, np.int64), np.empty(0, np.int64))
    order = np.argsort(starts, kind="stable")
    starts, latest = starts[order], np.maximum.accumulate(ends[order])
    is_first = np.concatenate((np.ones(1, np.bool_), starts[1:] > latest[:-1]))
    is_last = np.concatenate((is_first[1:], np.ones(1, np.bool_)))
    return Intervals(starts[is_first], latest[is_last])


def whole(start_ns: int, end_ns: int) -> Intervals:
    """Return the set of one interval; empty if it does not end after its start."""
    return merge(np.array([start_ns], np.int64), np.array([max(start_ns, end_ns)], np.int64))


def _without_twins(times_ns: Times) -> Times:
    """Sort; of equal times keep one. `np.unique` hashes first, which takes far longer."""
    times = np.sort(times_ns, kind="stable")
    return times[np.concatenate((np.ones(1, np.bool_), times[1:] != times[:-1]))[: len(times)]]
