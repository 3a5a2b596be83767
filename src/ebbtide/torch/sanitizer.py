"""Look for wrong bytes in every step: checksums, poison, delays and bounds.

Works at two places. At every copy (`SanitizedDevice`): the place lies inside its tier and
overlaps no other that is held, a source's checksum is taken as its copy out is asked for and
compared when a fetch has been waited for, memory is full of poison when it is handed out, and a
place is when it is given back; some copies start late, and some not before somebody waits for
them, which is the latest that their order allows. At every tensor that autograd saves
(`witness`) and asks for (`unpack_by`): bits and layout are compared, so what compute reads too
early, or from another place, or made again otherwise, shows before a gradient is made from it.

Known weakness: device memory that is let go belongs to torch's allocator, so it is not poisoned
then, but when ebbtide hands out memory the next time. What the plan keeps, and what a replay
reads of it, is not looked at: it is torch's own.
"""

from __future__ import annotations

import random
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ebbtide.errors import CorruptionError
from ebbtide.memory.ledger import SanitizerStatistics
from ebbtide.plan import Decision
from ebbtide.torch.devices.base import AbstractDevice, Event, Place, Stream
from ebbtide.torch.devices.delays import AbstractDelay, NoDelay
from ebbtide.torch.fingerprint import fingerprint
from ebbtide.torch.identity import Layout
from ebbtide.torch.internals import pause_dispatch
from ebbtide.torch.record import Handle, Record, Role
from ebbtide.torch.sharded import SavedDTensor, local_of
from ebbtide.torch.tiers import Tiers
from ebbtide.torch.traffic import Traffic

_NO_DELAY: Final = NoDelay()

POISON: Final = 0xA5
"""Each byte of memory that holds nothing: small wrong numbers in every floating type."""

CHANCE_OF_DELAY: Final = 0.3
"""That a copy sleeps first."""
CHANCE_OF_WAITING: Final = 0.4
"""That a copy starts no sooner than somebody waits for it."""
MAX_DELAY_NS: Final = 5_000_000
"""About the time of a block's backward: long enough that what does not wait comes too early."""

WHAT_TO_DO: Final = (
    "Gradients made from it would be wrong. Stop training with this plan, let `ebbtide verify` "
    "run on this model, and report what it prints."
)

_LOOKED_AT: Final = frozenset({Role.INPUT, Role.DERIVED, Role.COMPUTED})


Witness = Callable[[Handle, Tensor], None]
Unpack = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What lies in one place."""

    first: int
    last: int
    source: Tensor
    """Checksum of what was evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """A fetch that was not waited for."""

    event: Event
    """Held, so that its address means no other event."""
    row: weakref.ref[Tensor]
    place: Place


class Sanitizer:
    """The checks of one attached model, and what they cost.

    Args:
        delay: How copies of the model's device are held back.
        seed: Of which copies are, and for how long.
    """

    def __init__(self, delay: AbstractDelay, *, seed: int = 0) -> None:
        self._delay = delay
        self._random = random.Random(seed)
        self._traffic: weakref.ref[Traffic] | None = None
        self._step = 0
        self._last_index = sys.maxsize
        self._held: dict[tuple[Decision, int], _Held] = {}
        self._coming: dict[int, _Coming] = {}
        self._prints: weakref.WeakKeyDictionary[Record, dict[tuple[int, int], Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        self._poison: dict[Stream, Tensor] = {}
        self._poisoning: deque[tuple[Tensor, Stream, Event]] = deque()
        self._num_tensors = self._num_copies = self._num_delays = 0
        self._compared_bytes = self._poisoned_bytes = 0
        self._check_ns = self._delay_ns = 0

    def statistics(self) -> SanitizerStatistics:
        """Return what was looked at so far and what it took."""
        return SanitizerStatistics(
            num_steps=self._step,
            num_tensors=self._num_tensors,
            num_copies=self._num_copies,
            compared_bytes=self._compared_bytes,
            poisoned_bytes=self._poisoned_bytes,
            num_delays=self._num_delays,
            delay_ns=self._delay_ns,
            check_ns=self._check_ns,
        )

    # -- what autograd saves -------------------------------------------------------------------

    def witness(self, record: Record, index: int) -> Witness:
        """Return what is told of every tensor that block number `index` saves."""
        if index <= self._last_index:
            self._step += 1
            self._let_poison_go()
        self._last_index = index
        prints: dict[tuple[int, int], Tensor] = {}
        self._prints[record] = prints

        def look(handle: Handle, tensor: Tensor) -> None:
            if handle.record.node(handle.node).role in _LOOKED_AT:
                start_ns = time.perf_counter_ns()
                prints[handle.node, handle.number] = fingerprint(tensor)
                self._check_ns += time.perf_counter_ns() - start_ns

        return look

    def unpack_by(self, unpack: Unpack) -> Unpack:
        """Return a saved-tensor hook that does as `unpack` and compares what that returns.

        It raises CorruptionError, within backward, where that is not what was saved.
        """

        def compare(packed: Any) -> Tensor:
            tensor = unpack(packed)
            if isinstance(packed, Handle):
                self._compare_saved(packed, tensor)
            elif isinstance(packed, SavedDTensor):
                local = local_of(tensor)
                assert local is not None, "bug in ebbtide"
                self._compare_saved(packed.handle, local)
            return tensor

        return compare

    def _compare_saved(self, handle: Handle, tensor: Tensor) -> None:
        record = handle.record
        saved = self._prints.get(record, {}).get((handle.node, handle.number))
        holder = record.holder_of(handle)
        if saved is None or (holder.kept is not None and not holder.is_copy):
            return
        start_ns = time.perf_counter_ns()
        layout = Layout.of(tensor)
        if layout[1:] != handle.layout[1:]:
            raise CorruptionError(
                f"step {self._step}: {holder.name}, which autograd saved in {record.block}, came "
                f"back in another layout: shape {tuple(layout.shape)} and stride {layout.stride}, "
                f"saved with {tuple(handle.layout.shape)} and {handle.layout.stride}. {WHAT_TO_DO}"
            )
        if not bool(fingerprint(tensor) == saved):
            how = "evicted and fetched" if holder.slot is not None else "made again"
            raise CorruptionError(
                f"step {self._step}: {holder.name}, which autograd saved in {record.block}, came "
                f"back with other bits than were saved; it was {how}. {WHAT_TO_DO}"
            )
        self._num_tensors += 1
        self._compared_bytes += layout.num_bytes
        self._check_ns += time.perf_counter_ns() - start_ns

    # -- what is copied ------------------------------------------------------------------------

    def guard_device(self, device: AbstractDevice, tiers: Tiers) -> AbstractDevice:
        """Return a device that does as `device`, and looks at every copy."""
        return SanitizedDevice(device, tiers, self, self._delay)

    def guard_traffic(self, traffic: Traffic) -> None:
        """Let `traffic` poison places that it gives back, and name what it moves in errors."""
        self._traffic = weakref.ref(traffic)
        tiers, device = traffic.tiers, traffic.device
        assert isinstance(device, SanitizedDevice), "bug in ebbtide"

        def give_back(place: Place, last_copy: Event) -> None:
            self._held.pop(_key(place), None)
            if tiers.is_open(place.tier) and last_copy is not None:
                last_copy = self._poison_place(device.plain, place, device.start(last_copy))
            tiers.give_back(place, last_copy)

        traffic.give_back = give_back

    def choose_delay_ns(self) -> int | None:
        """Return how long the next copy is held back; 0: not at all; None: until it is wanted."""
        drawn = self._random.random()
        if drawn >= CHANCE_OF_DELAY + CHANCE_OF_WAITING:
            return 0
        self._num_delays += 1
        if drawn >= CHANCE_OF_DELAY:
            return None
        delay_ns = self._random.randrange(1, MAX_DELAY_NS)
        self._delay_ns += delay_ns
        return delay_ns

    def note_lost(self, place: Place, *, is_out: bool) -> None:
        """Note that the device memory of a copy was let go before the copy was made."""
        if not is_out and not self._slot_at(place):
            return  # a fetch for a graph that is gone: nobody reads what it would have brought
        raise CorruptionError(
            f"step {self._step}: the device memory of {self._name_at(place)} was let go before its "
            f"copy was made. {WHAT_TO_DO}"
        )

    def note_evict(self, place: Place, row: Tensor, tiers: Tiers) -> None:
        """Check the bounds of a place that is written to next, and note what goes there."""
        self._check_bounds(place, row, tiers)
        first, last = _span(place)
        for (tier, _), held in self._held.items():
            if tier is place.tier and first < held.last and held.first < last:
                raise CorruptionError(
                    f"step {self._step}: an activation is evicted to bytes {first} to {last} of "
                    f"{tier.value}, of which another, at {held.first} to {held.last}, is not "
                    f"fetched yet. {WHAT_TO_DO}"
                )
        start_ns = time.perf_counter_ns()
        self._held[_key(place)] = _Held(first=first, last=last, source=fingerprint(row))
        self._check_ns += time.perf_counter_ns() - start_ns

    def note_fetch(self, place: Place, row: Tensor, tiers: Tiers) -> None:
        """Check the bounds of a place that is read next."""
        self._check_bounds(place, row, tiers)
        if _key(place) not in self._held:
            raise CorruptionError(
                f"step {self._step}: {self._name_at(place)} is fetched from a place that was given "
                f"back. {WHAT_TO_DO}"
            )

    def expect(self, event: Event, place: Place, row: Tensor) -> None:
        """Note a fetch that was started."""
        self._coming[id(event)] = _Coming(event=event, row=weakref.ref(row), place=place)

    def compare_fetched(self, event: Event, *, is_current: bool) -> None:
        """Compare what came back with what was evicted, if `event` is the end of a fetch."""
        coming = self._coming.pop(id(event), None)
        row = None if coming is None else coming.row()
        if coming is None or row is None or not is_current:
            return
        held = self._held.get(_key(coming.place))
        if held is None or not self._slot_at(coming.place):
            return  # nobody reads it any more
        start_ns = time.perf_counter_ns()
        if not bool(fingerprint(row) == held.source):
            name = self._name_at(coming.place)
            raise CorruptionError(
                f"step {self._step}: {name} was fetched from {coming.place.tier.value} with other "
                f"bits than were evicted. {WHAT_TO_DO}"
            )
        self._num_copies += 1
        self._compared_bytes += row.numel()
        self._check_ns += time.perf_counter_ns() - start_ns

    def fill_with_poison(self, row: Tensor) -> None:
        """Fill memory that is handed out, on the current stream."""
        with torch.no_grad(), pause_dispatch():
            row.fill_(POISON)
        self._poisoned_bytes += row.numel()

    def _check_bounds(self, place: Place, row: Tensor, tiers: Tiers) -> None:
        first, last = _span(place)
        capacity = tiers.capacity_bytes(place.tier)
        if first < 0 or last > capacity or row.numel() != place.region.num_bytes:
            raise CorruptionError(
                f"step {self._step}: a copy of {row.numel()} bytes from or to bytes {first} to "
                f"{last} of {place.tier.value}, which has {capacity}. {WHAT_TO_DO}"
            )

    def _slot_at(self, place: Place) -> str:
        traffic = None if self._traffic is None else self._traffic()
        return "" if traffic is None else traffic.name_at(place)

    def _name_at(self, place: Place) -> str:
        where = f"what lies at byte {place.region.offset_bytes} of {place.tier.value}"
        return self._slot_at(place) or where

    def _poison_place(self, device: AbstractDevice, place: Place, last_copy: Event) -> Event:
        """Overwrite a place behind its last copy; whoever takes it next waits for that."""
        num_bytes, stream = place.region.num_bytes, device.current_stream()
        with torch.no_grad(), pause_dispatch():
            # Of each stream its own: another stream's may be let go while copies read it.
            poison = self._poison.get(stream)
            if poison is None or poison.numel() < num_bytes:
                poison = self._poison[stream] = device.allocate(num_bytes)
                poison.fill_(POISON)
            row = poison[:num_bytes]
        event = device.copy(row, place, stream=stream, after=(last_copy,))
        self._poisoning.append((row, stream, event))
        self._poisoned_bytes += num_bytes
        return event

    def _let_poison_go(self) -> None:
        """Fence the copies of poison before the rows that they read are dropped."""
        traffic = None if self._traffic is None else self._traffic()
        while self._poisoning and traffic is not None:
            _, stream, event = self._poisoning[0]
            traffic.device.wait(stream, event)
            self._poisoning.popleft()


class _Waiting:
    """A copy that starts when somebody wants its end; the caller keeps the row alive till then."""

    __slots__ = ("after", "event", "is_out", "place", "row", "stream")

    def __init__(
        self, place: Place, row: Tensor, *, is_out: bool, stream: Stream, after: Sequence[Event]
    ) -> None:
        self.place = place
        self.row = weakref.ref(row)
        self.is_out = is_out
        self.stream = stream
        self.after = after
        self.event: Event = None
        """Of the plain device, once it was started."""


class SanitizedDevice(AbstractDevice):
    """Looks at every copy of another device."""

    def __init__(
        self, plain: AbstractDevice, tiers: Tiers, sanitizer: Sanitizer, delay: AbstractDelay
    ) -> None:
        self.plain = plain
        """The device that copies."""
        self._tiers = tiers
        self._sanitizer = sanitizer
        self._delay = delay

    def current_stream(self) -> Stream:
        return self.plain.current_stream()

    def allocate(self, num_bytes: int) -> Tensor:
        row = self.plain.allocate(num_bytes)
        self._sanitizer.fill_with_poison(row)
        return row

    def copy(
        self,
        source: Tensor | Place,
        target: Tensor | Place,
        *,
        stream: Stream,
        after: Sequence[Event],
    ) -> Event:
        if isinstance(target, Place):
            assert isinstance(source, Tensor), "bug in ebbtide"
            self._sanitizer.note_evict(target, source, self._tiers)
        else:
            assert isinstance(source, Place), "bug in ebbtide"
            self._sanitizer.note_fetch(source, target, self._tiers)
        delay_ns = self._sanitizer.choose_delay_ns()
        is_out = isinstance(target, Place)
        place, row = (target, source) if is_out else (source, target)
        assert isinstance(place, Place) and isinstance(row, Tensor), "bug in ebbtide"
        if delay_ns is None:
            event = _Waiting(place, row, is_out=is_out, stream=stream, after=after)
        else:
            started = [self.start(earlier) for earlier in after]
            delay = self._delay if delay_ns else _NO_DELAY
            event = delay.copy(
                self.plain, source, target, stream=stream, after=started, delay_ns=delay_ns
            )
        if not is_out:
            self._sanitizer.expect(event, place, row)
        return event

    def wait(self, stream: Stream, event: Event | Stream) -> None:
        self.plain.wait(stream, self.start(event))
        self._sanitizer.compare_fetched(
            event, is_current=bool(stream == self.plain.current_stream())
        )

    def start(self, event: Event | Stream) -> Event | Stream:
        """Start a copy that waits for that, and all that it comes after; returns its end."""
        if not isinstance(event, _Waiting):
            return event
        if event.event is None:
            row = event.row()
            started = [self.start(earlier) for earlier in event.after]
            if row is None:
                self._sanitizer.note_lost(event.place, is_out=event.is_out)
                event.event = started[-1]  # of a fetch, that has always one before it
            else:
                source, target = (row, event.place) if event.is_out else (event.place, row)
                event.event = self.plain.copy(source, target, stream=event.stream, after=started)
            event.after = ()
        return event.event


def _key(place: Place) -> tuple[Decision, int]:
    return place.tier, place.region.offset_bytes


def _span(place: Place) -> tuple[int, int]:
    first = place.region.offset_bytes
    return first, first + place.region.num_bytes
