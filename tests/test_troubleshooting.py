"""docs/troubleshooting.md quotes messages as the code has them, and the index has every page."""

import re
from pathlib import Path

import pytest

from scripts.errors_page import PACKAGE
from scripts.messages import find_messages, read_sources

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")

# Said by torch, or by a report, not as an error or a warning.
ELSEWHERE = ("compute waited", "moved out", "kept on the device", "one of the variables")


OWN = ("BudgetError", "MemoryTierError", "ModelError", "PlanError", "MissingExtraError")
MESSAGES = "\n".join(
    " ".join(message.text.split())
    for message in find_messages(read_sources(PACKAGE), frozenset(OWN))
)


def quotes() -> list[str]:
    """What stands in backticks in the first column of a table, and reads as a sentence."""
    found = re.findall(r"`([^`\n]+)`", "\n".join(re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE)))
    return [text for text in found if len(re.findall(r"\b[a-z]{2,}\b", text)) >= 3]


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_message_is_one_of_the_code(quote: str) -> None:
    if quote.startswith(ELSEWHERE):
        sources = "\n".join(read_sources(PACKAGE).values())
        assert any(start in sources for start in ELSEWHERE if quote.startswith(start))
        return
    parts = [re.escape(part) for part in re.split(r"\s*\.\.\.\s*|\b[NAB]\b", quote) if part]
    assert re.search(".*".join(parts), MESSAGES), quote


def test_some_messages_are_quoted() -> None:
    assert len(quotes()) > 20


def test_the_index_has_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text("utf-8")))
    assert listed == {path.name for path in DOCS.glob("*.md")} - {"README.md"}
