"""The relaxation: a linear program that no plan beats, and the shares that it would choose.

Variables: for each block the weights of its menu's options and the bytes that it evicts; for each
slot its length and the bytes copied so far, out and in (two cumulative curves: first in, first
out, and earliest deadline, lose nothing in a chain). It is optimistic wherever a slot hides
something: copies may start with the slot, what is fetched in a slot is there for it, splits are
free, and of a block in backward only what any plan needs at once is counted. So its optimum is a
lower bound. Sources: Checkmate (MLSys 2020) and OffMate (2024) for the idea of an exact program;
what differs is the chain's structure, which takes the variables from quadratic to linear.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from ebbtide.machine import Machine
from ebbtide.planner.caps import Caps, link_rates, slowdowns
from ebbtide.planner.chain import BlockClass, Chain
from ebbtide.planner.menu import Option
from ebbtide.planner.result import UnsolvedError

# Bytes and nanoseconds are scaled to GB and ms, so that the solver's tolerances mean something.
_BYTES, _NS = 1e9, 1e6


# What scipy's linprog says.
TIME_IS_UP, INFEASIBLE = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """An optimum of the relaxation."""

    step_ns: float
    """No plan is faster."""
    stored_bytes: NDArray[np.float64]
    """What each block stores."""
    evicted_bytes: NDArray[np.float64]
    """What each block evicts of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    ns: int
    """Time without recomputation."""
    bytes_after: int
    """Forward: what may have been made by its end. Backward: what is first used after it."""
    use_bytes: int
    """Backward: most bytes in use or held in one of its events."""


class _Rows:
    """Inequalities `coefficients x variables <= limit`."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.limits: list[float] = []

    def add(self, terms: list[tuple[int, float]], limit: float) -> None:
        self.rows += [len(self.limits)] * len(terms)
        self.columns += [column for column, _ in terms]
        self.values += [value for _, value in terms]
        self.limits.append(limit)

    def matrix(self, num_columns: int) -> coo_array:
        shape = (len(self.limits), num_columns)
        return coo_array((self.values, (self.rows, self.columns)), shape=shape)


def relax(
    chain: Chain,
    menus: tuple[tuple[Option, ...], ...],
    machine: Machine,
    caps: Caps,
    *,
    num_slots: int,
    time_limit_s: float,
) -> Relaxed | None:
    """Solve the relaxation; None if it has no solution within the caps.

    Args:
        chain: What is planned.
        menus: The options of each class.
        machine: Its links.
        caps: What the step may take.
        num_slots: Slots of a block's forward and backward; more is tighter and slower.
        time_limit_s: For the solver.

    Raises:
        UnsolvedError: The solver did not finish in time, or gave up.
    """
    return _Program(chain, menus, machine, caps, num_slots).solve(time_limit_s)


class _Program:
    def __init__(
        self,
        chain: Chain,
        menus: tuple[tuple[Option, ...], ...],
        machine: Machine,
        caps: Caps,
        num_slots: int,
    ) -> None:
        self._chain, self._menus, self._caps, self._machine = chain, menus, caps, machine
        outside = chain.outside
        room = caps.device_bytes - outside.resident_bytes - outside.constant_bytes
        self._room = room / _BYTES
        is_slowed = slowdowns(machine)[0] > 0
        self._forward = [
            _forward_slots(block, num_slots, is_slowed=is_slowed) for block in chain.classes
        ]
        self._backward = [_backward_slots(block, num_slots) for block in chain.classes]
        self._num = 0
        num_blocks = len(chain.class_of)
        self._weights = [self._new(len(menus[c])) for c in chain.class_of]
        self._stored = self._new(num_blocks)
        self._evicted = self._new(num_blocks)
        self._made = self._new(num_blocks + 1)  # running sums, so that rows stay sparse
        self._moved = self._new(num_blocks + 1)
        self._upper: dict[int, float] = {}
        self._lower: dict[int, float] = {}
        self._leq, self._eq = _Rows(), _Rows()
        self._lengths: list[int] = []

    def _new(self, count: int) -> range:
        self._num += count
        return range(self._num - count, self._num)

    def solve(self, time_limit_s: float) -> Relaxed | None:
        self._blocks()
        self._forward_pass()
        self._backward_pass()
        self._tiers()
        cost = np.zeros(self._num)
        cost[self._lengths] = 1.0
        # Of equal times, the one that moves least: ties are broken the same way each time.
        cost[self._evicted.start : self._evicted.stop] = 1e-7
        bounds = np.zeros((self._num, 2))
        bounds[:, 1] = np.inf
        for column, value in self._upper.items():
            bounds[column, 1] = value
        for column, value in self._lower.items():
            bounds[column, 0] = value
        result = linprog(
            cost,
            A_ub=self._leq.matrix(self._num).tocsr(),
            b_ub=self._leq.limits,
            A_eq=self._eq.matrix(self._num).tocsr(),
            b_eq=self._eq.limits,
            bounds=bounds,
            method="highs",
            options={"time_limit": time_limit_s},
        )
        if result.status == INFEASIBLE:
            return None
        if result.status == TIME_IS_UP:
            raise UnsolvedError(f"the solver did not finish in {time_limit_s} s")
        if result.status != 0:
            raise UnsolvedError(f"the solver gave up: {result.message}")
        found = np.asarray(result.x)
        spent = float(found[self._lengths].sum()) * _NS
        return Relaxed(
            step_ns=spent + self._chain.outside.ends_ns,
            stored_bytes=found[self._stored.start : self._stored.stop] * _BYTES,
            evicted_bytes=found[self._evicted.start : self._evicted.stop] * _BYTES,
        )

    def _blocks(self) -> None:
        self._replay: list[list[tuple[int, float]]] = []
        for block, c in enumerate(self._chain.class_of):
            weights, menu = self._weights[block], self._menus[c]
            self._eq.add([(w, 1.0) for w in weights], 1.0)
            sizes = [(w, o.num_bytes / _BYTES) for w, o in zip(weights, menu, strict=True)]
            stored, evicted = self._stored[block], self._evicted[block]
            self._eq.add([*sizes, (stored, -1.0)], 0.0)
            self._leq.add([(evicted, 1.0), (stored, -1.0)], 0.0)
            for sums, part in ((self._made, stored), (self._moved, evicted)):
                self._eq.add([(sums[block], 1.0), (part, 1.0), (sums[block + 1], -1.0)], 0.0)
            self._replay.append([(w, o.spent_ns / _NS) for w, o in zip(weights, menu, strict=True)])
        self._upper[self._made[0]] = self._upper[self._moved[0]] = 0.0

    def _slot(self, ns: int) -> int:
        length = self._new(1)[0]
        self._lower[length] = ns / _NS
        self._lengths.append(length)
        return length

    def _copy(self, before: int | None, length: int, rate: float) -> int:
        """Add a curve's next point: no less than before, and no more than the link carries."""
        after = self._new(1)[0]
        per_ms = rate * _NS * 1e-9 / _BYTES
        terms = [(after, 1.0), (length, -per_ms)]
        if before is None:
            self._leq.add(terms, 0.0)
        else:
            self._leq.add([*terms, (before, -1.0)], 0.0)
            self._leq.add([(before, 1.0), (after, -1.0)], 0.0)
        return after

    def _slow(self, block: int, seconds_per_byte: float) -> tuple[int, float]:
        return self._evicted[block], seconds_per_byte * _BYTES / (_NS * 1e-9)

    def _lengthen(
        self, lengths: list[int], slots: list[_Slot], terms: list[tuple[int, float]]
    ) -> None:
        """Let the slots of a block together last as long as all that happens in them."""
        total = sum(slot.ns for slot in slots) / _NS
        self._leq.add([*terms, *((length, -1.0) for length in lengths)], -total)

    def _forward_pass(self) -> None:
        rate, _ = link_rates(self._machine, self._caps)
        slow_out, _ = slowdowns(self._machine)
        out: int | None = None
        for block, c in enumerate(self._chain.class_of):
            lengths = [self._slot(slot.ns) for slot in self._forward[c]]
            self._lengthen(lengths, self._forward[c], [self._slow(block, slow_out)])
            for slot, length in zip(self._forward[c], lengths, strict=True):
                out = self._copy(out, length, rate)
                # Only what has been made can have left.
                self._leq.add([(out, 1.0), (self._moved[block + 1], -1.0)], 0.0)
                made = slot.bytes_after / _BYTES
                self._leq.add([(out, 1.0), (self._moved[block], -1.0)], made)
        outside = self._chain.outside
        num_blocks = len(self._chain.class_of)
        # Before the turn a plan may wait for what its last call has made.
        out = self._copy(out, self._slot(0), rate)
        self._leq.add([(out, 1.0), (self._moved[num_blocks], -1.0)], 0.0)
        turn = self._slot(outside.turn_ns)
        end = self._copy(out, turn, rate)
        self._eq.add([(end, 1.0), (self._moved[num_blocks], -1.0)], 0.0)
        # In the turn: what is stored and had not left before it. The turn is one moment.
        kept = [(self._made[num_blocks], 1.0), (out, -1.0)]
        self._leq.add(kept, self._room - outside.turn_bytes / _BYTES)

    def _backward_pass(self) -> None:
        _, rate = link_rates(self._machine, self._caps)
        _, slow_in = slowdowns(self._machine)
        num_blocks = len(self._chain.class_of)
        gradients = self._chain.gradient_bytes_before()
        everything = self._moved[num_blocks]
        back: int | None = None
        for block in reversed(range(num_blocks)):
            slots = self._backward[self._chain.class_of[block]]
            lengths: list[int] = []
            for slot in slots:
                before = back
                length = self._slot(slot.ns)
                lengths.append(length)
                back = self._copy(before, length, rate)
                # What later blocks evicted is back, and of this one what is used by now.
                later = [(everything, 1.0), (self._moved[block + 1], -1.0)]
                self._leq.add([*later, (back, -1.0)], 0.0)
                here = [(everything, 1.0), (self._moved[block], -1.0)]
                self._leq.add([*here, (back, -1.0)], slot.bytes_after / _BYTES)
                # Kept ones of the blocks before, and fetched ones that are theirs.
                held = [(self._made[block], 1.0), (self._moved[block], -1.0)]
                limit = self._room - (gradients[block] + slot.use_bytes) / _BYTES
                self._leq.add(held, limit)
                if before is not None:
                    ahead = [(before, 1.0), (everything, -1.0), (self._moved[block], 1.0)]
                    self._leq.add(_merge(held + ahead), limit)
            self._lengthen(lengths, slots, [*self._replay[block], self._slow(block, slow_in)])

    def _tiers(self) -> None:
        moved = self._moved[len(self._chain.class_of)]
        host, disk = self._caps.host_bytes / _BYTES, self._caps.disk_bytes / _BYTES
        self._upper[moved] = host + disk
        machine = self._machine
        if not (host and disk):
            return
        num_out = sum(len(self._forward[c]) for c in self._chain.class_of) + 2
        sides = (
            (self._lengths[:num_out], machine.disk_write_bytes_per_s),
            (self._lengths[num_out:], machine.disk_read_bytes_per_s),
        )
        for lengths, bytes_per_s in sides:
            per_ms = bytes_per_s * _NS * 1e-9 / _BYTES
            self._leq.add([(moved, 1.0), *((length, -per_ms) for length in lengths)], host)


def _merge(terms: list[tuple[int, float]]) -> list[tuple[int, float]]:
    merged: dict[int, float] = {}
    for column, value in terms:
        merged[column] = merged.get(column, 0.0) + value
    return list(merged.items())


def _cuts(spent_ns: list[int], num_slots: int) -> list[int]:
    """Cut moments into at most `num_slots` runs of about equal time; return where they end."""
    total, passed, ends = sum(spent_ns) + len(spent_ns), 0, list[int]()
    for moment, ns in enumerate(spent_ns):
        passed += ns + 1
        if passed * num_slots >= total * (len(ends) + 1):
            ends.append(moment + 1)
    return ends


def _forward_slots(block: BlockClass, num_slots: int, *, is_slowed: bool) -> list[_Slot]:
    moments = block.moments
    spent = [moment.spent_ns for moment in moments]
    spent[-1] += block.tail_ns
    slots: list[_Slot] = []
    for start, end in pairwise([0, *_cuts(spent, num_slots)]):
        # The outputs of the slot's last moment leave after it, unless the block goes on: with
        # compute, or with what their copies cost.
        goes_on = block.tail_ns or (is_slowed and not block.is_fused)
        last = end if end == len(spent) and goes_on else end - 1
        made = sum(block.num_bytes[i] for moment in moments[:last] for i in moment.outputs)
        slots.append(_Slot(ns=sum(spent[start:end]), bytes_after=made, use_bytes=0))
    if is_slowed and block.is_fused:
        # What copies cost comes after the block, while its outputs leave.
        slots.append(_Slot(ns=0, bytes_after=sum(block.num_bytes), use_bytes=0))
    return slots


def _backward_slots(block: BlockClass, num_slots: int) -> list[_Slot]:
    first_use: dict[int, int] = {}
    for event, uses in enumerate(block.uses):
        for i in uses:
            first_use.setdefault(i, event)
    slots: list[_Slot] = []
    for start, end in pairwise([0, *_cuts(list(block.compute_ns), num_slots)]):
        # Within the slot itself a fetch may still come: only its first event is a deadline,
        # and that one for what is fetched before the slot, which the slot before it says.
        used = {i for i, event in first_use.items() if event < end}
        rest = sum(size for i, size in enumerate(block.num_bytes) if i not in used)
        in_use = max(
            sum(block.num_bytes[i] for i in set(block.uses[event])) + block.held_bytes[event]
            for event in range(start, end)
        )
        ns = sum(block.compute_ns[start:end])
        slots.append(_Slot(ns=ns, bytes_after=rest, use_bytes=in_use))
    return slots
