"""States of blocks by hand, and that the estimate is careful: against exact layouts."""

import random
from dataclasses import replace

import numpy as np
import pytest

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.check import check_plan
from ebbtide.machine import Machine
from ebbtide.plan import Decision
from ebbtide.planner.candidate import lay_out_states
from ebbtide.planner.caps import Caps
from ebbtide.planner.chain import compile_chain
from ebbtide.planner.space import Ints, Space
from ebbtide.workload import Outside, Workload
from tests.corpus import CORPUS
from tests.planner.exhaustive import plan_with, random_machine, random_workload

WIDE = 10**6
ENDLESS = Caps(device_bytes=2**60, host_bytes=2**60, disk_bytes=0)
MACHINE = Machine(
    name="fast",
    device_bytes=2**40,
    host_bytes=2**40,
    out_bytes_per_s=50 * 10**9,
    in_bytes_per_s=50 * 10**9,
    both_bytes_per_s=90 * 10**9,
)


def made(name: str, num_bytes: int, make_ns: int, *inputs: str) -> Activation:
    return Activation(
        name=name,
        op="aten.mm",
        kind=OpKind.MATMUL if inputs else OpKind.INPUT,
        num_bytes=num_bytes,
        inputs=inputs,
        is_saved=True,
        is_replayable=bool(inputs),
        group=name,
        make_ns=make_ns,
    )


def a_step() -> Workload:
    """y frees 30 bytes for 3 ns, h 20 for 10; x is needed last."""
    block = Block(
        name="b",
        class_name="Layer",
        activations=(made("x", 10, 0), made("h", 20, 10, "x"), made("y", 30, 3, "h")),
        backward=tuple(
            BackwardEvent(uses=(use,), compute_ns=5, held_bytes=2) for use in ("y", "h", "x")
        ),
    )
    outside = Outside(resident_bytes=100, turn_bytes=4, turn_ns=7, ends_bytes=1, ends_ns=9)
    return Workload(model="Model", blocks=(block,), outside=outside)


def space_of(workload: Workload, *, min_bytes: int = 1, num_slots: int = 16) -> Space:
    return Space(compile_chain(workload), num_slots=num_slots, min_bytes=min_bytes)


def test_states_evict_what_is_needed_last_first() -> None:
    space = space_of(a_step())
    assert [option.num_bytes for option in space.menus[0]] == [60, 30, 10]
    evicted = [[space.states[s].evicted for s in row] for row in space.rows[0]]
    assert evicted == [[(), (0,), (0, 1), (0, 1, 2)], [(), (0,), (0, 1)], [(), (0,)]]
    sizes = [[space.states[s].evicted_bytes for s in row] for row in space.rows[0]]
    assert sizes == [[0, 10, 30, 60], [0, 10, 30], [0, 10]]
    kept = [[space.states[s].kept_bytes for s in row] for row in space.rows[0]]
    assert kept == [[60, 50, 30, 0], [30, 20, 0], [10, 0]]
    assert [space.states[row[0]].step for row in space.rows[0]] == [0, 1, 2]
    assert list(space.evicted_bytes) == [s.evicted_bytes for s in space.states]
    assert list(space.kept_bytes) == [s.kept_bytes for s in space.states]


def test_small_activations_never_move() -> None:
    space = space_of(a_step(), min_bytes=20)
    assert [space.states[s].evicted for s in space.rows[0][0]] == [(), (1,), (1, 2)]
    assert [space.states[s].evicted for s in space.rows[0][2]] == [()]
    # The default, with sizes of some bytes.
    assert all(not state.evicted for state in Space(compile_chain(a_step()), num_slots=4).states)


def test_pins_to_a_tier_are_in_every_state_and_others_in_none() -> None:
    pins = {"h": Decision.HOST, "x": Decision.KEEP}
    space = Space(compile_chain(a_step(), pins), num_slots=4, min_bytes=25)
    evicted = [[space.states[s].evicted for s in row] for row in space.rows[0]]
    # Nor is h too small to move if the user says so.
    assert evicted == [[(1,), (1, 2)], [(1,)]]


def test_equal_blocks_share_their_states() -> None:
    assert len(space_of(CORPUS["llama-8b/8k"]).rows) == 1
    assert len(space_of(CORPUS["deepseek/8k"]).rows) == 2


def test_estimates_by_hand() -> None:
    workload = a_step()
    space = space_of(workload)
    base_ns = 9 + 13 + 7 + 15
    rows = np.array([[row[0]] for row in space.rows[0]])
    seconds = space.estimate(rows, MACHINE, ENDLESS)
    assert seconds == pytest.approx([base_ns * 1e-9, (base_ns + 3) * 1e-9, (base_ns + 13) * 1e-9])
    # y is on its way for 30 ns, of which the turn hides 7, and needed at once on its way back.
    slow = replace(MACHINE, out_bytes_per_s=10**9, in_bytes_per_s=10**9)
    only_y = space_of(workload, min_bytes=30)
    row = np.array([[only_y.rows[0][0][1]]])
    assert only_y.estimate(row, slow, ENDLESS) == pytest.approx((base_ns + 23 + 30) * 1e-9)


def test_what_has_no_room_takes_forever() -> None:
    space = space_of(a_step())
    keep, y_again, h_again = (row[0] for row in space.rows[0])
    rows = np.array([[keep], [y_again], [h_again]])
    # Of the turn and backward: 100 + 60 + 4.
    for device_bytes, fits in ((164, True), (163, False)):
        caps = replace(ENDLESS, device_bytes=device_bytes)
        assert np.isfinite(space.estimate(rows, MACHINE, caps))[0] == fits
    evict = np.array([[space.rows[0][2][1]]])
    for host_bytes, fits in ((10, True), (9, False)):
        caps = replace(ENDLESS, host_bytes=host_bytes)
        assert np.isfinite(space.estimate(evict, MACHINE, caps))[0] == fits


@pytest.mark.parametrize("name", ["llama-8b/8k", "gpt2/32k", "deepseek/8k"])
@pytest.mark.parametrize("num_slots", [1, 3, 16])
def test_keeping_all_takes_the_base_time(name: str, num_slots: int) -> None:
    space = space_of(CORPUS[name], num_slots=num_slots)
    row = np.array([[space.rows[c][0][0] for c in space.chain.class_of]])
    (seconds,) = space.estimate(row, MACHINE, ENDLESS)
    assert seconds == pytest.approx(space.chain.base_ns * 1e-9, rel=1e-9)


def random_rows(rng: random.Random, space: Space, count: int) -> Ints:
    states = [[s for row in options for s in row] for options in space.rows]
    return np.array([[rng.choice(states[c]) for c in space.chain.class_of] for _ in range(count)])


def check_careful(seed: int) -> int:
    """Assert that what the estimate has room for can be laid out; return how many that were."""
    rng = random.Random(seed)
    workload = random_workload(rng, rng.randint(1, 4), rng.randint(1, 6))
    machine = random_machine(rng, has_disk=False)
    space = space_of(
        workload, num_slots=rng.choice((1, 2, 3, 4, 16)), min_bytes=rng.choice((1, 1, 5))
    )
    names = [a.name for block in workload.blocks for a in block.activations]
    keep = plan_with(workload, dict.fromkeys(names, Decision.KEEP))
    most_bytes = check_plan(keep, workload, machine).peak_bytes
    rows = random_rows(rng, space, 12)
    num_fit = 0
    for _ in range(3):
        caps = Caps(
            device_bytes=rng.randint(most_bytes // 2, most_bytes + 5),
            host_bytes=WIDE,
            disk_bytes=0,
        )
        seconds = space.estimate(rows, machine, caps)
        assert (seconds >= space.chain.base_ns * 1e-9 * (1 - 1e-9)).all(), seed
        for row in rows[np.isfinite(seconds)]:
            num_fit += 1
            found = lay_out_states(space, [space.states[s] for s in row], machine, caps)
            assert found is not None, (seed, caps, list(row))
            assert found.layout.peak_bytes <= caps.device_bytes
    return num_fit


def test_what_the_estimate_has_room_for_can_be_laid_out() -> None:
    assert sum(check_careful(seed) for seed in range(100)) > 1000


@pytest.mark.parametrize("name", ["llama-8b-x8/8k", "gpt2/8k"])
def test_the_estimate_is_near_the_exact_time(name: str) -> None:
    space = Space(compile_chain(CORPUS[name]), num_slots=16)
    outside = space.chain.outside
    least = outside.resident_bytes + outside.constant_bytes + outside.turn_bytes
    caps = replace(ENDLESS, device_bytes=least + CORPUS[name].num_bytes_saved // 2)
    rows = random_rows(random.Random(0), space, 300)
    seconds = space.estimate(rows, MACHINE, caps)
    exact: list[float] = []
    for row, estimated in zip(rows, seconds, strict=True):
        if np.isfinite(estimated):
            found = lay_out_states(space, [space.states[s] for s in row], MACHINE, caps)
            assert found is not None
            exact.append(found.layout.step_ns * 1e-9 / estimated)
    assert len(exact) > 30
    # Copies as a fluid: a last activation may come later than its bytes would.
    assert min(exact) > 0.9
    assert max(exact) < 1.1
