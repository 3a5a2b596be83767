"""Timelines worked out by hand from docs/planner.md, and peaks against the oracle."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from ebbtide.block import Block
from ebbtide.check import check_plan
from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.plan import TURN_END, Decision, Plan
from ebbtide.simulate import STORING, simulate
from ebbtide.timeline import Lane, Span, Timeline
from ebbtide.workload import Workload
from tests.planner.exhaustive import planned_workloads
from tests.two_blocks import MACHINE, WIDE, two_blocks

KEEP, HOST, DISK, RECOMPUTE = Decision.KEEP, Decision.HOST, Decision.DISK, Decision.RECOMPUTE


def a_plan(workload: Workload, decisions: Mapping[str, Decision], **changes: Any) -> Plan:
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


def run(
    decisions: Mapping[str, Decision],
    workload: Workload | None = None,
    machine: Machine = MACHINE,
    **changes: Any,
) -> Timeline:
    workload = workload or two_blocks()
    plan = a_plan(workload, decisions, **changes)
    assert check_plan(plan, workload, machine).faults == ()
    return simulate(plan, workload, machine)


def lane(timeline: Timeline, *lanes: Lane) -> list[tuple[str, int, int]]:
    return [(s.name, s.start_ns, s.end_ns) for s in timeline.spans if s.lane in lanes]


def end_ns(timeline: Timeline) -> int:
    return max(span.end_ns for span in timeline.spans)


KEPT = {"a.x": KEEP, "a.h": KEEP, "b.x": KEEP, "b.h": KEEP}
EVICT_A = {**KEPT, "a.x": HOST, "a.h": HOST}


def test_without_copies_there_is_compute_alone() -> None:
    timeline = run(KEPT)
    assert timeline.source == "simulated: plan mine on small"
    assert timeline.peak_bytes == 100 + 150
    assert timeline.spans == tuple(
        Span(lane=Lane.COMPUTE, name=name, start_ns=start, end_ns=start + 10)
        for name, start in (
            ("a.h", 0),
            ("b.h", 10),
            ("turn", 20),
            ("backward of b.h", 30),
            ("backward of b.x", 40),
            ("backward of a.h", 50),
            ("backward of a.x", 60),
        )
    )


def test_copies_that_have_time_overlap_with_compute() -> None:
    moments: dict[str, Any] = {
        "release_at": {"a.x": "b.x", "a.h": TURN_END},
        "fetch_at": {"a.x": TURN_END, "a.h": TURN_END},
    }
    timeline = run(EVICT_A, **moments)
    compute = lane(run(KEPT), Lane.COMPUTE)
    assert lane(timeline, Lane.COMPUTE) == compute
    assert lane(timeline, Lane.STALL) == []
    # In the order of making; back in reverse, each as soon as the one before it is done.
    assert [span for span in timeline.spans if span.lane is Lane.COPY_OUT] == [
        Span(lane=Lane.COPY_OUT, name="a.x", start_ns=0, end_ns=10, num_bytes=10),
        Span(lane=Lane.COPY_OUT, name="a.h", start_ns=10, end_ns=30, num_bytes=20),
    ]
    assert [span for span in timeline.spans if span.lane is Lane.COPY_IN] == [
        Span(lane=Lane.COPY_IN, name="a.h", start_ns=30, end_ns=50, num_bytes=20),
        Span(lane=Lane.COPY_IN, name="a.x", start_ns=50, end_ns=60, num_bytes=10),
    ]
    assert timeline.peak_bytes == 100 + 120 + 30


def test_compute_stalls_for_what_it_lets_go() -> None:
    timeline = run(EVICT_A, release_at={"a.x": "a.h", "a.h": "b.x"}, fetch_at={"a.h": "b.h"})
    # a.x leaves from 0 to 10 and is waited for; a.h is made at 20 and leaves until 40.
    assert lane(timeline, Lane.COPY_OUT) == [("a.x", 0, 10), ("a.h", 20, 40)]
    assert lane(timeline, Lane.COMPUTE, Lane.STALL)[:5] == [
        ("a.x", 0, 10),
        ("a.h", 10, 20),
        ("a.h", 20, 40),
        ("b.h", 40, 50),
        ("turn", 50, 60),
    ]
    assert lane(timeline, Lane.STALL)[:2] == [("a.x", 0, 10), ("a.h", 20, 40)]
    # a.h is back at 80, when it is needed; a.x is fetched on need, at 90.
    assert lane(timeline, Lane.COPY_IN) == [("a.h", 60, 80), ("a.x", 90, 100)]
    assert lane(timeline, Lane.STALL)[2:] == [("a.x", 90, 100)]
    assert end_ns(timeline) == 110


def test_without_moments_copies_are_waited_for_at_the_turn_and_on_need() -> None:
    timeline = run(EVICT_A)
    # a.h has left at 30, and the turn could start at 20.
    assert lane(timeline, Lane.STALL) == [("a.h", 20, 30), ("a.h", 60, 80), ("a.x", 90, 100)]
    assert lane(timeline, Lane.COPY_IN) == [("a.h", 60, 80), ("a.x", 90, 100)]
    assert end_ns(timeline) == 110
    # Making b.h holds all of it.
    assert timeline.peak_bytes == 100 + 150


def test_a_moment_after_the_need_is_the_need() -> None:
    late = run(EVICT_A, fetch_at={"a.h": "a.x", "a.x": "a.x"})
    assert late.spans == run(EVICT_A).spans


def test_fetches_of_one_moment_come_in_reverse_order_of_eviction() -> None:
    timeline = run(EVICT_A, fetch_at={"a.x": "b.x", "a.h": "b.x"})
    assert lane(timeline, Lane.COPY_IN) == [("a.h", 50, 70), ("a.x", 70, 80)]
    # An earlier moment goes before that order.
    timeline = run(EVICT_A, fetch_at={"a.x": "b.h", "a.h": "b.x"})
    assert lane(timeline, Lane.COPY_IN) == [("a.x", 40, 50), ("a.h", 50, 70)]


def test_a_fetch_waits_for_its_own_eviction() -> None:
    # b.h, 80 bytes, is made at 20, needed at 30 and away until 100.
    decisions = {**KEPT, "b.h": HOST}
    timeline = run(decisions, release_at={"b.h": TURN_END}, fetch_at={"b.h": TURN_END})
    assert lane(timeline, Lane.COPY_OUT, Lane.COPY_IN) == [("b.h", 20, 100), ("b.h", 100, 180)]
    assert lane(timeline, Lane.STALL) == [("b.h", 30, 100), ("b.h", 100, 180)]
    assert end_ns(timeline) == 220


def test_the_disk_is_a_lane_of_its_own() -> None:
    decisions = {**EVICT_A, "a.h": DISK}
    moments: dict[str, Any] = {
        "release_at": {"a.x": "b.x", "a.h": TURN_END},
        "fetch_at": {"a.x": TURN_END, "a.h": TURN_END},
    }
    timeline = run(decisions, **moments)
    assert lane(timeline, Lane.COPY_OUT) == [("a.x", 0, 10), ("a.h", 10, 30)]
    assert lane(timeline, Lane.DISK_WRITE) == [("a.h", 30, 70)]
    assert lane(timeline, Lane.DISK_READ) == [("a.h", 70, 80)]
    # a.x starts behind a.h, though the link is free while the disk reads.
    assert lane(timeline, Lane.COPY_IN) == [("a.h", 80, 100), ("a.x", 100, 110)]
    assert lane(timeline, Lane.STALL) == [("a.h", 30, 70), ("a.h", 90, 100)]
    assert end_ns(timeline) == 120


def test_a_replay_takes_the_time_of_its_calls() -> None:
    timeline = run({**KEPT, "a.h": RECOMPUTE})
    assert lane(timeline, Lane.COMPUTE)[-2:] == [
        ("backward of a.h", 50, 70),
        ("backward of a.x", 70, 80),
    ]
    assert end_ns(timeline) == 80
    # Making b.h: 100, a.x and b's 120.
    assert timeline.peak_bytes == 230


def test_a_replay_waits_for_what_it_reads() -> None:
    decisions = {**KEPT, "a.x": HOST, "a.h": RECOMPUTE}
    timeline = run(decisions, release_at={"a.x": "b.x"})
    assert lane(timeline, Lane.STALL) == [("a.x", 50, 60)]
    assert lane(timeline, Lane.COMPUTE)[-2] == ("backward of a.h", 60, 80)


def test_half_of_the_ends_comes_before_the_first_block() -> None:
    timeline = run(EVICT_A, two_blocks(ends_ns=7, ends_bytes=200), release_at={"a.x": "b.x"})
    compute = lane(timeline, Lane.COMPUTE)
    assert compute[0] == ("before the first block", 0, 3)
    assert compute[1] == ("a.h", 3, 13)
    assert compute[-1] == ("after the last block", 113, 117)
    assert lane(timeline, Lane.COPY_OUT)[0] == ("a.x", 3, 13)
    assert timeline.peak_bytes == 300


def test_the_rest_of_a_block_does_not_delay_its_copies() -> None:
    workload = two_blocks()
    first = replace(workload.blocks[0], rest_ns=5)
    timeline = run(
        EVICT_A, replace(workload, blocks=(first, workload.blocks[1])), release_at={"a.x": "b.x"}
    )
    assert lane(timeline, Lane.COMPUTE)[:3] == [
        ("a.h", 0, 10),
        ("forward", 10, 15),
        ("b.h", 15, 25),
    ]
    assert lane(timeline, Lane.COPY_OUT) == [("a.x", 0, 10), ("a.h", 10, 30)]


def with_fused(*indices: int, **changes: Any) -> Workload:
    workload = two_blocks()
    blocks = tuple(
        replace(block, is_fused=True, **changes) if index in indices else block
        for index, block in enumerate(workload.blocks)
    )
    return replace(workload, blocks=blocks)


def test_copies_of_a_fused_block_start_after_all_of_it() -> None:
    moments: dict[str, Any] = {"release_at": {"a.x": "b.h", "a.h": TURN_END}}
    timeline = run(EVICT_A, with_fused(0, rest_ns=5), **moments)
    assert lane(timeline, Lane.COPY_OUT) == [("a.x", 15, 25), ("a.h", 25, 45)]
    assert lane(timeline, Lane.COMPUTE, Lane.STALL)[:4] == [
        ("forward of a.x", 0, 15),
        ("a.x", 15, 25),
        ("b.h", 25, 35),
        ("turn", 35, 45),
    ]
    # What they cost comes right after the block, each when its copy has started.
    machine = replace(MACHINE, slowdown_ppm=100_000)
    timeline = run(EVICT_A, with_fused(0, rest_ns=5), machine, **moments)
    assert lane(timeline, Lane.COPY_OUT) == [("a.x", 15, 25), ("a.h", 25, 45)]
    assert lane(timeline, Lane.COMPUTE)[:4] == [
        ("forward of a.x", 0, 15),
        ("slower beside copies out", 15, 16),
        ("slower beside copies out", 16, 18),
        ("b.h", 25, 35),
    ]


def test_stacking_is_charged_where_backward_needs_what_was_stored_also_if_it_left() -> None:
    # A quarter of a ns for each byte.
    workload = with_fused(0, store_ns_per_gib=2**28)
    kept = run(KEPT, workload)
    assert lane(kept, Lane.COMPUTE)[-4:] == [
        (STORING, 50, 55),
        ("backward of a.h", 55, 65),
        (STORING, 65, 68),
        ("backward of a.x", 68, 78),
    ]
    spent = [(s.end_ns - s.start_ns) for s in run(EVICT_A, workload).spans if s.name == STORING]
    assert spent == [5, 3]
    again = run({**KEPT, "a.h": RECOMPUTE}, workload)
    assert lane(again, Lane.COMPUTE)[-3:] == [
        (STORING, 50, 53),
        ("backward of a.h", 53, 73),
        ("backward of a.x", 73, 83),
    ]


@pytest.mark.parametrize("anchor", ["b.x", "b.h"])
def test_a_fused_block_waits_at_its_start_for_what_it_lets_go(anchor: str) -> None:
    timeline = run(EVICT_A, with_fused(1), release_at={"a.h": anchor, "a.x": anchor})
    assert lane(timeline, Lane.COMPUTE, Lane.STALL)[:4] == [
        ("a.h", 0, 10),
        ("a.h", 10, 30),
        ("forward of b.x", 30, 40),
        ("turn", 40, 50),
    ]
    # b alone, and in backward a.h or a.x, each fetched for its need, beside b's.
    assert timeline.peak_bytes == 100 + 120


def test_a_block_that_is_left_alone_takes_its_rest() -> None:
    workload = two_blocks()
    for is_fused in (False, True):
        alone = Block(name="c", class_name="Layer", activations=(), rest_ns=7, is_fused=is_fused)
        timeline = run(KEPT, replace(workload, blocks=(*workload.blocks, alone)))
        assert lane(timeline, Lane.COMPUTE)[2] == ("forward", 20, 27)


def test_copies_are_rounded_up_to_whole_nanoseconds() -> None:
    machine = replace(MACHINE, out_bytes_per_s=3 * 10**9, in_bytes_per_s=7 * 10**9)
    timeline = run({**KEPT, "a.x": HOST}, machine=machine)
    assert lane(timeline, Lane.COPY_OUT) == [("a.x", 0, 4)]
    assert lane(timeline, Lane.COPY_IN) == [("a.x", 60, 62)]


def test_a_machine_without_a_link_moves_to_the_disk_alone() -> None:
    machine = replace(
        MACHINE, host_bytes=0, out_bytes_per_s=0, in_bytes_per_s=0, both_bytes_per_s=0
    )
    timeline = run({**KEPT, "a.h": DISK}, machine=machine, fetch_at={"a.h": TURN_END})
    assert lane(timeline, Lane.COPY_OUT, Lane.COPY_IN) == []
    assert lane(timeline, Lane.DISK_WRITE) == [("a.h", 10, 50)]
    # At the turn's start compute waits until 50; it ends at 60.
    assert lane(timeline, Lane.DISK_READ) == [("a.h", 60, 70)]
    assert lane(timeline, Lane.STALL) == [("a.h", 20, 50)]


def test_what_nobody_needs_comes_back_only_if_the_plan_says_so() -> None:
    workload = two_blocks()
    a, b = workload.blocks
    unsaved = replace(a.activations[0], is_saved=False)
    a = replace(a, activations=(unsaved, a.activations[1]), backward=a.backward[:1])
    workload = replace(workload, blocks=(a, b))
    timeline = run(EVICT_A, workload, release_at={"a.h": "b.h"})
    assert lane(timeline, Lane.COPY_IN) == [("a.h", 70, 90)]
    for fetch_at in ({"a.x": TURN_END}, {"a.x": "b.x"}, {}):
        plan = a_plan(workload, EVICT_A, fetch_at=fetch_at)
        peak_bytes = check_plan(plan, workload, MACHINE).peak_bytes
        assert simulate(plan, workload, MACHINE).peak_bytes == peak_bytes


def test_a_plan_for_another_workload_is_refused() -> None:
    workload = two_blocks()
    plan = replace(a_plan(workload, KEPT), fingerprint="0" * 16)
    with pytest.raises(PlanError, match=r"plan 'mine' is for Model \(fingerprint 0{16}\)"):
        simulate(plan, workload, MACHINE)


def test_a_workload_without_times_is_refused() -> None:
    workload = replace(two_blocks(), outside=None)
    with pytest.raises(PlanError, match="the workload of Model has no times"):
        simulate(a_plan(workload, KEPT), workload, MACHINE)


# Properties.


@settings(max_examples=80)
@given(planned_workloads())
def test_the_peak_is_the_oracles(planned: tuple[Workload, Plan]) -> None:
    workload, plan = planned
    report = check_plan(plan, workload, MACHINE)
    assert report.is_sound
    assert simulate(plan, workload, MACHINE).peak_bytes == report.peak_bytes


@settings(max_examples=40)
@given(planned_workloads())
def test_lanes_do_one_thing_at_a_time_and_nothing_is_lost(planned: tuple[Workload, Plan]) -> None:
    workload, plan = planned
    timeline = simulate(plan, workload, MACHINE)
    free = dict.fromkeys(Lane, 0)
    for span in timeline.spans:
        # Compute waits or computes.
        busy = Lane.COMPUTE if span.lane is Lane.STALL else span.lane
        assert span.start_ns >= free[busy]
        free[busy] = span.end_ns
    sizes = {a.name: a.num_bytes for block in workload.blocks for a in block.activations}
    evicted = {name for name, d in plan.decisions.items() if d in (HOST, DISK)}
    left = [span for span in timeline.spans if span.lane is Lane.COPY_OUT]
    assert sorted(span.name for span in left) == sorted(evicted)
    assert all(span.num_bytes == sizes[span.name] for span in left)
    came = [span.name for span in timeline.spans if span.lane is Lane.COPY_IN]
    assert len(came) == len(set(came))
    assert set(came) <= evicted
    # The directions never share the link, so that the cap for both at once cannot bind.
    last_out = max((span.end_ns for span in left), default=0)
    assert all(s.start_ns >= last_out for s in timeline.spans if s.lane is Lane.COPY_IN)


@settings(max_examples=40)
@given(planned_workloads())
def test_a_step_is_its_compute_and_its_stalls(planned: tuple[Workload, Plan]) -> None:
    workload, plan = planned
    timeline = simulate(plan, workload, MACHINE)
    busy = [s for s in timeline.spans if s.lane in (Lane.COMPUTE, Lane.STALL)]
    end = max((span.end_ns for span in busy), default=0)
    assert sum(span.end_ns - span.start_ns for span in busy) == end
    outside = workload.outside
    assert outside is not None
    base_ns = outside.turn_ns + outside.ends_ns
    base_ns += sum(block.forward_ns + block.backward_ns for block in workload.blocks)
    assert sum(s.end_ns - s.start_ns for s in busy if s.lane is Lane.COMPUTE) >= base_ns
