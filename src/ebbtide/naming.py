"""Answers to a mistyped name: what the caller may have meant."""

from collections.abc import Iterable
from difflib import SequenceMatcher


def nearest(name: str, valid: Iterable[str]) -> list[str]:
    """List every valid name once, the most similar to `name` first.

    Case is ignored. Names that are equally similar come in alphabetical order,
    so the answer does not depend on the order of `valid`.
    """

    def rank(candidate: str) -> tuple[float, str]:
        matcher = SequenceMatcher(a=candidate.lower(), b=name.lower(), autojunk=False)
        return (-matcher.ratio(), candidate)

    return sorted(set(valid), key=rank)


def unknown_name_message(kind: str, name: str, valid: Iterable[str]) -> str:
    """Say that `name` is not a known `kind`, and list the valid names, nearest first.

    Args:
        kind: What the name should have been, in the caller's terms: "planner".
        name: What was given.
        valid: The names that would have been accepted.
    """
    names = nearest(name, valid)
    if not names:
        return f"unknown {kind} {name!r}; there are no valid names"
    return f"unknown {kind} {name!r}; valid names, nearest first: {', '.join(names)}"
