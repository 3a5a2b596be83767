"""Space inside one large region of memory or of a file, handed out by offset.

Best fit with immediate coalescing (Knuth, The Art of Computer Programming, volume 1, 2.5).
What differs here: requests are rounded up to an alignment of 512 bytes instead of to a power
of two, since rounding 33 GiB of pinned memory up to 64 GiB makes a plan impossible
(design rule 7). Known weakness: with sizes that differ from step to step, free space can
split into pieces that are each too small; the caller then keeps or recomputes.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

# One disk sector, and the unit of device allocations: copies and disk requests stay aligned.
ALIGNMENT_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of an arena that one caller holds until it gives it back."""

    offset_bytes: int
    """Distance from the arena's start; a multiple of the alignment."""
    num_bytes: int
    """What the caller asked for."""
    taken_bytes: int
    """What the arena lost to it: `num_bytes` rounded up to the alignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStatistics:
    """How full an arena is and was."""

    capacity_bytes: int
    """Size of the whole arena."""
    held_bytes: int
    """Sum of what callers asked for and still hold."""
    taken_bytes: int
    """The same with the rounding: at most 511 bytes more for each region."""
    peak_taken_bytes: int
    """Most `taken_bytes` that there ever were at once."""
    num_regions: int
    """Regions that callers hold."""
    num_refused: int
    """Requests for which nothing was free."""


class Arena:
    """Hands out parts of a region of `capacity_bytes` bytes, and takes them back.

    It does arithmetic on offsets only: it owns no memory. Deterministic: the same calls give
    the same offsets. O(log n) comparisons a call, n being the number of free ranges. Not
    thread-safe: the owner holds a lock or uses one thread.

    Rounding costs less than 0.8 % for regions of 64 KiB or more, the smallest that a plan
    moves by default.

    Args:
        capacity_bytes: Size of the region; 0 or more.
        alignment_bytes: Every offset is a multiple of it; 1 or more.

    Raises:
        ValueError: The capacity is negative, or the alignment is not positive.
    """

    def __init__(self, capacity_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}; it must be 0 or more")
        if alignment_bytes < 1:
            raise ValueError(f"alignment_bytes is {alignment_bytes}; it must be 1 or more")
        self._capacity_bytes = capacity_bytes
        self._alignment_bytes = alignment_bytes
        self._held: dict[int, Region] = {}
        # One free range three times: sorted by (size, start) to find the best fit, and by
        # each end to find the neighbours of a region that comes back.
        self._free_by_size: list[tuple[int, int]] = []
        self._free_end_by_start: dict[int, int] = {}
        self._free_start_by_end: dict[int, int] = {}
        self._held_bytes = 0
        self._taken_bytes = 0
        self._peak_taken_bytes = 0
        self._num_refused = 0
        if capacity_bytes:
            self._add_free(0, capacity_bytes)

    def take(self, num_bytes: int) -> Region | None:
        """Return a region of `num_bytes` bytes, or None when no free range is that large.

        The smallest free range that fits is used, the first of equals.

        Raises:
            ValueError: `num_bytes` is not positive.
        """
        if num_bytes < 1:
            raise ValueError(f"num_bytes is {num_bytes}; a region has at least 1 byte")
        index = bisect_left(self._free_by_size, (num_bytes, 0))
        if index == len(self._free_by_size):
            self._num_refused += 1
            return None
        size, start = self._free_by_size[index]
        # Every free range starts aligned and ends aligned or at the arena's end, so the
        # rounded size exceeds a range that fits only at the arena's end: clip it there.
        taken_bytes = min(-(-num_bytes // self._alignment_bytes) * self._alignment_bytes, size)
        self._remove_free(start, start + size)
        if taken_bytes < size:
            self._add_free(start + taken_bytes, start + size)
        region = Region(offset_bytes=start, num_bytes=num_bytes, taken_bytes=taken_bytes)
        self._held[start] = region
        self._held_bytes += num_bytes
        self._taken_bytes += taken_bytes
        self._peak_taken_bytes = max(self._peak_taken_bytes, self._taken_bytes)
        return region

    def give_back(self, region: Region) -> None:
        """Make a region free again; the very object that `take` returned.

        Copies that still read or write the region are unchecked: another activation may then
        overwrite it, and gradients are silently wrong.

        Raises:
            AssertionError: The arena does not hold the region.
        """
        # By identity: an equal region may have been taken since. Raised rather than asserted,
        # since python -O would let two activations share bytes.
        if self._held.get(region.offset_bytes) is not region:
            raise AssertionError(
                f"{region} was given back, but the arena does not hold it: it was given back "
                "twice or comes from another arena; this is a bug in ebbtide"
            )
        del self._held[region.offset_bytes]
        self._held_bytes -= region.num_bytes
        self._taken_bytes -= region.taken_bytes
        start = region.offset_bytes
        end = start + region.taken_bytes
        earlier_start = self._free_start_by_end.get(start)
        if earlier_start is not None:
            self._remove_free(earlier_start, start)
            start = earlier_start
        later_end = self._free_end_by_start.get(end)
        if later_end is not None:
            self._remove_free(end, later_end)
            end = later_end
        self._add_free(start, end)

    def grow(self, capacity_bytes: int) -> None:
        """Extend the arena at its end; held regions stay where they are.

        Raises:
            ValueError: The new capacity is below the present one, or the present one is not a
                multiple of the alignment, so that what follows it would start unaligned.
        """
        if capacity_bytes < self._capacity_bytes:
            raise ValueError(
                f"capacity_bytes is {capacity_bytes}, below the present {self._capacity_bytes}; "
                "an arena only grows"
            )
        if capacity_bytes == self._capacity_bytes:
            return
        if self._capacity_bytes % self._alignment_bytes:
            raise ValueError(
                f"the present capacity of {self._capacity_bytes} bytes is not a multiple of the "
                f"alignment of {self._alignment_bytes}; only an arena of whole units grows"
            )
        start = self._capacity_bytes
        earlier_start = self._free_start_by_end.get(start)
        if earlier_start is not None:
            self._remove_free(earlier_start, start)
            start = earlier_start
        self._add_free(start, capacity_bytes)
        self._capacity_bytes = capacity_bytes

    def statistics(self) -> ArenaStatistics:
        """Return how full the arena is and was."""
        return ArenaStatistics(
            capacity_bytes=self._capacity_bytes,
            held_bytes=self._held_bytes,
            taken_bytes=self._taken_bytes,
            peak_taken_bytes=self._peak_taken_bytes,
            num_regions=len(self._held),
            num_refused=self._num_refused,
        )

    def _add_free(self, start: int, end: int) -> None:
        insort(self._free_by_size, (end - start, start))
        self._free_end_by_start[start] = end
        self._free_start_by_end[end] = start

    def _remove_free(self, start: int, end: int) -> None:
        del self._free_by_size[bisect_left(self._free_by_size, (end - start, start))]
        del self._free_end_by_start[start]
        del self._free_start_by_end[end]
