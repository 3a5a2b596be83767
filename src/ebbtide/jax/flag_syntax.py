"""Read `XLA_FLAGS` as XLA does, with what it ignores and what it dies of.

The rules are those of `xla/parse_flags_from_env.cc` and `tsl/util/command_line_flags.cc` in
openxla/xla:

- A value whose first letter other than white space is not `-` is the name of a file with flags.
- A flag's name ends at the first letter that is none of `-`, `_`, letters and digits. After `=` a
  quote begins a value that ends at the next such quote, or at the end; in double quotes a
  backslash takes the next letter as it is. Without a quote a flag ends at white space.
- Reading stops without a word at the first thing that does not start with `-`.
- Later flags overwrite earlier ones. A flag without `=` is true if it is a truth value, and
  unknown otherwise. Unknown flags, and those with one `-`, end the process.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

_SPACE = " \t\r\n"
_NAME = re.compile(r"[-_A-Za-z0-9]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One flag as XLA sees it."""

    name: str
    """Without `--`; with its dash, if it has one only."""
    value: str | None
    """What follows `=`, without quotes; None: there is no `=`."""

    @property
    def is_true(self) -> bool:
        """Whether XLA reads it as true, if the flag is a truth value."""
        return self.value is None or self.value.lower() in ("true", "1")

    def __str__(self) -> str:
        name = self.name if self.name.startswith("-") else f"--{self.name}"
        return name if self.value is None else f"{name}={self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedFlags:
    """What XLA makes of a value of `XLA_FLAGS`."""

    arguments: tuple[Argument, ...] = ()
    """In their order; the last of a name counts."""
    ignored: str = ""
    """What XLA never looks at, since it does not start with `-`."""
    missing_file: str = ""
    """The file that was named and cannot be read."""

    def last(self, name: str) -> Argument | None:
        """Return the flag of this name that counts, or None."""
        return next((a for a in reversed(self.arguments) if a.name == name), None)


def parse_xla_flags(text: str, read_file: Callable[[str], str | None]) -> ParsedFlags:
    """Read a value of `XLA_FLAGS`.

    Args:
        text: The variable's value.
        read_file: Returns the text of the file that the value may name, or None if there is none.
    """
    if not text:
        return ParsedFlags()
    # XLA looks at the first letter after the white space, if there is one at all.
    if not text.lstrip(_SPACE).startswith("-"):
        content = read_file(text)
        return ParsedFlags(missing_file=text) if content is None else _parse(content)
    return _parse(text)


def _parse(text: str) -> ParsedFlags:
    arguments: list[Argument] = []
    begin = _skip_space(text, 0)
    while begin < len(text) and text[begin] == "-":
        name = _NAME.match(text, begin)
        assert name is not None, "the pattern matches nothing as well: a bug in ebbtide"
        end = name.end()
        if text[end : end + 1] == "=" and text[end + 1 : end + 2] in ("'", '"'):
            value, end = _quoted(text, end + 1)
            arguments.append(_argument(f"{name[0]}={value}"))
        else:
            while end < len(text) and text[end] not in _SPACE:
                end += 1
            arguments.append(_argument(text[begin:end]))
        begin = _skip_space(text, end)
    return ParsedFlags(arguments=tuple(arguments), ignored=text[begin:])


def _skip_space(text: str, begin: int) -> int:
    while begin < len(text) and text[begin] in _SPACE:
        begin += 1
    return begin


def _quoted(text: str, begin: int) -> tuple[str, int]:
    """Return the value in the quotes that open at `begin`, and where what follows it begins."""
    quote, end = text[begin], begin + 1
    letters: list[str] = []
    while end < len(text) and text[end] != quote:
        if quote == '"' and text[end] == "\\" and end + 1 < len(text):
            end += 1
        letters.append(text[end])
        end += 1
    return "".join(letters), end + 1


def _argument(text: str) -> Argument:
    name, mark, value = text.partition("=")
    return Argument(name=name[2:] if name.startswith("--") else name, value=value if mark else None)
