"""How what is evicted is dealt out to host memory and the disk, and what that costs."""

from dataclasses import replace

import pytest

from ebbtide.check import check_plan
from ebbtide.machine import Machine
from ebbtide.plan import Decision
from ebbtide.planner import plan_for_budget
from ebbtide.planner.candidate import deal_out, lay_out_states
from ebbtide.planner.caps import Caps
from ebbtide.planner.chain import compile_chain
from ebbtide.planner.layout import Treatment, lay_out
from ebbtide.planner.space import Space, State
from tests.corpus import CORPUS
from tests.corpus.machines import budget_of, machine_with

GIB = 2**30
WORKLOAD = CORPUS["llama-8b-x8/32k"]


def machine(host_gib: float, write_gb_per_s: float, read_gb_per_s: float) -> Machine:
    return replace(
        machine_with(50),
        host_bytes=int(host_gib * GIB),
        disk_bytes=2**42,
        disk_write_bytes_per_s=int(write_gb_per_s * 1e9),
        disk_read_bytes_per_s=int(read_gb_per_s * 1e9),
    )


def evicting_most() -> tuple[Space, list[State]]:
    """Return a space, and states that evict what a block stores without recomputing."""
    space = Space(compile_chain(WORKLOAD), num_slots=4)
    return space, [space.states[space.rows[c][0][-1]] for c in space.chain.class_of]


def tiers_of(treatments: tuple[Treatment, ...]) -> list[list[Decision]]:
    return [list(treatment.tiers.values()) for treatment in treatments]


def disk_bytes_by_block(treatments: tuple[Treatment, ...]) -> list[int]:
    return [treatment.bytes_on(Decision.DISK) for treatment in treatments]


def test_the_disk_gets_the_earliest_or_a_part_of_each_block() -> None:
    space, states = evicting_most()
    evicted_bytes = sum(state.evicted_bytes for state in states)
    host_bytes = evicted_bytes // 2
    earliest, evenly = deal_out(space, states, host_bytes)
    for treatments in (earliest, evenly):
        assert sum(t.bytes_on(Decision.HOST) for t in treatments) <= host_bytes
        on_disk = sum(disk_bytes_by_block(treatments))
        largest = max(max(state.program.num_bytes) for state in states)
        assert 0 <= on_disk - (evicted_bytes - host_bytes) < largest
    tiers = [tier for block in tiers_of(earliest) for tier in block]
    num_disk = tiers.count(Decision.DISK)
    assert set(tiers[:num_disk]) == {Decision.DISK} and set(tiers[num_disk:]) == {Decision.HOST}
    shares = [
        num_bytes / state.evicted_bytes
        for num_bytes, state in zip(disk_bytes_by_block(evenly), states, strict=True)
    ]
    assert len(shares) == 8
    assert all(0.35 < share < 0.65 for share in shares)


def test_what_fits_into_host_memory_leaves_the_disk_alone() -> None:
    space, states = evicting_most()
    evicted_bytes = sum(state.evicted_bytes for state in states)
    (treatments,) = deal_out(space, states, evicted_bytes)
    assert sum(disk_bytes_by_block(treatments)) == 0
    (treatments,) = deal_out(space, states, 0)
    assert sum(disk_bytes_by_block(treatments)) == evicted_bytes


def test_the_faster_way_is_taken() -> None:
    space, states = evicting_most()
    caps = Caps(device_bytes=2**50, host_bytes=4 * GIB, disk_bytes=2**42)
    # One where a slow disk has to read all through backward, and one where it makes no odds.
    for on in (machine(4, 12, 6), machine(4, 10**4, 10**4)):
        found = lay_out_states(space, states, on, caps)
        assert found is not None
        times = [
            layout.step_ns
            for treatments in deal_out(space, states, caps.host_bytes)
            if (layout := lay_out(space.chain, treatments, on, cap_bytes=caps.device_bytes))
        ]
        assert len(times) == 2
        assert found.layout.step_ns == min(times)


@pytest.mark.parametrize("host_gib", [1, 4])
@pytest.mark.parametrize("rates", [(3.3, 1.4), (12.0, 12.0)])
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_no_spilling_in_mid_forward_would_be_much_faster(
    host_gib: int, rates: tuple[float, float], share: float
) -> None:
    # The bound lets any byte be in host memory first and on the disk later: it asks only that
    # what the host cannot hold at the turn is written by then, and read afterwards.
    on = machine(host_gib, *rates)
    budget_bytes = budget_of(WORKLOAD, share)
    plan = plan_for_budget(WORKLOAD, on, budget_bytes=budget_bytes).plan
    assert plan is not None and plan.disk_bytes > GIB
    assert plan.predicted_step_ns <= 1.012 * plan.bound_step_ns
    assert check_plan(plan, WORKLOAD, on, budget_bytes=budget_bytes).is_sound


@pytest.mark.parametrize("planner", ["lp", "greedy"])
@pytest.mark.parametrize("case", ["llama-8b-x8/32k", "llama-8b/8k"])
def test_a_disk_makes_no_plan_slower(planner: str, case: str) -> None:
    workload = CORPUS[case]
    budget_bytes = budget_of(workload, 0.1)
    times: list[int] = []
    for on in (
        machine(4, 12, 12),
        machine(4, 3.3, 1.4),
        machine(4, 0.001, 0.001),
        replace(machine(4, 1, 1), disk_bytes=0),
        replace(machine(0, 1, 1), disk_bytes=0),
    ):
        plan = plan_for_budget(workload, on, budget_bytes=budget_bytes, planner=planner).plan
        assert plan is not None
        times.append(plan.predicted_step_ns)
    fast, slow, useless, host_alone, nothing = times
    assert fast < host_alone and slow <= host_alone and useless == host_alone < nothing
