"""The pure strategies: one decision for everything, or no plan."""

from dataclasses import replace

import pytest

from ebbtide.machine import Machine
from ebbtide.plan import Decision
from ebbtide.planner.baselines import Baseline, plan_baseline
from ebbtide.planner.candidate import Found
from ebbtide.planner.caps import Caps
from ebbtide.planner.chain import compile_chain
from ebbtide.planner.space import Space
from tests.corpus import CORPUS

WORKLOAD = CORPUS["llama-8b-x8/8k"]
NAMES = [a.name.removeprefix("model.layers.0") for a in WORKLOAD.blocks[0].activations]
MACHINE = Machine(
    name="fast",
    device_bytes=2**40,
    host_bytes=2**40,
    out_bytes_per_s=50 * 10**9,
    in_bytes_per_s=50 * 10**9,
    both_bytes_per_s=90 * 10**9,
)
WIDE = Caps(device_bytes=2**40, host_bytes=2**40, disk_bytes=0)


def space() -> Space:
    return Space(compile_chain(WORKLOAD), num_slots=4)


def found(baseline: Baseline, caps: Caps = WIDE, machine: Machine = MACHINE) -> Found:
    plan = plan_baseline(space(), baseline, machine, caps)
    assert plan is not None
    assert len(plan.treatments) == 8
    # All blocks are alike.
    assert len({id(treatment.program) for treatment in plan.treatments}) == 1
    assert all(treatment.tiers == plan.treatments[0].tiers for treatment in plan.treatments)
    return plan


def stored(plan: Found) -> set[str]:
    return {NAMES[i] for i in plan.treatments[0].program.made_at}


def evicted(plan: Found) -> set[str]:
    tiers = plan.treatments[0].tiers
    assert set(tiers.values()) <= {Decision.HOST}
    return {NAMES[i] for i in tiers}


SAVED = {
    a.name.removeprefix("model.layers.0") for a in WORKLOAD.blocks[0].activations if a.is_saved
}


def test_keep_keeps_all_that_autograd_saves() -> None:
    plan = found(Baseline.KEEP)
    assert (stored(plan), evicted(plan)) == (SAVED, set())
    assert plan.layout.step_ns == compile_chain(WORKLOAD).base_ns


def test_recompute_keeps_the_inputs_alone() -> None:
    plan = found(Baseline.RECOMPUTE)
    assert (stored(plan), evicted(plan)) == ({".input"}, set())
    chain = compile_chain(WORKLOAD)
    # All is made again but what nothing saves: o_proj, which the residual needs, is.
    block = WORKLOAD.blocks[0]
    unsaved = {".mlp.down_proj", ".output"}
    spent = {
        a.group: a.make_ns
        for a in block.activations
        if a.name.removeprefix("model.layers.0") not in unsaved
    }
    assert plan.layout.step_ns == chain.base_ns + 8 * sum(spent.values())


def test_offload_evicts_all_that_autograd_saves() -> None:
    plan = found(Baseline.OFFLOAD)
    assert stored(plan) == evicted(plan) == SAVED
    moved = sum(plan.treatments[0].program.num_bytes[i] for i in plan.treatments[0].tiers)
    assert 8 * moved == WORKLOAD.num_bytes_saved
    # The link alone takes longer than compute both ways.
    assert plan.layout.step_ns > compile_chain(WORKLOAD).base_ns


def test_offload_inputs_evicts_what_recompute_keeps() -> None:
    plan = found(Baseline.OFFLOAD_INPUTS)
    assert stored(plan) == evicted(plan) == {".input"}
    recompute = found(Baseline.RECOMPUTE)
    assert plan.layout.peak_bytes <= recompute.layout.peak_bytes
    assert plan.layout.step_ns >= recompute.layout.step_ns


@pytest.mark.parametrize("baseline", Baseline)
def test_a_strategy_fits_its_peak_or_is_refused(baseline: Baseline) -> None:
    wide = found(baseline)
    same = found(baseline, replace(WIDE, device_bytes=wide.layout.peak_bytes))
    assert same.layout == wide.layout
    held = WORKLOAD.outside
    assert held is not None
    caps = replace(WIDE, device_bytes=held.resident_bytes)
    assert plan_baseline(space(), baseline, MACHINE, caps) is None


@pytest.mark.parametrize("baseline", [Baseline.OFFLOAD, Baseline.OFFLOAD_INPUTS])
def test_a_strategy_that_overfills_the_host_is_refused(baseline: Baseline) -> None:
    sizes = found(baseline).treatments[0].program.num_bytes
    moved = 8 * sum(sizes[i] for i in found(baseline).treatments[0].tiers)
    assert found(baseline, replace(WIDE, host_bytes=moved))
    caps = replace(WIDE, host_bytes=moved - 1)
    assert plan_baseline(space(), baseline, MACHINE, caps) is None


def test_what_the_host_has_no_room_for_goes_to_the_disk_from_the_first_block_on() -> None:
    machine = replace(
        MACHINE, disk_bytes=2**40, disk_write_bytes_per_s=10**10, disk_read_bytes_per_s=10**10
    )
    caps = replace(WIDE, host_bytes=WORKLOAD.num_bytes_saved // 2, disk_bytes=2**40)
    plan = plan_baseline(space(), Baseline.OFFLOAD, machine, caps)
    assert plan is not None
    tiers = [tier for t in plan.treatments for _, tier in sorted(t.tiers.items())]
    num_on_disk = tiers.count(Decision.DISK)
    assert 0 < num_on_disk < len(tiers)
    assert tiers[:num_on_disk] == [Decision.DISK] * num_on_disk
