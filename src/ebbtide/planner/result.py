"""What a planner answers: a plan, or why there is none."""

import enum
from dataclasses import dataclass

from ebbtide.plan import Plan


class UnsolvedError(Exception):
    """A solver cannot say what the optimum is, nor that there is none."""


@enum.unique
class Code(enum.Enum):
    """How planning ended."""

    FOUND = "found"
    """A plan keeps to the budget."""
    EVERYTHING_FITS = "everything fits"
    """No activation has to leave: the plan keeps all."""
    NOTHING_FITS = "nothing fits"
    """No plan keeps to the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer to "plan this workload for that budget"."""

    code: Code
    """How it ended."""
    plan: Plan | None
    """The plan; None if nothing fits."""
    smallest_budget_bytes: int
    """The smallest budget that some plan of this planner keeps to; 0 if that was not asked."""
    message: str
    """One sentence for people, with the largest holders at the peak if nothing fits."""
    planner: str
    """Who planned; another than asked where the solver was missing or too slow."""
