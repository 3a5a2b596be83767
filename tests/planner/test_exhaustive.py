import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.check import check_plan
from ebbtide.machine import Machine
from ebbtide.plan import TURN_END, TURN_START, Decision, Plan
from ebbtide.workload import Outside, Workload
from tests.planner.exhaustive import (
    all_decisions,
    all_layouts,
    best_step_ns,
    plan_with,
    planned_workloads,
    random_machine,
    random_plan,
    random_workload,
    workloads,
)

KEEP, HOST, DISK, RECOMPUTE = Decision.KEEP, Decision.HOST, Decision.DISK, Decision.RECOMPUTE


def made(name: str, num_bytes: int, *inputs: str, is_saved: bool = True) -> Activation:
    return Activation(
        name=name,
        op="aten.mm",
        kind=OpKind.MATMUL if inputs else OpKind.INPUT,
        num_bytes=num_bytes,
        inputs=inputs,
        is_saved=is_saved,
        is_replayable=bool(inputs),
        group=name,
    )


def a_workload() -> Workload:
    """x 10 and y 8 are saved, t 5 between them is not; 100 bytes are always there."""
    block = Block(
        name="b",
        class_name="Layer",
        activations=(
            made("x", 10),
            made("t", 5, "x", is_saved=False),
            made("y", 8, "t"),
        ),
        backward=(
            BackwardEvent(uses=("y",), compute_ns=1, held_bytes=0),
            BackwardEvent(uses=("x",), compute_ns=1, held_bytes=0),
        ),
    )
    outside = Outside(resident_bytes=100, turn_bytes=30, turn_ns=1, ends_bytes=0, ends_ns=0)
    return Workload(model="Model", blocks=(block,), outside=outside)


def a_machine(*, host_bytes: int = 100, disk_bytes: int = 0) -> Machine:
    return replace(
        random_machine(random.Random(0), has_disk=True),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )


# What a decision costs, in place of a simulator.
COSTS_NS = {KEEP: 0, RECOMPUTE: 10, HOST: 100, DISK: 1000}


def cost_ns(plan: Plan) -> int | None:
    return sum(COSTS_NS[decision] for decision in plan.decisions.values())


def test_all_decisions_are_those_of_what_backward_needs() -> None:
    # t is needed only where y is made from it, and then x, which is saved anyway.
    assert list(all_decisions(a_workload(), a_machine(host_bytes=0))) == [
        {"y": KEEP, "x": KEEP},
        {"y": RECOMPUTE, "t": KEEP, "x": KEEP},
        {"y": RECOMPUTE, "t": RECOMPUTE, "x": KEEP},
    ]


def test_all_decisions_keep_to_the_tiers() -> None:
    workload = a_workload()
    # y: KEEP or HOST, or t KEEP, HOST or RECOMPUTE; x: KEEP or HOST.
    assert len(list(all_decisions(workload, a_machine()))) == 5 * 2
    assert len(list(all_decisions(workload, a_machine(disk_bytes=100)))) == 7 * 3
    # x on the host leaves no room for y or t there.
    assert len(list(all_decisions(workload, a_machine(host_bytes=10)))) == 10 - 2
    shared = replace(a_machine(host_bytes=20), num_local_ranks=2)
    assert len(list(all_decisions(workload, shared))) == 10 - 2


def test_all_layouts_are_every_moment_once() -> None:
    workload = a_workload()
    plans = list(all_layouts(workload, {"x": HOST, "y": KEEP}))
    # Let go at t, y and both ends of the turn; fetched at the turn, either event, or on need.
    assert len(plans) == 4 * 4
    assert {plan.release_at["x"] for plan in plans} == {"t", "y", TURN_START, TURN_END}
    assert {plan.fetch_at.get("x") for plan in plans} == {TURN_END, "y", "x", None}
    assert list(all_layouts(workload, {"x": KEEP, "y": KEEP})) == [
        plan_with(workload, {"x": KEEP, "y": KEEP})
    ]


@pytest.mark.parametrize(
    ("budget_bytes", "best_ns"),
    [
        # The turn holds 100 + 30, and x 10 and y 8.
        (148, 0),
        # x and t, from which y is made.
        (147, 10),
        (145, 10),
        # x alone. Making y again from t holds 100 + 10 + 5 + 8 only.
        (144, 20),
        (140, 20),
        # y alone, with x evicted.
        (139, 100),
        (138, 100),
        # t alone; then nothing at all.
        (137, 110),
        (135, 110),
        (134, 120),
        (130, 120),
        (129, None),
    ],
)
def test_the_best_plan_is_the_cheapest_that_fits(budget_bytes: int, best_ns: int | None) -> None:
    assert best_step_ns(a_workload(), a_machine(), budget_bytes, cost_ns) == best_ns


def test_the_callers_scheduler_lays_the_plans_out() -> None:
    workload = a_workload()
    seen: list[dict[str, Decision]] = []

    def lay_out(decisions: dict[str, Decision]) -> Plan | None:
        seen.append(decisions)
        return None if decisions["x"] is KEEP else plan_with(workload, decisions)

    assert best_step_ns(workload, a_machine(), 148, cost_ns, lay_out=lay_out) == 100
    assert seen == list(all_decisions(workload, a_machine()))
    assert best_step_ns(workload, a_machine(), 148, lambda plan: None) is None


def test_an_unsound_plan_does_not_count_however_fast() -> None:
    workload = a_workload()

    def lay_out(decisions: dict[str, Decision]) -> Plan:
        return replace(plan_with(workload, decisions), host_bytes=0)

    def fewer_kept_ns(plan: Plan) -> int:
        return 10 * sum(decision is KEEP for decision in plan.decisions.values())

    # Of x and y one is kept at least, as whatever is evicted takes host bytes.
    assert best_step_ns(workload, a_machine(), 148, fewer_kept_ns, lay_out=lay_out) == 10


def test_a_workload_with_too_many_plans_is_refused() -> None:
    workload = random_workload(random.Random(0), 4, 3)
    with pytest.raises(ValueError, match="12 activations have too many plans to try; at most 9"):
        best_step_ns(workload, a_machine(), 100, cost_ns)


def test_equal_seeds_give_equal_workloads_plans_and_machines() -> None:
    first, second = (random.Random(5) for _ in range(2))
    workload = random_workload(first, 3, 6)
    assert workload == random_workload(second, 3, 6)
    assert random_plan(first, workload) == random_plan(second, workload)
    assert random_machine(first) == random_machine(second)


def test_random_workloads_have_all_that_planners_must_meet() -> None:
    met: set[str] = set()
    for seed in range(30):
        for block in random_workload(random.Random(seed), 2, 5).blocks:
            met |= {activation.kind.value for activation in block.activations}
            groups = [activation.group for activation in block.activations]
            met |= {"group" for group in groups if groups.count(group) == 2}
            met |= {"unsaved" for a in block.activations[1:] if not a.is_saved}
            met |= {f"input saved {a.is_saved}" for a in block.activations[:1]}
            uses = [name for event in block.backward for name in event.uses]
            met |= {"used again" for name in uses if uses.count(name) > 1}
            assert {a.name for a in block.activations if a.is_saved} == set(uses)
    assert met == {kind.value for kind in OpKind} | {
        "group",
        "unsaved",
        "input saved True",
        "input saved False",
        "used again",
    }


@given(workloads())
def test_workloads_are_timed_and_can_be_planned(workload: Workload) -> None:
    assert workload.is_timed
    assert Workload.from_json(workload.to_json()) == workload
    everything = {a.name: KEEP for block in workload.blocks for a in block.activations}
    assert check_plan(plan_with(workload, everything), workload, a_machine()).is_sound


@given(planned_workloads())
def test_random_plans_are_sound(planned: tuple[Workload, Plan]) -> None:
    workload, plan = planned
    machine = a_machine(host_bytes=10**6, disk_bytes=10**6)
    assert check_plan(plan, workload, machine).faults == ()


@settings(max_examples=20)
@given(workloads(max_blocks=2, max_activations=2))
def test_no_plan_fits_below_the_best_peak(workload: Workload) -> None:
    machine = a_machine()

    def peak_bytes(plan: Plan) -> int:
        return check_plan(plan, workload, machine).peak_bytes

    def lay_out(decisions: dict[str, Decision]) -> Plan:
        return plan_with(workload, decisions)

    least_bytes = best_step_ns(workload, machine, 10**6, peak_bytes, lay_out=lay_out)
    assert least_bytes is not None
    search = dict(lay_out=lay_out)
    assert best_step_ns(workload, machine, least_bytes, peak_bytes, **search) == least_bytes
    assert best_step_ns(workload, machine, least_bytes - 1, peak_bytes, **search) is None
