"""Where evicted bytes go: pinned host memory and disk, each with the events of its last users."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ebbtide.errors import MemoryTierError, PinnedMemoryError
from ebbtide.memory.arena import ALIGNMENT_BYTES, Arena, Region
from ebbtide.memory.disk import DiskStore
from ebbtide.memory.pages import PageWishes
from ebbtide.plan import Decision
from ebbtide.torch.devices.base import Event, Place
from ebbtide.units import format_bytes

log = logging.getLogger("ebbtide")


class HostRegion:
    """One exact-size region of host memory, with the arena that divides it (design rule 7)."""

    def __init__(
        self, buffer: Tensor, unpin: Callable[[], None], wishes: PageWishes | None = None
    ) -> None:
        """Take over `buffer`, a row of bytes.

        `unpin` is called once: by `close`, or when the region dies without, since pages must not
        go back to the system while the driver may still copy to them. `wishes` says what pages
        the system gave, where that is known.
        """
        self.buffer = buffer
        self.wishes = wishes
        self.arena = Arena(buffer.numel())
        self._unpin = weakref.finalize(self, unpin)
        self._unpin.atexit = False  # at the end of the process the driver does it

    def close(self) -> None:
        """Give the memory back to the system."""
        self._unpin()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the system gave of a region that was asked for."""

    region: HostRegion | None
    """As large as was asked for, or smaller; None where the system gave nothing."""
    refusal: MemoryTierError | None = None
    """Why it is not as large as was asked for."""


def take_what_there_is(
    make_host: Callable[[int], HostRegion],
    num_bytes: int,
    *,
    least_bytes: int = 0,
    had_bytes: int = 0,
) -> Taken:
    """Take a region, or the largest that the system gives where it refuses.

    Where a limit tells what is left, that much is tried; then, as a driver tells nothing, three
    quarters, a half, three eighths and so on, since each try may take as long as pinning does.

    Args:
        make_host: Takes a region; raises MemoryTierError.
        num_bytes: What is asked for, 1 or more.
        least_bytes: Less is of no use; by default a 64th of what is asked for.
        had_bytes: A size that the system gave before, and may give again.
    """
    try:
        return Taken(region=make_host(num_bytes))
    except MemoryTierError as error:
        refusal = error
    least_bytes = max(least_bytes, num_bytes >> _MAX_HALVINGS, ALIGNMENT_BYTES)
    room = refusal.room_bytes if isinstance(refusal, PinnedMemoryError) else None
    for size in _sizes_below(num_bytes, room, had_bytes):
        if size < least_bytes:
            break
        try:
            return Taken(region=make_host(size), refusal=refusal)
        except MemoryTierError as error:
            log.debug("%s", error)
    return Taken(region=None, refusal=refusal)


_MAX_HALVINGS = 6


def _sizes_below(num_bytes: int, room_bytes: int | None, had_bytes: int) -> list[int]:
    """Return whole units to try after `num_bytes`, the largest first."""
    most_bytes = num_bytes - 1 if room_bytes is None else min(num_bytes - 1, room_bytes)
    sizes = [had_bytes, *([] if room_bytes is None else [most_bytes])]
    top_bytes = num_bytes if room_bytes is None else most_bytes
    for halvings in range(1, _MAX_HALVINGS + 1):
        sizes += [top_bytes * 3 >> halvings + 1, top_bytes >> halvings]
    whole = {size - size % ALIGNMENT_BYTES for size in sizes if size <= most_bytes}
    return sorted(whole, reverse=True)


class Tiers:
    """The places that storages are evicted to, for one device."""

    def __init__(
        self,
        *,
        host: HostRegion | None,
        disk: DiskStore | None,
        make_host: Callable[[int], HostRegion] | None = None,
        host_cap_bytes: int | None = None,
    ) -> None:
        self.host = host
        self.disk = disk
        self.bounce: HostRegion | None = None
        """Pinned memory that copies between a GPU and the disk pass through."""
        self.host_cap_bytes = host_cap_bytes
        self._make_host = make_host
        self._refused_bytes = {Decision.HOST: 0, Decision.DISK: 0}
        self._last_copies: dict[Decision, dict[int, tuple[int, Event]]] = {
            Decision.HOST: {},
            Decision.DISK: {},
        }
        """By the start of a free space that a copy touched: its end, and the last such copy. No two
        overlap, since whoever takes a place and copies to it asks for these first."""

    def take(self, tier: Decision, num_bytes: int) -> Place | None:
        """Return room for `num_bytes` in `tier`, or None when it is full or absent."""
        if tier is Decision.HOST:
            region = None if self.host is None else self.host.arena.take(num_bytes)
        else:
            region = None if self.disk is None else self.disk.take(num_bytes)
        if region is None:
            self._refused_bytes[tier] += num_bytes
            return None
        return Place(tier=tier, region=region)

    def reserve_host(self, num_bytes: int) -> MemoryTierError | None:
        """Take one region of `num_bytes` from the system, or the cap if that is less.

        Only while nothing is held: the old region is given back first. Where the system refuses,
        what it gives is taken, and is the cap from then on.

        Returns:
            The refusal, if there was one.
        """
        assert self._make_host is not None, "bug in ebbtide: no host memory on this device"
        if self.host_cap_bytes is not None:
            num_bytes = min(num_bytes, self.host_cap_bytes)
        had_bytes = self.host_bytes
        self._close_host()
        if num_bytes == 0:
            return None
        taken = take_what_there_is(self._make_host, num_bytes, had_bytes=had_bytes)
        self.host = taken.region
        if taken.refusal is not None:
            self.host_cap_bytes = self.host_bytes
        return taken.refusal

    def reserve_bounce(self, num_bytes: int, *, least_bytes: int) -> MemoryTierError | None:
        """Take new bounce memory, or as much as there is; the refusal if that is too little.

        The old one belongs to the devices that were made with it.
        """
        assert self._make_host is not None, "bug in ebbtide: no host memory on this device"
        taken = take_what_there_is(self._make_host, num_bytes, least_bytes=least_bytes)
        self.bounce = taken.region
        return None if taken.region is not None else taken.refusal

    @property
    def host_bytes(self) -> int:
        """Size of the host region."""
        return 0 if self.host is None else self.host.buffer.numel()

    def _close_host(self) -> None:
        if self.host is not None:
            self.host.close()
        self.host = None
        self._last_copies[Decision.HOST] = {}

    def grow_to_demand(self) -> None:
        """Make room for what was refused since the last call; only while nothing is held.

        Between steps, never in one (design rule 7): a longer batch or a second graph that is
        alive at once may need more than the step that was planned for. Where the system refuses,
        things stay as they were: what does not fit is kept or recomputed.
        """
        refused, self._refused_bytes[Decision.HOST] = self._refused_bytes[Decision.HOST], 0
        if refused and self.host is not None:
            capacity = self.host_bytes
            if self.host_cap_bytes is None or capacity < self.host_cap_bytes:
                self._grow_host(capacity, capacity + refused)
        refused, self._refused_bytes[Decision.DISK] = self._refused_bytes[Decision.DISK], 0
        if refused and self.disk is not None:
            statistics = self.disk.statistics()
            wanted = min(statistics.reserved_bytes + refused, statistics.cap_bytes)
            try:
                self.disk.reserve(wanted)
            except MemoryTierError as error:
                reserved = format_bytes(statistics.reserved_bytes)
                log.warning("the disk tier stays at %s: %s", reserved, error)

    def _grow_host(self, capacity: int, wanted: int) -> None:
        """Exchange the region for a larger one, or for one of its own size if that is refused."""
        assert self._make_host is not None, "bug in ebbtide"
        if self.host_cap_bytes is not None:
            wanted = min(wanted, self.host_cap_bytes)
        self._close_host()
        try:
            self.host = self._make_host(wanted)
        except MemoryTierError as error:
            self.host_cap_bytes = capacity
            self.reserve_host(capacity)
            log.warning("the host tier stays at %s: %s", format_bytes(self.host_bytes), error)

    def give_back(self, place: Place, last_copy: Event) -> None:
        """Free `place`; whoever takes it next waits for `last_copy` (design rule 1).

        After the tier was closed it does nothing.
        """
        if not self.is_open(place.tier):
            return
        self._arena(place.tier).give_back(place.region)
        if last_copy is not None:
            first, end = _span(place.region)
            known = self._last_copies[place.tier]
            assert first not in known, "bug in ebbtide: a copy waited for no owner before it"
            known[first] = end, last_copy

    def events_before_reuse(self, place: Place) -> tuple[Event, ...]:
        """Return the copies that must have passed before `place` may be written."""
        first, end = _span(place.region)
        known = self._last_copies[place.tier]
        same = known.get(first)
        if same is not None and same[0] == end:  # as where steps do what the last one did
            return (known.pop(first)[1],)
        events: list[Event] = []
        left: dict[int, tuple[int, Event]] = {}
        for start, (stop, event) in known.items():
            if stop <= first or end <= start:
                left[start] = stop, event
                continue
            events.append(event)
            if start < first:
                left[start] = first, event
            if end < stop:
                left[end] = stop, event
        self._last_copies[place.tier] = left
        return tuple(events)

    def is_open(self, tier: Decision) -> bool:
        """Return whether `tier` is there, and has not been closed."""
        if tier is Decision.HOST:
            return self.host is not None
        return self.disk is not None and not self.disk.is_closed

    def capacity_bytes(self, tier: Decision) -> int:
        """Return the bytes that `tier` has."""
        if tier is Decision.HOST:
            return self.host_bytes
        return 0 if self.disk is None else self.disk.statistics().reserved_bytes

    def held_bytes(self, tier: Decision) -> int:
        """Return the bytes that `tier` holds now."""
        if tier is Decision.HOST:
            return 0 if self.host is None else self.host.arena.statistics().held_bytes
        return 0 if self.disk is None else self.disk.statistics().held_bytes

    def _arena(self, tier: Decision) -> Arena | DiskStore:
        host = None if self.host is None else self.host.arena
        found = host if tier is Decision.HOST else self.disk
        assert found is not None, "bug in ebbtide"
        return found

    def close(self) -> None:
        """Give back all host memory; the disk store belongs to whoever opened it."""
        for region in (self.host, self.bounce):
            if region is not None:
                region.close()
        self.host = self.bounce = None


def _span(region: Region) -> tuple[int, int]:
    return region.offset_bytes, region.offset_bytes + region.taken_bytes
