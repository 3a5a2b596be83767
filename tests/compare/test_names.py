import pytest

from ebbtide.compare.names import (
    DEFAULT_STRATEGIES,
    PEERS,
    is_ours,
    order_runs,
    parse_strategies,
    runs_compiled,
)


def test_canonical_names_are_kept_in_order() -> None:
    assert parse_strategies("trl, keep,ebbtide:balanced") == ("trl", "keep", "ebbtide:balanced")


def test_the_defaults_are_canonical() -> None:
    assert parse_strategies(",".join(DEFAULT_STRATEGIES)) == DEFAULT_STRATEGIES


def test_a_plan_needs_no_prefix_but_for_keep() -> None:
    assert parse_strategies("keep,recompute,offload-last:4,ebbtide:keep") == (
        "keep",
        "ebbtide:recompute",
        "ebbtide:offload-last:4",
        "ebbtide:keep",
    )


def test_a_mistyped_name_lists_the_valid_ones_nearest_first() -> None:
    with pytest.raises(ValueError) as caught:
        parse_strategies("keep,chekpoint")
    assert str(caught.value).startswith(
        "unknown strategy 'chekpoint'; valid names, nearest first: checkpoint, checkpoint-offload,"
    )
    assert all(name in str(caught.value) for name in (*PEERS, "ebbtide:offload-last:K"))


@pytest.mark.parametrize("name", ["offload-last:0", "ebbtide:offload-last:many", "offload-last"])
def test_a_malformed_block_count_says_the_rule(name: str) -> None:
    with pytest.raises(ValueError, match="whole number of 1 or more"):
        parse_strategies(name)


def test_families_of_peers_take_a_share_or_a_mode() -> None:
    listed = "compile-keep,compile-budget:0.50,compile-budget:0,torch-sac:op,torch-sac:02"
    assert parse_strategies(listed) == (
        *("compile-keep", "compile-budget:0.5", "compile-budget:0", "torch-sac:op", "torch-sac:2"),
    )


@pytest.mark.parametrize("name", ["compile-budget:1.5", "compile-budget:x", "compile-budget:nan"])
def test_a_share_is_from_0_to_1(name: str) -> None:
    with pytest.raises(ValueError, match=f"--strategies {name}: .* is no share of memory from 0"):
        parse_strategies(name)


@pytest.mark.parametrize("name", ["torch-sac:0", "torch-sac:", "torch-sac:all"])
def test_a_mode_is_op_or_a_number(name: str) -> None:
    with pytest.raises(ValueError, match=f"--strategies {name}: .* is neither op nor a whole"):
        parse_strategies(name)


def test_rows_that_run_compiled_are_known_by_name_or_by_flag() -> None:
    names = ("keep", "compile-keep", "compile-budget:0", "torch-sac:op")
    assert [runs_compiled(name, is_compiled=False) for name in names] == [False, True, True, False]
    assert all(runs_compiled(name, is_compiled=True) for name in names)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="names no strategy"):
        parse_strategies(" , ")


def test_one_strategy_makes_one_row() -> None:
    with pytest.raises(ValueError, match="names ebbtide:balanced twice"):
        parse_strategies("balanced,ebbtide:balanced")


def test_a_budget_adds_its_row_at_the_end_unless_it_is_named() -> None:
    assert parse_strategies("trl,keep", has_budget=True) == ("trl", "keep", "ebbtide")
    assert parse_strategies("ebbtide,keep", has_budget=True) == ("ebbtide", "keep")


def test_the_plan_for_a_budget_needs_one() -> None:
    with pytest.raises(ValueError, match=r"names ebbtide, which is the plan for a budget; give"):
        parse_strategies("keep,ebbtide")


def test_plans_of_ours_are_told_from_peers() -> None:
    assert is_ours("ebbtide") and is_ours("ebbtide:keep")
    assert not any(is_ours(name) for name in PEERS)


def test_what_can_be_the_reference_runs_first() -> None:
    names = ("trl", "checkpoint", "ebbtide:balanced", "keep")
    assert order_runs(names) == ("keep", "checkpoint", "trl", "ebbtide:balanced")
    assert order_runs(("trl", "save-on-cpu")) == ("trl", "save-on-cpu")
    assert order_runs(("compile-budget:0", "compile-keep")) == ("compile-keep", "compile-budget:0")
