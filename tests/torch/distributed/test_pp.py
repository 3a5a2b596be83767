"""Pipelines train as without ebbtide: micro-batches whose forwards and backwards interleave."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch.distributed.pp import NUM_MICRO_BATCHES
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
    return by_case(run_ranks("pp", tmp_path_factory.mktemp("pp")))


@pytest.mark.parametrize("case", ["1F1B", "GPipe", "interleaved"])
def test_stages_have_the_gradients_of_plain_stages(case: str, results: Results) -> None:
    plans = [plan for name, plan in results if name == case]
    assert len(plans) >= 2
    for plan in plans:
        assert_trained_alike(results[case, plan])
        assert_plan_was_run(results[case, plan], plan, num_micro_batches=NUM_MICRO_BATCHES)


@pytest.mark.parametrize(("case", "num_graphs"), [("1F1B", (2, 1)), ("GPipe", (4, 4))])
def test_a_budget_has_room_for_all_micro_batches_that_are_alive_at_once(
    case: str, num_graphs: tuple[int, int], results: Results
) -> None:
    """The first stage of two runs two forwards before a backward, and under GPipe all."""
    for result, num in zip(results[case, "budget"], num_graphs, strict=True):
        assert result["num_graphs"] == num
        assert result["kept_bytes"] > 0
        assert result["peak_bytes"] <= result["budget_bytes"]


@pytest.mark.parametrize("plan", ["recompute", "balanced"])
def test_two_stages_of_one_attach_have_the_right_gradients(plan: str, results: Results) -> None:
    """Fetches are then guessed in an order that is not that of backward, so some come twice."""
    of_ranks = results["interleaved, both stages in one", plan]
    assert_trained_alike(of_ranks)
    for result in of_ranks:
        planned_bytes = NUM_MICRO_BATCHES * result["planned_bytes"]
        assert result["moved_out_bytes"] == planned_bytes <= result["moved_in_bytes"]
