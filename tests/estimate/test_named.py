"""Plans by name are sound, move what is named, and wait or do not wait for it."""

import pytest

from ebbtide.catalog.models import MODELS
from ebbtide.check import check_plan
from ebbtide.estimate.named import plan_by_names
from ebbtide.estimate.setup import Setup
from ebbtide.estimate.strategies import Strategy
from ebbtide.machine import Machine
from ebbtide.plan import TURN_END, Decision
from ebbtide.planner import missing
from ebbtide.simulate import simulate
from ebbtide.timeline import Lane
from ebbtide.workload import Workload
from tests.estimate.asking import ask

NAMES = frozenset({".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"})
MACHINE = Machine(
    name="roomy",
    device_bytes=2**50,
    host_bytes=2**50,
    out_bytes_per_s=50 * 10**9,
    in_bytes_per_s=40 * 10**9,
    both_bytes_per_s=90 * 10**9,
    disk_bytes=2**50,
    disk_write_bytes_per_s=10**9,
    disk_read_bytes_per_s=2 * 10**9,
)


@pytest.fixture(scope="module")
def workload() -> Workload:
    setup = Setup(shape=MODELS["llama-3-8b"], context=8192, batch=1)
    return ask(setup).workloads[0]


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("names", [frozenset[str](), NAMES, frozenset({".input"})])
def test_a_plan_by_names_is_sound(
    workload: Workload, names: frozenset[str], is_overlapped: bool
) -> None:
    plan = plan_by_names(workload, names, is_overlapped=is_overlapped)
    report = check_plan(plan, workload, MACHINE)
    assert report.faults == ()
    assert report.peak_bytes == simulate(plan, workload, MACHINE).peak_bytes
    moved = {
        a.name
        for block in workload.blocks
        for a in block.activations
        if a.name.removeprefix(block.name) in names
    }
    assert {name for name, d in plan.decisions.items() if d is Decision.HOST} == moved
    assert missing(plan, workload) == []


def test_without_overlap_compute_waits_for_all_copies(workload: Workload) -> None:
    plan = plan_by_names(workload, NAMES, is_overlapped=False)
    timeline = simulate(plan, workload, MACHINE)
    copied_ns = timeline.busy_ns(Lane.COPY_OUT) + timeline.busy_ns(Lane.COPY_IN)
    assert timeline.stall_ns == pytest.approx(copied_ns, rel=0.02)
    assert timeline.busy_ns(Lane.COPY_OUT) == pytest.approx(plan.host_bytes / 50, rel=1e-5)
    assert timeline.busy_ns(Lane.COPY_IN) == pytest.approx(plan.host_bytes / 40, rel=1e-5)


def test_with_overlap_it_waits_for_the_last_layer_alone(workload: Workload) -> None:
    plan = plan_by_names(workload, NAMES, is_overlapped=True)
    timeline = simulate(plan, workload, MACHINE)
    copied_ns = timeline.busy_ns(Lane.COPY_OUT) + timeline.busy_ns(Lane.COPY_IN)
    assert timeline.stall_ns < copied_ns / 32
    last = workload.blocks[-1].name + ".self_attn.q_proj"
    assert plan.fetch_at[last] == TURN_END
    first = workload.blocks[0].name + ".self_attn.q_proj"
    assert plan.release_at[first] == workload.blocks[1].name + ".self_attn.q_proj"
    assert plan.fetch_at[first] == workload.blocks[1].name + ".mlp.product"


def test_what_is_kept_by_name_does_not_move(workload: Workload) -> None:
    plan = plan_by_names(workload, NAMES, is_overlapped=True, tier=Decision.KEEP)
    assert set(plan.decisions.values()) == {Decision.KEEP, Decision.RECOMPUTE}
    assert (plan.host_bytes, plan.release_at, plan.fetch_at) == (0, {}, {})


def test_full_recomputation_of_gpt2_and_of_experts_keeps_inputs_alone() -> None:
    for name in ("gpt2", "deepseek-v3-671b"):
        estimator = ask(Setup(shape=MODELS[name], context=1024, batch=1))
        row = estimator.row(Strategy.REMAT)
        shape = MODELS[name]
        inputs = shape.num_layers * 1024 * shape.hidden * 2
        keep = estimator.row(Strategy.KEEP)
        assert row.holders["activations"] >= inputs
        assert row.peak_bytes < keep.peak_bytes
        # What is run again is forward, once.
        again = row.step_ns - keep.step_ns
        forward = sum(block.forward_ns for block in estimator.workloads[0].blocks)
        assert 0.7 * forward < again <= forward
