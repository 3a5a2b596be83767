"""The CPU as the device: copies to disk run on threads, and a wait blocks until they ended."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ebbtide.errors import MemoryTierError
from ebbtide.memory.arena import Region
from ebbtide.memory.disk import DiskStore
from ebbtide.memory.file_calls import AbstractFileCalls, OpenFile, SystemFileCalls
from ebbtide.memory.ledger import Ledger
from ebbtide.plan import Decision
from ebbtide.torch.devices.base import Place
from ebbtide.torch.devices.cpu import CpuDevice
from ebbtide.torch.tiers import Tiers
from ebbtide.torch.traffic import Slot, Traffic
from tests.disk_folders import in_folder

ROW = 4096
CAP_BYTES = 8 * ROW


class GatedCalls(AbstractFileCalls):
    """The real calls, with writes that wait for a gate and can fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.error: OSError | None = None
        self._system = SystemFileCalls(is_direct=False)

    def open(self, path: Path) -> OpenFile:
        return self._system.open(path)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        self._system.allocate(descriptor, num_bytes)

    def write_at(self, descriptor: int, source: memoryview, offset_bytes: int) -> int:
        assert self.gate.wait(timeout=30), "the test never opened the gate"
        if self.error is not None:
            raise self.error
        return self._system.write_at(descriptor, source, offset_bytes)

    def read_at(self, descriptor: int, target: memoryview, offset_bytes: int) -> int:
        return self._system.read_at(descriptor, target, offset_bytes)


class Opening(Future[None]):
    """The end of another copy, which cannot run before somebody waits for this."""

    def __init__(self, copy: Future[None], calls: GatedCalls) -> None:
        super().__init__()
        self._copy = copy
        self._calls = calls

    def done(self) -> bool:
        return self._copy.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._calls.gate.set()
        return self._copy.exception(timeout)


@pytest.fixture
def calls() -> GatedCalls:
    return GatedCalls()


@pytest.fixture
def store(tmp_path: Path, calls: GatedCalls) -> Iterator[DiskStore]:
    with DiskStore(in_folder(tmp_path, CAP_BYTES), num_threads=2, calls=calls) as store:
        store.reserve(CAP_BYTES)
        yield store
        calls.gate.set()


def row(value: int, num_bytes: int = ROW) -> Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def place(store: DiskStore, num_bytes: int = ROW) -> Place:
    region = store.take(num_bytes)
    assert region is not None
    return Place(tier=Decision.DISK, region=region)


def values(tensor: Tensor) -> set[int]:
    return set(tensor.tolist())


def test_a_row_goes_to_disk_and_comes_back(store: DiskStore, calls: GatedCalls) -> None:
    calls.gate.set()
    device, there, back = CpuDevice(store), place(store), row(0)
    out = device.copy(row(7), there, stream=0, after=())
    fetched = device.copy(there, back, stream=0, after=(out,))
    device.wait(0, fetched)
    assert values(back) == {7}
    counts = store.statistics()
    assert (counts.written_bytes, counts.read_bytes) == (ROW, ROW)


def test_an_evict_does_not_block_and_a_wait_does(store: DiskStore, calls: GatedCalls) -> None:
    device = CpuDevice(store)
    out = device.copy(row(7), place(store), stream=0, after=())
    assert not out.done()
    assert store.statistics().written_bytes == 0
    device.wait(0, Opening(out, calls))
    assert out.done()
    assert store.statistics().written_bytes == ROW


def test_a_fetch_waits_for_its_evict(store: DiskStore, calls: GatedCalls) -> None:
    """Design rule 1: the evict cannot run before the fetch waits for it."""
    device, there, back = CpuDevice(store), place(store), row(0)
    out = device.copy(row(7), there, stream=0, after=())
    fetched = device.copy(there, back, stream=0, after=(Opening(out, calls),))
    assert calls.gate.is_set() and out.done()
    device.wait(0, fetched)
    assert values(back) == {7}


def test_an_evict_waits_for_the_copies_of_the_last_owner_of_its_place(
    store: DiskStore, calls: GatedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Design rule 1: whatever became of them."""
    calls.gate.set()
    device, there = CpuDevice(store), place(store)
    reading: Future[None] = Future()
    waited: list[Future[None]] = []

    def wait(events: list[Future[None]]) -> None:
        assert store.statistics().written_bytes == 0
        waited.extend(events)

    monkeypatch.setattr(futures, "wait", wait)
    out = device.copy(row(7), there, stream=0, after=(reading,))
    assert waited == [reading]
    device.wait(0, out)
    assert store.statistics().written_bytes == ROW


def test_there_is_one_stream_and_new_memory_is_a_row_of_bytes(store: DiskStore) -> None:
    device = CpuDevice(store)
    assert device.current_stream() == device.current_stream()
    device.wait(device.current_stream(), device.current_stream())
    memory = device.allocate(5)
    assert (memory.shape, memory.dtype) == ((5,), torch.uint8)


def test_host_is_no_tier_of_the_cpu(store: DiskStore) -> None:
    region = Region(offset_bytes=0, num_bytes=ROW, taken_bytes=ROW)
    host = Place(tier=Decision.HOST, region=region)
    for source, target in ((row(1), host), (host, row(1))):
        with pytest.raises(AssertionError, match="bug in ebbtide"):
            CpuDevice(store).copy(source, target, stream=0, after=())
    with pytest.raises(AssertionError, match="a copy without a disk tier"):
        CpuDevice(None).copy(row(1), host, stream=0, after=())


# -- traffic over it -------------------------------------------------------------------------------


@pytest.fixture
def traffic(store: DiskStore) -> Traffic:
    return Traffic(
        CpuDevice(store),
        Tiers(host=None, disk=store),
        Ledger(),
        max_out_bytes_in_flight=2 * ROW,
        max_in_bytes_in_flight=2 * ROW,
    )


def evict(traffic: Traffic, source: Tensor) -> Slot:
    taken = traffic.tiers.take(Decision.DISK, source.numel())
    assert taken is not None
    return traffic.evict("a row", source[:], taken, source.detach())


def test_a_row_that_is_being_written_serves_from_memory(
    traffic: Traffic, calls: GatedCalls
) -> None:
    source = row(7)
    slot = evict(traffic, source)
    assert traffic.bytes_of(slot).data_ptr() == source.data_ptr()
    assert traffic.ledger.snapshot().num_resurrections == 1
    assert not calls.gate.is_set()


def test_evicted_rows_come_back_and_are_gone_afterwards(
    traffic: Traffic, calls: GatedCalls, store: DiskStore
) -> None:
    calls.gate.set()
    slots = [evict(traffic, row(i)) for i in range(5)]
    assert traffic.bytes_in_flight == (2 * ROW, 0)
    traffic.settle_all()
    assert traffic.bytes_in_flight == (0, 0)
    for i in (4, 3, 2, 1, 0):
        assert values(traffic.bytes_of(slots[i])) == {i}
        traffic.release(slots[i])
    counts = traffic.ledger.snapshot()
    assert (counts.disk.moved_out_bytes, counts.disk.moved_in_bytes) == (5 * ROW, 5 * ROW)
    assert counts.peak_held_device_bytes == 3 * ROW, "one in use and two in flight"
    slots.clear()
    assert traffic.is_idle
    assert store.statistics().held_bytes == 0


def test_a_failed_write_is_raised_and_never_becomes_a_wrong_value(
    traffic: Traffic, calls: GatedCalls
) -> None:
    calls.error = OSError(errno.ENOSPC, "No space left on device")
    calls.gate.set()
    slot = evict(traffic, row(7))
    with pytest.raises(MemoryTierError, match="the disk or your quota is full"):
        traffic.release(slot)
    assert values(traffic.bytes_of(slot)) == {7}, "the source was not let go"
