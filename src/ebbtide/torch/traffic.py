"""Evict storages to a tier and fetch them back; every wait of the runtime is in this file.

A `Slot` is one evicted storage. It has three lives: *leaving* (its device source is still held,
and serves every use), *away*, and *back* (a fetched device copy exists). Copies run in the
background; the device memory they touch is released only behind a fence on the stream that owns
it, and only at calls that the program itself makes, never when an event happens to have passed:
the peak is the same in every run.

A little longer than most modules, so that no wait is anywhere else.
"""

from __future__ import annotations

import heapq
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

from torch import Tensor

from ebbtide.errors import EbbtideError, RuntimeStateError
from ebbtide.memory.ledger import Ledger
from ebbtide.torch.anchors import TURN_END_RANK, Anchors
from ebbtide.torch.devices.base import AbstractDevice, Event, Place, Stream, raised_anew
from ebbtide.torch.identity import StorageRef, storage_key
from ebbtide.torch.internals import alias_of, mark_range
from ebbtide.torch.tiers import Tiers

MUTATED: Final = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: {name} was written to after autograd saved it (version {saved}, now {now}). "
    "Write to a copy instead: `x = x + y`, not `x += y`."
)

NEVER: Final = sys.maxsize
"""After every use: it is fetched when it is needed."""

MIN_TRIM_BYTES: Final = 16 * 2**20
"""Less is not worth the system's time: a chosen number."""

CLOSED: Final = (
    "{name} was evicted, and the memory that held it was given back by close(). Run backward "
    "before close(), or drop the graph."
)


class _Copies:
    """The copies of one slot and the device memory that they touch."""

    __slots__ = (
        "back", "back_is_waited", "back_stream", "copied_out", "fetched", "key", "last_copy",
        "leaving", "lost", "num_bytes", "place", "source_stream",
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
        self.lost: EbbtideError | None = None
        """Why the tier does not hold the bytes; their source stays then."""
        self.back: Tensor | None = None
        self.back_stream: Stream = None
        self.back_is_waited = False
        self.fetched: Event = None

    @property
    def can_be_fetched(self) -> bool:
        """Whether the tier alone holds the bytes."""
        return self.leaving is None and self.back is None


class Slot:
    """One evicted storage. Alive as long as a record of a graph holds it (design rule 4)."""

    __slots__ = (
        "__weakref__", "_graveyard", "activation", "copies", "fetch_rank", "forward_pass", "index",
        "is_used", "name", "others", "version", "watched", "written",
    )  # fmt: skip

    def __init__(
        self,
        *,
        index: int,
        name: str,
        activation: str,
        copies: _Copies,
        watched: Tensor,
        forward_pass: Pass,
        graveyard: deque[_Copies],
    ) -> None:
        self.index = index
        """Place in the order of evictions; fetches look ahead downwards."""
        self.name = name
        self.activation = activation
        """What the plan decides for; profilers' traces name the slot's copies after it."""
        self.copies = copies
        self.watched: Tensor | None = watched
        """While leaving: an alias of the source that shares its version counter."""
        self.version = watched._version
        self.others: list[tuple[Tensor, int]] = []
        """While leaving: more aliases, which may count their versions apart, and their versions."""
        self.written = 0
        """The source's later version, when it was written to while its copy may have run."""
        self.is_used = False
        """Backward has asked for it: it is not fetched ahead again."""
        self.forward_pass = forward_pass
        self.fetch_rank = NEVER
        """The use in backward at which the plan starts its fetch."""
        self._graveyard = graveyard

    @property
    def num_bytes(self) -> int:
        """Bytes of the storage."""
        return self.copies.num_bytes

    def __del__(self) -> None:
        # A finalizer may run at any time and on any thread: it only hands over.
        self._graveyard.append(self.copies)


class Pass:
    """One forward pass: which of its slots backward fetches next, by the plan's moments.

    Two graphs that are alive have a pass each, so that the backward of one starts no fetch of
    the other (design rule 4). It dies with its slots and records.
    """

    __slots__ = ("__weakref__", "_reached", "_slots", "_waiting", "is_checked")

    def __init__(self) -> None:
        self.is_checked = False
        """Some block of it is checked: backward then makes more again than the plan says, and
        what would be fetched ahead has no room."""
        self._slots: list[weakref.ref[Slot]] = []
        self._waiting: deque[weakref.ref[Slot]] | None = None
        """In the order of their fetches; None until a backward starts."""
        self._reached = TURN_END_RANK

    def add(self, slot: Slot) -> None:
        """Let `slot` be fetched at its moment, in each backward that starts from now on."""
        self._slots.append(weakref.ref(slot))

    def rewind(self) -> None:
        """Start a backward: a retained graph runs several, and each one fetches anew."""
        slots = [slot for known in self._slots if (slot := known()) is not None]
        slots.sort(key=lambda slot: (slot.fetch_rank, -slot.index))
        for slot in slots:
            slot.is_used = False
        self._slots = [weakref.ref(slot) for slot in slots]
        self._waiting = deque(self._slots)
        self._reached = TURN_END_RANK

    def reach(self, rank: int) -> None:
        """Note that backward has come to the use number `rank`."""
        if self._waiting is None:
            self.rewind()  # nothing told that it started
        self._reached = max(self._reached, rank)

    def next_due(self) -> Slot | None:
        """Return the slot whose fetch is due and not started, or None."""
        while self._waiting:
            slot = self._waiting[0]()
            if slot is None:
                self._waiting.popleft()
                continue
            if slot.fetch_rank > self._reached:
                return None
            if not slot.is_used and slot.copies.can_be_fetched:
                return slot
            self._waiting.popleft()
        return None


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
        anchors: Anchors | None = None,
        trim: Callable[[], None] | None = None,
    ) -> None:
        """Prepare for the copies of one plan.

        `trim` gives memory that was freed back to the system, where allocators of the device keep
        it and others want it. It is called before the turn, whose peak is the step's own.
        """
        self.ledger = ledger
        self.tiers = tiers
        self.anchors = anchors or Anchors()
        self.forward_pass = Pass()
        """The pass that runs now, or ran last."""
        self.give_back: Callable[[Place, Event], None] = tiers.give_back
        """Frees the place of a slot that has died, behind its last copy."""
        self._device = device
        self._max_out = max_out_bytes_in_flight
        self._max_in = max_in_bytes_in_flight
        self._trim = trim
        self._let_go_bytes = 0
        """Sources that were let go since the last call of `trim`."""
        self._leaving: deque[weakref.ref[Slot]] = deque()
        self._ahead: deque[weakref.ref[Slot]] = deque()  # nearest first
        self._releases: list[tuple[int, int, weakref.ref[Slot]]] = []  # a heap, soonest first
        self._out_bytes = 0
        self._in_bytes = 0
        self._order: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
        self._first_index = 0
        """No slot before it is alive."""
        self._first_ahead = 0
        """The number from which it was looked ahead."""
        self._next_ahead = 0
        """What lies between it and that was fetched ahead, or is none to fetch: a use that goes
        back up a little, as those of one block do, looks at none of it again."""
        self._next_index = 0
        self._graveyard: deque[_Copies] = deque()
        self._by_storage: dict[int, tuple[StorageRef, weakref.ref[Slot]]] = {}

    def evict(
        self,
        name: str,
        source: Tensor,
        place: Place,
        watched: Tensor,
        activation: str = "",
        *,
        is_shared: bool = True,
    ) -> Slot:
        """Start to copy `source`, a whole storage as bytes, to `place`.

        Args:
            name: What it is called in messages.
            source: The bytes; the caller gives up its reference.
            place: Where to; taken from `tiers`, given back when the slot dies.
            watched: An alias that shares the version counter of the tensor autograd saved.
            activation: What the plan decides for, if that is not `name`: a piece has a name of
                its own.
            is_shared: The version of `watched` tells whether the storage was written to, so a
                later evict of the storage may find this slot.

        Returns:
            The slot; one that exists already, if another block evicted the same storage
            (design rule 3: one storage moves once).
        """
        self.bury()
        found = self._find(source, watched) if is_shared else None
        if found is not None:
            self.tiers.give_back(place, None)
            self._anchor(found, activation or name)
            return found
        num_bytes = source.numel()
        # Design rule 10: room first, so that bytes in flight never exceed the plan's bound.
        while self._leaving and self._out_bytes + num_bytes > self._max_out:
            self._settle_oldest()
        stream = self._device.current_stream()  # design rule 6
        # Design rule 1: the place may still be in use by the copies of its last owner.
        # `ebbtide trace` finds the copies of each activation by this range.
        with mark_range(f"ebbtide: evict {activation or name}"):
            event = self._device.copy(
                source, place, stream=stream, after=self.tiers.events_before_reuse(place)
            )
        slot = Slot(
            index=self._next_index,
            name=name,
            activation=activation or name,
            copies=_Copies(place, source, stream, event),
            watched=watched,
            forward_pass=self.forward_pass,
            graveyard=self._graveyard,
        )
        self._next_index += 1
        self._out_bytes += num_bytes
        self._leaving.append(weakref.ref(slot))
        self._order[slot.index] = slot
        self._anchor(slot, activation or name)
        if self.anchors.has_releases:
            rank = self.anchors.release_ranks.get(activation or name, self.anchors.turn_start_rank)
            heapq.heappush(self._releases, (rank, slot.index, weakref.ref(slot)))
        if is_shared:
            known = StorageRef(source.untyped_storage()), weakref.ref(slot)
            self._by_storage[slot.copies.key] = known
        self.ledger.count_eviction(place.tier, num_bytes)
        self.ledger.count_device_bytes(num_bytes)
        return slot

    def bytes_of(self, slot: Slot) -> Tensor:
        """Return the slot's bytes on the device, ready for the current stream, and look ahead.

        The tensor is valid for work queued on the current stream before `release(slot)`.

        Raises:
            RuntimeError: The tensor was written to after it was saved, as torch itself says.
            RuntimeStateError: Its tier was closed.
            MemoryTierError: Its copy out or back failed. Where it was the copy back, the same
                backward can be run again.
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
                self._await_back(copies)
            assert copies.back is not None, "bug in ebbtide"
            found, owner = copies.back, copies.back_stream
        if stream != owner:
            found = self._copy_across(found, owner, stream)
        if self.anchors.has_fetches:
            self._fetch_due(slot.forward_pass)
        elif not slot.forward_pass.is_checked:
            self.fetch_ahead(slot.index)
        return found

    def fetch_ahead(self, index: int, *, is_start: bool = False) -> None:
        """Fetch slots that were evicted before number `index`, latest first, within the bound.

        Args:
            index: The slot that backward asks for, or one behind all, where it starts.
            is_start: A backward starts, as far as that is told.
        """
        if is_start or index > self._first_ahead:
            self._next_ahead = self._first_ahead = index
        elif index < self._next_ahead:
            self._first_ahead = index  # what is skipped is looked at when backward goes back up
        start = position = min(index, self._next_ahead)
        found_any = is_behind_leaving = False
        while position > self._first_index:
            slot = self._order.get(position - 1)
            found_any = found_any or slot is not None
            if slot is not None and self.tiers.is_open(slot.copies.place.tier):
                copies = slot.copies
                if copies.leaving is not None:
                    is_behind_leaving = True  # to be looked at again
                elif not slot.is_used and copies.can_be_fetched and not self._fetch_if_room(slot):
                    break
            position -= 1
            if not is_behind_leaving:
                self._next_ahead = position
        else:
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
        """Fence the slot's copy out and let its source go.

        Raises:
            MemoryTierError: The copy failed; the source stays as long as the slot. Only in the
                slot's own forward: a step that comes after a failed one does not fail for it.
        """
        copies = slot.copies
        if copies.leaving is None:
            return
        if copies.lost is None:
            self._note_write(slot)
            self._fence_leaving(copies)
        if copies.lost is not None:
            if slot.forward_pass is self.forward_pass:
                raise raised_anew(copies.lost)
            return
        slot.watched = None
        slot.others.clear()
        current = self._device.current_stream()
        if current != copies.source_stream:
            self._device.wait(current, copies.copied_out)
        copies.leaving = None
        self._let_go_bytes += copies.num_bytes

    def watch(self, slot: Slot, tensor: Tensor) -> None:
        """Note writes to another tensor of the storage, while its source is still held."""
        if slot.watched is not None:
            slot.others.append((alias_of(tensor), tensor._version))

    def watch_alias(self, slot: Slot, alias: Tensor, version: int) -> None:
        """Note writes to a DTensor over the storage, while its source is still held."""
        if slot.watched is not None:
            slot.others.append((alias, version))

    def unshare(self, slot: Slot) -> None:
        """Let no later evict of the storage find `slot`: the storage is written to next."""
        known = self._by_storage.get(slot.copies.key)
        if known is not None and known[1]() is slot:
            del self._by_storage[slot.copies.key]

    def settle_all(self) -> None:
        """Fence every copy out and let the sources go: at the turn from forward to backward."""
        self._settle_leaving()
        self._drop_ahead()

    # -- the moments of a step -----------------------------------------------------------------

    def start_pass(self) -> None:
        """Note that a forward pass starts."""
        self.forward_pass = Pass()
        if self.anchors.has_releases:
            self._settle_leaving()  # what an earlier pass was to hold until its backward

    def reach_call(self, group: str) -> None:
        """Let go what the plan lets go before the call that makes `group`."""
        rank = self.anchors.call_ranks.get(group)
        if rank is not None and self._releases:
            self._release_up_to(rank)

    def start_turn(self) -> None:
        """Note that the last block's forward has ended: the logits' peak comes now."""
        if self.anchors.has_releases:
            self._release_up_to(self.anchors.turn_start_rank)
            self._drop_ahead()
        else:
            self.settle_all()
        if self._trim is not None and self._let_go_bytes >= MIN_TRIM_BYTES:
            self._let_go_bytes = 0
            self._trim()

    def start_backward(self, forward_pass: Pass | None, index: int) -> None:
        """Note that the backward of a pass starts, in which slots before `index` were evicted.

        None for a pass of which no slot and no record is alive.
        """
        if self.anchors.has_releases:
            self._settle_leaving()
        if self.anchors.has_fetches:
            if forward_pass is not None:
                forward_pass.rewind()
                self._fetch_due(forward_pass)
        elif forward_pass is None or not forward_pass.is_checked:
            self.fetch_ahead(index, is_start=True)

    def reach_use(self, forward_pass: Pass, activation: str) -> None:
        """Start the fetches that the plan starts when backward asks for `activation`."""
        rank = self.anchors.use_ranks.get(activation)
        if rank is not None and self.anchors.has_fetches:
            forward_pass.reach(rank)
            self._fetch_due(forward_pass)

    # -- the end -------------------------------------------------------------------------------

    def bury(self) -> None:
        """Give back what dead slots held, behind the fences that it needs."""
        while self._graveyard:
            dead = self._graveyard.popleft()
            if dead.leaving is not None and dead.lost is None:
                self._fence_leaving(dead)
            if dead.lost is not None:
                self.ledger.count_device_bytes(-dead.num_bytes)
            if dead.back is not None:
                self._fence_back(dead)
                self.ledger.count_device_bytes(-dead.num_bytes)
            self.give_back(dead.place, dead.last_copy)
            known = self._by_storage.get(dead.key)
            if known is not None and known[1]() is None:
                del self._by_storage[dead.key]
            self.ledger.count_release(dead.place.tier, dead.num_bytes)

    def close(self) -> None:
        """Give all host memory back; what is evicted and was not fetched is lost."""
        self.bury()
        self.tiers.close()

    @property
    def device(self) -> AbstractDevice:
        """What makes the copies."""
        return self._device

    def name_at(self, place: Place) -> str:
        """Return what the slot that holds `place` is called, for messages; empty if none does."""
        names = (slot.name for slot in self._order.values() if slot.copies.place is place)
        return next(names, "")

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

    def _anchor(self, slot: Slot, activation: str) -> None:
        """Note when the plan fetches `slot`: the soonest of all activations that it serves."""
        rank = self.anchors.fetch_ranks.get(activation, NEVER)
        if rank < slot.fetch_rank:
            if slot.fetch_rank == NEVER:
                slot.forward_pass.add(slot)
            slot.fetch_rank = rank

    def _release_up_to(self, rank: int) -> None:
        while self._releases and self._releases[0][0] <= rank:
            slot = heapq.heappop(self._releases)[2]()
            if slot is None:
                self.bury()
            else:
                self.settle(slot)

    def _settle_leaving(self) -> None:
        self.bury()
        self._releases.clear()
        while self._leaving:
            self._settle_oldest()

    def _fetch_due(self, forward_pass: Pass) -> None:
        if forward_pass.is_checked:
            return
        while (slot := forward_pass.next_due()) is not None:
            if not self.tiers.is_open(slot.copies.place.tier):
                return
            if not self._fetch_if_room(slot):
                return

    def _fetch_if_room(self, slot: Slot) -> bool:
        """Fetch ahead of the use, unless the bytes in flight would exceed the plan's bound."""
        if self._in_bytes + slot.num_bytes > self._max_in:  # design rule 10
            return False
        self._fetch(slot)
        self._ahead.append(weakref.ref(slot))
        return True

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
        try:
            self._device.wait(copies.source_stream, copies.copied_out)
        except EbbtideError as error:
            # It has ended all the same, and reads nothing any more.
            copies.lost = error.with_traceback(None)
        self._out_bytes -= copies.num_bytes
        if copies.lost is None:
            self.ledger.count_device_bytes(-copies.num_bytes)

    def _await_back(self, copies: _Copies) -> None:
        """Let the stream that asked for it wait for a fetch; one that failed leaves nothing."""
        try:
            self._device.wait(copies.back_stream, copies.fetched)  # design rule 1
        except EbbtideError:
            copies.back = None
            # The failed one has ended: a backward that is run again fetches anew.
            copies.last_copy = copies.copied_out
            self._in_bytes -= copies.num_bytes
            self.ledger.count_device_bytes(-copies.num_bytes)
            self._drop_ahead()  # they may have failed as well
            raise
        copies.back_is_waited = True
        self._in_bytes -= copies.num_bytes

    def _fence_back(self, copies: _Copies) -> None:
        if not copies.back_is_waited:
            # Design rule 1: nobody may get memory that a dropped fetch still writes to.
            try:
                self._device.wait(copies.back_stream, copies.fetched)
            except EbbtideError:
                copies.last_copy = copies.copied_out  # nobody used it
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
        if slot.watched is None:
            return
        for alias, version in ((slot.watched, slot.version), *slot.others):
            if alias._version != version:
                slot.written = alias._version

    def _fetch(self, slot: Slot) -> None:
        copies = slot.copies
        stream = self._device.current_stream()  # design rule 6
        back = self._device.allocate(copies.num_bytes)
        # Design rule 1: a fetch waits for its own evict, and for earlier fetches, so that whoever
        # gets the place waits for all of them. It also waits for `stream`, on which the new
        # memory may still be in use by its last owner.
        with mark_range(f"ebbtide: fetch {slot.activation}"):
            after = (copies.last_copy,)
            fetched = self._device.copy(copies.place, back, stream=stream, after=after)
        # Only now: where the copy was refused, a later use must not find memory without bytes.
        copies.back, copies.back_stream, copies.back_is_waited = back, stream, False
        copies.fetched = copies.last_copy = fetched
        self._in_bytes += copies.num_bytes
        self.ledger.count_fetch(copies.place.tier, copies.num_bytes)
        self.ledger.count_device_bytes(copies.num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Drop what was fetched ahead, farthest first, for a fetch that cannot wait."""
        while self._ahead and self._in_bytes + num_bytes > self._max_in:  # design rule 10
            self._drop_farthest()

    def _drop_ahead(self) -> None:
        """Drop what a backward that stopped half-way had fetched."""
        while self._ahead:
            self._drop_farthest()

    def _drop_farthest(self) -> None:
        slot = self._ahead.pop()()
        if slot is not None and not slot.copies.back_is_waited:
            self.release(slot)
            self._next_ahead = max(self._next_ahead, slot.index + 1)

    def _copy_across(self, found: Tensor, owner: Stream, stream: Stream) -> Tensor:
        """Copy bytes of another stream's memory, so that this stream owns what it uses."""
        self._device.wait(stream, owner)
        copied = self._device.allocate(found.numel())
        copied.copy_(found)
        self._device.wait(owner, stream)
        return copied
