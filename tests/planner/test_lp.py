"""The exact planner beside its relaxation and greedy."""

from dataclasses import replace
from itertools import pairwise, product

import pytest

from ebbtide.machine import Machine
from ebbtide.planner.candidate import Found
from ebbtide.planner.caps import Caps
from ebbtide.planner.chain import compile_chain
from ebbtide.planner.greedy import plan_greedily
from ebbtide.planner.lp import plan_by_lp
from ebbtide.planner.relax import Relaxed, relax
from ebbtide.planner.space import Space
from ebbtide.workload import Workload
from tests.corpus import CORPUS
from tests.corpus.machines import machine_with

SHORT = ("llama-8b-x8/8k", "gpt2/8k")


def caps_for(workload: Workload, share: float) -> Caps:
    outside = workload.outside
    assert outside is not None
    held = outside.resident_bytes + outside.constant_bytes + outside.turn_bytes
    device_bytes = held + int(share * workload.num_bytes_saved)
    return Caps(device_bytes=device_bytes, host_bytes=2**50, disk_bytes=0)


def space_of(name: str) -> Space:
    chain = compile_chain(CORPUS[name])
    return Space(chain, num_slots=16 if len(chain.class_of) <= 16 else 4)


def relaxed_of(space: Space, machine: Machine, caps: Caps) -> Relaxed:
    relaxed = relax(
        space.chain,
        tuple(space.menus),
        machine,
        caps,
        num_slots=6 if len(space.chain.class_of) <= 16 else 1,
        time_limit_s=60.0,
    )
    assert relaxed is not None
    return relaxed


def found_by_lp(space: Space, machine: Machine, caps: Caps) -> tuple[Found, Relaxed]:
    relaxed = relaxed_of(space, machine, caps)
    found = plan_by_lp(space, machine, caps, relaxed)
    assert found is not None
    assert found.layout.peak_bytes <= caps.device_bytes
    return found, relaxed


@pytest.mark.parametrize(("name", "link_gb_per_s"), list(product(SHORT, (25, 180))))
def test_it_is_near_its_relaxation_and_no_slower_than_greedy(name: str, link_gb_per_s: int) -> None:
    space, machine = space_of(name), machine_with(link_gb_per_s)
    for share in (0.5, 0.25, 0.12):
        caps = caps_for(CORPUS[name], share)
        found, relaxed = found_by_lp(space, machine, caps)
        gap = found.layout.step_ns / relaxed.step_ns - 1
        assert -1e-6 <= gap <= 0.005, (share, gap)
        greedy = plan_greedily(space, machine, caps)
        assert greedy is not None
        assert found.layout.step_ns <= greedy.layout.step_ns, share


@pytest.mark.parametrize("name", ["llama-8b/8k", "llama-70b/8k", "deepseek/8k"])
def test_long_chains_are_within_three_parts_in_a_thousand(name: str) -> None:
    space, machine = space_of(name), machine_with(50)
    found, relaxed = found_by_lp(space, machine, caps_for(CORPUS[name], 0.2))
    assert found.layout.step_ns / relaxed.step_ns - 1 <= 0.003


@pytest.mark.parametrize("name", SHORT)
def test_it_stores_and_moves_about_what_the_relaxation_does(name: str) -> None:
    space, machine = space_of(name), machine_with(50)
    caps = caps_for(CORPUS[name], 0.3)
    found, relaxed = found_by_lp(space, machine, caps)
    stored = [sum(t.program.num_bytes[i] for i in t.program.made_at) for t in found.treatments]
    moved = [sum(t.program.num_bytes[i] for i in t.tiers) for t in found.treatments]
    total = CORPUS[name].num_bytes_saved
    assert sum(stored) == pytest.approx(float(relaxed.stored_bytes.sum()), abs=0.1 * total)
    assert sum(moved) == pytest.approx(float(relaxed.evicted_bytes.sum()), abs=0.1 * total)
    # What is not moved is in the turn, and the turn has room for it.
    assert sum(stored) - sum(moved) <= 0.3 * total


def test_without_a_tier_it_is_a_knapsack() -> None:
    space, machine = space_of("llama-8b-x8/8k"), machine_with(50)
    caps = replace(caps_for(CORPUS["llama-8b-x8/8k"], 0.4), host_bytes=0)
    found, relaxed = found_by_lp(space, machine, caps)
    assert not any(treatment.tiers for treatment in found.treatments)
    # At most one step of one block more than the fractional one.
    steps = [b.replay_ns - a.replay_ns for m in space.menus for a, b in pairwise(m)]
    assert found.layout.step_ns <= relaxed.step_ns + max(steps)


def test_the_same_input_gives_the_same_plan() -> None:
    space, machine = space_of("gpt2/8k"), machine_with(50)
    caps = caps_for(CORPUS["gpt2/8k"], 0.3)
    first, _ = found_by_lp(space, machine, caps)
    second, _ = found_by_lp(space_of("gpt2/8k"), machine, caps)
    assert first == second


def test_nothing_is_found_where_whole_activations_do_not_fit() -> None:
    space, machine = space_of("llama-8b-x8/8k"), machine_with(50)
    caps = caps_for(CORPUS["llama-8b-x8/8k"], 0.3)
    relaxed = relaxed_of(space, machine, caps)
    small = caps_for(CORPUS["llama-8b-x8/8k"], -0.2)
    assert plan_by_lp(space, machine, small, relaxed) is None
