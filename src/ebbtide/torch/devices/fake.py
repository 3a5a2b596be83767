"""A device that has no hardware and every legal order of events.

Tensors are CPU tensors and compute runs at once, but copies only run when the rules force them
to: when a stream waits for them, or, under a `random` schedule, at any earlier moment that the
given order allows. Memory that is handed out is filled with a poison value, and so is the target
of a copy whose source was let go too early. A wait or a reference that is missing therefore gives
wrong values on any machine, every time.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ebbtide.torch.devices.base import AbstractDevice, Event, Place, Stream

POISON = 0xA5

Schedule = Literal["late", "eager", "random"]


@dataclass(slots=True, eq=False)
class FakeCopy:
    """One copy: which bytes, and what it is ordered behind."""

    host: Tensor
    is_out: bool
    memory: weakref.ref[Tensor]
    """The device memory; dead once the runtime let it go."""
    after: tuple[FakeCopy, ...]
    stream: Stream
    is_ordered: bool
    """It was queued behind the stream that was current, so behind the source's kernels."""
    is_done: bool = False
    waiters: set[Stream] = field(default_factory=set[Stream])

    def follows(self, other: FakeCopy) -> bool:
        """Return whether the given order puts this copy behind `other`."""
        return any(e is other or e.follows(other) for e in self.after)


class FakeDevice(AbstractDevice):
    """Runs copies as late (or as early, or at random) as the given order allows.

    Args:
        num_host_bytes: Size of the host tier.
        schedule: `late` runs a copy when something waits for it; `eager` at once; `random`
            at any moment in between.
        seed: For `random`.
    """

    def __init__(self, num_host_bytes: int, *, schedule: Schedule = "late", seed: int = 0) -> None:
        self.host = torch.full((num_host_bytes,), POISON, dtype=torch.uint8)
        self.violations: list[str] = []
        """Broken rules that no value shows: writes to memory that was let go."""
        self._schedule = schedule
        self._random = random.Random(seed)
        self._stream: Stream = "main"
        self._pending: list[FakeCopy] = []

    @contextmanager
    def stream(self, name: str) -> Generator[None]:
        """Make another compute stream the current one."""
        before, self._stream = self._stream, name
        self._catch_up(name)
        try:
            yield
        finally:
            self._stream = before

    def current_stream(self) -> Stream:
        return self._stream

    def allocate(self, num_bytes: int) -> Tensor:
        self._tick()
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def copy(
        self,
        source: Tensor | Place,
        target: Tensor | Place,
        *,
        stream: Stream,
        after: Sequence[Event],
    ) -> Event:
        is_out = isinstance(target, Place)
        place, memory = (target, source) if is_out else (source, target)
        assert isinstance(place, Place) and isinstance(memory, Tensor)
        first = place.region.offset_bytes
        copy = FakeCopy(
            host=self.host[first : first + place.region.num_bytes],
            is_out=is_out,
            memory=weakref.ref(memory),
            after=tuple(e for e in after if isinstance(e, FakeCopy)),
            stream=stream,
            is_ordered=stream == self._stream,
        )
        self._pending.append(copy)
        if self._schedule == "eager":
            self._run(copy)
        self._tick()
        return copy

    def wait(self, stream: Stream, event: Event | Stream) -> None:
        if isinstance(event, FakeCopy):
            event.waiters.add(stream)
            # A fence of another stream lets that stream's work wait, not this one's.
            if stream == self._stream or event.is_out:
                self._run(event)
        elif stream == self._stream:
            self._catch_up(event)
        self._tick()

    def finish(self) -> None:
        """Run all that is left."""
        while self._pending:
            self._run(self._pending[-1])

    def _catch_up(self, stream: Stream) -> None:
        for copy in [c for c in self._pending if stream in c.waiters]:
            self._run(copy)

    def _tick(self) -> None:
        if self._schedule != "random":
            return
        for copy in self._random.sample(self._pending, len(self._pending)):
            if self._random.random() < 0.3 and all(e.is_done for e in copy.after):
                self._run(copy)

    def _run(self, copy: FakeCopy) -> None:
        if copy.is_done:
            return
        for earlier in copy.after:
            self._run(earlier)
        if not copy.is_out:
            for other in list(self._pending):  # whatever may run before it does
                if other.is_out and _overlap(other.host, copy.host) and not other.follows(copy):
                    self._run(other)
        copy.is_done = True
        self._pending.remove(copy)
        memory = copy.memory()
        if copy.is_out:
            if memory is None:
                self.violations.append("an evict read memory that was let go before its fence")
            if memory is None or not copy.is_ordered:
                copy.host.fill_(POISON)
            else:
                copy.host.copy_(memory)
        elif memory is not None:
            memory.copy_(copy.host)
        elif copy.stream not in copy.waiters:
            self.violations.append("a fetch wrote to memory that was let go before its fence")


def _overlap(left: Tensor, right: Tensor) -> bool:
    first, second = left.data_ptr(), right.data_ptr()
    return first < second + right.numel() and second < first + left.numel()
