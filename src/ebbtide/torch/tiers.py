"""Where evicted bytes go: pinned host memory and disk, each with the events of its last users."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

from torch import Tensor

from ebbtide.errors import MemoryTierError
from ebbtide.memory.arena import Arena, Region
from ebbtide.memory.disk import DiskStore
from ebbtide.plan import Decision
from ebbtide.torch.devices.base import Event, Place
from ebbtide.units import format_bytes

log = logging.getLogger("ebbtide")


class HostRegion:
    """One exact-size region of host memory, with the arena that divides it (design rule 7)."""

    def __init__(self, buffer: Tensor, unpin: Callable[[], None]) -> None:
        """Take over `buffer`, a row of bytes.

        `unpin` is called once: by `close`, or when the region dies without, since pages must not
        go back to the system while the driver may still copy to them.
        """
        self.buffer = buffer
        self.arena = Arena(buffer.numel())
        self._unpin = weakref.finalize(self, unpin)
        self._unpin.atexit = False  # at the end of the process the driver does it

    def close(self) -> None:
        """Give the memory back to the system."""
        self._unpin()


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
        self._last_copies: dict[Decision, list[tuple[int, int, Event]]] = {
            Decision.HOST: [],
            Decision.DISK: [],
        }

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

    def reserve_host(self, num_bytes: int) -> None:
        """Take one region of `num_bytes` from the system, or the cap if that is less.

        Only while nothing is held: the old region is given back first.
        """
        assert self._make_host is not None, "bug in ebbtide: no host memory on this device"
        if self.host_cap_bytes is not None:
            num_bytes = min(num_bytes, self.host_cap_bytes)
        old, self.host = self.host, None
        if old is not None:
            old.close()
        self._last_copies[Decision.HOST] = []
        self.host = self._make_host(num_bytes) if num_bytes else None

    def grow_to_demand(self) -> None:
        """Make room for what was refused since the last call; only while nothing is held.

        Between steps, never in one (design rule 7): a longer batch or a second graph that is
        alive at once may need more than the step that was planned for. Where the system refuses,
        things stay as they were: what does not fit is kept or recomputed.
        """
        refused, self._refused_bytes[Decision.HOST] = self._refused_bytes[Decision.HOST], 0
        if refused and self.host is not None:
            capacity = self.host.buffer.numel()
            if self.host_cap_bytes is None or capacity < self.host_cap_bytes:
                try:
                    self.reserve_host(capacity + refused)
                except MemoryTierError as error:
                    log.warning("the host tier stays at %s: %s", format_bytes(capacity), error)
                    self.host_cap_bytes = capacity
                    self.reserve_host(capacity)
        refused, self._refused_bytes[Decision.DISK] = self._refused_bytes[Decision.DISK], 0
        if refused and self.disk is not None:
            statistics = self.disk.statistics()
            wanted = min(statistics.reserved_bytes + refused, statistics.cap_bytes)
            try:
                self.disk.reserve(wanted)
            except MemoryTierError as error:
                reserved = format_bytes(statistics.reserved_bytes)
                log.warning("the disk tier stays at %s: %s", reserved, error)

    def give_back(self, place: Place, last_copy: Event) -> None:
        """Free `place`; whoever takes it next waits for `last_copy` (design rule 1).

        After the tier was closed it does nothing.
        """
        if not self.is_open(place.tier):
            return
        self._arena(place.tier).give_back(place.region)
        if last_copy is not None:
            first, end = _span(place.region)
            self._last_copies[place.tier].append((first, end, last_copy))

    def events_before_reuse(self, place: Place) -> tuple[Event, ...]:
        """Return the copies that must have passed before `place` may be written."""
        first, end = _span(place.region)
        events: list[Event] = []
        left: list[tuple[int, int, Event]] = []
        for start, stop, event in self._last_copies[place.tier]:
            if stop <= first or end <= start:
                left.append((start, stop, event))
                continue
            events.append(event)
            if start < first:
                left.append((start, first, event))
            if end < stop:
                left.append((end, stop, event))
        self._last_copies[place.tier] = left
        return tuple(events)

    def is_open(self, tier: Decision) -> bool:
        """Return whether `tier` is there, and has not been closed."""
        return (self.host if tier is Decision.HOST else self.disk) is not None

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
