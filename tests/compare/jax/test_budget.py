"""Budgets that are told by what full rematerialisation takes."""

import pytest

from ebbtide.compare.jax.budget import check_jax_budget, describe_loss, is_relative, resolve_budget
from ebbtide.compare.results import Row, Status
from ebbtide.errors import BudgetError

BOTH = ("no-remat", "full-remat")
FULL_REMAT = Row(strategy="full-remat", status=Status.OK, peak_bytes=1000)


@pytest.mark.parametrize(
    ("budget", "num_bytes"),
    [
        ("full-remat", "1000"),
        ("full-remat+10%", "1100"),
        ("full-remat-2.5%", "975"),
        ("full-remat+0.05%", "1000"),
    ],
)
def test_it_is_so_much_of_what_that_row_took(budget: str, num_bytes: str) -> None:
    assert is_relative(budget)
    check_jax_budget(budget, BOTH)
    assert resolve_budget(budget, FULL_REMAT) == num_bytes


@pytest.mark.parametrize("budget", ["40GiB", "50%", "auto"])
def test_other_budgets_are_as_ever(budget: str) -> None:
    assert not is_relative(budget)
    check_jax_budget(budget, ())


@pytest.mark.parametrize("budget", ["full-remat+10", "full-remat*2", "no-remat+10%", "full-remat "])
def test_what_is_malformed_is_refused_with_its_text(budget: str) -> None:
    with pytest.raises(ValueError, match="--budget"):
        check_jax_budget(budget, BOTH)


def test_the_row_has_to_be_there() -> None:
    with pytest.raises(ValueError, match=r"--budget full-remat\+10% .* does not name; add it"):
        check_jax_budget("full-remat+10%", ("no-remat", "ebbtide"))


def test_the_row_has_to_have_finished() -> None:
    with pytest.raises(BudgetError, match="full-remat, which did not finish; give a size"):
        resolve_budget("full-remat", Row(strategy="full-remat", status=Status.OOM))


def a_row(*step_ms: int) -> Row:
    return Row(strategy="r", status=Status.OK, step_ns=tuple(ms * 1_000_000 for ms in step_ms))


def test_a_plan_that_is_slower_than_full_rematerialisation_says_so() -> None:
    assert describe_loss(a_row(500, 495, 480), a_row(490, 480, 470)) == (
        "the plan loses: 495.0 ms a step against 480.0 ms of full-remat; use full-remat at this "
        "shape, or give the plan a larger budget"
    )


@pytest.mark.parametrize("full_remat", [a_row(495), a_row(496), a_row(), None])
def test_a_plan_that_is_as_fast_or_has_nothing_beside_it_says_nothing(
    full_remat: Row | None,
) -> None:
    assert describe_loss(a_row(495), full_remat) == ""
    assert describe_loss(a_row(), full_remat) == ""
