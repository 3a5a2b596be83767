"""The versions of Python and of other packages that ebbtide was tried with: one place says which.

`docs/versions.md` has the same as a table. Another version may do; a warning says once that nobody
has tried.
"""

import logging
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

log = logging.getLogger("ebbtide")

Release = tuple[int, int]
"""The first two numbers of a version: those that promise something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supported:
    """From which release to which a package was tried."""

    oldest: Release
    newest: Release


PYTHON = "Python"

SUPPORTED: Mapping[str, Supported] = MappingProxyType(
    {
        PYTHON: Supported(oldest=(3, 11), newest=(3, 12)),
        "torch": Supported(oldest=(2, 11), newest=(2, 13)),
        "jax": Supported(oldest=(0, 10), newest=(0, 11)),
        "transformers": Supported(oldest=(5, 17), newest=(5, 24)),
    }
)
"""By the name that the message shows; read-only."""


@cache
def warn_if_untried(package: str, version: str) -> None:
    """Warn, once for each version, if it is newer or older than those that were tried.

    Args:
        package: One of `SUPPORTED`.
        version: As the package gives it: "2.14.0a0+git1234". One without two numbers says nothing.
    """
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    if numbers is None:
        return
    release = int(numbers[1]), int(numbers[2])
    known = SUPPORTED[package]
    if known.oldest <= release <= known.newest:
        return
    log.warning(
        "%s %s was not tried with this ebbtide: %s to %s were. If something fails, install one of "
        "those; ebbtide's verify says whether gradients are right.",
        package,
        version,
        _shown(known.oldest),
        _shown(known.newest),
    )


def check_versions(package: str, version: str) -> None:
    """Warn of the Python that runs and of the package, each once."""
    warn_if_untried(PYTHON, platform.python_version())
    warn_if_untried(package, version)


def _shown(release: Release) -> str:
    return f"{release[0]}.{release[1]}"
