"""What host memory cannot hold goes to disk, the earliest first; or is recomputed, the last."""

from dataclasses import replace

import pytest

from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import NAMED_PLANS, missing, named_plan
from ebbtide.planner.spill import recompute_rest, spill_to_disk
from ebbtide.workload import Activation, Block, OpKind, Workload
from tests.corpus import CORPUS


def _workload() -> Workload:
    blocks = [
        Block(
            name=f"layers.{i}",
            class_name="Layer",
            activations=tuple(
                Activation(
                    name=f"layers.{i}.{part}",
                    op="mm",
                    kind=OpKind.MATMUL,
                    num_bytes=num_bytes,
                    inputs=(),
                    is_saved=True,
                    is_replayable=True,
                    group=f"layers.{i}.{part}",
                )
                for part, num_bytes in (("up", 100), ("down", 40))
            ),
        )
        for i in range(3)
    ]
    return Workload(model="Model", blocks=tuple(blocks))


def _plan(workload: Workload) -> Plan:
    names = [a.name for b in workload.blocks for a in b.activations]
    return Plan(
        name="offload",
        model=workload.model,
        fingerprint=workload.fingerprint,
        decisions={n: Decision.HOST for n in names[:-1]} | {names[-1]: Decision.KEEP},
        host_bytes=380,
        disk_bytes=0,
        max_out_bytes_in_flight=1000,
        max_in_bytes_in_flight=1000,
    )


def test_the_first_blocks_go_to_disk_and_the_last_stay_in_host_memory() -> None:
    workload = _workload()
    spilled = spill_to_disk(_plan(workload), workload, 240)
    assert {n: d.value for n, d in spilled.decisions.items()} == {
        "layers.0.down": "disk",
        "layers.0.up": "disk",
        "layers.1.down": "host",
        "layers.1.up": "host",
        "layers.2.down": "keep",
        "layers.2.up": "host",
    }
    assert (spilled.host_bytes, spilled.disk_bytes) == (240, 140)


def test_a_plan_that_fits_is_left_as_it_is() -> None:
    workload = _workload()
    assert spill_to_disk(_plan(workload), workload, 380) == _plan(workload)


def test_the_last_blocks_are_recomputed_and_the_first_stay_in_host_memory() -> None:
    workload = _workload()
    plan = recompute_rest(_plan(workload), workload, host_bytes=240, disk_bytes=0)
    assert {n: d.value for n, d in plan.decisions.items()} == {
        "layers.0.down": "host",
        "layers.0.up": "host",
        "layers.1.down": "recompute",
        "layers.1.up": "host",
        "layers.2.down": "keep",
        "layers.2.up": "recompute",
    }
    assert (plan.host_bytes, plan.disk_bytes) == (240, 0)


def test_what_cannot_be_made_again_comes_first_and_is_kept_where_it_has_no_room() -> None:
    first, *others = _workload().blocks
    fixed = tuple(replace(a, is_replayable=False) for a in others[0].activations)
    workload = Workload(model="Model", blocks=(first, replace(others[0], activations=fixed)))
    plan = named_plan("offload-last:2", workload, min_bytes=1)
    assert plan.host_bytes == 280
    fitted = recompute_rest(plan, workload, host_bytes=130, disk_bytes=0)
    assert {n: d.value for n, d in fitted.decisions.items()} == {
        "layers.0.down": "recompute",
        "layers.0.up": "recompute",
        "layers.1.down": "keep",
        "layers.1.up": "host",
    }
    assert fitted.host_bytes == 100


def test_a_plan_that_needs_no_more_comes_back_as_it_is() -> None:
    workload = _workload()
    plan = replace(_plan(workload), budget_bytes=9, peak_bytes=8, predicted_step_ns=7)
    assert recompute_rest(plan, workload, host_bytes=380, disk_bytes=0) is plan
    less = recompute_rest(plan, workload, host_bytes=379, disk_bytes=0)
    numbers = (less.budget_bytes, less.peak_bytes, less.predicted_step_ns, less.bound_step_ns)
    assert numbers == (0, 0, 0, 0)


def test_moments_of_what_no_longer_moves_are_dropped() -> None:
    workload = _workload()
    names = [a.name for b in workload.blocks for a in b.activations][:-1]
    moments = dict.fromkeys(names, "layers.2.down")
    plan = replace(_plan(workload), release_at=moments, fetch_at=moments)
    less = recompute_rest(plan, workload, host_bytes=240, disk_bytes=0)
    moved = {"layers.0.down", "layers.0.up", "layers.1.up"}
    assert set(less.release_at) == set(less.fetch_at) == moved


@pytest.mark.parametrize("tier", [Decision.HOST, Decision.DISK])
@pytest.mark.parametrize("name", [n.replace("K", "2") for n in NAMED_PLANS[2:]])
def test_a_plan_stays_complete_and_keeps_to_any_cap(name: str, tier: Decision) -> None:
    for case in ("llama-8b-x8/8k", "gpt2/8k"):
        workload = CORPUS[case]
        plan = named_plan(name, workload, tier=tier)
        whole = plan.host_bytes + plan.disk_bytes
        for cap in (0, whole // 7, whole // 2, whole - 1):
            caps = {Decision.HOST: (cap, 0), Decision.DISK: (0, cap)}[tier]
            fitted = recompute_rest(plan, workload, host_bytes=caps[0], disk_bytes=caps[1])
            assert missing(fitted, workload) == []
            assert fitted.host_bytes <= caps[0] and fitted.disk_bytes <= caps[1]
            assert fitted.host_bytes + fitted.disk_bytes > cap * 0.8 or cap == 0
            kept = {n for n, d in fitted.decisions.items() if d is plan.decision(n)}
            moved = {n for n, d in fitted.decisions.items() if d is tier}
            assert moved <= kept
            fitted.check_fits(workload)
