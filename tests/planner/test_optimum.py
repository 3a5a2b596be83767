"""Bound, optimum and plan on tiny workloads: the optimum by trying every plan.

Sizes of the random workloads are scaled to MB and 0.1 ms, so that the solver's tolerances are far
below one unit.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.check import check_plan
from ebbtide.machine import Machine
from ebbtide.plan import Decision, Plan
from ebbtide.planner.chain import compile_chain
from ebbtide.planner.layout import Treatment, lay_out
from ebbtide.planner.menu import Option
from ebbtide.planner.program import Program, make_program
from ebbtide.planner.result import Code
from ebbtide.planner.solve import plan_for_budget
from ebbtide.simulate import simulate
from ebbtide.workload import Outside, Workload
from tests.planner.exhaustive import (
    EVICTIONS,
    best_step_ns,
    plan_with,
    random_machine,
    random_workload,
)

PLANNERS = ("lp", "greedy", "uniform")
BYTES, NS = 10**6, 10**5


def scaled(workload: Workload) -> Workload:
    outside = workload.outside
    assert outside is not None
    return replace(
        workload,
        outside=Outside(
            **{
                name: getattr(outside, name) * (NS if name.endswith("_ns") else BYTES)
                for name in Outside.__dataclass_fields__
            }
        ),
        blocks=tuple(
            replace(
                block,
                activations=tuple(
                    replace(a, num_bytes=a.num_bytes * BYTES, make_ns=a.make_ns * NS)
                    for a in block.activations
                ),
                backward=tuple(
                    replace(
                        e,
                        compute_ns=e.compute_ns * NS,
                        held_bytes=e.held_bytes * BYTES,
                        gradient_bytes=e.gradient_bytes * BYTES,
                    )
                    for e in block.backward
                ),
                rest_ns=block.rest_ns * NS,
                workspace_bytes=block.workspace_bytes * BYTES,
            )
            for block in workload.blocks
        ),
    )


def a_machine(rng: random.Random, *, has_disk: bool) -> Machine:
    """Sometimes with a host that has no room for all, or none at all."""
    machine = random_machine(rng, has_disk=has_disk)
    host_bytes = rng.randrange(25) if rng.random() < 0.4 else 10**6
    rates = {
        name: getattr(machine, name) * (BYTES // NS)
        for name in (
            "out_bytes_per_s",
            "in_bytes_per_s",
            "both_bytes_per_s",
            "disk_write_bytes_per_s",
            "disk_read_bytes_per_s",
        )
    }
    tiers = {"host_bytes": host_bytes * BYTES, "disk_bytes": machine.disk_bytes * BYTES}
    return replace(machine, device_bytes=10**12, **tiers, **rates)


def keep_peak_bytes(workload: Workload, machine: Machine) -> int:
    names = [a.name for block in workload.blocks for a in block.activations if a.is_saved]
    keep = plan_with(workload, dict.fromkeys(names, Decision.KEEP))
    return check_plan(keep, workload, machine).peak_bytes


def scheduler(
    workload: Workload, machine: Machine, budget_bytes: int
) -> Callable[[dict[str, Decision]], Plan | None]:
    """Plans with the moments that planners would choose."""
    chain = compile_chain(workload)
    programs: dict[tuple[int, frozenset[int]], Program] = {}

    def treat(block: int, decisions: dict[str, Decision]) -> Treatment:
        number, names = chain.class_of[block], chain.names[block]
        tiers = {
            i: decisions[name]
            for i, name in enumerate(names)
            if decisions.get(name, Decision.RECOMPUTE) is not Decision.RECOMPUTE
        }
        stored = frozenset(tiers)
        if (number, stored) not in programs:
            option = Option(stored=stored, num_bytes=0, replay_ns=0, replayed=frozenset())
            programs[number, stored] = make_program(chain.classes[number], option)
        return Treatment(
            program=programs[number, stored],
            tiers={i: tier for i, tier in tiers.items() if tier in EVICTIONS},
        )

    def schedule(decisions: dict[str, Decision]) -> Plan | None:
        treatments = [treat(block, decisions) for block in range(len(chain.class_of))]
        layout = lay_out(chain, treatments, machine, cap_bytes=budget_bytes)
        if layout is None:
            return None
        return replace(
            plan_with(workload, decisions),
            release_at=layout.release_at,
            fetch_at=layout.fetch_at,
            peak_bytes=layout.peak_bytes,
            predicted_step_ns=layout.step_ns,
        )

    return schedule


def step_ns(plan: Plan, workload: Workload, machine: Machine) -> int:
    timeline = simulate(plan, workload, machine)
    return max((span.end_ns for span in timeline.spans), default=0)


def plans_of(workload: Workload, machine: Machine, budget_bytes: int) -> dict[str, Plan]:
    """What each planner finds; every plan is sound and as fast as it says."""
    plans: dict[str, Plan] = {}
    for planner in PLANNERS:
        outcome = plan_for_budget(
            workload, machine, budget_bytes=budget_bytes, planner=planner, min_bytes=1
        )
        plan = outcome.plan
        assert (plan is None) == (outcome.code is Code.NOTHING_FITS)
        if plan is not None:
            assert check_plan(plan, workload, machine, budget_bytes=budget_bytes).faults == ()
            assert step_ns(plan, workload, machine) == plan.predicted_step_ns
            plans[planner] = plan
    return plans


def stacked(workload: Workload, rng: random.Random) -> Workload:
    """Let what a block stores cost compute time, from little to more than making it again."""
    return replace(
        workload,
        blocks=tuple(
            replace(block, store_ns_per_gib=rng.choice((0, 10_000_000, 100_000_000)))
            for block in workload.blocks
        ),
    )


def check_against_optimum(
    seed: int, num_blocks: int, num_activations: int, *, is_stacked: bool = False
) -> bool:
    """Assert bound <= optimum <= plan at a random budget; whether there was any plan."""
    rng = random.Random(seed)
    workload = scaled(random_workload(rng, num_blocks, num_activations))
    workload = stacked(workload, rng) if is_stacked else workload
    # With a disk there are four decisions, and few activations are many plans.
    machine = a_machine(rng, has_disk=num_blocks * num_activations <= 6 and rng.random() < 0.5)
    most_bytes = keep_peak_bytes(workload, machine)
    budget_bytes = rng.randint(most_bytes * 3 // 4, most_bytes - 1)
    plans = plans_of(workload, machine, budget_bytes)
    if not plans:
        return False
    optimum_ns = best_step_ns(
        workload,
        machine,
        budget_bytes,
        lambda plan: plan.predicted_step_ns,
        lay_out=scheduler(workload, machine, budget_bytes),
    )
    for planner, plan in plans.items():
        at = (seed, num_blocks, num_activations, planner, budget_bytes)
        assert optimum_ns is not None, at
        assert plan.bound_step_ns <= optimum_ns <= plan.predicted_step_ns, at
    return True


SHAPES = ((1, 3), (2, 2), (3, 2), (2, 3))


def test_bound_optimum_and_plan_are_in_this_order() -> None:
    num_planned = sum(
        check_against_optimum(seed, *SHAPES[seed % len(SHAPES)]) for seed in range(24)
    )
    assert num_planned >= 10


def test_bound_optimum_and_plan_are_in_this_order_where_storing_costs() -> None:
    num_planned = sum(
        check_against_optimum(seed, *SHAPES[seed % len(SHAPES)], is_stacked=True)
        for seed in range(500, 524)
    )
    assert num_planned >= 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4000, 4200, 20))
def test_bound_optimum_and_plan_are_in_this_order_where_storing_costs_for_many(
    first: int,
) -> None:
    for seed in range(first, first + 20):
        check_against_optimum(seed, *SHAPES[seed % len(SHAPES)], is_stacked=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_bound_optimum_and_plan_are_in_this_order_for_many(first: int) -> None:
    for seed in range(first, first + 20):
        check_against_optimum(seed, *SHAPES[seed % len(SHAPES)])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2000, 2024, 4))
def test_bound_optimum_and_plan_are_in_this_order_for_nine_activations(first: int) -> None:
    for seed in range(first, first + 4):
        check_against_optimum(seed, 3, 3)


def check_against_every_moment(seed: int, num_blocks: int, num_activations: int) -> bool:
    """As above, with every choice of moments; whether there was any plan."""
    rng = random.Random(seed)
    workload = scaled(random_workload(rng, num_blocks, num_activations))
    machine = a_machine(rng, has_disk=rng.random() < 0.3)
    most_bytes = keep_peak_bytes(workload, machine)
    budget_bytes = rng.randint(most_bytes * 3 // 4, most_bytes - 1)
    plans = plans_of(workload, machine, budget_bytes)
    if not plans:
        return False
    optimum_ns = best_step_ns(
        workload, machine, budget_bytes, lambda plan: step_ns(plan, workload, machine)
    )
    for planner, plan in plans.items():
        at = (seed, num_blocks, num_activations, planner, budget_bytes)
        assert optimum_ns is not None, at
        assert plan.bound_step_ns <= optimum_ns <= plan.predicted_step_ns, at
    return True


# Two activations: some 700 plans with both evicted, and never more than some thousands.
TINIEST = ((1, 2), (2, 1), (1, 1))


def test_no_choice_of_moments_beats_the_bound() -> None:
    num_planned = sum(
        check_against_every_moment(seed, *TINIEST[seed % len(TINIEST)]) for seed in range(24)
    )
    assert num_planned >= 6


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3000, 3200, 40))
def test_no_choice_of_moments_beats_the_bound_for_many(first: int) -> None:
    for seed in range(first, first + 40):
        check_against_every_moment(seed, *TINIEST[seed % len(TINIEST)])


def a_block_that_ends_dear() -> Workload:
    """y, 3 GB and dear to make again, is the last thing that forward makes; the turn is wide."""
    x = Activation(
        name="x",
        op="input",
        kind=OpKind.INPUT,
        num_bytes=10**9,
        inputs=(),
        is_saved=True,
        is_replayable=False,
        group="x",
    )
    y = replace(
        x,
        name="y",
        op="aten.mm",
        kind=OpKind.MATMUL,
        num_bytes=3 * 10**9,
        inputs=("x",),
        is_replayable=True,
        group="y",
        make_ns=400 * 10**6,
    )
    backward = tuple(
        BackwardEvent(uses=(use,), compute_ns=10 * 10**6, held_bytes=0) for use in "yx"
    )
    return Workload(
        model="Model",
        blocks=(Block(name="b", class_name="Layer", activations=(x, y), backward=backward),),
        outside=Outside(
            resident_bytes=0, turn_bytes=25 * 10**8, turn_ns=10**6, ends_bytes=0, ends_ns=0
        ),
    )


def test_what_forward_makes_last_can_leave_before_the_turn() -> None:
    # Compute may wait at the turn's start: y leaves in 60 ms and comes back in 60, where making
    # it again takes 400.
    workload = a_block_that_ends_dear()
    rate = 50 * 10**9
    machine = replace(
        random_machine(random.Random(0)),
        device_bytes=10**12,
        host_bytes=10**12,
        out_bytes_per_s=rate,
        in_bytes_per_s=rate,
        both_bytes_per_s=rate,
    )
    budget_bytes = 4 * 10**9
    optimum_ns = best_step_ns(
        workload, machine, budget_bytes, lambda plan: step_ns(plan, workload, machine)
    )
    assert optimum_ns == (400 + 60 + 1 + 60 + 20) * 10**6
    for planner, plan in plans_of(workload, machine, budget_bytes).items():
        assert plan.bound_step_ns <= optimum_ns <= plan.predicted_step_ns, planner


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("slowdown_ppm", [0, 100_000, 500_000])
def test_what_forward_makes_last_leaves_while_copies_slow_compute_down(
    slowdown_ppm: int, is_fused: bool
) -> None:
    # y must leave before the turn, in 60 ms, and what that costs is a part of them. It comes back
    # in 6, and what that costs comes after.
    workload = a_block_that_ends_dear()
    assert workload.outside is not None
    (block,) = workload.blocks
    x, y = block.activations
    y = replace(y, kind=OpKind.OPAQUE, is_replayable=False)
    block = replace(
        block,
        activations=(replace(x, num_bytes=1), y),
        backward=tuple(replace(event, compute_ns=0) for event in block.backward),
        is_fused=is_fused,
    )
    budget_bytes = 4 * 10**9
    outside = replace(workload.outside, turn_bytes=budget_bytes - 1)
    workload = replace(workload, blocks=(block,), outside=outside)
    machine = replace(
        random_machine(random.Random(0)),
        device_bytes=10**12,
        host_bytes=10**12,
        out_bytes_per_s=50 * 10**9,
        in_bytes_per_s=500 * 10**9,
        slowdown_ppm=slowdown_ppm,
    )
    optimum_ns = best_step_ns(
        workload, machine, budget_bytes, lambda plan: step_ns(plan, workload, machine)
    )
    assert optimum_ns is not None
    assert optimum_ns == (400 + 60 + 1 + 6) * 10**6 + 6 * slowdown_ppm
    for planner, plan in plans_of(workload, machine, budget_bytes).items():
        assert plan.bound_step_ns <= optimum_ns <= plan.predicted_step_ns, planner


@pytest.mark.parametrize("seed", [1263, 1314])
def test_the_solver_refuses_nothing_that_fits(seed: int) -> None:
    # All that there is are inputs, which leave while the turn waits.
    rng = random.Random(seed)
    workload = scaled(random_workload(rng, rng.randint(1, 3), 1))
    last = replace(workload.blocks[-1], rest_ns=0)
    workload = replace(workload, blocks=(*workload.blocks[:-1], last))
    machine = replace(a_machine(rng, has_disk=False), host_bytes=10**12)
    for planner in PLANNERS:
        outcome = plan_for_budget(workload, machine, budget_bytes=1, planner=planner, min_bytes=1)
        again = plan_for_budget(
            workload,
            machine,
            budget_bytes=outcome.smallest_budget_bytes,
            planner=planner,
            min_bytes=1,
        )
        assert again.plan is not None, (planner, again.message)


@pytest.mark.parametrize("seed", range(10))
def test_where_the_optimum_is_to_keep_all_so_is_the_plan(seed: int) -> None:
    rng = random.Random(seed)
    workload = scaled(random_workload(rng, 2, 3))
    machine = a_machine(rng, has_disk=False)
    budget_bytes = keep_peak_bytes(workload, machine)
    for planner in PLANNERS:
        outcome = plan_for_budget(
            workload, machine, budget_bytes=budget_bytes, planner=planner, min_bytes=1
        )
        assert outcome.plan is not None
        base_ns = compile_chain(workload).base_ns
        assert outcome.plan.bound_step_ns <= base_ns
        assert outcome.plan.predicted_step_ns == base_ns
