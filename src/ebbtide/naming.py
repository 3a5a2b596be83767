"""Answers to a mistyped name: what the caller may have meant."""

from collections.abc import Iterable
from difflib import SequenceMatcher

MOST_SHOWN_CHARS = 100
"""A name that is longer is shown and compared by its start: messages are for people, and comparing
takes time that grows with the product of two lengths."""
MOST_NAME_CHARS = 80
"""Characters of a name that somebody else chose."""


def plain_name(text: str) -> str:
    """Return a name from a file as it may be kept: no control characters, and not endless."""
    cut = text[: MOST_NAME_CHARS + 1]
    shown = "".join(letter if letter.isprintable() else "?" for letter in cut)
    return shown if len(shown) <= MOST_NAME_CHARS else shown[: MOST_NAME_CHARS - 3] + "..."


def nearest(name: str, valid: Iterable[str]) -> list[str]:
    """List every valid name once, the most similar to `name` first.

    Case is ignored. Names that are equally similar come in alphabetical order,
    so the answer does not depend on the order of `valid`.
    """

    given = name[:MOST_SHOWN_CHARS].lower()

    def rank(candidate: str) -> tuple[float, str]:
        start = candidate[:MOST_SHOWN_CHARS].lower()
        matcher = SequenceMatcher(a=start, b=given, autojunk=False)
        return (-matcher.ratio(), candidate)

    return sorted(set(valid), key=rank)


def shorten(text: str) -> str:
    """Return the text for a message: a long one by its start."""
    return text if len(text) <= MOST_SHOWN_CHARS else f"{text[:MOST_SHOWN_CHARS]}..."


def unknown_name_message(kind: str, name: str, valid: Iterable[str]) -> str:
    """Say that `name` is not a known `kind`, and list the valid names, nearest first.

    Args:
        kind: What the name should have been, in the caller's terms: "planner".
        name: What was given.
        valid: The names that would have been accepted.
    """
    names = nearest(name, valid)
    name = shorten(name)
    if not names:
        return f"unknown {kind} {name!r}; there are no valid names"
    return f"unknown {kind} {name!r}; valid names, nearest first: {', '.join(names)}"
