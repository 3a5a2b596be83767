"""A budget that is told by another row: what full rematerialisation takes, or so much more of it.

That row's peak is not known before it ran, and it is what a plan is judged by.
"""

from __future__ import annotations

import re
from fractions import Fraction

from ebbtide.compare.jax.names import FULL_REMAT
from ebbtide.compare.request import check_budget
from ebbtide.compare.results import Row, Status, take_median
from ebbtide.errors import BudgetError

_RELATIVE = re.compile(rf"{FULL_REMAT}(?:(?P<change>[+-][0-9]{{1,3}}(?:\.[0-9]{{1,3}})?)%)?")


def is_relative(budget: str) -> bool:
    """Whether a budget is told by the row `full-remat`: `full-remat`, `full-remat+10%`."""
    return _RELATIVE.fullmatch(budget) is not None


def check_jax_budget(budget: str, strategies: tuple[str, ...]) -> None:
    """Raise for a budget that no device could give a meaning to.

    Args:
        budget: `--budget`.
        strategies: The rows that will run.

    Raises:
        ValueError: It is malformed, or told by a row that is not among the strategies.
    """
    if not is_relative(budget):
        check_budget(budget)
    elif FULL_REMAT not in strategies:
        raise ValueError(
            f"--budget {budget} is told by the row {FULL_REMAT}, which --strategies does not name; "
            "add it, or give a size such as 40GiB"
        )


def describe_loss(row: Row, full_remat: Row | None) -> str:
    """Say that a plan's step is slower than full rematerialisation's; empty if it is not.

    Only where both were timed: a plan's times are predicted, and may be wrong.
    """
    ours = take_median(row.step_ns)
    theirs = None if full_remat is None else take_median(full_remat.step_ns)
    if ours is None or theirs is None or ours <= theirs:
        return ""
    return (
        f"the plan loses: {ours / 1e6:.1f} ms a step against {theirs / 1e6:.1f} ms of "
        f"{FULL_REMAT}; use {FULL_REMAT} at this shape, or give the plan a larger budget"
    )


def resolve_budget(budget: str, full_remat: Row) -> str:
    """Return the bytes that a relative budget means.

    Args:
        budget: One that `is_relative`.
        full_remat: That row.

    Raises:
        BudgetError: The row did not finish.
    """
    if full_remat.status is not Status.OK or full_remat.peak_bytes is None:
        raise BudgetError(
            f"the budget {budget} is told by the row {FULL_REMAT}, which did not finish; give a "
            "size such as 40GiB"
        )
    found = _RELATIVE.fullmatch(budget)
    assert found is not None, "bug in ebbtide: a budget that is not relative"
    return str(int(full_remat.peak_bytes * (1 + Fraction(found["change"] or 0) / 100)))
