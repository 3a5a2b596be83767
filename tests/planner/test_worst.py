"""The worst of what several ranks measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.planner.worst import worst_machine, worst_workload
from ebbtide.workload import Outside, Workload

NAMES = ("rank 0", "rank 3")

MACHINE = Machine(
    name="a",
    device_bytes=1000,
    host_bytes=800,
    out_bytes_per_s=10,
    in_bytes_per_s=20,
    both_bytes_per_s=30,
    disk_bytes=500,
    disk_write_bytes_per_s=3,
    disk_read_bytes_per_s=4,
    slowdown_ppm=7,
    num_local_ranks=2,
    source="a probe",
)


def activation(name: str, num_bytes: int, make_ns: int) -> Activation:
    return Activation(
        name=f"b.{name}",
        op="aten.mm",
        kind=OpKind.MATMUL,
        num_bytes=num_bytes,
        inputs=(),
        is_saved=True,
        is_replayable=True,
        group=f"b.{name}",
        make_ns=make_ns,
    )


def workload(*, factor: int = 1, uses: tuple[str, ...] = ("b.x", "b.y")) -> Workload:
    events = tuple(
        BackwardEvent(uses=(name,), compute_ns=5 * factor, held_bytes=9, gradient_bytes=2)
        for name in uses
    )
    block = Block(
        name="b",
        class_name="Block",
        activations=(activation("x", 10, 3 * factor), activation("y", 20, 4)),
        backward=events,
        rest_ns=6 * factor,
        workspace_bytes=8,
    )
    outside = Outside(
        resident_bytes=100, turn_bytes=50, turn_ns=11 * factor, ends_bytes=1, ends_ns=2
    )
    return Workload(model="M", blocks=(block,), outside=outside)


def test_the_worst_machine_promises_what_each_has() -> None:
    other = replace(
        MACHINE, device_bytes=900, in_bytes_per_s=40, out_bytes_per_s=5, slowdown_ppm=9,
        disk_bytes=600, disk_read_bytes_per_s=1,
    )  # fmt: skip
    worst = worst_machine([MACHINE, other])
    assert worst == replace(
        MACHINE,
        device_bytes=900,
        out_bytes_per_s=5,
        slowdown_ppm=9,
        disk_read_bytes_per_s=1,
        source="the worst of 2 ranks; the first is a probe",
    )
    assert worst_machine([other, MACHINE]).device_bytes == 900


def test_what_a_rank_may_pin_is_the_least_share_of_any() -> None:
    """One node with 8 ranks and 800 bytes, and one with 2 ranks and 300."""
    crowded = replace(MACHINE, host_bytes=800, num_local_ranks=8)
    roomy = replace(MACHINE, host_bytes=300, num_local_ranks=2)
    assert worst_machine([crowded, roomy]).host_bytes_per_rank == 100
    assert worst_machine([roomy, crowded]).host_bytes_per_rank == 100


def test_a_rank_that_can_pin_nothing_leaves_all_without_a_host_tier() -> None:
    none = replace(MACHINE, host_bytes=0, out_bytes_per_s=0, in_bytes_per_s=0, both_bytes_per_s=0)
    assert worst_machine([MACHINE, none]).host_bytes == 0


def test_one_workload_is_its_own_worst() -> None:
    assert worst_workload([workload()], NAMES[:1]) == workload()


def test_the_longest_time_and_the_most_bytes_of_each_count() -> None:
    small, large = workload(factor=1), workload(factor=2)
    (block,) = large.blocks
    grown = replace(block.activations[1], num_bytes=30, is_replayable=False)
    event = replace(block.backward[0], held_bytes=4, compute_ns=1)
    block = replace(
        block,
        activations=(block.activations[0], grown),
        backward=(event, block.backward[1]),
        workspace_bytes=3,
    )
    assert large.outside is not None
    other = replace(large, blocks=(block,), outside=replace(large.outside, resident_bytes=70))
    worst = worst_workload([small, other], NAMES)
    (found,) = worst.blocks
    assert [a.num_bytes for a in found.activations] == [10, 30]
    assert [a.make_ns for a in found.activations] == [6, 4]
    assert [a.is_replayable for a in found.activations] == [True, False]
    assert [(e.compute_ns, e.held_bytes) for e in found.backward] == [(5, 9), (10, 9)]
    assert (found.rest_ns, found.workspace_bytes) == (12, 8)
    assert worst.outside is not None
    assert (worst.outside.resident_bytes, worst.outside.turn_ns) == (100, 22)


def test_of_other_orders_of_backward_the_slowest_counts() -> None:
    slow = workload(factor=3, uses=("b.y", "b.x"))
    worst = worst_workload([workload(), slow], NAMES)
    assert worst.blocks[0].backward == slow.blocks[0].backward


def test_other_blocks_are_refused_by_name() -> None:
    block = workload().blocks[0]
    other = replace(workload(), blocks=(replace(block, activations=block.activations[:1],
                                                backward=block.backward[:1]),))  # fmt: skip
    with pytest.raises(PlanError, match=r"rank 3 observed other blocks .* than rank 0: 1 activ"):
        worst_workload([workload(), other], NAMES)
    renamed = replace(workload(), blocks=(replace(block, class_name="Other"),))
    with pytest.raises(PlanError, match="of a pipeline, the ranks of one stage"):
        worst_workload([workload(), renamed], NAMES)
