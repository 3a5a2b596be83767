"""Copies between a GPU and a disk, with streams of the CPU in the GPU's place."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide.errors import MemoryTierError
from ebbtide.memory.arena import Region
from ebbtide.memory.disk import DiskStore
from ebbtide.memory.file_calls import AbstractFileCalls, OpenFile, SystemFileCalls
from ebbtide.torch.devices.disk_lane import DiskCopy, DiskLane
from ebbtide.torch.tiers import HostRegion
from ebbtide.units import DiskSpec

ROW = 8192
WAIT_S = 60


class Event:
    """The end of work that was done at once."""

    def synchronize(self) -> None:
        """Do nothing."""


class Stream:
    """Does everything at once, and notes what it was told to wait for."""

    def __init__(self) -> None:
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)

    def record_event(self) -> Event:
        return Event()


class HeldCalls(AbstractFileCalls):
    """The real calls; writes wait until they may, and then fail if they shall."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.may_write.set()
        self.write_errno = 0
        self._real = SystemFileCalls(is_direct=False)

    def open(self, path: Path) -> OpenFile:
        return self._real.open(path)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        self._real.allocate(descriptor, num_bytes)

    def write_at(self, descriptor: int, source: memoryview, offset_bytes: int) -> int:
        self.may_write.wait(WAIT_S)
        if self.write_errno:
            raise OSError(self.write_errno, os.strerror(self.write_errno))
        return self._real.write_at(descriptor, source, offset_bytes)

    def read_at(self, descriptor: int, target: memoryview, offset_bytes: int) -> int:
        return self._real.read_at(descriptor, target, offset_bytes)


class Bench:
    """A lane over a small disk, and the places that it copies to."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        self.calls = HeldCalls()
        spec = DiskSpec(path=str(folder), cap_bytes=64 * ROW)
        self.store = DiskStore([spec], rates=[1.0], calls=self.calls)
        self.store.reserve(64 * ROW)
        bounce = HostRegion(torch.zeros(num_rows * ROW, dtype=torch.uint8), lambda: None)
        self.lane = DiskLane(self.store, bounce)
        self.compute, self.copies = Stream(), Stream()

    def place(self, num_bytes: int = ROW) -> Region:
        region = self.store.take(num_bytes)
        assert region is not None
        return region

    def copy(self, memory: Tensor, place: Region, *after: DiskCopy, is_out: bool) -> DiskCopy:
        lane: Any = self.copies
        return self.lane.copy(memory, place, lane, self.compute, after, is_out=is_out)

    def evict(self, memory: Tensor, place: Region, *after: DiskCopy) -> DiskCopy:
        return self.copy(memory, place, *after, is_out=True)

    def fetch(self, place: Region, *after: DiskCopy) -> tuple[DiskCopy, Tensor]:
        memory = torch.zeros(place.num_bytes, dtype=torch.uint8)
        return self.copy(memory, place, *after, is_out=False), memory

    @property
    def read_bytes(self) -> int:
        return self.store.statistics().read_bytes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    yield tmp_path


def content(seed: int, num_bytes: int = ROW) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), generator=made, dtype=torch.uint8)


def test_what_left_last_comes_back_without_a_read(folder: Path) -> None:
    bench = Bench(folder, num_rows=2)
    places = [bench.place() for _ in range(5)]
    out: list[DiskCopy] = []
    for index, place in enumerate(places):
        out.append(bench.evict(content(index), place))
        out[-1].is_stored.result(WAIT_S)
    read_bytes: list[int] = []
    for index in reversed(range(5)):
        copy, memory = bench.fetch(places[index], out[index])
        copy.is_stored.result(WAIT_S)
        assert torch.equal(memory, content(index))
        read_bytes.append(bench.read_bytes)
    assert read_bytes == [0, 0, ROW, 2 * ROW, 3 * ROW]
    found = bench.lane.statistics()
    assert (found.num_served, found.served_bytes) == (2, 2 * ROW)


def test_a_place_is_read_in_a_second_backward(folder: Path) -> None:
    bench = Bench(folder, num_rows=2)
    place = bench.place()
    out = bench.evict(content(1), place)
    first, _ = bench.fetch(place, out)
    first.is_stored.result(WAIT_S)
    second, memory = bench.fetch(place, first)
    second.device_copy.result(WAIT_S)
    assert torch.equal(memory, content(1))
    assert (bench.lane.statistics().num_served, bench.read_bytes) == (1, ROW)


def test_what_is_still_being_written_is_served_and_its_place_waits_for_the_write(
    folder: Path,
) -> None:
    bench = Bench(folder, num_rows=1)
    bench.calls.may_write.clear()
    place = bench.place()
    out = bench.evict(content(1), place)
    back, memory = bench.fetch(place, out)
    back.device_copy.result(WAIT_S)
    assert torch.equal(memory, content(1))
    # On a GPU the copy back follows the copy that filled the row.
    assert out.device_copy.result(WAIT_S) in bench.copies.waited
    assert not out.is_stored.done() and not back.is_stored.done()
    # Whoever gets the place next waits for the copy back alone: so it ends after the write.
    later = bench.evict(content(2), place, back)
    bench.calls.may_write.set()
    later.is_stored.result(WAIT_S)
    assert out.is_stored.done() and back.is_stored.done()
    found = bytearray(ROW)
    bench.store.read(place, found).result(WAIT_S)
    assert bytes(found) == content(2).numpy().tobytes()


def test_a_disk_that_did_not_take_it_fails_who_reads_and_nobody_before(folder: Path) -> None:
    bench = Bench(folder, num_rows=2)
    bench.calls.may_write.clear()
    bench.calls.write_errno = errno.EIO
    place = bench.place()
    out = bench.evict(content(1), place)
    served, memory = bench.fetch(place, out)
    served.device_copy.result(WAIT_S)
    assert torch.equal(memory, content(1))
    bench.calls.may_write.set()
    for copy in (out.is_stored, served.is_stored):
        with pytest.raises(MemoryTierError, match=f"errno {errno.EIO}"):
            copy.result(WAIT_S)
    again, _ = bench.fetch(place, served)
    for copy in (again.device_copy, again.is_stored):
        with pytest.raises(MemoryTierError, match=f"errno {errno.EIO}"):
            copy.result(WAIT_S)
    # The rows are free again.
    bench.calls.write_errno = 0
    for seed in range(3):
        assert bench.evict(content(seed), bench.place()).is_stored.result(WAIT_S) is None


def test_a_failed_write_leaves_nothing_that_is_served(folder: Path) -> None:
    bench = Bench(folder, num_rows=2)
    bench.calls.write_errno = errno.ENOSPC
    place = bench.place()
    out = bench.evict(content(1), place)
    with pytest.raises(MemoryTierError, match="full"):
        out.is_stored.result(WAIT_S)
    # Two rows are free only if the failed copy has left its own.
    for seed in range(2):
        with pytest.raises(MemoryTierError, match="full"):
            bench.evict(content(seed), bench.place()).is_stored.result(WAIT_S)
    back, _ = bench.fetch(place, out)
    with pytest.raises(MemoryTierError, match="full"):
        back.device_copy.result(WAIT_S)
    assert bench.lane.statistics().num_served == 0


def test_a_later_owner_of_a_place_gets_its_own_bytes(folder: Path) -> None:
    bench = Bench(folder, num_rows=3)
    first = bench.place()
    bench.evict(content(1), first).is_stored.result(WAIT_S)
    bench.store.give_back(first)
    second = bench.place()
    assert second == first
    bench.store.write(second, content(2).numpy().tobytes()).result(WAIT_S)
    back, memory = bench.fetch(second)
    back.device_copy.result(WAIT_S)
    assert torch.equal(memory, content(2))
    assert bench.read_bytes == ROW


def test_whoever_evicts_does_not_wait_for_room(folder: Path) -> None:
    bench = Bench(folder, num_rows=2)
    bench.calls.may_write.clear()
    places = [bench.place() for _ in range(6)]
    out = [bench.evict(content(index), place) for index, place in enumerate(places)]
    out[1].device_copy.result(WAIT_S)
    assert [copy.device_copy.done() for copy in out] == [True, True, False, False, False, False]
    bench.calls.may_write.set()
    for index in reversed(range(6)):
        out[index].device_copy.result(WAIT_S)
        back, memory = bench.fetch(places[index], out[index])
        back.device_copy.result(WAIT_S)
        assert torch.equal(memory, content(index))


def test_a_copy_holds_no_device_memory_once_it_is_queued(folder: Path) -> None:
    """Else the allocator gets it back whenever a thread comes to it, and peaks differ."""
    bench = Bench(folder, num_rows=1)
    bench.calls.may_write.clear()
    memory = content(1)
    source = weakref.ref(memory)
    place = bench.place()
    out = bench.evict(memory, place)
    del memory
    out.device_copy.result(WAIT_S)
    assert source() is None
    back, memory = bench.fetch(place, out)
    target = weakref.ref(memory)
    del memory
    back.device_copy.result(WAIT_S)
    assert target() is None
    assert not back.is_stored.done()
    bench.calls.may_write.set()
    back.is_stored.result(WAIT_S)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_copies_of_any_sizes_and_in_any_order_all_end(folder: Path, num_rows: int) -> None:
    """Room that is held while others wait for it would stop them for ever."""
    bench, drawn = Bench(folder, num_rows), random.Random(num_rows)
    for _ in range(8):
        sizes = [drawn.randrange(1, ROW) for _ in range(16)]
        places = [bench.place(num_bytes) for num_bytes in sizes]
        last = [
            bench.evict(content(index, place.num_bytes), place)
            for index, place in enumerate(places)
        ]
        order = drawn.sample(range(16), 16)
        fetched: dict[int, Tensor] = {}
        for index in order:
            last[index], fetched[index] = bench.fetch(places[index], last[index])
        for index in order:
            last[index].device_copy.result(WAIT_S)
            assert torch.equal(fetched[index], content(index, sizes[index]))
        for place, copy in zip(places, last, strict=True):
            copy.is_stored.result(WAIT_S)
            bench.store.give_back(place)


def test_at_the_end_of_the_interpreter_nobody_waits_for_room_for_ever(folder: Path) -> None:
    """Executors refuse what is submitted then, and join what waits: more copies than rows do."""
    bench = Bench(folder, num_rows=2)
    bench.calls.may_write.clear()
    out = [bench.evict(content(index), bench.place()) for index in range(6)]
    back, _ = bench.fetch(bench.place())
    bench.lane._threads.shutdown(wait=False)  # pyright: ignore[reportPrivateUsage]
    bench.calls.may_write.set()
    errors = [copy.is_stored.exception(WAIT_S) for copy in (*out, back)]
    assert errors[:2] == [None, None]
    assert [type(error) for error in errors[2:]] == [RuntimeError] * 5
    assert isinstance(back.device_copy.exception(WAIT_S), RuntimeError)
