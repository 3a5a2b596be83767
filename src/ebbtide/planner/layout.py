"""From decisions to a plan that can be executed: when copies are let go and may start.

Memory depends on the order of moments alone (`docs/planner.md`), so the peak is exact. Evictions
are let go at the first moment at which their copy is predicted to be done, and earlier, with a
stall, only where memory needs it. Fetches start at the earliest moment from which there is
room until they are needed, in reverse order of eviction.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, gt, sub

from ebbtide.machine import Machine
from ebbtide.plan import TURN_END, TURN_START, Decision
from ebbtide.planner.chain import Chain
from ebbtide.planner.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What becomes of one block."""

    program: Program
    """What is stored."""
    tiers: Mapping[int, Decision]
    """What leaves, and where to: HOST or DISK."""

    def bytes_on(self, tier: Decision) -> int:
        """Return the bytes that leave for a tier."""
        return sum(self.program.num_bytes[i] for i, to in self.tiers.items() if to is tier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All that a Plan says beside its decisions."""

    release_at: dict[str, str]
    """As in Plan."""
    fetch_at: dict[str, str]
    """As in Plan."""
    step_ns: int
    """Predicted time."""
    peak_bytes: int
    """Exact, if the step follows the order of moments."""
    max_out_bytes_in_flight: int
    """Most bytes leaving at once."""
    max_in_bytes_in_flight: int
    """Most bytes fetched and not yet needed at once."""


@dataclass(slots=True)
class _Copy:
    """One evicted activation."""

    block: int
    activation: int
    name: str
    num_bytes: int
    tier: Decision
    held_until: int
    """Forward moment, over all blocks, up to which forward itself holds it."""
    out_end: int = 0
    first: int = 0
    """Backward moment, over all blocks."""
    last: int = 0
    fetch_moment: int = 0
    in_end: int = 0


def lay_out(
    chain: Chain, treatments: Sequence[Treatment], machine: Machine, *, cap_bytes: int
) -> Layout | None:
    """Time a step and place its copies; None if it cannot stay within `cap_bytes`."""
    outside = chain.outside
    if chain.ends_bytes > cap_bytes:
        return None
    forward = _Forward(chain, machine, cap_bytes)
    for block, treatment in enumerate(treatments):
        if not forward.run_block(block, treatment):
            return None
    if not forward.turn():
        return None
    backward = _Backward(chain, treatments, forward.held_bytes, machine, forward.copies)
    if not backward.place_fetches(cap_bytes):
        return None
    end_ns = backward.run(forward.now)
    return Layout(
        release_at=forward.release_at,
        fetch_at=backward.fetch_at,
        step_ns=end_ns + outside.ends_ns - outside.ends_ns // 2,
        peak_bytes=max(chain.ends_bytes, forward.peak_bytes, backward.peak_bytes),
        max_out_bytes_in_flight=forward.max_leaving,
        max_in_bytes_in_flight=backward.max_ahead,
    )


def copy_ns(num_bytes: int, bytes_per_s: int) -> int:
    """Return the time of a copy, rounded up."""
    return -(-num_bytes * 1_000_000_000 // bytes_per_s)


class _Forward:
    def __init__(self, chain: Chain, machine: Machine, cap_bytes: int) -> None:
        outside = chain.outside
        self.now = outside.ends_ns // 2
        self.copies: list[_Copy] = []
        self.release_at: dict[str, str] = {}
        self.peak_bytes = 0
        self.max_leaving = 0
        self.held_bytes: list[int] = []
        """What is on the device and stays, after each block: without leaving ones."""
        self._chain = chain
        self._machine = machine
        self._cap = cap_bytes
        self._held = outside.resident_bytes + outside.constant_bytes
        self._moment = 0
        self._leaving: list[_Copy] = []
        self._leaving_bytes = 0
        self._link_free = self._disk_free = 0

    def run_block(self, block: int, treatment: Treatment) -> bool:
        program = treatment.program
        names = self._chain.names[block]
        block_class = self._chain.classes[self._chain.class_of[block]]
        start = self._moment
        for moment, made, num_bytes in zip(
            program.moments, program.made, program.call_bytes, strict=True
        ):
            if self._leaving and moment.outputs:
                self._let_go_what_left(num_bytes, names[moment.outputs[0]])
            if not self._fit(num_bytes):
                return False
            self.now += moment.spent_ns
            for i in made:
                tier = treatment.tiers.get(i)
                size = program.num_bytes[i]
                if tier is None:
                    self._held += size
                else:
                    held_until = start + program.last_held[i]
                    self._evict(_Copy(block, i, names[i], size, tier, held_until))
            self._moment += 1
        # What the block does after its last call does not delay the last call's copies.
        self.now += block_class.tail_ns
        self.held_bytes.append(self._held)
        return True

    def turn(self) -> bool:
        turn_bytes = self._chain.outside.turn_bytes
        self._let_go_what_left(turn_bytes, TURN_START)
        if not self._fit(turn_bytes):
            return False
        self.now += self._chain.outside.turn_ns
        for copy in self._leaving:
            self._let_go(copy, TURN_END)
        return True

    def _fit(self, num_bytes: int) -> bool:
        now_bytes = self._held + self._leaving_bytes + num_bytes
        self.peak_bytes = max(self.peak_bytes, now_bytes)
        return now_bytes <= self._cap

    def _let_go_what_left(self, num_bytes: int, anchor: str) -> None:
        """Let go what has left by now, and wait for more where memory needs it."""
        room_bytes = self._cap - self._held - num_bytes
        stay: list[_Copy] = []
        num_seen = 0
        for copy in self._leaving:
            if copy.out_end > self.now and self._leaving_bytes <= room_bytes:
                break  # nor have those behind it left
            num_seen += 1
            if copy.held_until < self._moment:
                self._let_go(copy, anchor)
            else:
                stay.append(copy)
        if num_seen > len(stay):
            self._leaving[:num_seen] = stay

    def _let_go(self, copy: _Copy, anchor: str) -> None:
        self.now = max(self.now, copy.out_end)
        self._leaving_bytes -= copy.num_bytes
        self.release_at[copy.name] = anchor

    def _evict(self, copy: _Copy) -> None:
        machine, num_bytes = self._machine, copy.num_bytes
        copy.out_end = self.now
        if machine.out_bytes_per_s:
            start = max(self.now, self._link_free)
            self._link_free = start + copy_ns(num_bytes, machine.out_bytes_per_s)
            copy.out_end = self._link_free
        if copy.tier is Decision.DISK:
            start = max(copy.out_end, self._disk_free)
            self._disk_free = start + copy_ns(num_bytes, machine.disk_write_bytes_per_s)
            copy.out_end = self._disk_free
        self.copies.append(copy)
        self._leaving.append(copy)
        self._leaving_bytes += num_bytes
        self.max_leaving = max(self.max_leaving, self._leaving_bytes)
        self.now += machine.slow_ns(num_bytes, machine.out_bytes_per_s)


class _Backward:
    def __init__(
        self,
        chain: Chain,
        treatments: Sequence[Treatment],
        held_bytes: Sequence[int],
        machine: Machine,
        copies: Sequence[_Copy],
    ) -> None:
        self.fetch_at: dict[str, str] = {}
        self.peak_bytes = 0
        self.max_ahead = 0
        self._machine = machine
        self._link_free = self._disk_free = 0
        self._event_ns: list[int] = []
        self._held: list[int] = []
        """At each moment, without what is fetched."""
        self._first_used: list[str | None] = []
        """For each moment, an activation whose first use it is."""
        starts = [0] * len(treatments)
        gradients = chain.gradient_bytes_before()
        for block in reversed(range(len(treatments))):
            program, names = treatments[block].program, chain.names[block]
            starts[block] = len(self._event_ns)
            self._event_ns += program.event_ns
            stays = held_bytes[block] + gradients[block]
            self._held += [stays + scratch for scratch in program.scratch_bytes]
            first_used = chain.classes[chain.class_of[block]].first_used
            self._first_used += [None if i is None else names[i] for i in first_used]
        for copy in copies:
            program = treatments[copy.block].program
            copy.first = starts[copy.block] + program.first_need[copy.activation]
            copy.last = starts[copy.block] + program.last_need[copy.activation]
        self._copies = copies[::-1]

    def place_fetches(self, cap_bytes: int) -> bool:
        """Choose the moment of each fetch; False if what is in use at once does not fit."""
        dropped = self._bytes_by_moment(copy.last + 1 for copy in self._copies)
        needed = self._bytes_by_moment(copy.first for copy in self._copies)
        # Of all fetched bytes, in the order of their needs: most that may be fetched by a moment.
        most = [cap_bytes - held + gone for held, gone in zip(self._held, dropped, strict=False)]
        if any(map(gt, needed, most)):
            return False
        self._place_in_order(most)
        fetched = self._bytes_by_moment(copy.fetch_moment for copy in self._copies)
        there = map(sub, fetched, dropped)
        self.peak_bytes = max(map(add, self._held, there), default=0)
        self.max_ahead = max(map(sub, fetched, [0, *needed]))
        return True

    def _place_in_order(self, most: Sequence[int]) -> None:
        """Let each fetch start right after the last moment before its need that is too full."""
        lows = deque[int]()  # moments that allow less than all that follow them, up to the need
        moment = num_seen = fetched_bytes = 0
        for copy in sorted(self._copies, key=lambda copy: copy.first):
            for new in range(num_seen, copy.first):
                while lows and most[lows[-1]] >= most[new]:
                    lows.pop()
                lows.append(new)
            num_seen = copy.first
            fetched_bytes += copy.num_bytes
            while lows and most[lows[0]] < fetched_bytes:
                moment = max(moment, lows.popleft() + 1)
            # Only moments with a name can start a fetch; the first stands for `TURN_END`.
            while 0 < moment < copy.first and self._first_used[moment] is None:
                moment += 1
            copy.fetch_moment = moment
            # A moment without a name is that of the first need, at which a fetch starts anyway.
            anchor = self._first_used[moment] if moment else TURN_END
            if anchor is not None:
                self.fetch_at[copy.name] = anchor

    def run(self, now: int) -> int:
        """Return when the last event ends, if compute comes to backward at `now`."""
        due: dict[int, list[_Copy]] = {}
        needed: dict[int, list[_Copy]] = {}
        for copy in self._copies:
            due.setdefault(copy.fetch_moment, []).append(copy)
            needed.setdefault(copy.first, []).append(copy)
        for moment, spent_ns in enumerate(self._event_ns):
            for copy in due.get(moment, ()):
                self._fetch(copy, now)
            here = needed.get(moment, ())
            for copy in here:
                if copy.in_end > now:
                    now = copy.in_end
            for copy in here:
                now += self._machine.slow_ns(copy.num_bytes, self._machine.in_bytes_per_s)
            now += spent_ns
        return now

    def _fetch(self, copy: _Copy, now: int) -> None:
        machine, num_bytes = self._machine, copy.num_bytes
        copy.in_end = max(now, copy.out_end)
        if copy.tier is Decision.DISK:
            start = max(copy.in_end, self._disk_free)
            self._disk_free = start + copy_ns(num_bytes, machine.disk_read_bytes_per_s)
            copy.in_end = self._disk_free
        if machine.in_bytes_per_s:
            start = max(copy.in_end, self._link_free)
            self._link_free = start + copy_ns(num_bytes, machine.in_bytes_per_s)
            copy.in_end = self._link_free

    def _bytes_by_moment(self, moments: Iterable[int]) -> list[int]:
        """Return the bytes of the copies by each moment, for a moment of each copy."""
        num_bytes = [0] * (len(self._event_ns) + 1)
        for copy, moment in zip(self._copies, moments, strict=True):
            num_bytes[moment] += copy.num_bytes
        return list(accumulate(num_bytes))
