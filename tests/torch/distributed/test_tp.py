"""Models of DTensors train as without ebbtide: what is saved of them is moved and made again."""

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
    return by_case(run_ranks("tp", tmp_path_factory.mktemp("tp")))


@pytest.mark.parametrize(
    "case",
    ["products", "sequence", "products of gathered parameters", "written in place", "llama"],
)
def test_split_models_have_the_gradients_of_plain_split_models(case: str, results: Results) -> None:
    """Collectives run inside the blocks, and no recomputation runs one of them again."""
    plans = [plan for name, plan in results if name == case]
    assert plans
    for plan in plans:
        assert_trained_alike(results[case, plan])
        assert_plan_was_run(results[case, plan], plan)
        assert all(sum(result["collectives"]) > 0 for result in results[case, plan])


def test_a_write_to_a_saved_dtensor_raises_as_in_torch(results: Results) -> None:
    case = "written between forward and backward"
    for plan in ("plain", "recompute"):
        for result in results[case, plan]:
            assert "modified by an inplace operation" in result["message"]
