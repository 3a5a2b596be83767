"""docs/api.md is what the docstrings say."""

import re
from pathlib import Path

import pytest

import ebbtide

pytest.importorskip("griffe", reason="comes with the extra dev")

from scripts.api_page import write_page

PAGE = Path(__file__).parents[1] / "docs" / "api.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == write_page(), "run: make docs"


def test_every_public_name_is_on_the_page() -> None:
    names = set(re.findall(r"^### `(\w+)`$", PAGE.read_text("utf-8"), re.MULTILINE))
    public = {name for name in ebbtide.__all__ if not name.startswith("__")}
    assert public | {"attach", "Tide", "plan_for", "Plan", "read_trace"} <= names
