"""The closed form by hand, and below every plan."""

import random
from dataclasses import replace

import pytest

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.machine import Machine
from ebbtide.planner.bound import closed_form_ns, steps_by_price
from ebbtide.planner.caps import Caps
from ebbtide.planner.chain import Chain, compile_chain
from ebbtide.planner.menu import Option, make_menu
from ebbtide.planner.solve import plan_for_budget
from ebbtide.workload import Outside, Workload
from tests.corpus import CORPUS
from tests.planner.exhaustive import random_machine, random_workload


def machine_with(out_bytes_per_s: int, in_bytes_per_s: int) -> Machine:
    return Machine(
        name="link",
        device_bytes=2**50,
        host_bytes=2**50,
        out_bytes_per_s=out_bytes_per_s,
        in_bytes_per_s=in_bytes_per_s,
        both_bytes_per_s=out_bytes_per_s,
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


def a_step(num_blocks: int = 1) -> Workload:
    """A block stores 60: y frees 30 for 100 ns a byte, h 20 for 500. 104 bytes are not its own."""
    blocks = tuple(
        Block(
            name=f"b{index}",
            class_name="Layer",
            activations=(
                made(f"b{index}.x", 10, 0),
                made(f"b{index}.h", 20, 10_000, f"b{index}.x"),
                made(f"b{index}.y", 30, 3_000, f"b{index}.h"),
            ),
            backward=tuple(
                BackwardEvent(uses=(f"b{index}.{use}",), compute_ns=20_000, held_bytes=0)
                for use in "yhx"
            ),
        )
        for index in range(num_blocks)
    )
    outside = Outside(
        resident_bytes=90, constant_bytes=10, turn_bytes=4, turn_ns=7, ends_bytes=1, ends_ns=9
    )
    return Workload(model="Model", blocks=blocks, outside=outside)


def with_menus(workload: Workload) -> tuple[Chain, tuple[tuple[Option, ...], ...]]:
    chain = compile_chain(workload)
    return chain, tuple(make_menu(block) for block in chain.classes)


def delay_ns(workload: Workload, excess_bytes: int, machine: Machine, host_bytes: int) -> int:
    """What the bound is above the base, with so many bytes too many in the turn."""
    chain, menus = with_menus(workload)
    device_bytes = 104 + workload.num_bytes_saved - excess_bytes
    caps = Caps(device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=0)
    return closed_form_ns(chain, menus, machine, caps) - chain.base_ns


FAST = machine_with(10**9, 10**9)


@pytest.mark.parametrize(
    ("excess_bytes", "least_ns"),
    [(-5, 0), (0, 0), (1, 100), (15, 1_500), (30, 3_000), (40, 8_000), (50, 13_000)],
)
def test_what_cannot_move_is_made_again_cheapest_first(excess_bytes: int, least_ns: int) -> None:
    assert delay_ns(a_step(), excess_bytes, FAST, host_bytes=0) == least_ns


def test_steps_of_equal_blocks_count_together() -> None:
    chain, menus = with_menus(a_step(3))
    assert steps_by_price(chain, menus) == [(100.0, 90), (500.0, 60)]
    assert delay_ns(a_step(3), 100, FAST, host_bytes=0) == 9_000 + 5_000


def test_what_leaves_in_time_costs_nothing() -> None:
    # Forward takes 13,000 ns, in which a byte a nanosecond leaves and comes back.
    assert delay_ns(a_step(), 60, FAST, host_bytes=100) == 0


def test_the_link_takes_what_forward_gives_it_time_for() -> None:
    # 13 bytes leave in forward; a byte more by waiting would take 1,000 ns.
    slow = machine_with(10**6, 10**9)
    assert delay_ns(a_step(), 13, slow, host_bytes=100) == 0
    assert delay_ns(a_step(), 40, slow, host_bytes=100) == 27 * 100
    assert delay_ns(a_step(), 50, slow, host_bytes=100) == 30 * 100 + 7 * 500


def test_waiting_is_chosen_where_it_is_no_dearer() -> None:
    # 500 ns a byte, as for h: 26 leave in forward, y's 30 are made again, and 4 are waited for.
    assert delay_ns(a_step(), 60, machine_with(2 * 10**6, 10**9), 100) == 3_000 + 2_000
    # 400 ns: 32.5 leave in forward, and the rest of 60 is y.
    assert delay_ns(a_step(), 60, machine_with(2_500_000, 10**9), 100) == 2_750
    # 50 ns, less than y: two blocks have 26,000 ns, but this machine has no time for 1,000 of them.
    assert delay_ns(a_step(2), 60, machine_with(10**6, 10**9), 100) == 34 * 100


def test_making_again_gives_the_way_back_more_time() -> None:
    # 6 bytes come back in 60,000 ns. 14 are left: each made again for 100 ns lets 0.01 come back.
    slow = machine_with(10**9, 10**5)
    assert delay_ns(a_step(), 20, slow, host_bytes=100) == int(14 / 1.01 * 100)


def test_the_slower_way_counts() -> None:
    both = machine_with(10**6, 10**5)
    assert delay_ns(a_step(), 20, both, host_bytes=100) == int(14 / 1.01 * 100)


def test_the_tiers_limit_what_can_move() -> None:
    assert delay_ns(a_step(), 20, FAST, host_bytes=5) == 15 * 100
    # Nor does waiting help there.
    assert delay_ns(a_step(), 20, machine_with(10**9, 10**9), host_bytes=0) == 20 * 100


@pytest.mark.parametrize("name", ["llama-8b-x8/8k", "llama-8b-x12/32k", "gpt2/8k", "llama-8b/32k"])
def test_no_plan_is_below_the_closed_form(name: str) -> None:
    workload = CORPUS[name]
    chain, menus = with_menus(workload)
    outside = chain.outside
    least = outside.resident_bytes + outside.constant_bytes + outside.turn_bytes
    machine = machine_with(25 * 10**9, 20 * 10**9)
    previous_ns = 2**62
    for share in (0.05, 0.1, 0.2, 0.4, 0.8):
        budget_bytes = least + int(share * workload.num_bytes_saved)
        caps = Caps(device_bytes=budget_bytes, host_bytes=2**50, disk_bytes=0)
        bound_ns = closed_form_ns(chain, menus, machine, caps)
        # More room, a lower bound.
        assert chain.base_ns <= bound_ns <= previous_ns
        previous_ns = bound_ns
        plan = plan_for_budget(workload, machine, budget_bytes=budget_bytes, planner="greedy").plan
        assert plan is None or plan.bound_step_ns == bound_ns <= plan.predicted_step_ns


def test_no_plan_of_a_random_workload_is_below_the_closed_form() -> None:
    num_planned = 0
    for seed in range(150):
        rng = random.Random(seed)
        workload = random_workload(rng, rng.randint(1, 4), rng.randint(1, 5))
        machine = replace(random_machine(rng, has_disk=rng.random() < 0.3), host_bytes=40)
        budget_bytes = rng.randrange(20, 140)
        plan = plan_for_budget(
            workload, machine, budget_bytes=budget_bytes, planner="greedy", min_bytes=1
        ).plan
        if plan is not None:
            num_planned += 1
            assert 0 <= plan.bound_step_ns <= plan.predicted_step_ns, seed
    assert num_planned > 40
