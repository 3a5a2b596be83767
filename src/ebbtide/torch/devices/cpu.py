"""The CPU as the device: copies run on the disk store's threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from ebbtide.memory.disk import DiskStore
from ebbtide.plan import Decision
from ebbtide.torch.devices.base import AbstractDevice, AbstractMeter, Event, Mark, Place, Stream


class CpuDevice(AbstractDevice):
    """Runs compute on the calling thread, which is the only stream, and copies on threads.

    Host memory is the device's own memory here, so `DISK` is the only tier.
    """

    def __init__(self, disk: DiskStore | None) -> None:
        self._disk = disk

    def current_stream(self) -> Stream:
        return 0

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(
        self,
        source: Tensor | Place,
        target: Tensor | Place,
        *,
        stream: Stream,
        after: Sequence[Event],
    ) -> Event:
        # Compute that was queued on the stream has already run: it is this thread's own.
        assert self._disk is not None, "bug in ebbtide: a copy without a disk tier"
        for event in after:
            self.wait(stream, event)
        if isinstance(target, Place):
            assert target.tier is Decision.DISK and isinstance(source, Tensor), "bug in ebbtide"
            return self._disk.write(target.region, _memory(source))
        assert isinstance(source, Place) and source.tier is Decision.DISK, "bug in ebbtide"
        return self._disk.read(source.region, _memory(target))

    def wait(self, stream: Stream, event: Event | Stream) -> None:
        if isinstance(event, Future):
            event.result()


class CpuMeter(AbstractMeter):
    """The system's clock. No allocator of torch counts host memory: all bytes are 0."""

    def mark(self, *, is_ahead: bool = False) -> Mark:
        del is_ahead  # it is the CPU that computes
        return time.perf_counter_ns()

    def elapsed_ns(self, start: Mark, end: Mark) -> int:
        return end - start

    def allocated_bytes(self) -> int:
        return 0

    def take_peak_bytes(self) -> int:
        return 0


def _memory(row: Tensor) -> memoryview:
    array: Any = row.numpy()
    return memoryview(array)
