"""Write docs/api.md from the docstrings, as griffe reads them: without importing anything.

    python3 scripts/api_page.py docs/api.md

`tests/test_api_page.py` asserts that the page is up to date.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

SOURCES = Path(__file__).parents[1] / "src"

PACKAGES = ("", "torch", "jax", "planner", "trace")
"""What these list in `__all__` is their interface; "" is `ebbtide` itself."""

MODULES = {
    "plan": ("Plan", "Decision"),
    "workload": ("Workload", "Outside"),
    "block": ("Block", "Activation", "BackwardEvent", "OpKind"),
    "machine": ("Machine",),
    "timeline": ("Timeline", "Span", "Lane"),
    "check": ("check_plan",),
    "simulate": ("simulate",),
    "sweep": ("sweep_budgets",),
    "catalog.machines": ("find_machine",),
    "integrations.transformers": ("EbbtideCallback",),
    "integrations.lightning": ("EbbtideCallback",),
    "integrations.maxtext": ("to_maxtext", "read_maxtext", "plan_of"),
}
"""What else is used by name, of the modules that it is in."""

INTRO = """# Python interface

<!-- Made by scripts/api_page.py from the docstrings: change these, then `make docs`. -->

What users import, by the module to import it from. What is not listed may change without notice.
Byte counts are whole bytes, times whole nanoseconds. The command line: [README.md](README.md).
"""


def write_page(sources: Path = SOURCES) -> str:
    """Return the page for the package in `sources`."""
    root = griffe.load(
        "ebbtide", search_paths=[sources], docstring_parser="google", allow_inspection=False
    )
    lines = [INTRO]
    for package in PACKAGES:
        module = root[package] if package else root
        names = [name for name in _listed(module) if not name.startswith("__")]
        lines += _module(module, names)
    for path, names in MODULES.items():
        lines += _module(root[path], names)
    return "\n".join(lines).rstrip() + "\n"


def _listed(module: griffe.Object | griffe.Alias) -> list[str]:
    return [str(name) for name in module.exports or ()]


def _module(
    module: griffe.Object | griffe.Alias, names: list[str] | tuple[str, ...]
) -> Iterator[str]:
    yield from (f"## `{module.path}`", "")
    yield from _text(module)
    for name in names:
        member = module[name]
        thing = member.final_target if isinstance(member, griffe.Alias) else member
        yield from _thing(name, thing)


def _thing(name: str, thing: griffe.Object) -> Iterator[str]:
    yield from (f"### `{name}`", "")
    if isinstance(thing, griffe.Function):
        yield from ("```python", thing.signature(), "```", "")
    yield from _text(thing)
    if not isinstance(thing, griffe.Class):
        return
    members = [m for m in thing.members.values() if not m.name.startswith("_") and m.docstring]
    fields = [m for m in members if isinstance(m, griffe.Attribute)]
    yield from (_field(member) for member in fields)
    yield from [""] if fields else []
    for member in members:
        if isinstance(member, griffe.Function):
            yield from (f"#### `{name}.{member.name}`", "")
            yield from ("```python", member.signature(), "```", "")
            yield from _text(member)


def _field(member: griffe.Attribute) -> str:
    shown = member.name
    if member.annotation is not None:
        shown += f": {member.annotation}"
    if member.value is not None and "=" not in str(member.value):
        shown += f" = {member.value}"
    text = member.docstring.value if member.docstring else ""
    return f"- `{shown}`: {_line(text)}"


def _text(thing: griffe.Object | griffe.Alias) -> Iterator[str]:
    """Yield what the docstring says, its sections as lists."""
    if thing.docstring is None:
        return
    for section in thing.docstring.parsed:
        match section:
            case griffe.DocstringSectionText():
                yield from (section.value.strip(), "")
            case griffe.DocstringSectionParameters():
                yield from ("Arguments:", "")
                yield from (f"- `{p.name}`: {_line(p.description)}" for p in section.value)
                yield ""
            case griffe.DocstringSectionAttributes():
                yield from ("Attributes:", "")
                yield from (f"- `{a.name}`: {_line(a.description)}" for a in section.value)
                yield ""
            case griffe.DocstringSectionReturns():
                yield from (f"Returns: {_line(r.description)}" for r in section.value)
                yield ""
            case griffe.DocstringSectionRaises():
                yield from ("Raises:", "")
                yield from (f"- `{r.annotation}`: {_line(r.description)}" for r in section.value)
                yield ""
            case _:
                raise SystemExit(f"{thing.path}: no form for a section {section.kind.value}")


def _line(text: str) -> str:
    return " ".join(text.split())


def main() -> None:
    Path(sys.argv[1]).write_text(write_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
