"""docs/errors.md is what the code says, and the code's messages are found."""

from pathlib import Path

import pytest

from scripts.errors_page import PACKAGE, write_page
from scripts.messages import WARNING, Message, find_messages, read_sources

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"

SOURCE = """
RULE = "a rule"
LIMIT = 7

def word(kind, name):
    return f"unknown {kind} {name!r}"

def explain(self, error):
    if error:
        return ValueError(f"refused: {error.strerror}")
    return ValueError("refused for no reason" + f"; {RULE}")

def use(plan, table):
    raise PlanError(f"plan {plan.name!r} has {len(plan.decisions)}; {RULE} of {LIMIT}. " "Again.")
    raise PlanError(word("field", plan.name))
    text = "first text" if plan else f"second text of {table['key']}"
    raise PlanError(text)
    raise helper(plan)
    raise AssertionError("bug in ebbtide")
    log.warning("%s stays: %s", plan.path, text)
    log.info("nothing of this")
"""


def test_the_page_is_up_to_date() -> None:
    made = write_page(read_sources(PACKAGE))
    assert PAGE.read_text(encoding="utf-8") == made, "run: make docs"


def test_messages_are_found_with_what_they_are_made_of() -> None:
    found = find_messages({"a.b": SOURCE}, frozenset({"PlanError"}))
    expected = [
        ("PlanError", "first text"),
        ("PlanError", "plan {name} has {decisions}; a rule of 7. Again."),
        ("PlanError", "second text of {key}"),
        ("PlanError", "unknown field {name}"),
        ("ValueError", "refused for no reason; a rule"),
        ("ValueError", "refused: {strerror}"),
        (WARNING, "{path} stays: first text"),
        (WARNING, "{path} stays: second text of {key}"),
    ]
    assert found == [Message(kind=kind, module="a.b", text=text) for kind, text in expected]


@pytest.mark.parametrize(
    "message",
    [
        # A constant, a helper that makes an error, a helper of another module, and two texts.
        "`size {shown} is above {most_bytes} bytes, 8 EiB; a size is a number",
        "`{place}, since the disk or your quota is full ({reason});",
        "`unknown planner {planner}; valid names, nearest first: {names}`",
        "- `disk folder {folder} is on {file_system}, which is memory",
        "Install them with: pip install 'ebbtide[disk]'`",
    ],
)
def test_the_page_has_messages_of_each_kind(message: str) -> None:
    assert message in PAGE.read_text(encoding="utf-8")
