"""Time copies between GPUs and pinned host memory: one way, both at once, several GPUs at once.

Known weakness: GPUs are started one after the other. One that starts late or ends early copies
alone for that part, and its figure is then a little high.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import assert_never, final

import torch
from torch import Tensor

NUM_COPIES = 3
"""The best of so many counts; one before them pays for what the driver sets up."""


@enum.unique
class Way(enum.Enum):
    """Where bytes go."""

    OUT = "out"
    """Device to host."""
    IN = "in"
    """Host to device."""
    BOTH = "both"
    """One half each way at once."""


class AbstractTrial(ABC):
    """One GPU whose link is measured."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that one copy moves, in both directions together."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the device is idle."""

    @abstractmethod
    def start(self, way: Way) -> None:
        """Queue one copy; does not wait."""

    @abstractmethod
    def finish_s(self) -> float:
        """Wait for the copy, and return the seconds that it took on the device."""


@final
class LinkTrial(AbstractTrial):
    """A CUDA device with memory on both sides of its link.

    Args:
        memory: A row of bytes on the device.
        host: As many in pinned memory. Both are overwritten.
    """

    def __init__(self, memory: Tensor, host: Tensor) -> None:
        self._memory = memory
        self._host = host
        with torch.cuda.device(memory.device):
            self._lanes = (torch.cuda.Stream(), torch.cuda.Stream())
            self._before, self._after = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    @property
    def num_bytes(self) -> int:
        """Bytes of the row."""
        return self._memory.numel()

    def settle(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self._memory.device)

    def start(self, way: Way) -> None:
        """Queue a copy on the device's current stream, or two on streams of their own."""
        with torch.cuda.device(self._memory.device):
            self._before.record()
            self._copy(way)
            self._after.record()

    def finish_s(self) -> float:
        """Wait for the event after the copy."""
        self._after.synchronize()
        return self._before.elapsed_time(self._after) / 1000

    def _copy(self, way: Way) -> None:
        memory, host = self._memory, self._host
        match way:
            case Way.OUT:
                host.copy_(memory, non_blocking=True)
            case Way.IN:
                memory.copy_(host, non_blocking=True)
            case Way.BOTH:
                middle = memory.numel() // 2
                current = torch.cuda.current_stream()
                for lane in self._lanes:
                    lane.wait_stream(current)
                with torch.cuda.stream(self._lanes[0]):
                    host[:middle].copy_(memory[:middle], non_blocking=True)
                with torch.cuda.stream(self._lanes[1]):
                    memory[middle:].copy_(host[middle:], non_blocking=True)
                for lane in self._lanes:
                    current.wait_stream(lane)
            case _:
                assert_never(way)


def _go_on() -> None:
    """Wait for nobody."""


def time_copies(
    trials: Sequence[AbstractTrial],
    way: Way,
    *,
    wait_for_others: Callable[[], None] = _go_on,
    while_copying: Callable[[], None] = _go_on,
) -> list[int]:
    """Let all devices copy at once, and return the best rate of each, in bytes per second.

    Args:
        trials: The devices.
        way: The direction.
        wait_for_others: Called before each copy, so that several processes copy at once.
        while_copying: Called when copies have been queued, and not waited for.
    """
    seconds: list[list[float]] = []
    for _ in range(1 + NUM_COPIES):
        for trial in trials:
            trial.settle()
        wait_for_others()
        # What processes meet in may itself run on the device.
        for trial in trials:
            trial.settle()
        for trial in trials:
            trial.start(way)
        while_copying()
        seconds.append([trial.finish_s() for trial in trials])
    best = [min(of_trial) for of_trial in zip(*seconds[1:], strict=True)]
    return [
        max(1, int(trial.num_bytes / max(best_s, 1e-9)))
        for trial, best_s in zip(trials, best, strict=True)
    ]
