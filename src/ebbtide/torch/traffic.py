"""Evict storages to a tier and fetch them back; every wait of the runtime is in this file.

A `Slot` is one evicted storage. It has three lives: *leaving* (its device source is still held,
and serves every use), *away*, and *back* (a fetched device copy exists). Copies run in the
background; the device memory they touch is released only behind a fence on the stream that owns
it, and only at calls that the program itself makes, never when an event happens to have passed:
the peak is the same in every run.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

from torch import Tensor

from ebbtide.errors import RuntimeStateError
from ebbtide.memory.ledger import Ledger
from ebbtide.torch.devices.base import AbstractDevice, Event, Place, Stream
from ebbtide.torch.identity import StorageRef, storage_key
from ebbtide.torch.tiers import Tiers

MUTATED: Final = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: {name} was written to after autograd saved it (version {saved}, now {now}). "
    "Write to a copy instead: `x = x + y`, not `x += y`."
)

CLOSED: Final = (
    "{name} was evicted, and the memory that held it was given back by close(). Run backward "
    "before close(), or drop the graph."
)


class _Copies:
    """The copies of one slot and the device memory that they touch."""

    __slots__ = (
        "back", "back_is_waited", "back_stream", "copied_out", "fetched", "key", "last_copy",
        "leaving", "num_bytes", "place", "source_stream",
    )  # fmt: skip

    def __init__(self, place: Place, source: Tensor, stream: Stream, copied_out: Event) -> None:
        self.place = place
        self.num_bytes = source.numel()
        self.key = storage_key(source)
        self.leaving: Tensor | None = source
        self.source_stream = stream
        self.last_copy = copied_out
        """The latest copy from or to the place; it comes behind all earlier ones."""
        self.copied_out = copied_out
        self.back: Tensor | None = None
        self.back_stream: Stream = None
        self.back_is_waited = False
        self.fetched: Event = None


class Slot:
    """One evicted storage. Alive as long as a record of a graph holds it (design rule 4)."""

    __slots__ = (
        "__weakref__", "_graveyard", "copies", "index", "is_used", "name", "version", "watched",
        "written",
    )  # fmt: skip

    def __init__(
        self,
        *,
        index: int,
        name: str,
        copies: _Copies,
        watched: Tensor,
        graveyard: deque[_Copies],
    ) -> None:
        self.index = index
        """Place in the order of evictions; fetches look ahead downwards."""
        self.name = name
        self.copies = copies
        self.watched: Tensor | None = watched
        """While leaving: an alias of the source that shares its version counter."""
        self.version = watched._version
        self.written = 0
        """The source's later version, when it was written to while its copy may have run."""
        self.is_used = False
        """Backward has asked for it: it is not fetched ahead again."""
        self._graveyard = graveyard

    @property
    def num_bytes(self) -> int:
        """Bytes of the storage."""
        return self.copies.num_bytes

    def __del__(self) -> None:
        # A finalizer may run at any time and on any thread: it only hands over.
        self._graveyard.append(self.copies)


class Traffic:
    """All copies between one device and its tiers.

    Calls may come from any thread, one at a time: the runtime holds its lock.
    """

    def __init__(
        self,
        device: AbstractDevice,
        tiers: Tiers,
        ledger: Ledger,
        *,
        max_out_bytes_in_flight: int,
        max_in_bytes_in_flight: int,
    ) -> None:
        self.ledger = ledger
        self.tiers = tiers
        self._device = device
        self._max_out = max_out_bytes_in_flight
        self._max_in = max_in_bytes_in_flight
        self._leaving: deque[weakref.ref[Slot]] = deque()
        self._ahead: deque[weakref.ref[Slot]] = deque()  # nearest first
        self._out_bytes = 0
        self._in_bytes = 0
        self._order: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
        self._first_index = 0
        self._next_index = 0
        self._graveyard: deque[_Copies] = deque()
        self._by_storage: dict[int, tuple[StorageRef, weakref.ref[Slot]]] = {}

    def evict(self, name: str, source: Tensor, place: Place, watched: Tensor) -> Slot:
        """Start to copy `source`, a whole storage as bytes, to `place`.

        Args:
            name: The activation, for messages.
            source: The bytes; the caller gives up its reference.
            place: Where to; taken from `tiers`, given back when the slot dies.
            watched: An alias that shares the version counter of the tensor autograd saved.

        Returns:
            The slot; one that exists already, if another block evicted the same storage
            (design rule 3: one storage moves once).
        """
        self.bury()
        found = self._find(source, watched)
        if found is not None:
            self.tiers.give_back(place, None)
            return found
        num_bytes = source.numel()
        # Design rule 10: room first, so that bytes in flight never exceed the plan's bound.
        while self._leaving and self._out_bytes + num_bytes > self._max_out:
            self._settle_oldest()
        stream = self._device.current_stream()  # design rule 6
        # Design rule 1: the place may still be in use by the copies of its last owner.
        event = self._device.copy(
            source, place, stream=stream, after=self.tiers.events_before_reuse(place)
        )
        slot = Slot(
            index=self._next_index,
            name=name,
            copies=_Copies(place, source, stream, event),
            watched=watched,
            graveyard=self._graveyard,
        )
        self._next_index += 1
        self._out_bytes += num_bytes
        self._leaving.append(weakref.ref(slot))
        self._order[slot.index] = slot
        self._by_storage[slot.copies.key] = StorageRef(source.untyped_storage()), weakref.ref(slot)
        self.ledger.count_eviction(place.tier, num_bytes)
        self.ledger.count_device_bytes(num_bytes)
        return slot

    def bytes_of(self, slot: Slot) -> Tensor:
        """Return the slot's bytes on the device, ready for the current stream, and look ahead.

        The tensor is valid for work queued on the current stream before `release(slot)`.

        Raises:
            RuntimeError: The tensor was written to after it was saved, as torch itself says.
            RuntimeStateError: Its tier was closed.
        """
        self.bury()
        self._note_write(slot)
        if slot.written:
            raise RuntimeError(MUTATED.format(name=slot.name, saved=slot.version, now=slot.written))
        slot.is_used = True
        copies = slot.copies
        stream = self._device.current_stream()  # design rule 6
        if copies.leaving is not None:
            self.ledger.count_resurrection()
            found, owner = copies.leaving, copies.source_stream
        else:
            if copies.back is None:
                if not self.tiers.is_open(copies.place.tier):
                    raise RuntimeStateError(CLOSED.format(name=slot.name))
                self._make_room(copies.num_bytes)
                self._fetch(slot)
            if not copies.back_is_waited:
                self._device.wait(copies.back_stream, copies.fetched)  # design rule 1
                copies.back_is_waited = True
                self._in_bytes -= copies.num_bytes
            assert copies.back is not None, "bug in ebbtide"
            found, owner = copies.back, copies.back_stream
        if stream != owner:
            found = self._copy_across(found, owner, stream)
        self.fetch_ahead(slot.index)
        return found

    def fetch_ahead(self, index: int) -> None:
        """Fetch slots that were evicted before number `index`, latest first, within the bound."""
        start, found_any = index, False
        while index > self._first_index:
            index -= 1
            slot = self._order.get(index)
            if slot is None:
                continue
            found_any = True
            copies = slot.copies
            if slot.is_used or copies.leaving is not None or copies.back is not None:
                continue
            if not self.tiers.is_open(copies.place.tier):
                continue
            if self._in_bytes + slot.num_bytes > self._max_in:  # design rule 10
                return
            self._fetch(slot)
            self._ahead.append(weakref.ref(slot))
        if not found_any:
            self._first_index = start

    def release(self, slot: Slot) -> None:
        """Drop what the device holds of `slot`; its bytes stay in the tier."""
        self.settle(slot)
        copies = slot.copies
        if copies.back is not None:
            self._fence_back(copies)
            copies.back = None
            self.ledger.count_device_bytes(-copies.num_bytes)

    def settle(self, slot: Slot) -> None:
        """Fence the slot's copy out and let its source go."""
        copies = slot.copies
        if copies.leaving is None:
            return
        self._note_write(slot)
        slot.watched = None
        self._fence_leaving(copies)
        current = self._device.current_stream()
        if current != copies.source_stream:
            self._device.wait(current, copies.copied_out)
        copies.leaving = None

    def settle_all(self) -> None:
        """Fence every copy out and let the sources go: at the turn from forward to backward."""
        self.bury()
        while self._leaving:
            self._settle_oldest()
        while self._ahead:  # by a backward that stopped half-way
            self._drop_farthest()

    def bury(self) -> None:
        """Give back what dead slots held, behind the fences that it needs."""
        while self._graveyard:
            dead = self._graveyard.popleft()
            if dead.leaving is not None:
                self._fence_leaving(dead)
            if dead.back is not None:
                self._fence_back(dead)
                self.ledger.count_device_bytes(-dead.num_bytes)
            self.tiers.give_back(dead.place, dead.last_copy)
            known = self._by_storage.get(dead.key)
            if known is not None and known[1]() is None:
                del self._by_storage[dead.key]
            self.ledger.count_release(dead.place.tier, dead.num_bytes)

    def close(self) -> None:
        """Give all host memory back; what is evicted and was not fetched is lost."""
        self.bury()
        self.tiers.close()

    @property
    def next_index(self) -> int:
        """The number that the next evicted slot gets."""
        return self._next_index

    @property
    def is_idle(self) -> bool:
        """Whether no slot is alive."""
        self.bury()
        return not self._order

    @property
    def bytes_in_flight(self) -> tuple[int, int]:
        """Device bytes held for copies under way: out and in."""
        return self._out_bytes, self._in_bytes

    def _find(self, source: Tensor, watched: Tensor) -> Slot | None:
        known = self._by_storage.get(storage_key(source))
        if known is None or known[0].expired():
            return None
        slot = known[1]()
        if slot is None or slot.written or slot.version != watched._version:
            return None
        return slot if slot.num_bytes == source.numel() else None

    def _fence_leaving(self, copies: _Copies) -> None:
        # Design rule 1: whoever gets this memory next is queued behind the copy that reads it.
        self._device.wait(copies.source_stream, copies.copied_out)
        self._out_bytes -= copies.num_bytes
        self.ledger.count_device_bytes(-copies.num_bytes)

    def _fence_back(self, copies: _Copies) -> None:
        if not copies.back_is_waited:
            # Design rule 1: nobody may get memory that a dropped fetch still writes to.
            self._device.wait(copies.back_stream, copies.fetched)
            copies.back_is_waited = True
            self._in_bytes -= copies.num_bytes

    def _settle_oldest(self) -> None:
        slot = self._leaving.popleft()()
        if slot is None:
            self.bury()
        else:
            self.settle(slot)

    @staticmethod
    def _note_write(slot: Slot) -> None:
        if slot.watched is not None and slot.watched._version != slot.version:
            slot.written = slot.watched._version

    def _fetch(self, slot: Slot) -> None:
        copies = slot.copies
        stream = self._device.current_stream()  # design rule 6
        copies.back = self._device.allocate(copies.num_bytes)
        copies.back_stream, copies.back_is_waited = stream, False
        # Design rule 1: a fetch waits for its own evict, and for earlier fetches, so that whoever
        # gets the place waits for all of them. It also waits for `stream`, on which the new
        # memory may still be in use by its last owner.
        copies.fetched = copies.last_copy = self._device.copy(
            copies.place, copies.back, stream=stream, after=(copies.last_copy,)
        )
        self._in_bytes += copies.num_bytes
        self.ledger.count_fetch(copies.place.tier, copies.num_bytes)
        self.ledger.count_device_bytes(copies.num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Drop what was fetched ahead, farthest first, for a fetch that cannot wait."""
        while self._ahead and self._in_bytes + num_bytes > self._max_in:  # design rule 10
            self._drop_farthest()

    def _drop_farthest(self) -> None:
        slot = self._ahead.pop()()
        if slot is not None and not slot.copies.back_is_waited:
            self.release(slot)

    def _copy_across(self, found: Tensor, owner: Stream, stream: Stream) -> Tensor:
        """Copy bytes of another stream's memory, so that this stream owns what it uses."""
        self._device.wait(stream, owner)
        copied = self._device.allocate(found.numel())
        copied.copy_(found)
        self._device.wait(owner, stream)
        return copied
