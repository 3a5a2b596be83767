"""The driver: what it answers where all, some or nothing fits, and what it never forgets."""

import logging
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.check import check_plan
from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.plan import Decision, Plan
from ebbtide.planner.chain import compile_chain
from ebbtide.planner.result import Code, Outcome, UnsolvedError
from ebbtide.planner.solve import BUDGET_PLANNERS, plan_for_budget
from ebbtide.units import format_bytes
from ebbtide.workload import Outside, Workload
from tests.corpus import CORPUS
from tests.planner.exhaustive import plan_with

KEEP, HOST, DISK, RECOMPUTE = Decision.KEEP, Decision.HOST, Decision.DISK, Decision.RECOMPUTE
ROOT = Path(__file__).parents[2]
NAME = "llama-8b-x8/8k"
WORKLOAD = CORPUS[NAME]
TIB = 2**40

MACHINE = Machine(
    name="fast",
    device_bytes=TIB,
    host_bytes=TIB,
    out_bytes_per_s=50 * 10**9,
    in_bytes_per_s=50 * 10**9,
    both_bytes_per_s=90 * 10**9,
)
DISK_MACHINE = replace(
    MACHINE,
    disk_bytes=TIB,
    disk_write_bytes_per_s=20 * 10**9,
    disk_read_bytes_per_s=25 * 10**9,
)


def outside_of(workload: Workload) -> Outside:
    assert workload.outside is not None
    return workload.outside


def floor_bytes(workload: Workload = WORKLOAD) -> int:
    outside = outside_of(workload)
    return outside.resident_bytes + outside.constant_bytes + outside.turn_bytes


def budget(share: float, workload: Workload = WORKLOAD) -> int:
    """Room for what is always there, and for this share of what autograd saves."""
    return floor_bytes(workload) + int(share * workload.num_bytes_saved)


def solve(budget_bytes: int, machine: Machine = MACHINE, **changes: Any) -> Outcome:
    return plan_for_budget(WORKLOAD, machine, budget_bytes=budget_bytes, **changes)


def found(outcome: Outcome) -> Plan:
    assert outcome.code is Code.FOUND
    assert outcome.plan is not None
    return outcome.plan


def saved(workload: Workload = WORKLOAD) -> dict[str, Decision]:
    return {a.name: KEEP for block in workload.blocks for a in block.activations if a.is_saved}


def peak_of_keeping_all() -> int:
    plan = solve(TIB).plan
    assert plan is not None
    return plan.peak_bytes


# Everything fits.


@pytest.mark.parametrize("planner", BUDGET_PLANNERS)
def test_where_everything_fits_all_is_kept_and_nothing_else_is_done(planner: str) -> None:
    outcome = solve(TIB, planner=planner)
    assert (outcome.code, outcome.planner) == (Code.EVERYTHING_FITS, planner)
    assert outcome.plan is not None
    assert outcome.plan.decisions == saved()
    assert (outcome.plan.release_at, outcome.plan.fetch_at) == ({}, {})
    base_ns = compile_chain(WORKLOAD).base_ns
    assert outcome.plan.predicted_step_ns == outcome.plan.bound_step_ns == base_ns
    # The turn holds all that is saved.
    assert outcome.plan.peak_bytes == floor_bytes() + WORKLOAD.num_bytes_saved
    peak = format_bytes(outcome.plan.peak_bytes)
    assert outcome.message == f"everything fits: the step takes {peak} at most"
    assert outcome.smallest_budget_bytes == 0
    moved = (outcome.plan.host_bytes, outcome.plan.disk_bytes)
    flight = (outcome.plan.max_out_bytes_in_flight, outcome.plan.max_in_bytes_in_flight)
    assert moved == flight == (0, 0)
    assert check_plan(outcome.plan, WORKLOAD, MACHINE).is_sound


def test_everything_fits_exactly_at_the_peak_of_keeping_all() -> None:
    peak_bytes = peak_of_keeping_all()
    assert solve(peak_bytes).code is Code.EVERYTHING_FITS
    plan = found(solve(peak_bytes - 1))
    assert plan.peak_bytes < peak_bytes
    assert set(plan.decisions.values()) > {KEEP}


def test_everything_fits_also_where_making_it_again_takes_no_time() -> None:
    # Forward holds all 29. Keeping y, backward holds 11 + 10; making it again 7 + 22 + 10.
    x = Activation(
        name="x",
        op="input",
        kind=OpKind.INPUT,
        num_bytes=7,
        inputs=(),
        is_saved=False,
        is_replayable=False,
        group="x",
    )
    call = replace(
        x, op="aten.split", kind=OpKind.ELEMENTWISE, inputs=("x",), num_bytes=11, group="call"
    )
    block = Block(
        name="b",
        class_name="Layer",
        activations=(
            x,
            replace(call, name="lost", is_replayable=True),
            replace(call, name="y", is_replayable=True, is_saved=True),
        ),
        backward=(BackwardEvent(uses=("y",), compute_ns=1, held_bytes=10),),
    )
    outside = Outside(resident_bytes=0, turn_bytes=0, turn_ns=1, ends_bytes=0, ends_ns=0)
    workload = Workload(model="Model", blocks=(block,), outside=outside)
    keep = plan_with(workload, {"y": KEEP})
    assert check_plan(keep, workload, MACHINE).peak_bytes == 29
    outcome = plan_for_budget(workload, MACHINE, budget_bytes=29)
    assert outcome.code is Code.EVERYTHING_FITS
    assert outcome.plan is not None
    assert outcome.plan.decisions == {"y": KEEP}


# Something fits.


@pytest.mark.parametrize("planner", ["lp", "greedy", "uniform"])
def test_a_plan_keeps_to_its_budget_and_says_what_it_costs(planner: str) -> None:
    outcome = solve(budget(0.3), planner=planner)
    plan = found(outcome)
    assert plan.budget_bytes == budget(0.3)
    assert plan.peak_bytes <= plan.budget_bytes
    assert (plan.name, plan.model, plan.fingerprint) == (
        planner,
        "LlamaForCausalLM",
        WORKLOAD.fingerprint,
    )
    report = check_plan(plan, WORKLOAD, MACHINE)
    assert report.faults == ()
    assert (plan.host_bytes, plan.disk_bytes) == (report.host_bytes, 0)
    base_ns = compile_chain(WORKLOAD).base_ns
    assert base_ns <= plan.bound_step_ns <= plan.predicted_step_ns
    slower = plan.predicted_step_ns / base_ns - 1
    gap = plan.predicted_step_ns / plan.bound_step_ns - 1
    assert outcome.message == (
        f"{format_bytes(plan.peak_bytes)} at most; the step takes "
        f"{plan.predicted_step_ns / 1e6:.1f} ms, {slower:.1%} more than without a budget and at "
        f"most {gap:.2%} more than any plan"
    )


def test_what_backward_does_not_need_has_no_decision() -> None:
    plan = found(solve(budget(0.2)))
    replayed = {name for name, decision in plan.decisions.items() if decision is RECOMPUTE}
    activations = {a.name: a for block in WORKLOAD.blocks for a in block.activations}
    read = {name for made in replayed for name in activations[made].inputs}
    assert set(plan.decisions) == set(saved()) | read


def test_small_activations_are_never_moved() -> None:
    sizes = {a.name: a.num_bytes for block in WORKLOAD.blocks for a in block.activations}
    free = found(solve(budget(0.1), min_bytes=1, planner="offload"))
    assert {name.rpartition(".")[2] for name in free.decisions if free.decisions[name] is HOST} >= {
        "self_attn:lse",
        "residual",
    }
    least = 2 * 2**20
    plan = found(solve(budget(0.1), min_bytes=least, planner="offload"))
    moved = {name for name, decision in plan.decisions.items() if decision is HOST}
    assert moved == {name for name in saved() if sizes[name] >= least}
    assert min(sizes.values()) < least


# Nothing fits.


@pytest.mark.parametrize("planner", ["lp", "greedy", "uniform", "recompute", "offload-inputs"])
def test_where_nothing_fits_the_smallest_budget_is_named(planner: str) -> None:
    outcome = solve(floor_bytes() // 2, planner=planner)
    assert (outcome.code, outcome.plan, outcome.planner) == (Code.NOTHING_FITS, None, planner)
    smallest_bytes = outcome.smallest_budget_bytes
    fits = solve(smallest_bytes, planner=planner)
    assert found(fits).peak_bytes <= smallest_bytes
    less = solve(smallest_bytes * 98 // 100, planner=planner)
    assert less.code is Code.NOTHING_FITS
    # Asked from anywhere below, the answer is about the same.
    assert less.smallest_budget_bytes == pytest.approx(smallest_bytes, rel=0.01)


@pytest.mark.parametrize("tier", ["HOST", "DISK"])
def test_where_nothing_fits_pins_to_a_tier_are_kept_to(tier: str) -> None:
    decide = {"*mlp.up_proj": tier}
    options: dict[str, Any] = {"decide": decide}
    outcome = plan_for_budget(WORKLOAD, DISK_MACHINE, budget_bytes=1, **options)
    assert (outcome.code, outcome.plan) == (Code.NOTHING_FITS, None)
    smallest_bytes = outcome.smallest_budget_bytes
    fits = plan_for_budget(WORKLOAD, DISK_MACHINE, budget_bytes=smallest_bytes, **options)
    assert found(fits).peak_bytes <= smallest_bytes


def test_a_refusal_names_what_holds_the_rest() -> None:
    outside = outside_of(WORKLOAD)
    wide = replace(outside, ends_bytes=0, constant_bytes=2**20, turn_bytes=2**30)
    workload = replace(WORKLOAD, outside=wide)
    budget_bytes = wide.resident_bytes // 2
    outcome = plan_for_budget(workload, MACHINE, budget_bytes=budget_bytes)
    # Rounded up: asking for just that must do.
    smallest = f"{math.ceil(outcome.smallest_budget_bytes * 100 / 2**30) / 100:.2f} GiB"
    assert outcome.message == (
        f"no plan of lp fits a budget of {format_bytes(budget_bytes)}; the smallest that fits is "
        f"{smallest}. The rest of the step holds: parameters, gradients and optimizer state "
        f"{format_bytes(wide.resident_bytes)}, logits and loss 1.0 GiB, what is held around the "
        "blocks 1.0 MiB."
    )


def test_where_the_logits_hold_the_peak_a_chunked_loss_is_named() -> None:
    outside = outside_of(WORKLOAD)
    workload = replace(WORKLOAD, outside=replace(outside, turn_bytes=100 * 2**30))
    advice = (
        " The logits hold the peak, and moving activations cannot help that: compute the loss in "
        "chunks, with Liger's fused linear cross-entropy (liger_kernel) or, from torch 2.13 on, "
        "torch.nn.functional.linear_cross_entropy with LinearCrossEntropyOptions; `ebbtide compare "
        "--chunked-loss` measures what that gives."
    )
    least = floor_bytes(workload) - 100 * 2**30
    for budget_bytes in (least, floor_bytes(workload) - 1):
        outcome = plan_for_budget(workload, MACHINE, budget_bytes=budget_bytes, planner="greedy")
        assert outcome.code is Code.NOTHING_FITS
        assert outcome.message.endswith(advice)
        assert "logits and loss 100.0 GiB, parameters" in outcome.message
    # With less, other things do not fit either.
    outcome = plan_for_budget(workload, MACHINE, budget_bytes=least - 1, planner="greedy")
    assert advice not in outcome.message


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_a_pure_strategy_that_does_not_fit_is_refused(share: float) -> None:
    outcome = solve(budget(share), planner="keep")
    assert outcome.code is Code.NOTHING_FITS
    assert outcome.smallest_budget_bytes == peak_of_keeping_all()
    assert outcome.message.startswith("no plan of keep fits a budget of ")


# Tiers.


def test_what_is_on_the_host_keeps_to_its_cap() -> None:
    free = found(solve(budget(0.3)))
    for host_bytes in (free.host_bytes // 2, free.host_bytes // 5, 0):
        plan = found(solve(budget(0.3), host_bytes=host_bytes))
        report = check_plan(plan, WORKLOAD, MACHINE, host_bytes=host_bytes)
        assert report.faults == ()
        assert report.host_bytes <= host_bytes
        assert plan.predicted_step_ns >= free.predicted_step_ns
    assert HOST not in plan.decisions.values()


def test_the_host_is_shared_by_the_ranks_of_the_node() -> None:
    machine = replace(MACHINE, host_bytes=8 * 2**30, num_local_ranks=8)
    plan = found(solve(budget(0.3), machine))
    assert 0 < plan.host_bytes <= 2**30
    assert check_plan(plan, WORKLOAD, machine).faults == ()


def test_what_the_host_has_no_room_for_goes_to_the_disk() -> None:
    host_bytes = 2**30
    plan = found(solve(budget(0.05), DISK_MACHINE, host_bytes=host_bytes, planner="offload"))
    tiers = [
        plan.decisions[a.name]
        for block in WORKLOAD.blocks
        for a in block.activations
        if plan.decision(a.name) in (HOST, DISK)
    ]
    num_on_disk = tiers.count(DISK)
    assert 0 < num_on_disk < len(tiers)
    report = check_plan(plan, WORKLOAD, DISK_MACHINE, host_bytes=host_bytes)
    assert report.faults == ()
    # No more than one activation's room is left.
    sizes = {a.name: a.num_bytes for block in WORKLOAD.blocks for a in block.activations}
    assert host_bytes - max(sizes.values()) < report.host_bytes <= host_bytes


@pytest.mark.parametrize("planner", ["lp", "greedy", "uniform"])
def test_planners_keep_to_both_tiers(planner: str) -> None:
    caps = {"host_bytes": 2**29, "disk_bytes": 2**30}
    plan = found(solve(budget(0.3), DISK_MACHINE, planner=planner, **caps))
    report = check_plan(plan, WORKLOAD, DISK_MACHINE, **caps)
    assert report.faults == ()
    assert plan.bound_step_ns <= plan.predicted_step_ns


# Decisions of the user.


@pytest.mark.parametrize("planner", ["lp", "greedy", "uniform", "recompute", "offload"])
def test_pins_are_honoured(planner: str) -> None:
    decide = {"*.gate_proj": "HOST", "*.up_proj": "KEEP", "*.q_proj": "RECOMPUTE"}
    plan = found(solve(budget(0.7), planner=planner, decide=decide))
    wanted = {"gate_proj": HOST, "up_proj": KEEP, "q_proj": RECOMPUTE}
    decided = {
        name: decision
        for name, decision in plan.decisions.items()
        if name.rpartition(".")[2] in wanted
    }
    assert len(decided) == 3 * 8
    assert decided == {name: wanted[name.rpartition(".")[2]] for name in decided}
    assert check_plan(plan, WORKLOAD, MACHINE).faults == ()


def test_a_pin_to_the_disk_is_honoured_beside_the_host() -> None:
    decide = {"model.layers.0.mlp.gate_proj": "DISK", "model.layers.7.mlp.gate_proj": "HOST"}
    plan = found(solve(budget(0.5), DISK_MACHINE, decide=decide))
    assert plan.decisions["model.layers.0.mlp.gate_proj"] is DISK
    assert plan.decisions["model.layers.7.mlp.gate_proj"] is HOST
    assert check_plan(plan, WORKLOAD, DISK_MACHINE).faults == ()


def test_outputs_of_one_call_may_lie_on_different_tiers() -> None:
    decide = {"*.self_attn:out": "HOST", "*.self_attn:lse": "KEEP"}
    plan = found(solve(budget(0.5), decide=decide))
    lse = {d for name, d in plan.decisions.items() if name.endswith(":lse")}
    out = {d for name, d in plan.decisions.items() if name.endswith(":out")}
    assert (out, lse) == ({HOST}, {KEEP})


def test_a_pin_slows_no_step_below_its_own_optimum() -> None:
    free = found(solve(budget(0.3)))
    same = {name: free.decisions[name] for name in list(free.decisions)[:10]}
    plan = found(solve(budget(0.3), decide=same))
    assert plan.predicted_step_ns <= free.predicted_step_ns * 1.005


# The solver.


def planned_alike(left: Plan, right: Plan) -> bool:
    return replace(left, name="", bound_step_ns=0) == replace(right, name="", bound_step_ns=0)


def raise_timeout(*_: object, **__: object) -> None:
    raise UnsolvedError("the solver did not finish in 5.0 s")


@pytest.mark.parametrize("planner", ["lp", "uniform"])
def test_where_the_solver_is_too_slow_the_plan_does_not_need_it(
    planner: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ebbtide.planner.relax.relax", raise_timeout)
    with caplog.at_level(logging.WARNING, logger="ebbtide"):
        outcome = solve(budget(0.3), planner=planner)
    assert "the solver did not finish in 5.0 s; the greedy planner plans instead" in caplog.text
    fallback = "greedy" if planner == "lp" else planner
    assert outcome.planner == fallback
    monkeypatch.undo()
    assert planned_alike(found(outcome), found(solve(budget(0.3), planner=fallback)))


def test_no_time_at_all_is_too_little_for_the_solver() -> None:
    outcome = solve(budget(0.3), time_limit_s=0.0)
    assert outcome.planner == "greedy"
    plan = found(outcome)
    assert plan.name == "greedy"
    assert 0 < plan.bound_step_ns <= plan.predicted_step_ns
    assert planned_alike(plan, found(solve(budget(0.3), planner="greedy")))


WITHOUT_SOLVER = """
import sys
sys.modules["scipy"] = None
from tests.planner.test_solve import budget, solve
for planner in ("lp", "lp", "greedy", "uniform"):
    outcome = solve(budget(0.3), planner=planner)
    assert outcome.plan is not None
    print(outcome.planner, outcome.plan.name, outcome.plan.predicted_step_ns)
assert not any(name.startswith("scipy.") for name in sys.modules)
"""


def python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": "src:.", "PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        check=True,
    )


def test_without_a_solver_greedy_plans_and_says_so_once() -> None:
    finished = python(WITHOUT_SOLVER)
    greedy, uniform = (found(solve(budget(0.3), planner=p)) for p in ("greedy", "uniform"))
    assert finished.stdout.splitlines() == [
        *[f"greedy greedy {greedy.predicted_step_ns}"] * 3,
        f"uniform uniform {uniform.predicted_step_ns}",
    ]
    assert finished.stderr.splitlines() == [
        "scipy is not installed: the greedy planner plans instead of lp. Install it with: "
        "pip install 'ebbtide[solver]'"
    ]


def test_without_a_solver_a_bound_is_given_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.planner.solve._has_solver", lambda: False)
    base_ns = compile_chain(WORKLOAD).base_ns
    for planner in BUDGET_PLANNERS:
        plan = solve(budget(0.3), planner=planner).plan
        assert plan is None or base_ns <= plan.bound_step_ns <= plan.predicted_step_ns


# Determinism.


PRINT_PLAN = """
import sys
from tests.planner.test_solve import budget, solve
outcome = solve(budget(0.25), planner=sys.argv[1])
assert outcome.plan is not None
print(outcome.plan.to_json(), end="")
"""


@pytest.mark.parametrize("planner", ["lp", "greedy", "uniform"])
def test_the_same_input_gives_the_same_plan_byte_for_byte(planner: str) -> None:
    text = found(solve(budget(0.25), planner=planner)).to_json()
    again = Workload.from_json(WORKLOAD.to_json())
    outcome = plan_for_budget(again, MACHINE, budget_bytes=budget(0.25), planner=planner)
    assert found(outcome).to_json() == text


@pytest.mark.parametrize("planner", ["lp", "greedy"])
def test_another_process_with_another_hash_seed_gives_the_same_plan(planner: str) -> None:
    text = found(solve(budget(0.25), planner=planner)).to_json()
    assert python(PRINT_PLAN, planner, PYTHONHASHSEED="4321").stdout == text


# Refusals.


def test_an_unknown_planner_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlanError) as raised:
        solve(budget(0.5), planner="gredy")
    assert str(raised.value).startswith(
        "unknown planner 'gredy'; valid names, nearest first: greedy, "
    )
    assert all(planner in str(raised.value) for planner in BUDGET_PLANNERS)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_bytes is -1; it must be 0 or more"):
        solve(-1)


def test_a_workload_without_times_is_refused() -> None:
    with pytest.raises(PlanError, match="has no times, and a budget needs them"):
        plan_for_budget(replace(WORKLOAD, outside=None), MACHINE, budget_bytes=1)


def test_a_wrong_pin_is_refused() -> None:
    decide: Mapping[str, str] = {"*.nothing": "KEEP"}
    with pytest.raises(PlanError, match=r"the pattern '\*\.nothing' matches no activation"):
        solve(budget(0.5), decide=decide)
