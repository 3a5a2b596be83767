"""The search space of a chain, and a fast estimate of many candidates at once.

A block's *state* is an option of its menu and how many of the stored activations are evicted, in
a fixed order. A candidate gives each block a state. `Space.estimate` walks through a step once for
all candidates together, with copies as a fluid: `docs/planner.md` with bytes instead of whole
activations, and the moments of a block put together into a few slots. It is conservative in what
a slot holds, and never says that something fits the device which does not; whether whole
activations can be dealt out to two tiers is for the layout to find.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbtide.machine import Machine
from ebbtide.plan import Decision
from ebbtide.planner.caps import Caps, link_rates, slowdowns
from ebbtide.planner.chain import BlockClass, Chain
from ebbtide.planner.menu import Option, make_menu
from ebbtide.planner.named import MIN_BYTES
from ebbtide.planner.program import Program, make_program

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One way to treat a block."""

    program: Program
    """What is stored, and when it is made and needed."""
    evicted: tuple[int, ...]
    """What of that leaves the device."""
    step: int
    """The option's place in its class's menu."""
    evicted_bytes: int
    """Bytes that leave."""
    kept_bytes: int
    """Bytes that stay until backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """For each state (row) and slot of a block (column)."""

    kept_made: Floats
    evicted_made: Floats
    evicted_alive: Floats
    """What leaves and forward itself still holds."""
    transient: Floats
    call_s: Floats
    need: Floats
    in_use: Floats
    event_s: Floats
    scratch: Floats


class Space:
    """All states of a chain's blocks.

    Args:
        chain: What is planned.
        num_slots: Slots of a block's forward and of its backward; more is finer and slower.
        min_bytes: Smaller activations never move.
    """

    def __init__(self, chain: Chain, *, num_slots: int, min_bytes: int = MIN_BYTES) -> None:
        self.chain = chain
        self.states: list[State] = []
        self.rows: list[list[list[int]]] = []
        """For each class and option, the states by number of evicted activations."""
        self.menus: list[tuple[Option, ...]] = []
        for block in chain.classes:
            menu = make_menu(block)
            self.menus.append(menu)
            of_class: list[list[int]] = []
            for step, option in enumerate(menu):
                made = _states(block, option, step, min_bytes)
                of_class.append(list(range(len(self.states), len(self.states) + len(made))))
                self.states += made
            self.rows.append(of_class)
        self.evicted_bytes = np.array([s.evicted_bytes for s in self.states], dtype=np.float64)
        self.kept_bytes = np.array([s.kept_bytes for s in self.states], dtype=np.float64)
        self._tables = _tabulate(self.states, num_slots)
        self._largest_move = max(
            (s.program.num_bytes[i] for s in self.states for i in s.evicted), default=0
        )

    def estimate(self, candidates: Ints, machine: Machine, caps: Caps) -> Floats:
        """Return the step time of each candidate in seconds; infinite where it does not fit.

        Args:
            candidates: A state for each candidate (row) and block (column).
            machine: Its links.
            caps: What the step may take.
        """
        out_rate, in_rate = link_rates(machine, caps)
        slow_out, slow_in = slowdowns(machine)
        outside, tables = self.chain.outside, self._tables
        cap = float(caps.device_bytes)
        room = cap - outside.resident_bytes - outside.constant_bytes
        kept_made, evicted_made, evicted_alive, transient, call_s = (
            _columns(table, candidates)
            for table in (
                tables.kept_made, tables.evicted_made, tables.evicted_alive, tables.transient,
                tables.call_s,
            )
        )  # fmt: skip
        time = np.full(len(candidates), outside.ends_ns * 1e-9)
        kept, queue, lacks = (np.zeros(len(candidates)) for _ in range(3))

        def make_room(held: Floats, new: Floats, alive: Floats) -> None:
            """Wait until enough has left; activations leave as a whole, and `alive` not at all."""
            nonlocal time, queue, lacks
            full = held + queue + new
            if full.max() + self._largest_move <= room:
                return
            last = np.where(queue > 0.0, self._largest_move, 0.0)
            gone = np.minimum(np.maximum(full + last - room, 0.0), queue)
            queue = queue - gone
            time = time + gone / out_rate
            lacks = np.maximum(lacks, held + np.maximum(queue + new, alive) - room)

        nothing = np.zeros(len(candidates))
        for made, leaving, alive, transient_bytes, spent_s in zip(
            kept_made, evicted_made, evicted_alive, transient, call_s, strict=True
        ):
            make_room(kept + made + transient_bytes, leaving, alive)
            slow_s = slow_out * leaving
            time = time + spent_s + slow_s
            queue = np.maximum(queue - out_rate * spent_s, 0.0) + leaving * (
                1 - slow_out * out_rate
            )
            kept = kept + made
        make_room(kept + outside.turn_bytes, nothing, nothing)
        turn_s = outside.turn_ns * 1e-9
        time = time + turn_s + np.maximum(queue - out_rate * turn_s, 0.0) / out_rate
        spent = self._estimate_backward(candidates, room, kept, lacks, (in_rate, slow_in))
        lacks = np.maximum(lacks, outside.resident_bytes + outside.ends_bytes - cap)
        evicted = self.evicted_bytes[candidates].sum(axis=1)
        lacks = np.maximum(lacks, evicted - caps.host_bytes - caps.disk_bytes)
        if caps.host_bytes and caps.disk_bytes:
            # What the host has no room for takes as long as the disk does.
            on_disk = np.maximum(evicted - caps.host_bytes, 0.0)
            time = np.maximum(time, on_disk / machine.disk_write_bytes_per_s)
            spent = np.maximum(spent, on_disk / machine.disk_read_bytes_per_s)
        return np.where(lacks > 0.5, np.inf, time + spent)

    def _estimate_backward(
        self,
        candidates: Ints,
        room: float,
        kept: Floats,
        lacks: Floats,
        rates: tuple[float, float],
    ) -> Floats:
        """Return the time of backward; notes in `lacks` what does not fit."""
        in_rate, slow_in = rates
        tables, backward = self._tables, candidates[:, ::-1]
        need, in_use, event_s, scratch = (
            _columns(table, backward)
            for table in (tables.need, tables.in_use, tables.event_s, tables.scratch)
        )
        num_slots = tables.need.shape[1]
        kept_here = np.repeat(
            np.cumsum(self.kept_bytes[candidates], axis=1)[:, ::-1].T, num_slots, axis=0
        )
        free = room - kept_here - in_use - scratch
        np.maximum(lacks, -free.min(axis=0), out=lacks)
        # What may be there ahead of its need: what is needed before a tight moment leaves room.
        limit = free
        for p in range(len(limit) - 2, -1, -1):
            np.minimum(limit[p], limit[p + 1] + need[p + 1], out=limit[p])
        np.maximum(limit, 0.0, out=limit)
        left = need.sum(axis=0)
        ahead, time = np.zeros(len(candidates)), np.zeros(len(candidates))
        for wanted, most, spent_s in zip(need, limit, event_s + slow_in * need, strict=True):
            time += np.maximum(wanted - ahead, 0.0) / in_rate + spent_s
            left -= wanted
            ahead = np.maximum(ahead - wanted, 0.0)
            ahead = np.minimum(np.minimum(ahead + in_rate * spent_s, np.maximum(most, ahead)), left)
        return time


def _columns(table: Floats, candidates: Ints) -> Floats:
    """Look a table up: one row for each slot of the step, one column for each candidate."""
    num_candidates, num_blocks = candidates.shape
    looked_up = table[candidates].reshape(num_candidates, num_blocks * table.shape[1])
    return np.ascontiguousarray(looked_up.T)


def _states(block: BlockClass, option: Option, step: int, min_bytes: int) -> list[State]:
    program = make_program(block, option)
    away = frozenset({Decision.HOST, Decision.DISK})
    always = [i for i in program.first_need if block.pins[i] in away and block.num_bytes[i]]
    # What backward needs last is away longest: it goes first.
    order = sorted(
        (
            i
            for i in program.first_need
            if block.num_bytes[i] >= max(min_bytes, 1) and block.pins[i] is None
        ),
        key=lambda i: (-program.first_need[i], program.made_at[i], i),
    )
    states: list[State] = []
    for count in range(len(order) + 1):
        chosen = [*always, *order[:count]]
        evicted = tuple(sorted(chosen, key=lambda i: (program.made_at[i], i)))
        moved = sum(block.num_bytes[i] for i in evicted)
        states.append(
            State(
                program=program,
                evicted=evicted,
                step=step,
                evicted_bytes=moved,
                kept_bytes=option.num_bytes - moved,
            )
        )
    return states


def _tabulate(states: list[State], num_slots: int) -> _Tables:
    shape = (len(states), num_slots)
    names = _Tables.__dataclass_fields__
    arrays = {name: np.zeros(shape) for name in names}
    for row, state in enumerate(states):
        program, evicted = state.program, frozenset(state.evicted)
        num_bytes = program.num_bytes
        call_slot = _slots(program.call_ns, num_slots)
        for call, slot in enumerate(call_slot):
            arrays["call_s"][row, slot] += program.call_ns[call] * 1e-9
            cell = arrays["transient"][row, slot]
            arrays["transient"][row, slot] = max(cell, program.transient_bytes[call])
        alive = [0] * len(program.call_ns)
        for i in evicted:
            for call in range(program.made_at[i], program.last_held[i] + 1):
                alive[call] += num_bytes[i]
        for call, slot in enumerate(call_slot):
            cell = arrays["evicted_alive"][row, slot]
            arrays["evicted_alive"][row, slot] = max(cell, alive[call])
        for i, call in program.made_at.items():
            name = "evicted_made" if i in evicted else "kept_made"
            arrays[name][row, call_slot[call]] += num_bytes[i]
        event_slot = _slots(program.event_ns, num_slots)
        for event, slot in enumerate(event_slot):
            arrays["event_s"][row, slot] += program.event_ns[event] * 1e-9
            cell = arrays["scratch"][row, slot]
            arrays["scratch"][row, slot] = max(cell, program.scratch_bytes[event])
        for i in evicted:
            first = event_slot[program.first_need[i]]
            arrays["need"][row, first] += num_bytes[i]
            arrays["in_use"][row, first : event_slot[program.last_need[i]] + 1] += num_bytes[i]
    return _Tables(**arrays)


def _slots(spent_ns: tuple[int, ...], num_slots: int) -> list[int]:
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
