"""Engines of DeepSpeed train as without ebbtide, and parameters are freed as without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch.distributed.ranks import (
    assert_plan_was_run,
    assert_trained_alike,
    by_case,
    run_ranks,
)

pytest.importorskip("deepspeed")

pytestmark = pytest.mark.slow

Results = dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return by_case(run_ranks("zero", tmp_path_factory.mktemp("zero")))


@pytest.mark.parametrize("case", ["stage 2", "stage 3", "stage 3, gathered ahead"])
@pytest.mark.parametrize("plan", ["recompute", "balanced"])
def test_engines_have_the_gradients_of_plain_engines(
    case: str, plan: str, results: Results
) -> None:
    assert_trained_alike(results[case, plan])
    assert_plan_was_run(results[case, plan], plan)
    assert all(sum(result["collectives"]) > 0 for result in results[case, plan])


@pytest.mark.parametrize("plan", ["recompute", "balanced"])
def test_gathered_parameters_are_freed_as_without_ebbtide(plan: str, results: Results) -> None:
    for result in results["stage 3", plan]:
        assert result["left"] == result["wanted_left"] == [0, 0, 0, 0]
    for result in results["stage 3, gathered ahead", plan]:
        assert result["left"] == result["wanted_left"]
