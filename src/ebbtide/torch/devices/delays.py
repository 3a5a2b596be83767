"""Hold copies back for a while, beside the program, so that a missing wait shows."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch
from torch import Tensor

from ebbtide.torch.devices.base import AbstractDevice, Event, Place, Stream
from ebbtide.torch.internals import sleep_on_device

CYCLES_PER_NS: Final = 2
"""Of an NVIDIA GPU at 2 GHz: an estimate. At another clock a delay is longer or shorter."""

NUM_THREADS: Final = 4
"""As many copies may wait at once as each direction of a disk store has threads, about."""


class AbstractDelay(ABC):
    """Starts copies late."""

    @abstractmethod
    def copy(
        self,
        device: AbstractDevice,
        source: Tensor | Place,
        target: Tensor | Place,
        *,
        stream: Stream,
        after: Sequence[Event],
        delay_ns: int,
    ) -> Event:
        """Do as `device.copy` does, but let the copy start `delay_ns` later, about.

        The calling thread and `stream` do not wait for it.
        """


class CudaDelay(AbstractDelay):
    """Lets the lane wait for a stream that sleeps; kernels of the program run on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sleeping = torch.cuda.Stream(device)

    def copy(
        self,
        device: AbstractDevice,
        source: Tensor | Place,
        target: Tensor | Place,
        *,
        stream: Stream,
        after: Sequence[Event],
        delay_ns: int,
    ) -> Event:
        self._sleeping.wait_stream(stream)
        with torch.cuda.stream(self._sleeping):
            sleep_on_device(delay_ns * CYCLES_PER_NS)
        # The copy starts behind all that is queued on the stream that it is given.
        return device.copy(source, target, stream=self._sleeping, after=after)


class ThreadDelay(AbstractDelay):
    """Starts the copy on a thread of its own, for a device whose copies run on threads.

    Its events must be futures, as those of `CpuDevice` are.
    """

    def __init__(self) -> None:
        # Copies wait for earlier ones alone, and start in their order: none waits for ever.
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ebbtide-delay")

    def copy(
        self,
        device: AbstractDevice,
        source: Tensor | Place,
        target: Tensor | Place,
        *,
        stream: Stream,
        after: Sequence[Event],
        delay_ns: int,
    ) -> Event:
        def run() -> Any:
            time.sleep(delay_ns / 1e9)
            return device.copy(source, target, stream=stream, after=after).result()

        copied: Future[Any] = self._threads.submit(run)
        return copied


class NoDelay(AbstractDelay):
    """Starts copies as the device does: the fake one has an order of its own that is late."""

    def copy(
        self,
        device: AbstractDevice,
        source: Tensor | Place,
        target: Tensor | Place,
        *,
        stream: Stream,
        after: Sequence[Event],
        delay_ns: int,
    ) -> Event:
        del delay_ns
        return device.copy(source, target, stream=stream, after=after)
