"""Greedy beside the pure strategies, its own bound, and what it searches."""

from dataclasses import replace

import numpy as np
import pytest

from ebbtide.planner.baselines import Baseline, plan_baseline
from ebbtide.planner.bound import closed_form_ns
from ebbtide.planner.caps import Caps
from ebbtide.planner.chain import compile_chain
from ebbtide.planner.greedy import plan_greedily, search
from ebbtide.planner.space import Space
from ebbtide.workload import Workload
from tests.corpus import CORPUS
from tests.corpus.machines import machine_with

NAMES = ("llama-8b-x8/8k", "llama-8b-x12/32k", "gpt2/8k", "llama-8b/8k")
LINKS_GB_PER_S = (10, 25, 50, 180)


def caps_for(workload: Workload, share: float) -> Caps:
    outside = workload.outside
    assert outside is not None
    held = outside.resident_bytes + outside.constant_bytes + outside.turn_bytes
    device_bytes = held + int(share * workload.num_bytes_saved)
    return Caps(device_bytes=device_bytes, host_bytes=2**50, disk_bytes=0)


def space_of(name: str, *, num_slots: int = 4) -> Space:
    return Space(compile_chain(CORPUS[name]), num_slots=num_slots)


@pytest.mark.parametrize("name", NAMES)
def test_no_pure_strategy_is_faster(name: str) -> None:
    space = space_of(name)
    for link_gb_per_s in LINKS_GB_PER_S:
        machine = machine_with(link_gb_per_s)
        for share in (0.6, 0.3, 0.15):
            caps = caps_for(CORPUS[name], share)
            found = plan_greedily(space, machine, caps)
            assert found is not None
            assert found.layout.peak_bytes <= caps.device_bytes
            for baseline in Baseline:
                pure = plan_baseline(space, baseline, machine, caps)
                if pure is not None:
                    assert found.layout.step_ns <= pure.layout.step_ns, (share, baseline)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_within_five_percent_of_the_closed_form(name: str) -> None:
    space = space_of(name, num_slots=16 if len(CORPUS[name].blocks) <= 16 else 3)
    for link_gb_per_s in (25, 50, 180):
        machine = machine_with(link_gb_per_s)
        for share in (0.5, 0.25, 0.12):
            caps = caps_for(CORPUS[name], share)
            found = plan_greedily(space, machine, caps)
            assert found is not None
            bound_ns = closed_form_ns(space.chain, tuple(space.menus), machine, caps)
            gap = found.layout.step_ns / bound_ns - 1
            assert 0 <= gap <= 0.05, (link_gb_per_s, share, gap)


def test_with_a_fast_link_what_fits_is_moved_and_nothing_is_made_again() -> None:
    space = space_of("llama-8b/32k")
    caps = caps_for(CORPUS["llama-8b/32k"], 0.4)
    found = plan_greedily(space, machine_with(500), caps)
    assert found is not None
    assert found.layout.step_ns <= space.chain.base_ns * 1.002
    assert any(treatment.tiers for treatment in found.treatments)


def test_without_a_tier_all_is_made_again_or_kept() -> None:
    space = space_of("llama-8b-x8/8k")
    caps = replace(caps_for(CORPUS["llama-8b-x8/8k"], 0.4), host_bytes=0)
    found = plan_greedily(space, machine_with(50), caps)
    assert found is not None
    assert not any(treatment.tiers for treatment in found.treatments)
    # As a knapsack: the last block's steps first, and each option one of the menu.
    steps = [len(t.program.option.replayed) for t in found.treatments]
    assert steps == sorted(steps)


def test_the_first_blocks_leave() -> None:
    space = space_of("llama-8b-x8/32k")
    found = plan_greedily(space, machine_with(50), caps_for(CORPUS["llama-8b-x8/32k"], 0.5))
    assert found is not None
    moved = [bool(treatment.tiers) for treatment in found.treatments]
    assert moved[0]
    # None leaves after one that stays.
    assert moved == sorted(moved, reverse=True)


def test_the_search_has_whole_candidates_and_their_times() -> None:
    space = space_of("gpt2/8k")
    machine, caps = machine_with(50), caps_for(CORPUS["gpt2/8k"], 0.3)
    candidates, seconds = search(space, machine, caps)
    assert candidates.shape == (len(seconds), 12)
    assert np.array_equal(space.estimate(candidates, machine, caps), seconds)
    states = {s for options in space.rows for row in options for s in row}
    assert set(candidates.flatten().tolist()) <= states
    # The pure strategies are among them.
    keep, offload = space.rows[0][0][0], space.rows[0][0][-1]
    recompute, inputs = space.rows[0][-1][0], space.rows[0][-1][-1]
    rows = {tuple(row) for row in candidates.tolist()}
    assert {(state,) * 12 for state in (keep, offload, recompute, inputs)} <= rows


def test_the_same_input_gives_the_same_plan() -> None:
    machine, caps = machine_with(50), caps_for(CORPUS["gpt2/8k"], 0.3)
    found = [plan_greedily(space_of("gpt2/8k"), machine, caps) for _ in range(2)]
    assert found[0] is not None
    assert found[0] == found[1]


def test_nothing_is_found_where_nothing_fits() -> None:
    space = space_of("llama-8b-x8/8k")
    caps = caps_for(CORPUS["llama-8b-x8/8k"], -0.2)
    assert plan_greedily(space, machine_with(50), caps) is None
