"""A fast estimate of many candidates at once: a step with copies as a fluid.

`docs/planner.md` with bytes instead of whole activations, and the moments of a block put together
into a few slots. In both passes one level is walked from slot to slot, for all candidates
together: in forward the bytes that wait to leave, in backward those that are there ahead of their
need. All else is sums over blocks and slots. It is conservative in what a slot holds, and never
says that something fits the device which does not; whether whole activations can be dealt out to
two tiers is for the layout to find.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbtide.machine import Machine
from ebbtide.planner.caps import Caps, link_rates, slowdowns
from ebbtide.planner.chain import Chain
from ebbtide.planner.program import Program

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


MAX_VALUES = 8_000
"""Candidates x slots that are computed at once: arrays of 64 KiB. Much larger ones are new memory
from the system each time, which took longer than what is computed in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What a block does in each state (row)."""

    kept_bytes: Floats
    """What stays until backward."""
    evicted_bytes: Floats
    """What leaves."""
    most_made_held: Floats
    """Most in forward that cannot be waited for, beside what the blocks before keep."""
    most_use_held: Floats
    """Most in backward, beside what is kept."""
    call_s: Floats
    """By slot (column), as all below. Forward's time."""
    leaving: Floats
    """What is made and leaves."""
    made_held: Floats
    """In forward: what the block keeps so far, what is alive, and what is made and leaves."""
    event_s: Floats
    """Backward's time."""
    need: Floats
    """What is fetched and first needed."""
    use_held: Floats
    """In backward: what is fetched and in use, what is made again, and gradients."""


class Estimator:
    """Estimates candidates of one space.

    Args:
        chain: What is planned.
        tables: All states.
        largest_move_bytes: The largest activation that any state evicts.
    """

    def __init__(self, chain: Chain, tables: Tables, largest_move_bytes: int) -> None:
        self._outside, self._tables = chain.outside, tables
        self._ends_bytes = chain.ends_bytes
        # A row for each block, as candidates have.
        self._gradient_bytes = np.array(chain.gradient_bytes_before(), dtype=np.float64)[:, None]
        self._largest_move = largest_move_bytes
        self._num_slots = tables.need.shape[1]
        self._forward_s = tables.call_s.sum(axis=1)
        self._backward_s = tables.event_s.sum(axis=1)

    def estimate(self, candidates: Ints, machine: Machine, caps: Caps) -> Floats:
        """Return the step time of each candidate in seconds; infinite where it does not fit.

        Args:
            candidates: A state for each candidate (row) and block (column).
            machine: Its links.
            caps: What the step may take.
        """
        num_values = candidates.size * self._num_slots
        batches = np.array_split(candidates, -(-num_values // MAX_VALUES) or 1)
        return np.concatenate([self._estimate(batch.T, machine, caps) for batch in batches])

    def _estimate(self, states: Ints, machine: Machine, caps: Caps) -> Floats:
        """Estimate candidates (columns) by the states of their blocks (rows)."""
        outside, tables = self._outside, self._tables
        # What kept activations leave free: before each block's forward, and in the turn.
        free = np.empty((len(states) + 1, states.shape[1]))
        free[0] = caps.device_bytes - outside.resident_bytes - outside.constant_bytes
        free[1:] = free[0] - np.cumsum(tables.kept_bytes[states], axis=0)
        forward_s = self._forward(states, free, machine, caps)
        free_back = free[1:] - self._gradient_bytes
        backward_s = self._backward(states, free_back, machine, caps)
        evicted = tables.evicted_bytes[states].sum(axis=0)
        if caps.host_bytes and caps.disk_bytes:
            # What the host has no room for takes as long as the disk does.
            on_disk = np.maximum(evicted - caps.host_bytes, 0.0)
            forward_s = np.maximum(forward_s, on_disk / machine.disk_write_bytes_per_s)
            backward_s = np.maximum(backward_s, on_disk / machine.disk_read_bytes_per_s)
        fits = (
            (evicted <= caps.host_bytes + caps.disk_bytes)
            & (free[-1] >= outside.turn_bytes)
            & (free[:-1] >= tables.most_made_held[states]).all(axis=0)
            & (free_back >= tables.most_use_held[states]).all(axis=0)
        ) & (self._ends_bytes <= caps.device_bytes)
        return np.where(fits, forward_s + backward_s, np.inf)

    def _forward(self, states: Ints, free: Floats, machine: Machine, caps: Caps) -> Floats:
        """Walk through forward and the turn with one queue of bytes that leave."""
        (out_rate, _), (slow_out, _) = link_rates(machine, caps), slowdowns(machine)
        outside, tables = self._outside, self._tables
        places = self._places(states)
        # Compute waits until enough has left; activations leave as a whole.
        most = self._by_slot(free[:-1] - self._largest_move)
        most -= np.take(tables.made_held, places)
        np.maximum(most, 0.0, out=most)
        sent = np.take(out_rate * tables.call_s, places)
        # A copy slows compute down right after the call, and goes on meanwhile.
        queued = np.take((1 - slow_out * out_rate) * tables.leaving, places)
        queue = _levels(queued - sent, queued, np.maximum(most - sent, 0.0) + queued)
        waited = np.maximum(queue[:-1] - most, 0.0).sum(axis=0)
        most_in_turn = np.maximum(free[-1] - outside.turn_bytes - self._largest_move, 0.0)
        stay, turn_s = np.minimum(queue[-1], most_in_turn), outside.turn_ns * 1e-9
        waited += queue[-1] - stay + np.maximum(stay - out_rate * turn_s, 0.0)
        spent_s = (self._forward_s + slow_out * tables.evicted_bytes)[states].sum(axis=0)
        return spent_s + (outside.ends_ns * 1e-9 + turn_s) + waited / out_rate

    def _backward(self, states: Ints, free: Floats, machine: Machine, caps: Caps) -> Floats:
        """Walk through backward with one pool of bytes that are there ahead of their need."""
        (_, in_rate), (_, slow_in) = link_rates(machine, caps), slowdowns(machine)
        tables = self._tables
        places = self._places(states[::-1])
        need = np.take(tables.need, places)
        needed = np.cumsum(need, axis=0)
        # What is needed before a tight moment leaves room there; no more than all is ahead.
        most = self._by_slot(free[::-1])
        most -= np.take(tables.use_held, places)
        most += needed
        most = np.minimum.accumulate(most[::-1], axis=0)[::-1]
        np.minimum(most, needed[-1], out=most)
        most -= needed
        np.maximum(most, 0.0, out=most)
        came = np.take(in_rate * (tables.event_s + slow_in * tables.need), places)
        ahead = _levels(came - need, np.minimum(came, most), most)
        need -= ahead[:-1]
        waited = np.maximum(need, 0.0, out=need).sum(axis=0)
        spent_s = (self._backward_s + slow_in * tables.evicted_bytes)[states].sum(axis=0)
        return spent_s + waited / in_rate

    def _places(self, states: Ints) -> Ints:
        """Return where tables say what a block does in a slot."""
        places = states[:, None, :] * self._num_slots + np.arange(self._num_slots)[:, None]
        return np.ascontiguousarray(places.reshape(-1, states.shape[1]))

    def _by_slot(self, values: Floats) -> Floats:
        """Return what is there for each block for each of its slots."""
        return np.repeat(values, self._num_slots, axis=0)


def tabulate(program: Program, evictions: Sequence[Sequence[int]], num_slots: int) -> Tables:
    """Return the tables of some states of one program.

    Args:
        program: What is stored.
        evictions: For each state the activations that leave.
        num_slots: Slots of forward and of backward; more is finer and slower.
    """
    num_bytes = np.array(program.num_bytes, dtype=np.float64)
    leaves = _flags(evictions, len(num_bytes)) * num_bytes
    kept = _flags([list(program.made_at)], len(num_bytes)) * num_bytes - leaves

    made_at, last_held = program.made_at, program.last_held
    by_call = (len(num_bytes), len(program.call_ns))
    held = np.cumsum(kept @ _spans(made_at, made_at, by_call), axis=1) + program.transient_bytes
    pinned = held + leaves @ _spans(made_at, last_held, by_call)

    call_slot = _slots(program.call_ns, num_slots)
    event_slot = _slots(program.event_ns, num_slots)
    made = {i: call_slot[call] for i, call in made_at.items()}
    first = {i: event_slot[event] for i, event in program.first_need.items()}
    last = {i: event_slot[event] for i, event in program.last_need.items()}
    by_slot = (len(num_bytes), num_slots)
    leaving = leaves @ _spans(made, made, by_slot)
    made_held = _most(held, call_slot, num_slots) + leaving
    scratch = np.array([program.scratch_bytes], dtype=np.float64)
    use_held = _most(scratch, event_slot, num_slots) + leaves @ _spans(first, last, by_slot)
    ones = np.ones((len(evictions), 1))
    return Tables(
        kept_bytes=kept.sum(axis=1),
        evicted_bytes=leaves.sum(axis=1),
        most_made_held=np.maximum(pinned.max(axis=1), made_held.max(axis=1)),
        most_use_held=use_held.max(axis=1),
        call_s=ones * _sums(program.call_ns, call_slot, num_slots) * 1e-9,
        leaving=leaving,
        made_held=made_held,
        event_s=ones * _sums(program.event_ns, event_slot, num_slots) * 1e-9,
        need=leaves @ _spans(first, first, by_slot),
        use_held=use_held,
    )


def join(tables: Sequence[Tables]) -> Tables:
    """Return one table of all states, in order."""
    names = Tables.__dataclass_fields__
    return Tables(**{name: np.concatenate([getattr(t, name) for t in tables]) for name in names})


def _flags(chosen: Sequence[Sequence[int]], num_activations: int) -> Floats:
    """Return 1 for what each row chooses of the activations (columns)."""
    flags = np.zeros((len(chosen), num_activations))
    rows = [row for row, columns in enumerate(chosen) for _ in columns]
    flags[rows, [column for columns in chosen for column in columns]] = 1.0
    return flags


def _spans(
    first: Mapping[int, int], last: Mapping[int, int] | Sequence[int], shape: tuple[int, int]
) -> Floats:
    """Return 1 for each activation (row) in the moments (columns) from its first to its last."""
    spans = np.zeros(shape)
    for i, start in first.items():
        spans[i, start : last[i] + 1] = 1.0
    return spans


def _sums(values: Sequence[int], slots: Sequence[int], num_slots: int) -> Floats:
    """Add moments up into slots."""
    sums = np.zeros(num_slots)
    for value, slot in zip(values, slots, strict=True):
        sums[slot] += value
    return sums


def _most(values: Floats, slots: Sequence[int], num_slots: int) -> Floats:
    """Return the most of each slot's moments (columns)."""
    most = np.zeros((len(values), num_slots))
    used = sorted(set(slots))
    if used:
        starts = [slots.index(slot) for slot in used]
        most[:, used] = np.maximum.reduceat(values, starts, axis=1)
    return most


def _slots(spent_ns: Sequence[int], num_slots: int) -> list[int]:
    """Put moments together into slots of about equal time; each alone where there are enough."""
    if len(spent_ns) <= num_slots:
        return list(range(len(spent_ns)))
    total = sum(spent_ns) + len(spent_ns)
    slots: list[int] = []
    passed = 0
    for ns in spent_ns:
        slots.append(min(num_slots - 1, passed * num_slots // total))
        passed += ns + 1
    return slots


def _levels(change: Floats, least: Floats, most: Floats) -> Floats:
    """Return a level before each slot (row) and after the last.

    It starts at 0, and each slot changes it within bounds. Two such slots in a row do what one
    does, so that pairs are walked through first: few calls, where one a slot would be slow.
    """
    levels = np.zeros((len(change) + 1, change.shape[1]))
    if len(change) > 1:
        first, second = slice(0, -1, 2), slice(1, None, 2)
        after = (change[second], least[second], most[second])
        levels[::2] = _levels(
            change[first] + change[second],
            _step(least[first], *after),
            _step(most[first], *after),
        )
    levels[1::2] = _step(levels[:-1:2], change[::2], least[::2], most[::2])
    return levels


def _step(level: Floats, change: Floats, least: Floats, most: Floats) -> Floats:
    stepped = level + change
    np.maximum(stepped, least, out=stepped)
    return np.minimum(stepped, most, out=stepped)
