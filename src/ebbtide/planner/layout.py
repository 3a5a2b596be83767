"""From decisions to a plan that can be executed: when copies are let go and may start.

Memory depends on the order of moments alone (`docs/planner.md`), so the peak is exact. Evictions
are let go at the first moment at which their copy is predicted to be done, and earlier, with a
stall, only where memory needs it. Fetches start at the earliest moment from which there is
room until they are needed, in reverse order of eviction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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

    name: str
    num_bytes: int
    tier: Decision
    held_until: int = 0
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
    forward = _Forward(chain, machine, cap_bytes)
    for block, treatment in enumerate(treatments):
        if not forward.run_block(block, treatment):
            return None
    if not forward.turn():
        return None
    outside = chain.outside
    ends_bytes = outside.resident_bytes + outside.ends_bytes
    if ends_bytes > cap_bytes:
        return None
    backward = _Backward(chain, treatments, machine, forward.copies)
    room = cap_bytes - outside.resident_bytes - outside.constant_bytes
    if not backward.place_fetches(room):
        return None
    end_ns = backward.run(forward.now)
    peak = max(
        ends_bytes,
        forward.peak_bytes,
        backward.peak_bytes() + outside.resident_bytes + outside.constant_bytes,
    )
    return Layout(
        release_at=forward.release_at,
        fetch_at=backward.fetch_at,
        step_ns=end_ns + outside.ends_ns - outside.ends_ns // 2,
        peak_bytes=peak,
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
        self._chain = chain
        self._machine = machine
        self._cap = cap_bytes
        self._held = outside.resident_bytes + outside.constant_bytes
        """What is on the device and stays: with kept activations, without leaving ones."""
        self._moment = 0
        self._leaving: list[_Copy] = []
        self._leaving_bytes = 0
        self._link_free = self._disk_free = 0

    def run_block(self, block: int, treatment: Treatment) -> bool:
        program = treatment.program
        names = self._chain.names[block]
        calls = self._chain.classes[self._chain.class_of[block]].calls
        made: list[list[int]] = [[] for _ in calls]
        for i, call in program.made_at.items():
            made[call].append(i)
        for call, spent_ns in enumerate(program.call_ns):
            new_bytes = sum(program.num_bytes[i] for i in made[call])
            outputs = calls[call].outputs
            anchor = names[outputs[0]] if outputs else None
            if not self._fit(new_bytes + program.transient_bytes[call], anchor):
                return False
            # What the block does after its last call does not delay the last call's copies.
            rest_ns = spent_ns - calls[call].make_ns
            self.now += calls[call].make_ns
            for i in made[call]:
                tier = treatment.tiers.get(i)
                if tier is None:
                    self._held += program.num_bytes[i]
                else:
                    copy = _Copy(names[i], program.num_bytes[i], tier)
                    copy.held_until = self._moment - call + program.last_held[i]
                    self._evict(copy)
                    self.now += self._machine.slow_ns(copy.num_bytes, self._machine.out_bytes_per_s)
            self.now += rest_ns
            self._moment += 1
        return True

    def turn(self) -> bool:
        if not self._fit(self._chain.outside.turn_bytes, TURN_START):
            return False
        self.now += self._chain.outside.turn_ns
        for copy in self._leaving:
            self._let_go(copy, TURN_END)
        return True

    def _fit(self, num_bytes: int, anchor: str | None) -> bool:
        """Let go what has left by now, and wait for more where memory needs it."""
        if anchor is not None and self._leaving:
            stay: list[_Copy] = []
            num_seen = 0
            for copy in self._leaving:
                is_full = self._held + self._leaving_bytes + num_bytes > self._cap
                if copy.out_end > self.now and not is_full:
                    break  # nor have those behind it left
                num_seen += 1
                if copy.held_until < self._moment:
                    self._let_go(copy, anchor)
                else:
                    stay.append(copy)
            if num_seen > len(stay):
                self._leaving[:num_seen] = stay
        now_bytes = self._held + self._leaving_bytes + num_bytes
        self.peak_bytes = max(self.peak_bytes, now_bytes)
        return now_bytes <= self._cap

    def _let_go(self, copy: _Copy, anchor: str) -> None:
        self.now = max(self.now, copy.out_end)
        self._leaving_bytes -= copy.num_bytes
        self.release_at[copy.name] = anchor

    def _evict(self, copy: _Copy) -> None:
        machine, num_bytes = self._machine, copy.num_bytes
        if machine.out_bytes_per_s:
            start = max(self.now, self._link_free)
            self._link_free = start + copy_ns(num_bytes, machine.out_bytes_per_s)
            copy.out_end = self._link_free
        else:
            copy.out_end = self.now
        if copy.tier is Decision.DISK:
            start = max(copy.out_end, self._disk_free)
            self._disk_free = start + copy_ns(num_bytes, machine.disk_write_bytes_per_s)
            copy.out_end = self._disk_free
        self.copies.append(copy)
        self._leaving.append(copy)
        self._leaving_bytes += num_bytes
        self.max_leaving = max(self.max_leaving, self._leaving_bytes)


class _Backward:
    def __init__(
        self,
        chain: Chain,
        treatments: Sequence[Treatment],
        machine: Machine,
        copies: list[_Copy],
    ) -> None:
        self.fetch_at: dict[str, str] = {}
        self.max_ahead = 0
        self._machine = machine
        self._order = list(reversed(copies))
        by_name = {copy.name: copy for copy in copies}
        self._event_ns: list[int] = []
        self._first_used: list[str | None] = []
        """For each moment, an activation whose first use it is."""
        used: list[int] = []
        kept = [0]
        for treatment in treatments:
            program = treatment.program
            kept.append(
                kept[-1]
                + sum(program.num_bytes[i] for i in program.made_at if i not in treatment.tiers)
            )
        for block in reversed(range(len(treatments))):
            program, names = treatments[block].program, chain.names[block]
            start = len(self._event_ns)
            self._event_ns += program.event_ns
            used += [kept[block + 1] + scratch for scratch in program.scratch_bytes]
            seen: set[int] = set()
            for uses in chain.classes[chain.class_of[block]].uses:
                new = [i for i in uses if i not in seen]
                seen.update(new)
                self._first_used.append(names[new[0]] if new else None)
            for i in treatments[block].tiers:
                copy = by_name[names[i]]
                copy.first = start + program.first_need[i]
                copy.last = start + program.last_need[i]
        self._used = np.array(used, dtype=np.int64)
        for copy in copies:
            self._used[copy.first : copy.last + 1] += copy.num_bytes

    def place_fetches(self, room_bytes: int) -> bool:
        """Choose the moment of each fetch; False if what is in use at once does not fit."""
        free = room_bytes - self._used
        if free.size and free.min() < 0:
            return False
        # Only moments with a name can start a fetch; the first stands for `TURN_END`.
        moment = 0
        for copy in sorted(self._order, key=lambda copy: copy.first):
            tight = np.flatnonzero(free[moment : copy.first] < copy.num_bytes)
            if tight.size:
                moment += int(tight[-1]) + 1
            while 0 < moment < copy.first and self._first_used[moment] is None:
                moment += 1
            copy.fetch_moment = moment
            free[moment : copy.first] -= copy.num_bytes
            self._used[moment : copy.first] += copy.num_bytes
            # A moment without a name is that of the first need, at which a fetch starts anyway.
            anchor = TURN_END if moment == 0 else self._first_used[moment]
            if anchor is not None:
                self.fetch_at[copy.name] = anchor
        return True

    def run(self, now: int) -> int:
        """Return when the last event ends, if compute comes to backward at `now`."""
        due: dict[int, list[_Copy]] = {}
        needed: dict[int, list[_Copy]] = {}
        for copy in self._order:
            due.setdefault(copy.fetch_moment, []).append(copy)
            needed.setdefault(copy.first, []).append(copy)
        link_free = disk_free = ahead = 0
        machine = self._machine
        for moment, spent_ns in enumerate(self._event_ns):
            for copy in due.get(moment, ()):
                ready = max(now, copy.out_end)
                if copy.tier is Decision.DISK:
                    disk_free = max(ready, disk_free) + copy_ns(
                        copy.num_bytes, machine.disk_read_bytes_per_s
                    )
                    ready = disk_free
                if machine.in_bytes_per_s:
                    link_free = max(ready, link_free) + copy_ns(
                        copy.num_bytes, machine.in_bytes_per_s
                    )
                    ready = link_free
                copy.in_end = ready
                ahead += copy.num_bytes
            self.max_ahead = max(self.max_ahead, ahead)
            here = needed.get(moment, ())
            for copy in here:
                now = max(now, copy.in_end)
                ahead -= copy.num_bytes
            now += sum(machine.slow_ns(c.num_bytes, machine.in_bytes_per_s) for c in here)
            now += spent_ns
        return now

    def peak_bytes(self) -> int:
        """Return the most bytes in backward, without what is resident."""
        return int(self._used.max()) if self._used.size else 0
