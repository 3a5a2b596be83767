"""Which flags the installed jaxlib knows: XLA ends the process at one that it does not.

Nothing lists them, and asking XLA costs the process. But each flag's name is a string of the
library, with a zero at its end, so it can be looked for in the file. Not seen is then not known,
and a name that is seen may still be something else's: the answer errs towards "known".
"""

import importlib.metadata
import importlib.util
import mmap
from collections.abc import Iterable
from pathlib import Path

# Only the libraries that hold XLA are so large; all else need not be read.
_LEAST_BYTES = 20 * 2**20


def find_xla_libraries() -> tuple[Path, ...]:
    """Return the files of the installed jaxlib and its GPU plugins that hold XLA; maybe none."""
    folders: list[str] = []
    for package in ("jaxlib", "jax_plugins"):
        spec = importlib.util.find_spec(package)
        folders += list(spec.submodule_search_locations or ()) if spec else []
    found = (path for folder in folders for path in sorted(Path(folder).rglob("*.so")))
    return tuple(path for path in found if path.stat().st_size >= _LEAST_BYTES)


def find_jaxlib_version() -> str | None:
    """Return the version of the installed jaxlib, or None; imports nothing."""
    try:
        return importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return None


def find_unknown_flags(names: Iterable[str], libraries: Iterable[Path]) -> tuple[str, ...]:
    """Return those names that one of the libraries does not have: each parses all flags.

    Args:
        names: Flags without dashes.
        libraries: From `find_xla_libraries`; none: nothing is unknown.
    """
    left = sorted(set(names))
    unknown: set[str] = set()
    for library in libraries:
        if not left:
            break
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            unknown.update(name for name in left if text.find(name.encode() + b"\0") < 0)
    return tuple(sorted(unknown))
