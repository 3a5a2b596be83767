"""One plan for all ranks: for the worst that any of them measured, or refused by all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch.distributed.common import DISK_BYTES
from tests.torch.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    grouped: Results = {}
    said = run_ranks("common", tmp_path_factory.mktemp("common"))
    for result in sorted(said, key=lambda result: result["rank"]):
        grouped.setdefault(result["case"], []).append(result)
    return grouped


@pytest.mark.parametrize("case", ["equal", "a slow rank", "a small rank", "uneven batches"])
def test_ranks_of_one_plan_train_as_without_ebbtide(case: str, results: Results) -> None:
    """In no collective of ours: their number is that of plain training."""
    assert [result["rank"] for result in results[case]] == [0, 1]
    for result in results[case]:
        assert result["different"] == []
        assert result["collectives"] == result["wanted_collectives"]
        assert result["moved_out_bytes"] == result["moved_in_bytes"] == result["planned_bytes"]
        assert result["moved_out_bytes"] + result["num_recomputed_ops"] > 0


@pytest.mark.parametrize("case", ["equal", "a slow rank", "a small rank"])
def test_all_ranks_have_the_same_plan_byte_for_byte(case: str, results: Results) -> None:
    first, second = results[case]
    assert first["plan"] == second["plan"]
    assert first["workload"] == second["workload"]


def test_a_slow_rank_makes_all_ranks_move_less(results: Results) -> None:
    """It alone would recompute, while the other one moved all."""
    for result, equal in zip(results["a slow rank"], results["equal"], strict=True):
        assert result["moved_out_bytes"] == 0 < equal["moved_out_bytes"]
        assert result["num_recomputed_ops"] > 0
    fast, slow = results["a slow rank, each for itself"]
    assert slow["moved_out_bytes"] == 0 < fast["moved_out_bytes"]


def test_a_small_rank_makes_all_ranks_frugal(results: Results) -> None:
    """The budget is half of the device, and one device is small."""
    first, second = results["a small rank"]
    assert first["device_bytes"] == second["device_bytes"] < 2**40
    assert first["peak_bytes"] == second["peak_bytes"] <= first["device_bytes"] // 2


def test_ranks_whose_batches_differ_plan_from_the_same_measurements(results: Results) -> None:
    first, second = results["uneven batches"]
    assert first["workload"] == second["workload"]
    assert first["peak_bytes"] < second["peak_bytes"]


def test_where_nothing_fits_all_ranks_say_so(results: Results) -> None:
    first, second = results["nothing fits"]
    assert first["error"] == second["error"] == "BudgetError"
    assert first["message"] == second["message"]
    assert "the smallest that fits is" in first["message"]


def test_ranks_that_are_asked_for_different_things_are_refused(results: Results) -> None:
    for result in results["other arguments"]:
        assert result["error"] == "RankError"
        assert "rank 1 was asked for budget=" in result["message"]
        assert "must attach with the same arguments" in result["message"]


def test_ranks_with_other_blocks_are_refused(results: Results) -> None:
    for result in results["other blocks"]:
        assert result["error"] == "PlanError"
        assert result["message"] == (
            "rank 1 observed other blocks or activations than rank 0: 39 activations in 4 blocks, "
            "not 29. Ranks can share a plan where they run the same blocks on the same branches: "
            "of a pipeline, the ranks of one stage."
        )


def test_a_rank_that_does_not_come_is_named(results: Results) -> None:
    waiting, absent = results["an absent rank"]
    assert waiting["error"] == "RankError"
    assert waiting["message"].startswith("rank 1 did not come within 2 s to where the 2 ranks of")
    assert absent["different"] == []


def test_ranks_of_a_node_share_the_disk_space_that_is_given(results: Results) -> None:
    for result in results["equal"]:
        assert result["store_cap_bytes"] == DISK_BYTES // 2
