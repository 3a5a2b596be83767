"""NVIDIA (and ROCm) GPUs through torch: one stream for each direction of copies."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ebbtide.errors import MemoryTierError
from ebbtide.plan import Decision
from ebbtide.torch.devices.base import AbstractDevice, Event, Place, Stream
from ebbtide.torch.tiers import HostRegion, Tiers
from ebbtide.units import format_bytes


def pin_host_region(num_bytes: int) -> HostRegion:
    """Return `num_bytes` of pinned host memory in one region of exactly that size.

    torch's own pinned allocator rounds to powers of two; here the pages come from `mmap` and
    are registered with the driver.

    Raises:
        MemoryTierError: The system or the driver refuses.
    """
    try:
        pages = mmap.mmap(-1, num_bytes)
    except (OSError, ValueError) as error:
        raise _refused(num_bytes, str(error)) from error
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, 0)
    if int(error) != 0:
        raise _refused(num_bytes, f"cudaHostRegister failed with error {int(error)}")
    assert buffer.is_pinned(), "bug in ebbtide: a registered region is not pinned"

    def unpin() -> None:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(buffer.data_ptr())

    return HostRegion(buffer, unpin)


def _refused(num_bytes: int, reason: str) -> MemoryTierError:
    return MemoryTierError(
        f"{format_bytes(num_bytes)} of pinned host memory was refused: {reason}. It is host "
        "memory, not the GPU's, that ran out or is limited: look at `ulimit -l` and at the "
        "container's memory limit, or choose a plan that moves less."
    )


class CudaDevice(AbstractDevice):
    """Copies between one GPU and its tiers on two streams of their own.

    Args:
        device: The GPU.
        tiers: Its host region and disk store.
        bounce_bytes: Pinned memory that disk copies pass through; 0 without a disk.
    """

    def __init__(self, device: torch.device, tiers: Tiers) -> None:
        self._device = device
        self._tiers = tiers
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)

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
        lane = self._out if isinstance(target, Place) else self._in
        lane.wait_stream(stream)
        for event in after:
            lane.wait_event(event)
        with torch.cuda.stream(lane):
            self._bytes(target).copy_(self._bytes(source), non_blocking=True)
            return lane.record_event()

    def wait(self, stream: Stream, event: Event | Stream) -> None:
        if isinstance(event, torch.cuda.Stream):
            stream.wait_stream(event)
        else:
            stream.wait_event(event)

    def _bytes(self, end: Tensor | Place) -> Tensor:
        if isinstance(end, Tensor):
            return end
        assert end.tier is Decision.HOST and self._tiers.host is not None, "bug in ebbtide"
        first = end.region.offset_bytes
        return self._tiers.host.buffer[first : first + end.region.num_bytes]
