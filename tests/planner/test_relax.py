"""The relaxation: by hand where nothing moves, below every plan, and tighter with more slots."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from scipy.optimize import OptimizeResult

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.machine import Machine
from ebbtide.planner import relax as relax_module
from ebbtide.planner.caps import Caps
from ebbtide.planner.chain import compile_chain
from ebbtide.planner.menu import make_menu
from ebbtide.planner.relax import Relaxed, relax
from ebbtide.planner.result import UnsolvedError
from ebbtide.planner.solve import plan_for_budget
from ebbtide.workload import Outside, Workload
from tests.corpus import CORPUS

GB, MS = 10**9, 10**6
TIB = 2**40

MACHINE = Machine(
    name="fast",
    device_bytes=TIB,
    host_bytes=TIB,
    out_bytes_per_s=50 * GB,
    in_bytes_per_s=50 * GB,
    both_bytes_per_s=90 * GB,
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


def a_step(num_blocks: int) -> Workload:
    """A block stores 6 GB: y frees 3 GB for 3 ms, h 2 GB for 10 ms. 4 GB are not its own."""
    blocks = tuple(
        Block(
            name=f"b{index}",
            class_name="Layer",
            activations=(
                made(f"b{index}.x", GB, 0),
                made(f"b{index}.h", 2 * GB, 10 * MS, f"b{index}.x"),
                made(f"b{index}.y", 3 * GB, 3 * MS, f"b{index}.h"),
            ),
            backward=tuple(
                BackwardEvent(uses=(f"b{index}.{use}",), compute_ns=9 * MS, held_bytes=0)
                for use in "yhx"
            ),
        )
        for index in range(num_blocks)
    )
    outside = Outside(
        resident_bytes=3 * GB, turn_bytes=GB, turn_ns=5 * MS, ends_bytes=1, ends_ns=2 * MS
    )
    return Workload(model="Model", blocks=blocks, outside=outside)


def solve(
    workload: Workload,
    caps: Caps,
    machine: Machine = MACHINE,
    *,
    num_slots: int = 4,
    time_limit_s: float = 60.0,
) -> Relaxed | None:
    chain = compile_chain(workload)
    menus = tuple(make_menu(block) for block in chain.classes)
    return relax(chain, menus, machine, caps, num_slots=num_slots, time_limit_s=time_limit_s)


def solved(
    workload: Workload, caps: Caps, machine: Machine = MACHINE, *, slots: int = 4
) -> Relaxed:
    relaxed = solve(workload, caps, machine, num_slots=slots)
    assert relaxed is not None
    return relaxed


def caps_for(workload: Workload, share: float, *, host_bytes: int = TIB) -> Caps:
    outside = workload.outside
    assert outside is not None
    held = outside.resident_bytes + outside.constant_bytes + outside.turn_bytes
    device_bytes = held + int(share * workload.num_bytes_saved)
    return Caps(device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=0)


def never_replayed(workload: Workload, *, is_fused: bool) -> Workload:
    blocks = tuple(
        replace(
            block,
            is_fused=is_fused,
            activations=tuple(
                replace(a, kind=OpKind.OPAQUE, is_replayable=False) for a in block.activations
            ),
        )
        for block in workload.blocks
    )
    assert workload.outside is not None
    return replace(workload, blocks=blocks, outside=replace(workload.outside, turn_bytes=4 * GB))


def test_what_a_fused_block_makes_leaves_after_it() -> None:
    # All 6 GB must leave before the turn, which takes all that is free, 120 ms each way. By call x
    # leaves in the 10 ms of h, and some of it or of h in the 3 ms of y.
    caps = Caps(device_bytes=7 * GB, host_bytes=TIB, disk_bytes=0)
    by_call = solved(never_replayed(a_step(1), is_fused=False), caps)
    assert by_call.step_ns == pytest.approx((120 + 5 + 120 + 2) * MS, rel=1e-4)
    workload = never_replayed(a_step(1), is_fused=True)
    assert solved(workload, caps).step_ns == pytest.approx((13 + 120 + 5 + 120 + 2) * MS, rel=1e-4)
    # What the copies cost comes after the block, while they run.
    machine = replace(MACHINE, slowdown_ppm=500_000)
    relaxed = solved(workload, caps, machine)
    assert relaxed.step_ns == pytest.approx((13 + 120 + 5 + 120 + 2) * MS, rel=1e-4)


BASE_NS = 13 * MS + 27 * MS + 7 * MS


@pytest.mark.parametrize(
    ("room_gb", "more_ms"), [(6.0, 0), (4.5, 1.5), (3.0, 3), (2.5, 5.5), (1.0, 13)]
)
def test_without_a_tier_the_cheapest_is_made_again(room_gb: float, more_ms: float) -> None:
    workload = a_step(1)
    caps = Caps(device_bytes=4 * GB + int(room_gb * GB), host_bytes=0, disk_bytes=0)
    relaxed = solve(workload, caps)
    if room_gb < 2:
        # An event uses y or h, whichever plan there is: 3 GB.
        assert relaxed is None
        return
    assert relaxed is not None
    assert relaxed.step_ns == pytest.approx(BASE_NS + more_ms * MS, rel=1e-6)
    assert relaxed.stored_bytes == pytest.approx([room_gb * GB], rel=1e-6)
    assert relaxed.evicted_bytes == pytest.approx([0.0], abs=1.0)


def test_where_everything_fits_the_step_takes_its_base_time() -> None:
    for name in ("llama-8b-x8/8k", "gpt2/8k", "llama-8b/8k"):
        relaxed = solved(CORPUS[name], caps_for(CORPUS[name], 1.5), slots=2)
        base_ns = compile_chain(CORPUS[name]).base_ns
        assert relaxed.step_ns == pytest.approx(base_ns, rel=1e-6)
        assert float(relaxed.evicted_bytes.sum()) < 1.0


def test_what_has_time_to_leave_costs_nothing() -> None:
    # The first of two blocks may leave: 6 GB in 13 ms and back in 27 ms need 500 GB/s.
    workload = a_step(2)
    fast = replace(MACHINE, out_bytes_per_s=500 * GB, in_bytes_per_s=500 * GB)
    relaxed = solved(workload, caps_for(workload, 0.5), fast)
    assert relaxed.step_ns == pytest.approx(compile_chain(workload).base_ns, rel=1e-6)
    assert relaxed.evicted_bytes.sum() == pytest.approx(6 * GB, rel=1e-6)
    # At 100 GB/s 1.3 GB leave in b's forward, some more in a's own; the rest is made again.
    slower = replace(MACHINE, out_bytes_per_s=100 * GB, in_bytes_per_s=100 * GB)
    assert solved(workload, caps_for(workload, 0.5), slower).step_ns > relaxed.step_ns + MS


def test_shares_add_up_to_what_the_turn_and_the_host_hold() -> None:
    workload = CORPUS["llama-8b-x8/8k"]
    for host_bytes in (TIB, 10**9, 0):
        caps = caps_for(workload, 0.3, host_bytes=host_bytes)
        relaxed = solved(workload, caps)
        stored, evicted = relaxed.stored_bytes, relaxed.evicted_bytes
        assert len(stored) == len(evicted) == 8
        assert (evicted <= stored + 1e3).all()
        assert (evicted >= -1e3).all()
        assert stored.max() <= workload.blocks[0].num_bytes_saved + 1e3
        assert evicted.sum() <= host_bytes + 1e3
        kept = float((stored - evicted).sum())
        assert kept <= 0.3 * workload.num_bytes_saved + 1e3


def test_more_of_anything_never_takes_longer() -> None:
    workload = CORPUS["llama-8b-x8/8k"]
    steps = [solved(workload, caps_for(workload, share)).step_ns for share in (0.1, 0.2, 0.4, 0.8)]
    assert steps == sorted(steps, reverse=True)
    rates = [
        replace(MACHINE, out_bytes_per_s=rate * GB, in_bytes_per_s=rate * GB)
        for rate in (12, 25, 50, 180)
    ]
    steps = [solved(workload, caps_for(workload, 0.2), machine).step_ns for machine in rates]
    assert steps == sorted(steps, reverse=True)
    hosts = [caps_for(workload, 0.2, host_bytes=size) for size in (0, GB, 4 * GB, TIB)]
    steps = [solved(workload, caps).step_ns for caps in hosts]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(steps))


@pytest.mark.parametrize("name", ["llama-8b-x8/8k", "gpt2/8k"])
def test_more_slots_are_tighter(name: str) -> None:
    caps = caps_for(CORPUS[name], 0.25)
    steps = [solved(CORPUS[name], caps, slots=slots).step_ns for slots in (1, 2, 6)]
    assert steps[0] <= steps[1] * (1 + 1e-7)
    assert steps[0] <= steps[2] * (1 + 1e-7)


@pytest.mark.parametrize("share", [0.5, 0.25, 0.1])
@pytest.mark.parametrize("name", ["llama-8b-x8/8k", "gpt2/8k", "llama-8b/8k"])
def test_no_plan_is_below_it(name: str, share: float) -> None:
    workload = CORPUS[name]
    caps = caps_for(workload, share)
    relaxed = solved(workload, caps, slots=6 if len(workload.blocks) < 16 else 1)
    base_ns = compile_chain(workload).base_ns
    assert relaxed.step_ns >= base_ns * (1 - 1e-9)
    for planner in ("lp", "greedy"):
        plan = plan_for_budget(
            workload, MACHINE, budget_bytes=caps.device_bytes, planner=planner
        ).plan
        assert plan is not None
        assert relaxed.step_ns * (1 - 1e-6) <= plan.predicted_step_ns
        if planner == "lp":
            assert plan.bound_step_ns >= math.floor(relaxed.step_ns * (1 - 2e-6))


def test_there_is_none_where_what_is_used_at_once_does_not_fit() -> None:
    workload = CORPUS["llama-8b-x8/8k"]
    assert solve(workload, caps_for(workload, 0.0, host_bytes=0)) is None
    assert solve(workload, caps_for(workload, -0.5)) is None


def test_a_solver_out_of_time_says_so() -> None:
    workload = CORPUS["llama-8b/8k"]
    with pytest.raises(UnsolvedError, match=r"the solver did not finish in 0\.0 s"):
        solve(workload, caps_for(workload, 0.25), time_limit_s=0.0)


def test_the_disk_is_slower_than_the_host_and_better_than_nothing() -> None:
    workload = CORPUS["llama-8b-x8/8k"]
    machine = replace(
        MACHINE, disk_bytes=TIB, disk_write_bytes_per_s=8 * GB, disk_read_bytes_per_s=8 * GB
    )
    least = caps_for(workload, 0.1, host_bytes=0)
    nothing = solved(workload, least, machine).step_ns
    disk = solved(workload, replace(least, disk_bytes=TIB), machine).step_ns
    both = solved(workload, replace(least, host_bytes=2 * GB, disk_bytes=TIB), machine).step_ns
    host = solved(workload, replace(least, host_bytes=TIB, disk_bytes=TIB), machine).step_ns
    assert host < both < disk < nothing


def test_a_solver_that_gives_up_is_not_taken_for_infeasible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a number that the solver stumbles over would read as "no plan fits"."""

    def give_up(*_: object, **__: object) -> OptimizeResult:
        return OptimizeResult(status=4, message="numerical difficulties")

    monkeypatch.setattr(relax_module, "linprog", give_up)
    with pytest.raises(UnsolvedError, match="the solver gave up: numerical difficulties"):
        relax(
            compile_chain(CORPUS["gpt2/8k"]),
            tuple(make_menu(block) for block in compile_chain(CORPUS["gpt2/8k"]).classes),
            MACHINE,
            Caps(device_bytes=2**40, host_bytes=2**40, disk_bytes=0),
            num_slots=1,
            time_limit_s=5.0,
        )
