"""Moments of copies on a chain of two blocks, by hand, and layouts against the oracle."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ebbtide.block import BackwardEvent, Block
from ebbtide.check import check_plan
from ebbtide.machine import Machine
from ebbtide.plan import TURN_END, TURN_START, Decision, Plan
from ebbtide.planner.chain import compile_chain
from ebbtide.planner.layout import Layout, Treatment, copy_ns, lay_out
from ebbtide.planner.menu import Option
from ebbtide.planner.program import make_program
from ebbtide.simulate import simulate
from ebbtide.workload import Outside, Workload
from tests.planner.exhaustive import (
    EVICTIONS,
    all_decisions,
    plan_with,
    random_machine,
    random_workload,
)
from tests.two_blocks import MACHINE, WIDE, made, two_blocks

KEEP, HOST, DISK = Decision.KEEP, Decision.HOST, Decision.DISK


def laid_out(
    workload: Workload,
    decisions: Mapping[str, Decision],
    cap_bytes: int,
    machine: Machine = MACHINE,
) -> Layout | None:
    chain = compile_chain(workload)
    treatments: list[Treatment] = []
    for c, names in zip(chain.class_of, chain.names, strict=True):
        stored = [i for i, name in enumerate(names) if decisions.get(name) in (KEEP, *EVICTIONS)]
        option = Option(stored=frozenset(stored), num_bytes=0, replay_ns=0, replayed=frozenset())
        tiers = {i: decisions[names[i]] for i in stored if decisions[names[i]] in EVICTIONS}
        program = make_program(chain.classes[c], option)
        treatments.append(Treatment(program=program, tiers=tiers))
    return lay_out(chain, treatments, machine, cap_bytes=cap_bytes)


EVICT_A = {"a.x": HOST, "a.h": HOST, "b.x": KEEP, "b.h": KEEP}


def test_with_room_copies_hide_and_come_back_at_once() -> None:
    # a.x leaves from 0 to 10, a.h from 10 to 30. b.x is made at 10: a.x has left. b.h is made at
    # 10 and the turn starts at 20: a.h has not. It has at the turn's end.
    # Back, a.h comes from 30 to 50, when it is needed, and a.x from 50 to 60, when it is.
    # Event 0 holds 100, the kept 120 and both: 250.
    assert laid_out(two_blocks(), EVICT_A, WIDE) == Layout(
        release_at={"a.x": "b.x", "a.h": TURN_END},
        fetch_at={"a.x": TURN_END, "a.h": TURN_END},
        step_ns=70,
        peak_bytes=250,
        max_out_bytes_in_flight=30,
        max_in_bytes_in_flight=30,
    )


def test_a_fetch_waits_for_the_first_moment_with_room() -> None:
    # With one byte less a.x comes at a's first event, in time: 50 to 60.
    # Making b.h holds 100, the kept 120 and a.h, which is leaving: 240.
    assert laid_out(two_blocks(), EVICT_A, 249) == Layout(
        release_at={"a.x": "b.x", "a.h": TURN_END},
        fetch_at={"a.x": "a.h", "a.h": TURN_END},
        step_ns=70,
        peak_bytes=240,
        max_out_bytes_in_flight=30,
        # When a.x starts, a.h is not used yet.
        max_in_bytes_in_flight=30,
    )


def test_compute_waits_for_a_copy_where_memory_needs_it() -> None:
    # b.h waits from 10 to 30 for a.h. Backward starts at 50; there is no room for a.h until a's
    # first event, at 70: it comes until 90, and a.x until 100.
    layout = Layout(
        release_at={"a.x": "b.x", "a.h": "b.h"},
        fetch_at={"a.x": "a.h", "a.h": "a.h"},
        step_ns=110,
        peak_bytes=220,
        max_out_bytes_in_flight=30,
        max_in_bytes_in_flight=30,
    )
    assert laid_out(two_blocks(), EVICT_A, 239) == layout
    assert laid_out(two_blocks(), EVICT_A, layout.peak_bytes) == layout


def test_what_must_be_there_at_once_is_the_least() -> None:
    assert laid_out(two_blocks(), EVICT_A, 219) is None


def fused_blocks() -> Workload:
    workload = two_blocks()
    return replace(workload, blocks=tuple(replace(b, is_fused=True) for b in workload.blocks))


def test_a_fused_block_lets_go_at_its_start_and_copies_at_its_end() -> None:
    # a.x leaves from 10 to 20, a.h from 20 to 40. b starts at 10: nothing has left. At the
    # turn's start, 20, a.x has. Backward starts at 40, a.h is back at 60, and a.x at 70.
    assert laid_out(fused_blocks(), EVICT_A, WIDE) == Layout(
        release_at={"a.x": TURN_START, "a.h": TURN_END},
        fetch_at={"a.x": TURN_END, "a.h": TURN_END},
        step_ns=80,
        peak_bytes=250,
        max_out_bytes_in_flight=30,
        max_in_bytes_in_flight=30,
    )
    # With one byte less b waits for a.x, from 10 to 20: it holds 100, a.h and 120. a.h leaves
    # until 40, the turn's end, and is back at 60; a.x comes after that, in time.
    assert laid_out(fused_blocks(), EVICT_A, 249) == Layout(
        release_at={"a.x": "b.x", "a.h": TURN_END},
        fetch_at={"a.x": "a.h", "a.h": TURN_END},
        step_ns=80,
        peak_bytes=240,
        max_out_bytes_in_flight=30,
        max_in_bytes_in_flight=30,
    )


def test_what_a_fused_block_makes_is_all_there_at_once() -> None:
    # By call h goes before y is made: 100 and x, z and y. As one h is there too.
    names = ("x", "h", "z", "y")
    by_call = Block(
        name="b",
        class_name="Layer",
        activations=(made("x", 1), made("h", 20, "x"), made("z", 30, "h"), made("y", 40, "z")),
        backward=tuple(
            BackwardEvent(uses=(name,), compute_ns=10, held_bytes=0) for name in reversed(names)
        ),
    )
    decisions = {"x": KEEP, "h": HOST, "z": HOST, "y": KEEP}
    for block, least_bytes in ((by_call, 171), (replace(by_call, is_fused=True), 191)):
        workload = replace(two_blocks(), blocks=(block,))
        layout = laid_out(workload, decisions, least_bytes)
        assert layout is not None
        assert layout.peak_bytes == least_bytes
        assert laid_out(workload, decisions, least_bytes - 1) is None


def test_the_turn_lets_go_what_it_has_no_room_for() -> None:
    # The turn holds 100 + 120 + 15, and a.h only where there is room for 20 more.
    workload = two_blocks(turn_bytes=15)
    layout = laid_out(workload, EVICT_A, 255)
    assert layout is not None
    assert (layout.release_at["a.h"], layout.step_ns) == (TURN_END, 70)
    layout = laid_out(workload, EVICT_A, 254)
    assert layout is not None
    # From 20 to 30 the turn waits; it ends at 40, and so does all else 10 later.
    assert (layout.release_at["a.h"], layout.step_ns) == (TURN_START, 80)
    assert laid_out(workload, EVICT_A, 234) is None


def test_the_ends_have_half_of_their_time_each_and_a_limit_of_their_own() -> None:
    workload = two_blocks(ends_ns=7, ends_bytes=151)
    layout = laid_out(workload, EVICT_A, 251)
    assert layout is not None
    assert (layout.step_ns, layout.peak_bytes) == (77, 251)
    assert laid_out(workload, EVICT_A, 250) is None
    # Copies of a.x start after 3 ns, as forward does.
    assert layout.release_at == {"a.x": "b.x", "a.h": TURN_END}


def test_what_forward_still_reads_is_not_let_go_for_room() -> None:
    # h is read by z and by last: it can go before last's moment is over, but not before it.
    block = Block(
        name="b",
        class_name="Layer",
        activations=(
            made("x", 1),
            made("h", 20, "x"),
            made("z", 30, "h"),
            made("last", 5, "h", "z"),
            made("more", 20, "last"),
        ),
        backward=(BackwardEvent(uses=("more", "last", "z", "h", "x"), compute_ns=1, held_bytes=0),),
    )
    outside = Outside(resident_bytes=0, turn_bytes=0, turn_ns=0, ends_bytes=0, ends_ns=0)
    workload = Workload(model="Model", blocks=(block,), outside=outside)
    decisions = {"x": KEEP, "h": HOST, "z": KEEP, "last": KEEP, "more": KEEP}
    layout = laid_out(workload, decisions, WIDE)
    assert layout is not None
    # It has left at 30, when last is made, which still reads it: let go at the next one.
    assert layout.release_at == {"h": "more"}
    # The event has all 76; making last has 56, and it is not less without h.
    assert layout.peak_bytes == 76
    assert laid_out(workload, decisions, 75) is None


def test_a_copy_does_not_wait_for_the_blocks_rest() -> None:
    workload = two_blocks()
    first = replace(workload.blocks[0], rest_ns=20)
    layout = laid_out(replace(workload, blocks=(first, workload.blocks[1])), EVICT_A, WIDE)
    assert layout is not None
    # a.h is made at 10 and has left at 30, when b.x is made.
    assert layout.release_at == {"a.x": "b.x", "a.h": "b.x"}
    assert layout.step_ns == 90


def test_the_disk_comes_after_the_link_and_before_it_on_the_way_back() -> None:
    decisions = {**EVICT_A, "a.h": DISK}
    layout = laid_out(two_blocks(), decisions, WIDE)
    assert layout is not None
    # a.h passes the link from 10 to 30 and the disk until 70: the turn's end waits from 30 to 70.
    # It is read until 80 and there at 100, 10 late; a.x comes until 110, when it is needed.
    assert layout.release_at == {"a.x": "b.x", "a.h": TURN_END}
    assert layout.step_ns == 120
    # The first event of b starts at 70.
    assert layout.fetch_at == {"a.x": TURN_END, "a.h": TURN_END}


def test_a_cpu_has_a_disk_and_no_link() -> None:
    machine = replace(
        MACHINE, host_bytes=0, out_bytes_per_s=0, in_bytes_per_s=0, both_bytes_per_s=0
    )
    decisions = {"a.x": DISK, "a.h": KEEP, "b.x": KEEP, "b.h": KEEP}
    layout = laid_out(two_blocks(), decisions, WIDE, machine)
    assert layout is not None
    # Written from 0 to 20; b.x and b.h are made at 10, and the turn starts at 20.
    assert layout.release_at == {"a.x": TURN_START}
    assert layout.step_ns == 70


def test_nothing_evicted_takes_no_moments() -> None:
    decisions = dict.fromkeys(EVICT_A, KEEP)
    layout = Layout(
        release_at={},
        fetch_at={},
        step_ns=70,
        peak_bytes=250,
        max_out_bytes_in_flight=0,
        max_in_bytes_in_flight=0,
    )
    assert laid_out(two_blocks(), decisions, 250) == layout
    assert laid_out(two_blocks(), decisions, 249) is None


def test_copies_are_rounded_up_to_whole_nanoseconds() -> None:
    assert copy_ns(7, 2 * 10**9) == 4
    assert copy_ns(8, 2 * 10**9) == 4
    assert copy_ns(0, 10**9) == 0
    assert copy_ns(1, 3) == 333_333_334


def planned(workload: Workload, decisions: dict[str, Decision], layout: Layout) -> Plan:
    return replace(
        plan_with(workload, decisions),
        release_at=layout.release_at,
        fetch_at=layout.fetch_at,
        max_out_bytes_in_flight=layout.max_out_bytes_in_flight,
        max_in_bytes_in_flight=layout.max_in_bytes_in_flight,
        peak_bytes=layout.peak_bytes,
    )


@pytest.mark.parametrize("seed", range(0, 80, 20))
def test_a_layout_is_what_the_oracle_and_the_simulator_say(seed: int) -> None:
    num_laid_out = num_refused = 0
    for number in range(seed, seed + 20):
        rng = random.Random(number)
        workload = random_workload(rng, rng.randint(1, 2), rng.randint(2, 3))
        machine = random_machine(rng, has_disk=rng.random() < 0.4)
        every = list(all_decisions(workload, machine))
        for decisions in rng.sample(every, min(6, len(every))):
            wide = laid_out(workload, decisions, WIDE, machine)
            assert wide is not None
            cap_bytes = rng.randint(wide.peak_bytes * 2 // 3, wide.peak_bytes + 3)
            layout = laid_out(workload, decisions, cap_bytes, machine)
            if layout is None:
                num_refused += 1
                continue
            num_laid_out += 1
            assert layout.peak_bytes <= cap_bytes
            assert layout.step_ns >= wide.step_ns
            plan = planned(workload, decisions, layout)
            report = check_plan(plan, workload, machine, budget_bytes=layout.peak_bytes)
            assert report.faults == (), number
            assert report.max_out_bytes_in_flight == layout.max_out_bytes_in_flight
            timeline = simulate(plan, workload, machine)
            assert timeline.peak_bytes == layout.peak_bytes
            assert max((s.end_ns for s in timeline.spans), default=0) == layout.step_ns
    assert num_laid_out > 30
    assert num_refused > 10


@pytest.mark.parametrize("seed", range(12))
def test_a_layout_fits_its_own_peak_and_none_is_below_the_least(seed: int) -> None:
    rng = random.Random(seed)
    workload = random_workload(rng, 2, 3)
    machine = random_machine(rng)
    decisions = rng.choice(list(all_decisions(workload, machine)))
    peaks: list[int] = []
    layout = laid_out(workload, decisions, WIDE, machine)
    while layout is not None:
        peaks.append(layout.peak_bytes)
        again = laid_out(workload, decisions, layout.peak_bytes, machine)
        assert again is not None
        assert again.peak_bytes <= layout.peak_bytes
        layout = laid_out(workload, decisions, layout.peak_bytes - 1, machine)
    # As no smaller cap is kept to, the last one is the least.
    assert all(laid_out(workload, decisions, cap, machine) is None for cap in range(peaks[-1]))
