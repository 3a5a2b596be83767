"""The small interface that the runtime is written against.

Three devices implement it: CUDA, the CPU (copies to disk on threads) and a fake one with a
virtual order of events, on which every lifetime rule is tested.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ebbtide.memory.arena import Region
from ebbtide.plan import Decision

Stream = Any
"""A compute stream of one device; compared with `==`."""
Event = Any
"""The end of one copy."""
Mark = Any
"""A point in the work of one stream, for measuring time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A piece of host memory or disk that holds one evicted storage."""

    tier: Decision
    """`HOST` or `DISK`."""
    region: Region


def raised_anew(error: BaseException) -> BaseException:
    """Return a copy of a failed copy's error, to be raised.

    Raised itself, it would hold with its traceback the frames of whoever waited, and they the
    graph that holds the copy: memory that nobody can collect, since part of that ring is in C++.
    """
    again = copy(error)
    again.__cause__ = error.__cause__
    return again


class AbstractDevice(ABC):
    """Memory, streams and copies of one device.

    Work queued on a stream runs in order. Copies run beside it, on lanes of their own, and are
    ordered against it only by the events given here.
    """

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream that compute is queued on now, in this thread."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """Return a row of `num_bytes` bytes of device memory, owned by the current stream."""

    @abstractmethod
    def copy(
        self,
        source: Tensor | Place,
        target: Tensor | Place,
        *,
        stream: Stream,
        after: Sequence[Event],
    ) -> Event:
        """Start to copy the bytes of `source` to `target`; exactly one of them is a place.

        The copy starts after all that is queued on `stream` so far, and after the events of
        `after`; nothing else holds it back. The caller keeps the tensor alive until the
        returned event has passed.
        """

    @abstractmethod
    def wait(self, stream: Stream, event: Event | Stream) -> None:
        """Let all work queued on `stream` from now on start after `event`.

        Given another stream, after all that is queued on it so far.
        """


class AbstractMeter(ABC):
    """Clock and allocator of one device, as far as a step is measured with them."""

    @abstractmethod
    def mark(self, *, is_ahead: bool = False) -> Mark:
        """Return a mark behind all that is queued on the current stream.

        Args:
            is_ahead: Let the device wait before the mark for some milliseconds, so that the CPU
                gets ahead of it: then what is measured next holds no time in which the device
                waits for the CPU.
        """

    @abstractmethod
    def elapsed_ns(self, start: Mark, end: Mark) -> int:
        """Return the time between two marks; waits until the device has passed both."""

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Return the bytes that are allocated now; 0 where no allocator counts them."""

    @abstractmethod
    def take_peak_bytes(self) -> int:
        """Return the most bytes that were allocated at once since the last call, and start anew."""
