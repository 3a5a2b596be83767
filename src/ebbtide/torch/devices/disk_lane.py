"""Copies between a GPU and a disk, through pinned rows that serve what they still hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ebbtide.memory.arena import Region
from ebbtide.memory.bounce import Bounce, BounceStatistics, Row
from ebbtide.memory.disk import DiskStore
from ebbtide.memory.disk_rates import NUM_THREADS
from ebbtide.torch.devices.base import Event, Stream
from ebbtide.torch.tiers import HostRegion


class DiskCopy:
    """One copy between the GPU and the disk."""

    __slots__ = ("device_copy", "is_stored", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.device_copy: Future[Any] = Future()
        """The GPU's part of the copy, once it is queued."""
        self.is_stored: Future[None] = Future()
        """The file's part of the copy."""
        self.memory: Tensor | None = memory
        """On the GPU, until its copy is queued. Nobody else here holds it: when it is freed is
        for the runtime to say, and an executor holds arguments for longer."""

    def queue(self, copy_memory: Callable[[Tensor], Event]) -> Event:
        """Queue the GPU's part and tell whoever waits for that; returns its end."""
        memory, self.memory = self.memory, None
        assert memory is not None, "bug in ebbtide: a copy was queued twice"
        event = copy_memory(memory)
        del memory
        self.device_copy.set_result(event)
        return event

    def fail(self, error: BaseException) -> None:
        """Hand `error` to whoever waits for what has not been done."""
        self.memory = None
        if not self.device_copy.done():
            self.device_copy.set_exception(error)
        self.is_stored.set_exception(error)


class DiskLane:
    """GPU to disk and back, through pinned memory and threads.

    A copy that finds no room waits for it on a thread of its own, not on the one that asks: forward
    goes on, with the source on the GPU. Room is given in the order of copies, and whoever holds
    some waits for no copy that asked for it later, so that room always comes.

    What was stored last is brought back from its row, without a read, also while the disk is still
    being written to. A disk that failed to take it is then no matter.

    Args:
        store: The disk.
        bounce: The pinned memory.
    """

    def __init__(self, store: DiskStore, bounce: HostRegion) -> None:
        self._store = store
        self._buffer = bounce
        self._rows = Bounce(bounce.buffer.numel())
        # As many as the store has: each one waits for the GPU or for one of the store's.
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ebbtide-bounce")
        self._taker = ThreadPoolExecutor(1, thread_name_prefix="ebbtide-room")
        self._lock = threading.Lock()
        self._num_waiting = 0
        """Copies that wait for room, or for their turn to."""

    def copy(
        self,
        memory: Tensor,
        place: Region,
        lane: Stream,
        stream: Stream,
        after: Sequence[Event],
        *,
        is_out: bool,
    ) -> Event:
        """Start a copy, as `AbstractDevice.copy` says; `place` is the disk store's."""
        copy = DiskCopy(memory)
        earlier = [event for event in after if isinstance(event, DiskCopy)]
        ready = stream.record_event()
        row = None if is_out else self._rows.find(place)
        if row is not None:
            event = copy.queue(partial(self._copy_in, row, lane, ready, earlier))
            self._threads.submit(self._end_served, copy, row, event, earlier)
            return copy
        begin = partial(self._begin, copy, place, lane, ready, earlier, is_out)
        with self._lock:
            row = None if self._num_waiting else self._rows.take(place, is_waiting=False)
            self._num_waiting += row is None
        if row is not None:
            begin(row)
        else:
            self._taker.submit(self._begin_with_room, place, begin)
        return copy

    def statistics(self) -> BounceStatistics:
        """Return what the pinned memory served."""
        return self._rows.statistics()

    def _begin_with_room(self, place: Region, begin: Callable[[Row], None]) -> None:
        row = self._rows.take(place)
        assert row is not None, "bug in ebbtide"
        try:
            begin(row)
        finally:
            with self._lock:
                self._num_waiting -= 1

    def _begin(
        self,
        copy: DiskCopy,
        place: Region,
        lane: Stream,
        ready: Event,
        earlier: list[DiskCopy],
        is_out: bool,
        row: Row,
    ) -> None:
        try:
            if is_out:
                event = copy.queue(partial(self._copy_out, row, lane, ready))
                self._threads.submit(self._store_row, copy, place, event, earlier, row)
            else:
                self._threads.submit(self._load, copy, place, lane, ready, earlier, row)
        except BaseException as error:
            # Threads take nothing more where the interpreter ends: whoever waits for room goes on.
            self._rows.leave(row, is_wanted=False)
            copy.fail(error)

    def _store_row(
        self, copy: DiskCopy, place: Region, event: Event, earlier: list[DiskCopy], row: Row
    ) -> None:
        try:
            # The place must be free, whatever became of the copies that used it before.
            futures.wait([other.is_stored for other in earlier])
            event.synchronize()
            self._store.write(place, _memory(self._bytes_of(row))).result()
        except BaseException as error:
            self._rows.leave(row, is_wanted=False)
            copy.fail(error)
        else:
            self._rows.leave(row, is_wanted=True)
            copy.is_stored.set_result(None)

    def _load(
        self,
        copy: DiskCopy,
        place: Region,
        lane: Stream,
        ready: Event,
        earlier: list[DiskCopy],
        row: Row,
    ) -> None:
        try:
            for other in earlier:
                other.is_stored.result()
            self._store.read(place, _memory(self._bytes_of(row))).result()
            event = copy.queue(partial(self._copy_in, row, lane, ready, ()))
            copy.is_stored.set_result(None)
            event.synchronize()
        except BaseException as error:
            if not copy.is_stored.done():
                copy.fail(error)
        finally:
            self._rows.leave(row, is_wanted=False)

    def _end_served(self, copy: DiskCopy, row: Row, event: Event, earlier: list[DiskCopy]) -> None:
        """Give the row of a copy back, once the GPU has its bytes."""
        try:
            event.synchronize()
            for other in earlier:
                other.is_stored.result()  # whoever gets the place waits for this copy alone
        except BaseException as error:
            self._rows.leave(row, is_wanted=False)
            copy.fail(error)
        else:
            self._rows.leave(row, is_wanted=False)
            copy.is_stored.set_result(None)

    def _copy_out(self, row: Row, lane: Stream, ready: Event, memory: Tensor) -> Event:
        lane.wait_event(ready)
        with torch.cuda.stream(lane):
            self._bytes_of(row).copy_(memory, non_blocking=True)
            event = lane.record_event()
        # Before anybody is told that the copy is queued: who then asks finds the row.
        self._rows.fill(row)
        return event

    def _copy_in(
        self,
        row: Row,
        lane: Stream,
        ready: Event,
        earlier: Sequence[DiskCopy],
        memory: Tensor,
    ) -> Event:
        lane.wait_event(ready)
        for other in earlier:
            lane.wait_event(other.device_copy.result())  # it may be the one that fills the row
        with torch.cuda.stream(lane):
            memory.copy_(self._bytes_of(row), non_blocking=True)
            return lane.record_event()

    def _bytes_of(self, row: Row) -> Tensor:
        first = row.region.offset_bytes
        return self._buffer.buffer[first : first + row.region.num_bytes]


def _memory(row: Tensor) -> memoryview:
    array: Any = row.numpy()
    return memoryview(array)
