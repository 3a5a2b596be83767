"""NVIDIA (and ROCm) GPUs through torch: one stream for each direction of copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
from ebbtide.torch.devices.disk_lane import DiskCopy, DiskLane
from ebbtide.torch.internals import sleep_on_device
from ebbtide.torch.tiers import Tiers


class CudaDevice(AbstractDevice):
    """Copies between one GPU and its tiers on two streams of their own.

    Args:
        device: The GPU.
        tiers: Its host region and disk store; with a disk that is used, the bounce memory too.
    """

    def __init__(self, device: torch.device, tiers: Tiers) -> None:
        self._device = device
        self._tiers = tiers
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._disk: DiskLane | None = None
        if tiers.bounce is not None:
            assert tiers.disk is not None, "bug in ebbtide: bounce memory without a disk"
            self._disk = DiskLane(tiers.disk, tiers.bounce)

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(
        self,
        source: Tensor | Place,
        target: Tensor | Place,
        *,
        stream: Stream,
        after: Sequence[Event],
    ) -> Event:
        is_out = isinstance(target, Place)
        place = target if isinstance(target, Place) else source
        memory = source if isinstance(source, Tensor) else target
        assert isinstance(place, Place) and isinstance(memory, Tensor), "bug in ebbtide"
        lane = self._out if is_out else self._in
        if place.tier is Decision.DISK:
            assert self._disk is not None, "bug in ebbtide: a copy to disk without a disk"
            return self._disk.copy(memory, place.region, lane, stream, after, is_out=is_out)
        assert self._tiers.host is not None, "bug in ebbtide"
        first = place.region.offset_bytes
        host = self._tiers.host.buffer[first : first + place.region.num_bytes]
        lane.wait_stream(stream)
        for event in after:
            lane.wait_event(event)
        with torch.cuda.stream(lane):
            if is_out:
                host.copy_(memory, non_blocking=True)
            else:
                memory.copy_(host, non_blocking=True)
            return lane.record_event()

    def wait(self, stream: Stream, event: Event | Stream) -> None:
        if isinstance(event, torch.cuda.Stream):
            stream.wait_stream(event)
        elif isinstance(event, DiskCopy):
            # The copy to or from the bounce memory may not be queued yet: the CPU waits for
            # that, and the stream for the copy itself.
            error = event.device_copy.exception()
            if error is not None:
                raise raised_anew(error)
            stream.wait_event(event.device_copy.result())
        else:
            stream.wait_event(event)


PAUSE_CYCLES = 40_000_000
"""20 ms at 2 GHz: an estimate of what the CPU takes to queue a block with all its marks. Where that
is too short, the times hold some of the CPU's."""


class CudaMeter(AbstractMeter):
    """Timing events, and the counters of torch's allocator.

    Resets the allocator's peak: what somebody else reads of it is the peak since then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self, *, is_ahead: bool = False) -> Mark:
        if is_ahead:
            with torch.cuda.device(self._device):
                sleep_on_device(PAUSE_CYCLES)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_ns(self, start: Mark, end: Mark) -> int:
        end.synchronize()
        return max(0, round(start.elapsed_time(end) * 1_000_000))

    def allocated_bytes(self) -> int:
        return self._allocated("current")

    def take_peak_bytes(self) -> int:
        peak = self._allocated("peak")
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def _allocated(self, what: str) -> int:
        # `memory_allocated` sorts all counters into a new table first.
        counters: Any = torch.cuda.memory_stats_as_nested_dict(self._device)
        return counters["allocated_bytes"]["all"][what] if counters else 0
