"""Sequence parallelism by exchanging heads for tokens: no exchange is run a second time."""

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
    return by_case(run_ranks("ulysses", tmp_path_factory.mktemp("ulysses")))


@pytest.mark.parametrize("case", ["functional collectives", "collectives of torch.distributed.nn"])
def test_exchanges_inside_blocks_are_never_run_again(case: str, results: Results) -> None:
    """Four in each of four blocks, forward and backward: 32 a step, under any plan."""
    plans = [plan for name, plan in results if name == case]
    assert len(plans) >= 2
    for plan in plans:
        assert_trained_alike(results[case, plan])
        assert_plan_was_run(results[case, plan], plan)
        assert all(set(result["collectives"]) == {32} for result in results[case, plan])
