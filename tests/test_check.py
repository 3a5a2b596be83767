"""Peaks worked out by hand from docs/planner.md, a plan for every fault, and properties."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.check import CheckReport, check_plan
from ebbtide.machine import Machine
from ebbtide.plan import TURN_END, TURN_START, Decision, Plan
from ebbtide.workload import Outside, Workload
from tests.planner.exhaustive import generators, planned_workloads

KEEP, HOST, DISK, RECOMPUTE = Decision.KEEP, Decision.HOST, Decision.DISK, Decision.RECOMPUTE
WIDE = 10**6

MACHINE = Machine(
    name="small",
    device_bytes=WIDE,
    host_bytes=WIDE,
    out_bytes_per_s=1,
    in_bytes_per_s=1,
    both_bytes_per_s=1,
    disk_bytes=WIDE,
    disk_write_bytes_per_s=1,
    disk_read_bytes_per_s=1,
)


def made(
    name: str, num_bytes: int, *inputs: str, is_saved: bool = True, group: str | None = None
) -> Activation:
    """An activation; the input of its block if it reads nothing."""
    return Activation(
        name=name,
        op="aten.mm" if inputs else "input",
        kind=OpKind.MATMUL if inputs else OpKind.INPUT,
        num_bytes=num_bytes,
        inputs=inputs,
        is_saved=is_saved,
        is_replayable=bool(inputs),
        group=group or name,
        make_ns=1 if inputs else 0,
    )


def event(held_bytes: int, *uses: str) -> BackwardEvent:
    return BackwardEvent(uses=uses, compute_ns=1, held_bytes=held_bytes)


def a_block(
    name: str, activations: tuple[Activation, ...], *events: BackwardEvent, workspace_bytes: int = 0
) -> Block:
    return Block(
        name=name,
        class_name="Layer",
        activations=activations,
        backward=events,
        workspace_bytes=workspace_bytes,
    )


def a_step(*blocks: Block, turn_bytes: int = 0, ends_bytes: int = 0) -> Workload:
    """103 bytes are there from the first block's forward to its backward."""
    outside = Outside(
        resident_bytes=100,
        constant_bytes=3,
        turn_bytes=turn_bytes,
        turn_ns=1,
        ends_bytes=ends_bytes,
        ends_ns=1,
    )
    return Workload(model="Model", blocks=blocks, outside=outside)


def a_plan(workload: Workload, decisions: Mapping[str, Decision], **changes: Any) -> Plan:
    """A plan with limits that nothing reaches."""
    fields: dict[str, Any] = {
        "name": "mine",
        "model": workload.model,
        "fingerprint": workload.fingerprint,
        "decisions": decisions,
        "host_bytes": WIDE,
        "disk_bytes": WIDE,
        "max_out_bytes_in_flight": WIDE,
        "max_in_bytes_in_flight": WIDE,
    }
    return Plan(**{**fields, **changes})


def sound(workload: Workload, decisions: Mapping[str, Decision], **changes: Any) -> CheckReport:
    report = check_plan(a_plan(workload, decisions, **changes), workload, MACHINE)
    assert report.faults == ()
    assert report.is_sound
    return report


def the_fault(plan: Plan, workload: Workload, machine: Machine = MACHINE, **limits: int) -> str:
    report = check_plan(plan, workload, machine, **limits)
    assert not report.is_sound
    (fault,) = report.faults
    return fault


def peak(report: CheckReport) -> tuple[int, str]:
    return report.peak_bytes, report.peak_moment


# One block. y is made from h by way of t, which autograd does not save.


def one_block(*held_bytes: int) -> Block:
    held_y, held_h, held_x = held_bytes
    return a_block(
        "b",
        (
            made("x", 10),
            made("h", 20, "x"),
            made("t", 5, "h", is_saved=False),
            made("y", 8, "t"),
        ),
        event(held_y, "y"),
        event(held_h, "h"),
        event(held_x, "x"),
        workspace_bytes=2,
    )


ALL_KEPT = {"x": KEEP, "h": KEEP, "y": KEEP}


def test_kept_activations_and_one_that_forward_still_reads_are_held() -> None:
    # Making y: 103, x + h + y = 38, t = 5 which this call reads, 2 of workspace.
    report = sound(a_step(one_block(4, 4, 4)), ALL_KEPT)
    assert peak(report) == (103 + 38 + 5 + 2, "forward of b, making y")
    assert report.holders == (
        ("resident", 100),
        ("kept", 38),
        ("forward only", 5),
        ("constant", 3),
        ("gradients and workspace", 2),
    )
    assert (report.host_bytes, report.disk_bytes) == (0, 0)
    assert (report.max_out_bytes_in_flight, report.max_in_bytes_in_flight) == (0, 0)


def test_a_block_that_makes_nothing_has_its_workspace() -> None:
    empty = replace(a_block("a", (), workspace_bytes=70), backward=(event(0),))
    report = sound(a_step(empty, one_block(4, 4, 4)), ALL_KEPT)
    assert peak(report) == (103 + 70, "forward of a")


def test_the_turn_holds_what_is_kept_and_its_own() -> None:
    # t is gone, as nothing reads it after y; workspace belongs to ops.
    report = sound(a_step(one_block(4, 4, 4), turn_bytes=50), ALL_KEPT)
    assert peak(report) == (103 + 38 + 50, "the turn")
    assert ("turn (logits and loss)", 50) in report.holders


def test_the_ends_hold_no_constants() -> None:
    report = sound(a_step(one_block(4, 4, 4), ends_bytes=60), ALL_KEPT)
    assert peak(report) == (100 + 60, "the ends of the step")
    assert report.holders == (("resident", 100), ("ends (such as the optimizer's)", 60))


def test_kept_activations_stay_until_the_end_of_their_blocks_backward() -> None:
    # y and h have no use left at the last event.
    report = sound(a_step(one_block(4, 4, 30)), ALL_KEPT)
    assert peak(report) == (103 + 38 + 30, "backward of b, event 2")
    assert ("gradients and workspace", 30) in report.holders


def test_kept_activations_of_later_blocks_are_gone() -> None:
    first = a_block("a", (made("a.x", 10),), event(50, "a.x"))
    second = a_block("b", (made("b.x", 40),), event(0, "b.x"))
    # The forward of b holds 103 + 50, the backward of a 103 + 10 + 50.
    report = sound(a_step(first, second), {"a.x": KEEP, "b.x": KEEP})
    assert peak(report) == (103 + 10 + 50, "backward of a, event 0")


def test_an_input_and_what_nobody_reads_live_until_the_blocks_end() -> None:
    activations = (
        made("x", 10, is_saved=False),
        made("h", 20, "x", is_saved=False),
        made("lost", 6, "x", is_saved=False),
        made("y", 8, "h"),
        made("z", 1, "y"),
    )
    # Making y: x 10 + h 20 + lost 6 + y 8. Making z: h is gone, x and lost are there.
    first = a_block("a", activations, event(0, "y", "z"))
    report = sound(a_step(first), {"y": KEEP, "z": KEEP})
    assert peak(report) == (103 + 44, "forward of a, making y")
    wider = (*activations[:4], made("z", 30, "y"))
    report = sound(a_step(replace(first, activations=wider)), {"y": KEEP, "z": KEEP})
    assert peak(report) == (103 + 16 + 38, "forward of a, making z")
    # The next block starts without them, with y + z = 9.
    second = a_block("b", (made("b.x", 36),), event(0, "b.x"))
    report = sound(a_step(first, second), {"y": KEEP, "z": KEEP, "b.x": KEEP})
    assert peak(report) == (103 + 9 + 36, "forward of b, making b.x")


def test_a_replay_runs_call_by_call_and_drops_its_inputs_at_their_last_use() -> None:
    decisions = {"x": KEEP, "h": KEEP, "y": RECOMPUTE}
    report = sound(a_step(one_block(40, 4, 4)), decisions)
    # t is made: 103 + 30 + 5 + 40. Then y, before t is given up. The event has y alone.
    assert peak(report) == (103 + 30 + (5 + 8) + 40, "backward of b, event 0, making y again")
    assert ("recomputed", 13) in report.holders
    # Event 1 has none of it: 103 + 30 + 57 is more than 103 + 30 + 13 + 40.
    report = sound(a_step(one_block(40, 57, 4)), decisions)
    assert peak(report) == (103 + 30 + 57, "backward of b, event 1")


def test_an_activation_without_a_decision_is_replayed() -> None:
    workload = a_step(one_block(40, 4, 4))
    explicit = sound(workload, {"x": KEEP, "h": KEEP, "t": RECOMPUTE, "y": RECOMPUTE})
    assert sound(workload, {"x": KEEP, "h": KEEP}) == explicit


def test_a_replay_starts_from_what_an_earlier_one_left_there() -> None:
    decisions = {"x": KEEP}
    # Event 0: h 20, then t 5, then y 8. h stays, as event 1 asks for it; t goes.
    # Making t holds 25 of it, making y 33.
    report = sound(a_step(one_block(40, 4, 4)), decisions)
    assert peak(report) == (103 + 10 + 33 + 40, "backward of b, event 0, making y again")
    # Event 1 makes nothing again: it has x and h. Event 2 has x.
    report = sound(a_step(one_block(0, 90, 4)), decisions)
    assert peak(report) == (103 + 10 + 20 + 90, "backward of b, event 1")
    report = sound(a_step(one_block(0, 0, 90)), decisions)
    assert peak(report) == (103 + 10 + 90, "backward of b, event 2")


def test_a_replayed_activation_waits_for_a_use_much_later() -> None:
    block = a_block(
        "b",
        (made("x", 10), made("h", 20, "x"), made("y", 8, "h")),
        event(0, "y"),
        event(70, "x"),
        event(0, "h", "y"),
    )
    # y and h made for event 0 are still there in event 1.
    report = sound(a_step(block), {"x": KEEP})
    assert peak(report) == (103 + 10 + 28 + 70, "backward of b, event 1")


def test_an_event_that_needs_what_it_replays_from_has_it_for_its_compute() -> None:
    block = a_block("b", (made("x", 10), made("h", 20, "x"), made("y", 8, "h")), event(9, "h", "y"))
    # h is the first use, y is made from it, and both are there in the event: 28.
    report = sound(a_step(block), {"x": KEEP})
    assert peak(report) == (103 + 10 + 28 + 9, "backward of b, event 0, making y again")
    assert report.holders[1] == ("recomputed", 28)


def attention_block(held_bytes: int) -> Block:
    return a_block(
        "b",
        (
            made("x", 10),
            made("out", 20, "x", group="attention"),
            made("lse", 4, "x", group="attention"),
            made("y", 8, "out", is_saved=False),
        ),
        event(0, "x"),
        event(held_bytes, "lse"),
        event(held_bytes + 3, "out"),
    )


def test_the_outputs_of_one_call_are_made_at_one_moment() -> None:
    # x 10 + out 20 + lse 4, and never y with them before: y comes next, with 8 more.
    report = sound(a_step(attention_block(0)), {"x": KEEP, "out": KEEP, "lse": KEEP})
    assert peak(report) == (103 + 34 + 8, "forward of b, making y")


def test_a_replayed_call_makes_all_its_outputs_and_keeps_the_needed_ones() -> None:
    # For lse both are made: 24, although out is kept beside them, and the gradients that are alive
    # before event 1 are held in event 0 as well. Event 1 then has lse only.
    before = (event(30, "x"), event(30, "lse"), event(33, "out"))
    block = replace(attention_block(30), backward=before)
    report = sound(a_step(block), {"x": KEEP, "out": KEEP, "lse": RECOMPUTE})
    assert peak(report) == (103 + 30 + 24 + 30, "backward of b, event 1, making out again")
    # Without out kept, it stays from event 1 on until event 2 has used it: 103 + 10 + 20 + 33.
    report = sound(a_step(block), {"x": KEEP, "out": RECOMPUTE, "lse": RECOMPUTE})
    assert peak(report) == (103 + 10 + 24 + 30, "backward of b, event 1, making out again")
    more = replace(attention_block(30), backward=(event(0, "lse"), event(30, "x", "out")))
    report = sound(a_step(more), {"x": KEEP, "out": RECOMPUTE, "lse": RECOMPUTE})
    assert peak(report) == (103 + 10 + 20 + 30, "backward of b, event 1")


def test_a_replay_holds_no_more_gradients_than_are_alive_before_its_event() -> None:
    # Event 0 holds 5, so no more are alive when event 1 replays: 103 + 10 + 24 + 5, and then
    # event 1 itself holds lse 4 and its own 30: 103 + 10 + 20 + 4 + 30.
    before = (event(5, "x"), event(30, "lse"), event(0, "out"))
    block = replace(attention_block(30), backward=before)
    report = sound(a_step(block), {"x": KEEP, "out": RECOMPUTE, "lse": RECOMPUTE})
    assert peak(report) == (103 + 10 + 20 + 4 + 30, "backward of b, event 1")


def with_gradients(block: Block, *gradient_bytes: int) -> Block:
    events = zip(block.backward, gradient_bytes, strict=True)
    return replace(block, backward=tuple(replace(e, gradient_bytes=size) for e, size in events))


def step_with_gradients(*blocks: Block, turn: int = 0, ends: int = 0, **others: int) -> Workload:
    workload = a_step(*blocks, **others)
    assert workload.outside is not None
    outside = replace(workload.outside, turn_gradient_bytes=turn, ends_gradient_bytes=ends)
    return replace(workload, outside=outside)


def test_gradients_that_backward_makes_are_not_there_in_forward_and_the_turn() -> None:
    block = with_gradients(one_block(4, 4, 4), 500, 500, 500)
    # In the last event those of the first two are there: 103 + 38 + 1000 + 4.
    report = sound(step_with_gradients(block, turn_bytes=1900), ALL_KEPT)
    assert peak(report) == (103 + 38 + 1900, "the turn")
    # After it, all.
    report = sound(step_with_gradients(block), ALL_KEPT)
    assert peak(report) == (100 + 1500, "the ends of the step")
    assert report.holders == (("gradients that backward made", 1500), ("resident", 100))


def test_what_events_and_the_turn_leave_is_held_until_the_end() -> None:
    first = with_gradients(a_block("a", (made("a.x", 10),), event(50, "a.x")), 7)
    second = with_gradients(a_block("b", (made("b.x", 40),), event(48, "b.x")), 30)
    decisions = {"a.x": KEEP, "b.x": KEEP}
    # In its own event a gradient is in held_bytes: b's event holds 103 + 50 + 48 + 5.
    report = sound(step_with_gradients(first, second, turn=5), decisions)
    assert peak(report) == (103 + 50 + 48 + 5, "backward of b, event 0")
    larger = with_gradients(second, 60)
    report = sound(step_with_gradients(first, larger, turn=5), decisions)
    assert peak(report) == (103 + 10 + 50 + 65, "backward of a, event 0")
    assert ("gradients that backward made", 65) in report.holders
    report = sound(step_with_gradients(first, larger, turn=5, ends=90, ends_bytes=1), decisions)
    assert peak(report) == (100 + 67 + 5 + 90 + 1, "the ends of the step")


def test_a_replay_holds_the_gradients_that_its_block_has_left() -> None:
    before = (event(5, "x"), event(30, "lse"), event(0, "out"))
    block = with_gradients(replace(attention_block(30), backward=before), 4, 9, 0)
    # Event 0 holds 5, of which 4 stay; event 1 then holds lse 4, out 20 and 4 + 30.
    report = sound(step_with_gradients(block), {"x": KEEP, "out": RECOMPUTE, "lse": RECOMPUTE})
    assert peak(report) == (103 + 10 + 20 + 4 + 4 + 30, "backward of b, event 1")
    # It replays with what both events hold, the first one's gradients in event 0 being its own:
    # the smaller of 50 and 4 + 48, beside x, out and both outputs of the call.
    before = (event(50, "x"), event(48, "lse"), event(0, "out"))
    block = with_gradients(replace(attention_block(30), backward=before), 4, 0, 0)
    wide = tuple(replace(a, num_bytes=40) if a.name == "lse" else a for a in block.activations)
    workload = step_with_gradients(replace(block, activations=wide))
    report = sound(workload, {"x": KEEP, "out": KEEP, "lse": RECOMPUTE})
    assert peak(report) == (103 + 30 + 60 + 50, "backward of b, event 1, making out again")


def test_what_forward_still_reads_is_not_gone_when_it_is_let_go() -> None:
    # x 10 and out 20 are evicted, and let go before y is made, which reads out: both are there.
    block = attention_block(0)
    anchors = {"x": "y", "out": "y"}
    decisions = {"x": HOST, "out": HOST, "lse": KEEP}
    report = sound(a_step(block), decisions, release_at=anchors)
    assert peak(report) == (103 + 10 + 20 + 4 + 8, "forward of b, making y")


# Blocks that run as one.


def fused(block: Block) -> Block:
    return replace(block, is_fused=True)


@pytest.mark.parametrize("anchor", "xhty")
def test_before_a_fused_block_goes_what_any_of_its_activations_stands_for(anchor: str) -> None:
    # Making y: 103, x + h + y = 38, t = 5, 2 of workspace; of p 40 nothing.
    first = a_block("a", (made("p", 40),), event(0, "p"))
    workload = a_step(first, fused(one_block(0, 0, 0)))
    report = sound(workload, ALL_KEPT | {"p": HOST}, release_at={"p": anchor})
    assert peak(report) == (103 + 38 + 5 + 2, "forward of b, making y")
    # Without a moment it goes at the turn.
    report = sound(workload, ALL_KEPT | {"p": HOST})
    assert peak(report) == (103 + 40 + 38 + 5 + 2, "forward of b, making y")


def test_nothing_leaves_within_a_fused_block() -> None:
    # Else h could go before y is made, and the most would be making t.
    decisions = ALL_KEPT | {"h": HOST}
    report = sound(a_step(one_block(0, 0, 0)), decisions, release_at={"h": "y"})
    # Making t holds 103, x + h, t and 2, making y no h; its event all that is saved.
    assert peak(report) == (103 + 38, "backward of b, event 1")
    # Fused, all of it is there: x + h + y = 38, t = 5.
    workload = a_step(fused(one_block(0, 0, 0)))
    report = sound(workload, decisions, release_at={"h": TURN_START})
    assert peak(report) == (103 + 38 + 5 + 2, "forward of b, making y")
    assert report.holders[-1] == ("gradients and workspace", 2)
    plan = a_plan(workload, decisions, release_at={"h": "y"})
    assert the_fault(plan, workload) == (
        "release_at lets 'h' go before 'y' is made, but the block that makes both is fused: its "
        "forward runs as one, and nothing leaves within it. Name an activation of a later block."
    )


def test_what_a_fused_block_evicts_may_be_gone_before_the_next_moment() -> None:
    # x, which forward holds to the block's end, and h are not there when r is made.
    last = a_block("c", (made("q", 1), made("r", 100, "q")), event(0, "r"), event(0, "q"))
    workload = a_step(fused(one_block(0, 0, 0)), last)
    decisions = ALL_KEPT | {"x": HOST, "h": HOST, "q": KEEP, "r": KEEP}
    report = sound(workload, decisions, release_at={"x": "q", "h": "r"})
    assert peak(report) == (103 + 8 + 101, "forward of c, making r")
    assert report.max_out_bytes_in_flight == 30
    report = sound(workload, decisions, release_at={"x": "q"})
    assert peak(report) == (103 + 8 + 101 + 20, "forward of c, making r")


def test_a_call_of_a_fused_block_is_replayed_alone() -> None:
    # Making y again from h: t 5 + y 8, beside x + h; 90 held by the event, 60 before it.
    blocks = [replace(one_block(60, 90, 0), workspace_bytes=0)]
    blocks.append(fused(blocks[0]))
    for block in blocks:
        report = sound(a_step(block), {"x": KEEP, "h": KEEP, "y": RECOMPUTE})
        assert peak(report) == (103 + 30 + 90, "backward of b, event 1")
        assert report.faults == ()


# Two blocks, for evictions.


def two_blocks(*held_bytes: int) -> tuple[Block, Block]:
    """The first is a, with a.x 10 and a.h 20; the second b, with b.x 40 and b.h 80."""
    b_h, b_x, a_h, a_x = held_bytes
    return (
        a_block(
            "a", (made("a.x", 10), made("a.h", 20, "a.x")), event(a_h, "a.h"), event(a_x, "a.x")
        ),
        a_block(
            "b", (made("b.x", 40), made("b.h", 80, "b.x")), event(b_h, "b.h"), event(b_x, "b.x")
        ),
    )


EVICT_A = {"a.x": HOST, "a.h": HOST, "b.x": KEEP, "b.h": KEEP}


def test_an_evicted_activation_is_held_until_the_moment_before_which_it_is_let_go() -> None:
    workload = a_step(*two_blocks(0, 0, 0, 0))
    # Making b.h: both of a are let go before. 103 + 120.
    at = {"a.x": "b.x", "a.h": "b.h"}
    report = sound(workload, EVICT_A, release_at=at)
    assert peak(report) == (103 + 120, "forward of b, making b.h")
    assert report.holders == (("kept", 120), ("resident", 100), ("constant", 3))
    # a.x + a.h after a's forward; a.x is let go next.
    assert report.max_out_bytes_in_flight == 30
    assert report.host_bytes == 30
    # a.h is let go one moment later, which is the turn: 20 more.
    report = sound(workload, EVICT_A, release_at={"a.x": "b.x"})
    assert peak(report) == (103 + 120 + 20, "forward of b, making b.h")
    assert ("leaving", 20) in report.holders


def test_without_a_moment_an_eviction_is_let_go_at_the_turns_start() -> None:
    workload = a_step(*two_blocks(0, 0, 0, 0), turn_bytes=35)
    # Making b.h: 103 + 150. The turn: 103 + 120 + 35.
    assert peak(sound(workload, EVICT_A)) == (103 + 155, "the turn")
    at = {"a.x": TURN_START, "a.h": TURN_START}
    assert sound(workload, EVICT_A, release_at=at) == sound(workload, EVICT_A)
    # What is let go at its end is there in the turn: a.h.
    report = sound(workload, EVICT_A, release_at={"a.h": TURN_END})
    assert peak(report) == (103 + 120 + 20 + 35, "the turn")


def test_a_fetch_without_a_moment_is_there_from_its_first_need_to_its_last_use() -> None:
    # b's backward: 103 + 120 + 7; a's: a.h alone, then a.x alone.
    workload = a_step(*two_blocks(7, 7, 106, 0))
    report = sound(workload, EVICT_A, release_at={"a.x": "b.x", "a.h": "b.h"})
    assert peak(report) == (103 + 120 + 7, "backward of b, event 0")
    assert report.max_in_bytes_in_flight == 20
    # a's first event has a.h 20, its second a.x 10.
    workload = a_step(*two_blocks(0, 0, 150, 0))
    assert peak(sound(workload, EVICT_A)) == (103 + 20 + 150, "backward of a, event 0")
    workload = a_step(*two_blocks(0, 0, 0, 150))
    assert peak(sound(workload, EVICT_A)) == (103 + 10 + 150, "backward of a, event 1")


def test_a_fetch_is_held_from_its_moment_on() -> None:
    workload = a_step(*two_blocks(60, 50, 0, 0))
    # Event 0 of b: 103 + 120 + 60. Event 1: kept b.h stays, and a.h comes: 103 + 120 + 20 + 50.
    report = sound(workload, EVICT_A, fetch_at={"a.h": "b.x"})
    assert peak(report) == (103 + 120 + 20 + 50, "backward of b, event 1")
    assert ("fetched", 20) in report.holders
    # In flight are a.h alone, then a.x alone.
    assert report.max_in_bytes_in_flight == 20
    # TURN_END is the first event: both are there then.
    report = sound(workload, EVICT_A, fetch_at={"a.h": TURN_END, "a.x": "b.h"})
    assert peak(report) == (103 + 120 + 30 + 60, "backward of b, event 0")
    assert report.max_in_bytes_in_flight == 30


def test_a_fetch_at_the_moment_of_its_need_or_after_it_is_one_on_need() -> None:
    workload = a_step(*two_blocks(0, 0, 150, 149))
    plain = sound(workload, EVICT_A)
    assert peak(plain) == (103 + 20 + 150, "backward of a, event 0")
    assert sound(workload, EVICT_A, fetch_at={"a.h": "a.h", "a.x": "a.x"}) == plain
    # a.h is needed at event 0 of a, before that of a.x: it is fetched once, and not kept.
    assert sound(workload, EVICT_A, fetch_at={"a.h": "a.x"}) == plain


def test_a_moment_is_the_first_use_of_the_activation_that_stands_for_it() -> None:
    blocks = (
        a_block("a", (made("a.x", 10),), event(0, "a.x")),
        a_block("b", (made("b.x", 40),), event(5, "b.x"), event(0, "b.x")),
    )
    report = sound(a_step(*blocks), {"a.x": HOST, "b.x": KEEP}, fetch_at={"a.x": "b.x"})
    assert peak(report) == (103 + 40 + 10 + 5, "backward of b, event 0")


def test_an_evicted_activation_is_fetched_for_a_replay() -> None:
    workload = a_step(one_block(40, 4, 4))
    # y from t from h: h is fetched for the call that makes t, and stays for event 1.
    report = sound(workload, {"x": KEEP, "h": HOST, "y": RECOMPUTE})
    assert peak(report) == (103 + 10 + 20 + 13 + 40, "backward of b, event 0, making y again")
    assert report.max_in_bytes_in_flight == 20
    # An input that autograd does not save is needed too, for that replay only.
    block = a_block(
        "b",
        (made("x", 10, is_saved=False), made("y", 8, "x"), made("z", 1, "y")),
        event(0, "z"),
        event(0, "y"),
        event(90, "z"),
    )
    report = sound(a_step(block), {"x": HOST, "z": KEEP})
    # y is gone after event 1, x after event 1, where it was fetched.
    assert peak(report) == (103 + 1 + 90, "backward of b, event 2")
    assert report.max_in_bytes_in_flight == 10


def test_an_activation_used_by_two_events_stays_fetched_between_them() -> None:
    block = a_block(
        "b", (made("x", 10), made("y", 8, "x")), event(0, "y", "x"), event(90, "y"), event(0, "x")
    )
    report = sound(a_step(block), {"x": HOST, "y": HOST})
    assert peak(report) == (103 + 18 + 90, "backward of b, event 1")
    # Both are needed by event 0, and come at its start.
    assert report.max_in_bytes_in_flight == 18
    same = sound(a_step(block), {"x": HOST, "y": HOST}, fetch_at={"x": "y", "y": "y"})
    assert same == report


def test_what_an_event_fetches_on_need_is_there_while_it_replays() -> None:
    block = a_block(
        "b",
        (made("x", 10), made("h", 50, "x", is_saved=False), made("y", 8, "h"), made("z", 7, "x")),
        event(3, "y", "z"),
    )
    # Making y from h from x holds x 10, h 50, y 8; and z 7, which the event asks for after y.
    report = sound(a_step(block), {"x": KEEP, "z": HOST}, release_at={"z": TURN_START})
    assert peak(report) == (103 + 10 + 58 + 7 + 3, "backward of b, event 0, making y again")
    assert report.max_in_bytes_in_flight == 7


def test_what_is_stored_and_not_needed_costs_what_it_costs() -> None:
    workload = a_step(one_block(0, 0, 90))
    decisions = ALL_KEPT | {"t": KEEP}
    assert peak(sound(workload, decisions)) == (103 + 43 + 90, "backward of b, event 2")
    # Evicted, it is never fetched, also where the plan names a moment.
    decisions = ALL_KEPT | {"t": HOST}
    assert peak(sound(workload, decisions)) == (103 + 38 + 90, "backward of b, event 2")
    report = sound(workload, decisions, fetch_at={"t": "x"})
    assert peak(report) == (103 + 38 + 90, "backward of b, event 2")
    assert report.max_in_bytes_in_flight == 0


def test_a_saved_activation_without_a_use_is_never_replayed() -> None:
    block = a_block("b", (made("x", 10), made("y", 80, "x")), event(200, "x"))
    report = sound(a_step(block), {"x": KEEP, "y": RECOMPUTE})
    assert peak(report) == (103 + 10 + 200, "backward of b, event 0")


def test_the_disk_is_a_tier_of_its_own() -> None:
    workload = a_step(*two_blocks(0, 0, 0, 0))
    decisions = EVICT_A | {"a.h": DISK}
    report = sound(workload, decisions, release_at={"a.x": "b.x", "a.h": "b.h"})
    assert (report.host_bytes, report.disk_bytes) == (10, 20)
    assert peak(report) == (103 + 120, "forward of b, making b.h")
    assert report.max_out_bytes_in_flight == 30


def test_the_first_of_equal_peaks_is_named() -> None:
    workload = a_step(one_block(7, 7, 7))
    assert peak(sound(workload, ALL_KEPT)) == (103 + 45, "forward of b, making y")


# Faults.


def test_a_plan_for_another_workload_is_not_executed() -> None:
    workload = a_step(one_block(0, 0, 0))
    plan = a_plan(a_step(*two_blocks(0, 0, 0, 0)), EVICT_A)
    report = check_plan(plan, workload, MACHINE)
    (fault,) = report.faults
    assert fault.startswith("plan 'mine' is for Model (fingerprint ")
    assert peak(report) == (0, "")
    assert report.holders == ()


def test_a_workload_without_times_is_a_fault() -> None:
    timed = a_step(one_block(0, 0, 0))
    no_events = replace(timed, blocks=(replace(timed.blocks[0], backward=()),))
    for workload in (replace(timed, outside=None), no_events):
        plan = a_plan(timed, ALL_KEPT | {"y": HOST}, fetch_at={"y": "y"})
        assert the_fault(plan, workload) == (
            "the workload of Model is not timed; what a step holds is known only with the "
            "backward events of every block and what is outside of the blocks. Observe a timed "
            "step."
        )
        assert check_plan(plan, workload, MACHINE).host_bytes == 8


def test_a_needed_activation_that_may_not_be_replayed_is_a_fault() -> None:
    workload = a_step(one_block(0, 0, 0))
    assert the_fault(a_plan(workload, {"h": KEEP, "y": KEEP}), workload) == (
        "activation 'x' is neither kept nor evicted, and backward needs it (autograd saves it), "
        "but its op 'input' of kind 'input' may not be replayed. Decide keep, host or disk for it."
    )
    block = a_block("b", (made("x", 10, is_saved=False), made("y", 8, "x")), event(0, "y"))
    workload = a_step(block)
    assert "backward needs it ('y' is made again from it), but its op" in the_fault(
        a_plan(workload, {"y": RECOMPUTE}), workload
    )
    assert sound(workload, {"y": KEEP}).is_sound


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("h", "has the decision 'keep'"),
        ("t", "has no decision"),
        ("z", "is no activation of the workload"),
    ],
)
@pytest.mark.parametrize("mapping", ["release_at", "fetch_at"])
def test_a_moment_of_what_is_not_evicted_is_a_fault(mapping: str, name: str, given: str) -> None:
    workload = a_step(one_block(0, 0, 0))
    plan = a_plan(workload, ALL_KEPT, **{mapping: {name: TURN_END}})
    assert the_fault(plan, workload) == (
        f"{mapping} names '{name}', which {given}; only what is evicted, to host or disk, has a "
        "moment there. Drop the entry, or evict the activation."
    )


def test_a_release_at_an_unknown_moment_is_a_fault() -> None:
    workload = a_step(one_block(0, 0, 0))
    plan = a_plan(workload, ALL_KEPT | {"h": HOST}, release_at={"h": "z"})
    assert the_fault(plan, workload) == (
        "release_at lets 'h' go at 'z', which is no activation of the workload; a moment is an "
        "activation, '<turn start>' or '<turn end>'. Name one."
    )


@pytest.mark.parametrize("anchor", ["x", "out", "lse"])
def test_a_release_before_the_making_is_a_fault(anchor: str) -> None:
    # out and lse come from one call.
    workload = a_step(attention_block(0))
    decisions = {"x": KEEP, "out": KEEP, "lse": HOST}
    plan = a_plan(workload, decisions, release_at={"lse": anchor})
    assert the_fault(plan, workload) == (
        f"release_at lets 'lse' go before '{anchor}' is made, when 'lse' itself is not made yet; "
        "it can leave only after that. Name an activation of a later op call."
    )
    assert sound(workload, decisions, release_at={"lse": "y"}).is_sound


@pytest.mark.parametrize(
    ("anchor", "given"),
    [
        ("z", "which is no activation"),
        ("t", "which no backward event uses"),
        (TURN_START, "which is before backward"),
    ],
)
def test_a_fetch_at_what_is_no_moment_of_backward_is_a_fault(anchor: str, given: str) -> None:
    workload = a_step(one_block(0, 0, 0))
    plan = a_plan(workload, ALL_KEPT | {"x": HOST}, fetch_at={"x": anchor})
    assert the_fault(plan, workload) == (
        f"fetch_at fetches 'x' at '{anchor}', {given}; a fetch starts at the first use of a saved "
        "activation in backward, or at '<turn end>'. Name one."
    )


def test_a_peak_over_the_budget_is_a_fault() -> None:
    workload = a_step(one_block(4, 4, 4))
    plan = a_plan(workload, ALL_KEPT, budget_bytes=147)
    fault = (
        "forward of b, making y holds 148 bytes (most in: resident 100, kept 38, forward only 5), "
        "and the budget is 147 bytes; no moment may hold more. Plan with this budget, or give a "
        "larger one."
    )
    assert the_fault(plan, workload) == fault
    # What is passed goes before the plan's own, and that before the device.
    assert check_plan(plan, workload, MACHINE, budget_bytes=148).is_sound
    assert the_fault(replace(plan, budget_bytes=148), workload, budget_bytes=147) == fault
    small = replace(MACHINE, device_bytes=147)
    assert check_plan(replace(plan, budget_bytes=148), workload, small).is_sound
    assert the_fault(replace(plan, budget_bytes=0), workload, small) == fault
    assert check_plan(replace(plan, budget_bytes=0), workload, MACHINE).is_sound


@pytest.mark.parametrize(("tier", "decision"), [("host", HOST), ("disk", DISK)])
def test_a_tier_that_is_too_small_is_a_fault(tier: str, decision: Decision) -> None:
    workload = a_step(one_block(0, 0, 0))
    plan = a_plan(workload, ALL_KEPT | {"h": decision, "y": decision})
    fault = (
        f"what is evicted to {tier} takes 28 bytes, and 27 may be used; all of it is there at "
        f"once. Evict less to {tier}, or give more {tier}_bytes."
    )
    assert the_fault(plan, workload, MACHINE, **{f"{tier}_bytes": 27}) == fault
    assert check_plan(plan, workload, MACHINE, host_bytes=28, disk_bytes=28).is_sound
    # Two ranks share the host.
    changes: dict[str, Any] = {"host_bytes": 55, "num_local_ranks": 2}
    machine = replace(MACHINE, **(changes if decision is HOST else {"disk_bytes": 27}))
    assert the_fault(plan, workload, machine) == fault


@pytest.mark.parametrize(("tier", "decision"), [("host", HOST), ("disk", DISK)])
def test_a_plan_that_says_less_of_a_tier_than_it_takes_is_a_fault(
    tier: str, decision: Decision
) -> None:
    workload = a_step(one_block(0, 0, 0))
    decisions = ALL_KEPT | {"h": decision, "y": decision}
    assert the_fault(a_plan(workload, decisions, **{f"{tier}_bytes": 27}), workload) == (
        f"the plan's {tier}_bytes is 27, but its {tier} decisions add up to 28 bytes; it must be "
        "at least that. Plan again."
    )
    assert sound(workload, decisions, **{f"{tier}_bytes": 28}).is_sound


@pytest.mark.parametrize(("direction", "reached"), [("out", 30), ("in", 20)])
def test_a_limit_in_flight_that_the_plan_does_not_keep_is_a_fault(
    direction: str, reached: int
) -> None:
    workload = a_step(*two_blocks(0, 0, 0, 0))
    field = f"max_{direction}_bytes_in_flight"
    plan = a_plan(workload, EVICT_A, **{field: reached - 1})
    assert the_fault(plan, workload) == (
        f"the plan's {field} is {reached - 1}, but its moments reach {reached} bytes; it must be "
        "at least that. Plan again."
    )
    assert sound(workload, EVICT_A, **{field: reached}).is_sound


def test_a_predicted_peak_that_is_not_the_peak_is_a_fault() -> None:
    workload = a_step(one_block(4, 4, 4))
    for wrong in (147, 149):
        assert the_fault(a_plan(workload, ALL_KEPT, peak_bytes=wrong), workload) == (
            f"the plan's peak_bytes is {wrong}, but forward of b, making y holds 148 bytes, the "
            "most of the step; a predicted peak is exact. Plan again."
        )
    assert sound(workload, ALL_KEPT, peak_bytes=148).is_sound


def test_all_faults_are_reported_at_once() -> None:
    workload = a_step(one_block(4, 4, 4))
    plan = a_plan(
        workload,
        {"h": HOST, "y": KEEP},
        release_at={"h": "x"},
        fetch_at={"y": TURN_END},
        host_bytes=1,
        max_out_bytes_in_flight=0,
        budget_bytes=1,
    )
    report = check_plan(plan, workload, MACHINE, host_bytes=5)
    first_words = [" ".join(fault.split()[:3]) for fault in report.faults]
    assert first_words == [
        "activation 'x' is",
        "release_at lets 'h'",
        "fetch_at names 'y',",
        "what is evicted",
        "the plan's host_bytes",
        "forward of b,",
        "the plan's max_out_bytes_in_flight",
    ]


def test_a_step_without_blocks_has_its_turn() -> None:
    assert peak(sound(a_step(turn_bytes=5), {})) == (108, "the turn")


# Properties.


def everything_kept(workload: Workload) -> dict[str, Decision]:
    return {a.name: KEEP for block in workload.blocks for a in block.activations}


def anything(rng: random.Random, workload: Workload) -> Plan:
    """A plan of real names in wrong places."""
    names = [*everything_kept(workload), "unknown", TURN_START, TURN_END]
    known = names[:-3]
    return a_plan(
        workload,
        {name: rng.choice([*Decision]) for name in known if rng.random() < 0.8},
        release_at={name: rng.choice(names) for name in names if rng.random() < 0.5},
        fetch_at={name: rng.choice(names) for name in names if rng.random() < 0.5},
        **{
            field: rng.randrange(100)
            for field in ("host_bytes", "disk_bytes", "budget_bytes", "peak_bytes")
        },
    )


@given(planned_workloads(), generators())
def test_no_plan_makes_the_check_raise(made: tuple[Workload, Plan], rng: random.Random) -> None:
    workload, _ = made
    report = check_plan(anything(rng, workload), workload, MACHINE)
    assert report.peak_bytes == sum(held for _, held in report.holders)


@given(planned_workloads())
def test_a_plan_is_sound_at_its_peak_and_not_below(made: tuple[Workload, Plan]) -> None:
    workload, plan = made
    report = check_plan(plan, workload, MACHINE)
    assert report.faults == ()
    exact = replace(
        plan,
        peak_bytes=report.peak_bytes,
        max_out_bytes_in_flight=report.max_out_bytes_in_flight,
        max_in_bytes_in_flight=report.max_in_bytes_in_flight,
    )
    assert check_plan(exact, workload, MACHINE, budget_bytes=report.peak_bytes).is_sound
    assert not check_plan(exact, workload, MACHINE, budget_bytes=report.peak_bytes - 1).is_sound


@given(planned_workloads())
def test_resident_bytes_are_held_at_every_moment(made: tuple[Workload, Plan]) -> None:
    workload, plan = made
    assert workload.outside is not None
    resident_bytes = workload.outside.resident_bytes
    more = replace(workload, outside=replace(workload.outside, resident_bytes=resident_bytes + 9))
    before, after = check_plan(plan, workload, MACHINE), check_plan(plan, more, MACHINE)
    assert (after.peak_bytes, after.peak_moment) == (before.peak_bytes + 9, before.peak_moment)


@given(planned_workloads())
def test_later_fetches_and_earlier_releases_never_hold_more(made: tuple[Workload, Plan]) -> None:
    workload, plan = made
    peak_bytes = check_plan(plan, workload, MACHINE).peak_bytes
    on_need = check_plan(replace(plan, fetch_at={}), workload, MACHINE)
    assert on_need.peak_bytes <= peak_bytes
    at_the_end = replace(plan, release_at=dict.fromkeys(plan.release_at, TURN_END))
    assert check_plan(at_the_end, workload, MACHINE).peak_bytes >= peak_bytes


@given(planned_workloads())
def test_keeping_what_nobody_needs_never_holds_less(made: tuple[Workload, Plan]) -> None:
    workload, plan = made
    needless = [
        activation.name
        for block in workload.blocks
        for activation in block.activations
        if not activation.is_saved
        and plan.decision(activation.name) is None
        # Nothing that is made again reads it.
        and all(
            other.name in plan.decisions and plan.decision(other.name) is not RECOMPUTE
            for other in block.activations
            if activation.name in other.inputs
        )
    ]
    more = replace(plan, decisions={**plan.decisions, **dict.fromkeys(needless, KEEP)})
    peak_bytes = check_plan(plan, workload, MACHINE).peak_bytes
    assert check_plan(more, workload, MACHINE).peak_bytes >= peak_bytes


@given(planned_workloads())
def test_the_peak_of_keeping_everything_is_a_sum(made: tuple[Workload, Plan]) -> None:
    workload, _ = made
    outside = workload.outside
    assert outside is not None
    through = outside.resident_bytes + outside.constant_bytes
    held = [outside.resident_bytes + workload.gradient_bytes + outside.ends_bytes]
    kept = 0
    blocks_kept: list[int] = []
    for block in workload.blocks:
        kept += sum(a.num_bytes for a in block.activations)
        blocks_kept.append(kept)
        held.append(through + kept + block.workspace_bytes)
    held.append(through + kept + outside.turn_bytes)
    gradients = outside.turn_gradient_bytes
    for block, kept in reversed([*zip(workload.blocks, blocks_kept, strict=True)]):
        for event in block.backward:
            held.append(through + kept + gradients + event.held_bytes)
            gradients += event.gradient_bytes
    plan = a_plan(workload, everything_kept(workload))
    assert check_plan(plan, workload, MACHINE).peak_bytes == max(held)
