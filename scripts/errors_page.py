"""Write docs/errors.md from the code: every error and warning, what it means and what to do.

    python3 scripts/errors_page.py docs/errors.md

The meaning of a class is its docstring in `ebbtide/errors.py`; what to do in each case stands in
the message itself, as it is in the code. `tests/test_errors_page.py` asserts that the page is up to
date.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.messages import (
    INTERNAL,
    WARNING,
    Message,
    find_messages,
    read_sources,
)

PACKAGE = Path(__file__).parents[1] / "src" / "ebbtide"

MEANINGS: Mapping[str, str] = {
    "StorageFreedError": (
        "A saved tensor's memory was freed from outside before backward. A `RuntimeError`."
    ),
    "RuntimeError": (
        "What torch itself would raise, in its words: a saved tensor was written to before "
        "backward. Torch's own check cannot see it under saved-tensor hooks, so ebbtide makes it."
    ),
    "TypeError": "An argument has the wrong type. Python's own class.",
    "ValueError": (
        "An argument, an option or a file that one names is wrong. Python's own class; the "
        "commands print the message and end with status 2."
    ),
    WARNING: (
        "Said through the logger `ebbtide`; those of `ebbtide.jax` are Python warnings. The run "
        "goes on, in the way that the message says. To see none of the former: "
        "`logging.getLogger('ebbtide').setLevel(logging.ERROR)`."
    ),
}
"""What the classes mean that are not in `ebbtide/errors.py`, and in which order they come."""

INTRO = """# Errors and warnings

<!-- Made by scripts/errors_page.py from the code: change the code, then `make docs`. -->

Every error and warning that ebbtide has, under the class to catch and the module that it comes
from. A word in braces stands for what the message shows in its place. What to do is the end of each
message. By symptom instead: [troubleshooting.md](troubleshooting.md).

All classes of ebbtide's own are under `EbbtideError`. A message that says "bug in ebbtide" comes
with an `AssertionError`, and is one: please report it. Commands end with status 1 after an error, 2
after misuse, and 3 where no plan fits.
"""


def write_page(sources: Mapping[str, str]) -> str:
    """Return the page for a package with these modules."""
    own = dict(own_errors(sources["ebbtide.errors"]))
    others = {
        name: ""
        for text in sources.values()
        if re.search(r"^class \w+Error\b", text, re.MULTILINE)
        for name, _ in own_errors(text)
        if name not in own and name not in INTERNAL
    }
    messages = find_messages(sources, frozenset({*own, *others}))
    by_kind = {kind: list(found) for kind, found in groupby(messages, lambda m: m.kind)}
    meanings = {**own, **others, **MEANINGS}
    missing = [kind for kind in by_kind if not meanings.get(kind)]
    if missing:
        raise SystemExit(f"scripts/errors_page.py: MEANINGS says nothing of {', '.join(missing)}")
    lines = [INTRO]
    for kind, meaning in meanings.items():
        found = by_kind.get(kind, [])
        if found or kind in own:
            title = "Warnings" if kind == WARNING else f"`{kind}`"
            lines += [f"## {title}", "", meaning, "", *_by_module(found)]
    return "\n".join(lines).rstrip() + "\n"


def own_errors(source: str) -> Iterator[tuple[str, str]]:
    """Yield each class of errors of a module with what its docstring says, arguments left out."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
            text = inspect.cleandoc(ast.get_docstring(node) or "").partition("\n\nArgs:")[0]
            yield node.name, text


def _by_module(messages: Iterable[Message]) -> Iterator[str]:
    for module, found in groupby(messages, lambda message: message.module):
        yield f"From `{module}`:"
        yield ""
        yield from (f"- {_as_code(message.text)}" for message in found)
        yield ""


def _as_code(text: str) -> str:
    line = " ".join(text.split())
    return f"`` {line} ``" if "`" in line else f"`{line}`"


def main() -> None:
    Path(sys.argv[1]).write_text(write_page(read_sources(PACKAGE)), encoding="utf-8")


if __name__ == "__main__":
    main()
