"""What a report says, of figures that a test makes up and of a training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ebbtide.memory.ledger import Ledger
from ebbtide.plan import Decision, Plan
from ebbtide.planner import named_plan, plan_for_budget
from ebbtide.planner.advice import CHUNKED_LOSS
from ebbtide.torch import attach
from ebbtide.torch.pace import NUM_SKIPPED, NUM_STEPS, Paced
from ebbtide.torch.report import DeviceMemory, Outcome, read_memory, write_report
from tests.torch.cases import Gated, Stack, feature_step
from tests.torch.training import seeded, train
from tests.two_blocks import MACHINE, two_blocks

GIB = 2**30
WORKLOAD = two_blocks()


def planned(budget_bytes: int) -> Plan:
    plan = plan_for_budget(WORKLOAD, MACHINE, budget_bytes=budget_bytes).plan
    assert plan is not None
    return plan


PLAN = replace(planned(2**40), predicted_step_ns=20_000_000, bound_step_ns=16_000_000)
COUNTS = Ledger().snapshot()
OUTCOME = Outcome(
    plan=PLAN, counts=COUNTS, workload=WORKLOAD, machine=MACHINE, paced=None, memory=None
)


def lines(outcome: Outcome, start: str) -> list[str]:
    return [line for line in write_report(outcome).splitlines() if line.startswith(start)]


def test_predicted_stands_beside_measured_and_the_bound() -> None:
    paced = Paced(plan=PLAN, num_steps=5, measured_ns=21_000_000)
    outcome = replace(OUTCOME, paced=paced)
    (predicted,) = lines(outcome, "predicted: ")
    assert predicted.startswith(
        "predicted: forward and backward 20.0 ms, at most 25.00% over the least possible, 16.0 ms; "
        "peak "
    )
    assert lines(outcome, "measured: ") == [
        "measured: forward and backward 21.0 ms in 5 steps, where 20.0 ms were predicted before "
        "them (+5.0%)"
    ]
    assert lines(outcome, "advice: ") == []


def test_a_corrected_plan_is_held_against_what_was_predicted_before() -> None:
    paced = Paced(plan=PLAN, num_steps=5, measured_ns=30_000_000)
    corrected = replace(PLAN, predicted_step_ns=30_000_000)
    outcome = replace(OUTCOME, plan=corrected, paced=paced)
    (measured,) = lines(outcome, "measured: ")
    assert measured.endswith("where 20.0 ms were predicted before them (+50.0%)")
    (advice,) = lines(outcome, "advice: ")
    assert advice.startswith("advice: steps took 50% longer than was predicted: `ebbtide trace")
    name = next(iter(corrected.decisions))
    other = replace(corrected, decisions={**corrected.decisions, name: Decision.RECOMPUTE})
    (measured,) = lines(replace(outcome, plan=other), "measured: ")
    assert measured.endswith(", under the plan before this one")


def test_each_decision_has_its_count_and_its_bytes() -> None:
    names = [a.name for block in WORKLOAD.blocks for a in block.activations]
    sizes = {a.name: a.num_bytes for block in WORKLOAD.blocks for a in block.activations}
    decisions = dict.fromkeys(names, Decision.KEEP) | dict.fromkeys(names[:2], Decision.HOST)
    (line,) = lines(replace(OUTCOME, plan=replace(PLAN, decisions=decisions)), "plan ")
    assert (list(sizes.values()), line) == (
        [10, 20, 40, 80],
        f"plan {PLAN.name}: 2 keep (120 B), 2 host (30 B)",
    )


def test_the_holders_of_the_predicted_peak_are_named_largest_first() -> None:
    (line,) = lines(OUTCOME, "predicted peak of ")
    assert ", at the shape that was measured: " in line
    held = line.partition(", held by ")[2].split(", ")
    assert len(held) >= 2
    assert any(part.startswith("resident ") for part in held)


def test_a_plan_without_a_budget_says_that_nothing_was_predicted() -> None:
    plan = replace(named_plan("offload", WORKLOAD), host_bytes=2**20)
    outcome = replace(OUTCOME, plan=plan, machine=None)
    assert lines(outcome, "predicted") == [
        "predicted: nothing, as the plan was made without a budget; steps are not timed"
    ]
    assert lines(outcome, "measured") == []
    (advice,) = lines(outcome, "advice: ")
    assert advice == (
        "advice: the plan moves 1.0 MiB a step, and nothing has moved since the statistics were "
        "reset: train a step under it"
    )


def test_a_gpus_allocator_is_told_of_and_advised_on() -> None:
    memory = DeviceMemory(peak_bytes=35 * GIB, reserved_bytes=48 * GIB, num_retries=0)
    outcome = replace(OUTCOME, memory=memory)
    assert lines(outcome, "measured: peak") == [
        "measured: peak 35.0 GiB allocated, 48.0 GiB reserved, since the process started or its "
        "peaks were reset"
    ]
    assert lines(outcome, "advice: ") == [
        "advice: the allocator held 48.0 GiB for a peak of 35.0 GiB in use: set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True"
    ]
    (advice,) = lines(replace(OUTCOME, memory=replace(memory, num_retries=3)), "advice: ")
    assert advice.startswith("advice: the allocator ran full and gave its cache back 3 times")
    fitting = replace(memory, reserved_bytes=36 * GIB)
    assert lines(replace(OUTCOME, memory=fitting), "advice: ") == []
    assert read_memory(torch.device("cpu")) is None


def test_logits_that_hold_the_peak_are_advised_on() -> None:
    assert WORKLOAD.outside is not None
    outside = replace(WORKLOAD.outside, turn_bytes=PLAN.peak_bytes)
    outcome = replace(OUTCOME, workload=replace(WORKLOAD, outside=outside))
    (advice,) = lines(outcome, "advice: ")
    assert advice.endswith(CHUNKED_LOSS)


@pytest.mark.slow
def test_after_a_training_all_of_it_is_there_and_reading_it_changes_nothing(
    tmp_path: Path,
) -> None:
    model = seeded(lambda: Stack(Gated, 4))
    with attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", decide={"*": "RECOMPUTE"}) as tide:
        assert tide.report() == "ebbtide has not observed a whole training step yet"
        train(model, feature_step, num_steps=4)
        assert "measured: no step has been timed yet" in tide.report()
        train(model, feature_step, num_steps=NUM_SKIPPED + NUM_STEPS)
        report = tide.report()
        assert report == tide.report()
    found = [line.partition(":")[0] for line in report.splitlines()]
    assert found[:3] == ["plan lp", "predicted", "measured"]
    assert any(line.startswith("predicted peak of ") for line in found)
    assert f"in {NUM_STEPS} steps, where " in report
