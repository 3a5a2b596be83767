"""What commands print, of names too that somebody else chose, and the files that they write."""

import re
from collections.abc import Callable
from pathlib import Path

import typer

# Control characters, those of 8 bits too, can move the cursor, write over lines and set titles;
# marks of direction show letters in another order; half of a surrogate pair has no encoding.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with what is no letter for a terminal as an escape, such as `\\x1b`."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def echo(text: str, *, err: bool = False) -> None:
    """Print a line, of which names can neither steer the terminal nor stop the program."""
    typer.echo(printable(text), err=err)


def write_file(option: str, path: Path, write: Callable[[], object]) -> None:
    """Write a file that the user asked for with `option`.

    Raises:
        ValueError: It cannot be written.
    """
    try:
        write()
    except OSError as error:
        raise ValueError(
            f"{option} {path}: the file cannot be written ({error.strerror}); name another"
        ) from error
