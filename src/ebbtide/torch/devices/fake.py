"""A device that has no hardware and every legal order of events.

Tensors are CPU tensors. Compute runs at once, on the stream that is current; a copy runs as late
(or as early, or at random) as its order allows. What a stream must not rely on is poison: memory
that is handed out, a fetch that has not run, host space whose evict went wrong. So a wait that
is missing gives wrong values on any machine, every time.

Beside the values, every order is checked with vector clocks, as race detectors do (Mattern,
"Virtual Time and Global States of Distributed Systems", 1989): whatever two copies, or a copy
and compute, do to the same bytes without an order between them is a violation, even where the
values came out right. Known weakness: compute is only seen inside `watch()`.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.plan import Decision
from ebbtide.torch.devices.base import AbstractDevice, AbstractMeter, Event, Mark, Place, Stream
from ebbtide.torch.identity import StorageRef, storage_key
from ebbtide.torch.internals import pause_dispatch
from ebbtide.torch.ops import facts_of

POISON = 0xA5

Schedule = Literal["late", "eager", "random"]

Clock = dict[Hashable, int]
"""What has passed: so much of each stream's work, and 1 for each copy that has ended."""

# Often enough that some copies run early, seldom enough that some wait for long.
CHANCE_TO_RUN = 0.3


class FakeCopy:
    """One copy: which bytes, and what it is ordered behind."""

    __slots__ = (
        "begin", "end", "first", "is_lost", "is_out", "last", "memory", "num_bytes", "tier",
    )  # fmt: skip

    def __init__(self, place: Place, row: Tensor, *, is_out: bool, begin: Clock) -> None:
        self.is_out = is_out
        self.tier = place.tier
        self.num_bytes = place.region.num_bytes
        self.first = place.region.offset_bytes
        self.last = self.first + self.num_bytes
        self.begin = begin
        """What has passed before it starts."""
        self.end: Clock = {**begin, self: 1}
        """What has passed for whoever waits for it."""
        # Another tensor over the same bytes: that the caller lets go of its own must be noticed.
        self.memory: Tensor | None = row.detach()
        self.is_lost = False
        """It was ordered wrongly: if it is an evict, it leaves poison in the host space."""


class _Memory:
    """Device memory that copies touch, and what has touched it so far."""

    def __init__(self, row: Tensor, owner: Stream, *, is_ours: bool) -> None:
        self.storage = StorageRef(row.untyped_storage())
        self.owner = owner
        self.is_ours = is_ours
        """The device handed it out; else it belongs to the program."""
        self.written: Clock = {}
        self.used: Clock = {}
        """What has written or read it."""


class FakeDevice(AbstractDevice):
    """Runs copies as late (or as early, or at random) as the given order allows.

    Streams are named; work on one is not ordered against work on another without a `wait`.

    Args:
        num_host_bytes: Size of the host tier.
        schedule: `late` runs a copy when the current stream waits for it; `eager` at once;
            `random` at any moment in between.
        seed: For `random`.
        num_disk_bytes: Size of the disk tier, which is memory too.
    """

    def __init__(
        self,
        num_host_bytes: int,
        *,
        schedule: Schedule = "late",
        seed: int = 0,
        num_disk_bytes: int = 0,
    ) -> None:
        self.host = torch.full((num_host_bytes,), POISON, dtype=torch.uint8)
        self.disk = torch.full((num_disk_bytes,), POISON, dtype=torch.uint8)
        self.violations: list[str] = []
        """Rules that were broken, in words; empty for a correct runtime."""
        self.peak_out_bytes = 0
        """Most bytes at once of sources whose evict was started and that were not let go."""
        self.peak_in_bytes = 0
        """Most bytes at once of fetches that no stream had waited for."""
        self._schedule = schedule
        self._random = random.Random(seed)
        self._stream: Stream = "main"
        self._clocks: dict[Stream, Clock] = {}
        self._all: Clock = {}
        self._synchronized: Clock = {}
        self._memories: dict[int, _Memory] = {}
        self._pending: list[FakeCopy] = []
        self._placed: list[FakeCopy] = []
        self._leaving: set[FakeCopy] = set()
        self._coming: set[FakeCopy] = set()

    @contextmanager
    def stream(self, name: str) -> Generator[None]:
        """Make another compute stream the current one; that alone orders nothing."""
        before, self._stream = self._stream, name
        self._catch_up()
        try:
            yield
        finally:
            self._stream = before
            self._catch_up()

    @contextmanager
    def watch(self) -> Generator[None]:
        """Check every operator of this thread, too, that reads or writes what copies touch."""
        with _Watch(self):
            yield

    def current_stream(self) -> Stream:
        return self._stream

    def allocate(self, num_bytes: int) -> Tensor:
        self._tick()
        with pause_dispatch():
            row = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        memory = _Memory(row, self._stream, is_ours=True)
        # Its last owner used it until now, on the stream that it is handed out on.
        memory.written, memory.used = self._work(), self._work()
        self._memories[storage_key(row)] = memory
        weakref.finalize(row, self._let_go, memory, None).atexit = False
        return row

    def copy(
        self,
        source: Tensor | Place,
        target: Tensor | Place,
        *,
        stream: Stream,
        after: Sequence[Event],
    ) -> Event:
        is_out = isinstance(target, Place)
        place, row = (target, source) if is_out else (source, target)
        assert isinstance(place, Place) and isinstance(row, Tensor), "one end must be a place"
        tier_bytes = self._tier(place.tier).numel()
        assert tier_bytes, f"the fake device has no {place.tier.value} tier"
        assert row.dtype is torch.uint8 and row.shape == (place.region.num_bytes,), "sizes differ"
        end_bytes = place.region.offset_bytes + place.region.num_bytes
        assert end_bytes <= tier_bytes, f"the place lies beyond the {place.tier.value} tier"
        memory = self._memory_of(row)
        begin = dict(self._clock(stream))
        for event in after:
            _join(begin, event.end)
        with pause_dispatch():
            copy = FakeCopy(place, row, is_out=is_out, begin=begin)
        self._check_place(copy)
        self._check_memory(copy, memory)
        if is_out:
            self._leaving.add(copy)
            weakref.finalize(row, self._let_go, memory, copy).atexit = False
        else:
            self._coming.add(copy)
        self.peak_out_bytes = max(self.peak_out_bytes, _sum_bytes(self._leaving))
        self.peak_in_bytes = max(self.peak_in_bytes, _sum_bytes(self._coming))
        self._pending.append(copy)
        _join(self._all, copy.end)
        if self._schedule == "eager":
            self._run(copy)
        self._tick()
        return copy

    def wait(self, stream: Stream, event: Event | Stream) -> None:
        if isinstance(event, FakeCopy):
            self._coming.discard(event)
            _join(self._clock(stream), event.end)
        else:
            _join(self._clock(stream), self._clock(event))
        self._catch_up()
        self._tick()

    def finish(self) -> None:
        """Run all that is left, as when the CPU waits for the whole device."""
        while self._pending:
            self._run(self._pending[-1])
        for clock in (self._all, *self._clocks.values()):
            _join(self._synchronized, clock)
        for clock in self._clocks.values():
            _join(clock, self._synchronized)

    def touch(self, tensor: Tensor, *, is_written: bool) -> None:
        """Check that the current stream may read `tensor` now, or write to it."""
        memory = self._known(tensor)
        if memory is None:
            return
        doing, needed = ("wrote to", memory.used) if is_written else ("read", memory.written)
        for key in _missing(needed, self._clock(self._stream)):
            self.violations.append(f"compute {doing} memory {_while(key)}")
        if memory.is_ours:
            # What compute does to the program's own memory is otherwise the program's affair.
            mark = self._work()
            _join(memory.used, mark)
            if is_written:
                _join(memory.written, mark)

    def _tier(self, tier: Decision) -> Tensor:
        return self.host if tier is Decision.HOST else self.disk

    # -- order ---------------------------------------------------------------------------------

    def _clock(self, stream: Stream) -> Clock:
        return self._clocks.setdefault(stream, {**self._synchronized, stream: 0})

    def _work(self) -> Clock:
        """Note that there is new work on the current stream, and return its mark."""
        clock = self._clock(self._stream)
        clock[self._stream] += 1
        return {self._stream: clock[self._stream]}

    def _memory_of(self, row: Tensor) -> _Memory:
        memory = self._known(row)
        if memory is None:
            memory = _Memory(row, self._stream, is_ours=False)
            self._memories[storage_key(row)] = memory
        if not memory.is_ours:
            # An evict is asked for on the stream that made the source, or one that may read it.
            _join(memory.written, self._work())
        return memory

    def _known(self, tensor: Tensor) -> _Memory | None:
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
        if not is_plain or tensor.layout is not torch.strided:
            return None
        memory = self._memories.get(storage_key(tensor))
        return None if memory is None or memory.storage.expired() else memory

    def _check_place(self, copy: FakeCopy) -> None:
        """Compare with earlier copies of the same host bytes, where one of the two writes."""
        for other in self._placed:
            if other in copy.begin or not _overlap(copy, other):
                continue
            if copy.is_out:
                use = "another evict may write to" if other.is_out else "a fetch may read"
                self.violations.append(f"an evict wrote to a place that {use}")
            elif other.is_out:
                self.violations.append("a fetch read a place that an evict may write to")
        if copy.is_out:
            # Whoever comes behind this evict also comes behind what it was ordered after.
            self._placed = [o for o in self._placed if not _covers(copy, o)]
        self._placed.append(copy)

    def _check_memory(self, copy: FakeCopy, memory: _Memory) -> None:
        doing, needed = ("an evict read", memory.written)
        if not copy.is_out:
            doing, needed = ("a fetch wrote to", memory.used)
        for key in _missing(needed, copy.begin):
            copy.is_lost = True
            self.violations.append(f"{doing} memory {_while(key)}")
        _join(memory.used, copy.end)
        if not copy.is_out:
            _join(memory.written, copy.end)

    def _let_go(self, memory: _Memory, evict: FakeCopy | None) -> None:
        """Check that whoever gets the memory next, on its owner's stream, comes after its uses."""
        # No variable with a type: checking it takes a lock, which a finalizer may find taken.
        used = memory.used
        if evict is not None:
            self._leaving.discard(evict)
            used = dict[Hashable, int]({evict: 1})
        for key in _missing(used, self._clock(memory.owner)):
            if isinstance(key, FakeCopy):
                key.is_lost = True
                self._coming.discard(key)
            self.violations.append(f"memory was let go {_while(key)}")

    # -- values --------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Run what the current stream relies on from now on."""
        clock = self._clock(self._stream)
        for copy in [c for c in self._pending if c in clock]:
            self._run(copy)

    def _tick(self) -> None:
        if self._schedule != "random":
            return
        for copy in self._random.sample(self._pending, len(self._pending)):
            if self._random.random() < CHANCE_TO_RUN:
                self._run(copy)

    def _run(self, copy: FakeCopy) -> None:
        for earlier in [c for c in self._pending if c in copy.begin]:
            self._run(earlier)
        memory, copy.memory = copy.memory, None
        if memory is None:
            return
        self._pending.remove(copy)
        with pause_dispatch():
            space = self._tier(copy.tier)[copy.first : copy.last]
            if not copy.is_out:
                memory.copy_(space)
            elif copy.is_lost:
                space.fill_(POISON)
            else:
                space.copy_(memory)


class FakeMeter(AbstractMeter):
    """A clock that goes on by `tick_ns` with each mark, and an allocator that the test plays.

    Args:
        tick_ns: Time from one mark to the next.
        allocated: Returns the bytes that are allocated now.
        take_peak: Returns the peak since its last call.
    """

    def __init__(
        self,
        *,
        tick_ns: int = 1,
        allocated: Callable[[], int] = lambda: 0,
        take_peak: Callable[[], int] = lambda: 0,
    ) -> None:
        self.now_ns = 0
        self._tick_ns = tick_ns
        self._allocated = allocated
        self._take_peak = take_peak

    def mark(self, *, is_ahead: bool = False) -> Mark:
        del is_ahead
        self.now_ns += self._tick_ns
        return self.now_ns

    def elapsed_ns(self, start: Mark, end: Mark) -> int:
        return end - start

    def allocated_bytes(self) -> int:
        return self._allocated()

    def take_peak_bytes(self) -> int:
        return self._take_peak()


class _Watch(TorchDispatchMode):
    """Tells the device what compute reads and writes."""

    supports_higher_order_operators = True

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        if not facts.is_view:
            written = (*facts.written_positions, *facts.written_names)
            for name, argument in (*enumerate(args), *kwargs.items()):
                for tensor in _tensors_in(argument):
                    self._device.touch(tensor, is_written=name in written)
        return func(*args, **kwargs)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _tensors_in(element)


def _join(clock: Clock, other: Clock) -> None:
    for key, count in other.items():
        if clock.get(key, 0) < count:
            clock[key] = count


def _missing(needed: Clock, clock: Clock) -> list[Hashable]:
    return [key for key, count in needed.items() if clock.get(key, 0) < count]


def _overlap(left: FakeCopy, right: FakeCopy) -> bool:
    return left.tier is right.tier and left.first < right.last and right.first < left.last


def _covers(outer: FakeCopy, inner: FakeCopy) -> bool:
    """Return whether all that `inner` touches of its tier is touched by `outer`."""
    is_inside = outer.first <= inner.first and inner.last <= outer.last
    return outer.tier is inner.tier and is_inside


def _sum_bytes(copies: set[FakeCopy]) -> int:
    return sum(copy.num_bytes for copy in copies)


def _while(key: Hashable) -> str:
    if not isinstance(key, FakeCopy):
        return f"while stream {key!r} may use it"
    return f"while {'an evict may read' if key.is_out else 'a fetch may write to'} it"
