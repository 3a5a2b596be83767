"""Replicas under `DistributedDataParallel` train as without ebbtide, in every rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch.distributed.ddp import CASES
from tests.torch.distributed.ranks import (
    assert_plan_was_run,
    assert_trained_alike,
    by_case,
    run_ranks,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return by_case(run_ranks("ddp", tmp_path_factory.mktemp("ddp")))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_have_the_gradients_of_plain_replicas(
    case: Any, results: dict[tuple[str, str], list[dict[str, Any]]]
) -> None:
    num_micro_batches = 3 if case.name == "accumulation" else 1
    for plan in case.all_plans:
        assert_trained_alike(results[case.name, plan])
        assert_plan_was_run(results[case.name, plan], plan, num_micro_batches=num_micro_batches)
