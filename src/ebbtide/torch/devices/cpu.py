"""The CPU as the device: copies run on the disk store's threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from ebbtide.memory.disk import DiskStore
from ebbtide.plan import Decision
from ebbtide.torch.devices.base import (
    AbstractDevice,
    AbstractMeter,
    Event,
    Mark,
    Place,
    Stream,
    raised_anew,
)


class CpuDevice(AbstractDevice):
    """Runs compute on the calling thread, which is the only stream, and copies on threads.

    Host memory is the device's own memory here, so `DISK` is the only tier.

    Args:
        disk: The tier, if there is one.
        note_stall: Takes the nanoseconds that compute waited for a copy.
    """

    def __init__(
        self, disk: DiskStore | None, note_stall: Callable[[int], None] | None = None
    ) -> None:
        self._disk = disk
        self._note_stall = note_stall

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
        if isinstance(target, Place):
            # The place must be free, whatever became of the copies that used it before.
            futures.wait([event for event in after if isinstance(event, Future)])
            assert target.tier is Decision.DISK and isinstance(source, Tensor), "bug in ebbtide"
            return self._disk.write(target.region, _memory(source))
        for event in after:
            self.wait(stream, event)
        assert isinstance(source, Place) and source.tier is Decision.DISK, "bug in ebbtide"
        return self._disk.read(source.region, _memory(target))

    def wait(self, stream: Stream, event: Event | Stream) -> None:
        if not isinstance(event, Future):
            return
        start = time.perf_counter_ns()
        is_done = event.done()
        error = event.exception()
        if self._note_stall is not None and not is_done:
            self._note_stall(time.perf_counter_ns() - start)
        if error is not None:
            raise raised_anew(error)


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
