"""Equal blocks get equal decisions, and the best of those."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ebbtide.machine import Machine
from ebbtide.planner.candidate import Found, lay_out_states
from ebbtide.planner.caps import Caps
from ebbtide.planner.chain import compile_chain
from ebbtide.planner.greedy import plan_greedily
from ebbtide.planner.space import Space
from ebbtide.planner.uniform import MAX_TOGETHER, plan_uniformly
from ebbtide.workload import Workload
from tests.corpus import CORPUS

MACHINE = Machine(
    name="fast",
    device_bytes=2**50,
    host_bytes=2**50,
    out_bytes_per_s=50 * 10**9,
    in_bytes_per_s=50 * 10**9,
    both_bytes_per_s=90 * 10**9,
)


def caps_for(workload: Workload, share: float) -> Caps:
    outside = workload.outside
    assert outside is not None
    held = outside.resident_bytes + outside.constant_bytes + outside.turn_bytes
    device_bytes = held + int(share * workload.num_bytes_saved)
    return Caps(device_bytes=device_bytes, host_bytes=2**50, disk_bytes=0)


def treatments_by_class(space: Space, found: Found) -> list[set[tuple[object, ...]]]:
    by_class: list[set[tuple[object, ...]]] = [set() for _ in space.menus]
    for c, treatment in zip(space.chain.class_of, found.treatments, strict=True):
        stored = tuple(sorted(treatment.program.made_at))
        by_class[c].add((stored, tuple(sorted(treatment.tiers))))
    return by_class


@pytest.mark.parametrize("share", [0.6, 0.3, 0.1])
@pytest.mark.parametrize("name", ["llama-8b-x8/8k", "gpt2/8k", "deepseek/8k"])
def test_equal_blocks_get_equal_decisions(name: str, share: float) -> None:
    workload = CORPUS[name]
    space, caps = Space(compile_chain(workload), num_slots=4), caps_for(workload, share)
    found = plan_uniformly(space, MACHINE, caps)
    assert found is not None
    assert [len(kinds) for kinds in treatments_by_class(space, found)] == [1] * len(space.menus)
    assert found.layout.peak_bytes <= caps.device_bytes


@pytest.mark.parametrize("share", [0.7, 0.4, 0.2])
def test_no_other_uniform_plan_is_faster(share: float) -> None:
    workload = CORPUS["llama-8b-x8/8k"]
    space, caps = Space(compile_chain(workload), num_slots=16), caps_for(workload, share)
    found = plan_uniformly(space, MACHINE, caps)
    assert found is not None
    steps = [
        other.layout.step_ns
        for state in space.states
        if (other := lay_out_states(space, [state] * 8, MACHINE, caps)) is not None
    ]
    # The estimate chooses what is laid out.
    assert found.layout.step_ns <= min(steps) * 1.002


def test_all_classes_are_tried_together_where_that_is_few() -> None:
    # Two kinds of blocks, the first wide and the others thin.
    workload = CORPUS["gpt2/8k"]
    first, *rest = workload.blocks
    wide = replace(
        first,
        activations=tuple(replace(a, num_bytes=2 * a.num_bytes) for a in first.activations),
    )
    mixed = replace(workload, blocks=(wide, *rest[:3]))
    space = Space(compile_chain(mixed), num_slots=16, min_bytes=2**25)
    num_states = [sum(map(len, options)) for options in space.rows]
    assert len(num_states) == 2
    assert np.prod(num_states) <= MAX_TOGETHER
    caps = caps_for(mixed, 0.5)
    found = plan_uniformly(space, MACHINE, caps)
    assert found is not None
    assert [len(kinds) for kinds in treatments_by_class(space, found)] == [1, 1]
    states = [[space.states[s] for row in options for s in row] for options in space.rows]
    steps = [
        other.layout.step_ns
        for a, b in product(*states)
        if (other := lay_out_states(space, [a, b, b, b], MACHINE, caps)) is not None
    ]
    assert found.layout.step_ns <= min(steps) * 1.002


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_a_free_plan_is_no_slower(share: float) -> None:
    workload = CORPUS["llama-8b/8k"]
    space, caps = Space(compile_chain(workload), num_slots=4), caps_for(workload, share)
    uniform, free = plan_uniformly(space, MACHINE, caps), plan_greedily(space, MACHINE, caps)
    assert uniform is not None
    assert free is not None
    assert free.layout.step_ns <= uniform.layout.step_ns


def test_nothing_is_found_where_nothing_fits() -> None:
    workload = CORPUS["llama-8b-x8/8k"]
    space = Space(compile_chain(workload), num_slots=4)
    assert plan_uniformly(space, MACHINE, caps_for(workload, -0.1)) is None
