"""Rows of a comparison in JAX: their names, and which flags each has."""

import pytest

from ebbtide.compare.jax.names import (
    BY_HAND,
    DEFAULT_STRATEGIES,
    flag_set_of,
    is_ours,
    order_runs,
    parse_strategies,
)
from ebbtide.integrations.maxtext_names import OFFLOADING, SAVING


def test_maxtexts_presets_are_as_maxtext_has_them() -> None:
    assert BY_HAND["minimal"].saved == SAVING["minimal"]
    assert BY_HAND["minimal_offloaded"].offloaded == OFFLOADING["minimal_offloaded"]
    assert BY_HAND["qkv_proj_offloaded"].offloaded == OFFLOADING["qkv_proj_offloaded"]


def test_the_defaults_are_valid() -> None:
    listed = ",".join(DEFAULT_STRATEGIES)
    assert parse_strategies(listed, has_budget=False) == DEFAULT_STRATEGIES
    assert parse_strategies(listed, has_budget=True) == (*DEFAULT_STRATEGIES, "ebbtide")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("no-remat", "lhs"),
        ("full-remat", "lhs"),
        ("minimal", "lhs"),
        ("minimal_offloaded", "overlap"),
        ("offload", "overlap"),
        ("ebbtide", "overlap"),
        ("offload@none", "none"),
        ("ebbtide@pipelined", "pipelined"),
    ],
)
def test_each_policy_has_the_flags_it_runs_best_with(name: str, flags: str) -> None:
    assert flag_set_of(name) == flags


def test_a_budget_adds_the_plan_unless_it_is_named() -> None:
    names = parse_strategies("ebbtide@lhs, no-remat", has_budget=True)
    assert names == ("ebbtide@lhs", "no-remat")
    assert [is_ours(name) for name in names] == [True, False]


def test_references_run_first() -> None:
    assert order_runs(("offload", "full-remat", "no-remat")) == (
        *("no-remat", "full-remat", "offload"),
    )


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (" , ", "names no strategy"),
        ("minimal_ofloaded", "minimal_offloaded"),
        ("offload@lsh", "flag set .*lhs"),
        ("offload,offload", "names offload twice"),
        ("ebbtide", "give one, such as --budget 40GiB"),
        ("keep", "unknown strategy of jax|no strategy of jax|strategy of jax"),
    ],
)
def test_a_wrong_list_is_refused(listed: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_strategies(listed, has_budget=False)
