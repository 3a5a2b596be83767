"""Estimates against one slot after another, and what a block does in its slots by hand."""

import random
from dataclasses import replace

import numpy as np
import pytest

from ebbtide.machine import Machine
from ebbtide.planner.caps import Caps, link_rates, slowdowns
from ebbtide.planner.chain import Chain, compile_chain
from ebbtide.planner.estimate import MAX_VALUES, Estimator, Tables, join, tabulate
from ebbtide.planner.space import Ints, Space
from ebbtide.workload import Workload
from tests.corpus import CORPUS
from tests.corpus.machines import budget_of, machine_with

NUM_SLOTS = 3


def tables_of(space: Space) -> Tables:
    rows = [row for options in space.rows for row in options]
    states = [[space.states[s] for s in row] for row in rows]
    return join([tabulate(s[0].program, [x.evicted for x in s], NUM_SLOTS) for s in states])


def with_gradients(workload: Workload) -> Workload:
    """Half a block's activations in gradients for each block, and some for the head."""
    blocks = tuple(
        replace(
            block,
            backward=tuple(
                replace(e, gradient_bytes=block.num_bytes_saved // (2 * len(block.backward)))
                for e in block.backward
            ),
        )
        for block in workload.blocks
    )
    assert workload.outside is not None
    outside = replace(workload.outside, turn_gradient_bytes=workload.num_bytes_saved // 50)
    return replace(workload, blocks=blocks, outside=outside)


def random_rows(space: Space, count: int, seed: int) -> Ints:
    rng = random.Random(seed)
    states = [[s for row in options for s in row] for options in space.rows]
    return np.array([[rng.choice(states[c]) for c in space.chain.class_of] for _ in range(count)])


def walk(
    tables: Tables, row: list[int], chain: Chain, largest: int, machine: Machine, caps: Caps
) -> float:
    """Return the estimate of one candidate, slot by slot; infinite where it does not fit."""
    outside = chain.outside
    (out_rate, in_rate), (slow_out, slow_in) = link_rates(machine, caps), slowdowns(machine)
    room = caps.device_bytes - outside.resident_bytes - outside.constant_bytes
    queue = kept = waited_s = 0.0
    slots = range(NUM_SLOTS)
    for state in row:
        if kept + tables.most_made_held[state] > room:
            return float("inf")
        for slot in slots:
            most = max(room - kept - tables.made_held[state, slot] - largest, 0.0)
            waited_s += max(queue - most, 0.0) / out_rate
            leaving, call_s = tables.leaving[state, slot], tables.call_s[state, slot]
            queue = max(min(queue, most) - out_rate * call_s, 0.0) + leaving
            queue -= out_rate * slow_out * leaving
            waited_s += call_s + slow_out * leaving
        kept += tables.kept_bytes[state]
    if kept + outside.turn_bytes > room:
        return float("inf")
    turn_s = outside.turn_ns * 1e-9
    stay = min(queue, max(room - kept - outside.turn_bytes - largest, 0.0))
    waited_s += (queue - stay + max(stay - out_rate * turn_s, 0.0)) / out_rate + turn_s

    frees: list[float] = []
    backward = row[::-1]
    gradients = outside.turn_gradient_bytes
    for state, c in zip(backward, reversed(chain.class_of), strict=True):
        frees += [room - kept - gradients - tables.use_held[state, slot] for slot in slots]
        kept -= tables.kept_bytes[state]
        gradients += chain.classes[c].gradient_bytes
    if min(frees) < 0:
        return float("inf")
    needs = [float(tables.need[state, slot]) for state in backward for slot in slots]
    event_s = [float(tables.event_s[state, slot]) for state in backward for slot in slots]
    most_ahead = list(frees)
    for p in reversed(range(len(frees) - 1)):
        most_ahead[p] = min(most_ahead[p], most_ahead[p + 1] + needs[p + 1])
    ahead, left = 0.0, sum(needs)
    for need, spent_s, most in zip(needs, event_s, most_ahead, strict=True):
        spent_s += slow_in * need
        waited_s += max(need - ahead, 0.0) / in_rate + spent_s
        left -= need
        ahead = min(max(ahead - need, 0.0) + in_rate * spent_s, max(most, 0.0), left)
    return waited_s + outside.ends_ns * 1e-9


@pytest.mark.parametrize("name", ["llama-8b-x8/8k", "gpt2/32k", "deepseek/8k"])
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_all_at_once_is_slot_by_slot(name: str, share: float, has_gradients: bool) -> None:
    workload = with_gradients(CORPUS[name]) if has_gradients else CORPUS[name]
    space = Space(compile_chain(workload), num_slots=NUM_SLOTS)
    tables, chain = tables_of(space), space.chain
    device_bytes = budget_of(CORPUS[name], share) + workload.gradient_bytes
    caps = Caps(device_bytes=device_bytes, host_bytes=2**50, disk_bytes=0)
    largest = max(s.program.num_bytes[i] for s in space.states for i in s.evicted)
    least = np.array([[space.rows[c][-1][-1] for c in space.chain.class_of]])
    rows = np.concatenate([random_rows(space, 30, 1), least])
    for link_gb_per_s in (10, 50):
        machine = machine_with(link_gb_per_s)
        seconds = Estimator(chain, tables, largest).estimate(rows, machine, caps)
        expected = [walk(tables, list(row), chain, largest, machine, caps) for row in rows]
        assert seconds == pytest.approx(expected, rel=1e-9)
        assert np.isfinite(seconds).any()


def test_many_candidates_are_estimated_like_each_alone() -> None:
    space = Space(compile_chain(CORPUS["llama-8b/8k"]), num_slots=4)
    caps = Caps(device_bytes=budget_of(CORPUS["llama-8b/8k"], 0.5), host_bytes=2**50, disk_bytes=0)
    rows = random_rows(space, 200, 2)
    assert rows.size * 4 > 2 * MAX_VALUES
    seconds = space.estimate(rows, machine_with(50), caps)
    alone = [space.estimate(row[None, :], machine_with(50), caps)[0] for row in rows]
    assert seconds == pytest.approx(alone, rel=1e-12)
    assert np.isfinite(seconds).any()
    assert not np.isfinite(seconds).all()


def test_slots_hold_what_a_block_does_in_them() -> None:
    space = Space(compile_chain(CORPUS["gpt2/8k"]), num_slots=NUM_SLOTS)
    tables = tables_of(space)
    for s, state in enumerate(space.states):
        program = state.program
        assert tables.evicted_bytes[s] == state.evicted_bytes
        assert tables.kept_bytes[s] == state.kept_bytes
        assert tables.leaving[s].sum() == tables.need[s].sum() == state.evicted_bytes
        assert tables.call_s[s].sum() == pytest.approx(sum(program.call_ns) * 1e-9)
        assert tables.event_s[s].sum() == pytest.approx(sum(program.event_ns) * 1e-9)
        assert tables.most_use_held[s] >= max(program.scratch_bytes)
        # The last slot has all that is kept, and forward holds no less than that.
        assert tables.most_made_held[s] >= state.kept_bytes


def test_where_the_ends_have_no_room_nothing_fits() -> None:
    space = Space(compile_chain(CORPUS["gpt2/8k"]), num_slots=NUM_SLOTS)
    row = np.array([[space.rows[c][-1][0] for c in space.chain.class_of]])
    caps = Caps(device_bytes=2**50, host_bytes=0, disk_bytes=0)
    full = replace(space.chain, outside=replace(space.chain.outside, ends_bytes=2**50))
    largest = max(s.program.num_bytes[i] for s in space.states for i in s.evicted)
    for known, fits in ((space.chain, True), (full, False)):
        seconds = Estimator(known, tables_of(space), largest).estimate(row, machine_with(50), caps)
        assert bool(np.isfinite(seconds)[0]) == fits
