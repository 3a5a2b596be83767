"""Models that `fully_shard` shards train as without ebbtide, in every rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch.distributed.ranks import (
    assert_plan_was_run,
    assert_trained_alike,
    by_case,
    run_ranks,
)

pytestmark = pytest.mark.slow

Results = dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return by_case(run_ranks("fsdp", tmp_path_factory.mktemp("fsdp")))


@pytest.mark.parametrize(
    "case",
    ["blocks", "bf16", "not resharded", "offloaded parameters", "accumulation", "llama in bf16"],
)
def test_sharded_blocks_have_the_gradients_of_plain_sharded_ones(
    case: str, results: Results
) -> None:
    """And no all-gather runs a second time: the collectives are those of plain training."""
    plans = [plan for name, plan in results if name == case]
    assert len(plans) >= 2
    for plan in plans:
        assert_trained_alike(results[case, plan])
        num_micro_batches = 3 if case == "accumulation" else 1
        assert_plan_was_run(results[case, plan], plan, num_micro_batches=num_micro_batches)


@pytest.mark.parametrize("plan", ["recompute", "balanced"])
def test_what_a_freed_parameter_is_needed_for_is_kept(plan: str, results: Results) -> None:
    """Groups inside a block free parameters there: the gradients stay right, at less saving."""
    of_ranks = results["groups inside", plan]
    assert_trained_alike(of_ranks)
    for result in of_ranks:
        assert result["moved_out_bytes"] < max(1, result["planned_bytes"])
        assert result["num_recomputed_ops"] > 0


def test_the_reason_is_told(results: Results) -> None:
    for result in results["why it is kept", "recompute"]:
        assert result["reasons"] == ["a parameter was freed inside its block"]


@pytest.mark.parametrize("plan", ["recompute", "balanced"])
def test_gathered_parameters_are_freed_after_forward_as_without_ebbtide(
    plan: str, results: Results
) -> None:
    for result in results["freed", plan]:
        assert result["left_bytes"] == [[0, 0, 0]] * 4
