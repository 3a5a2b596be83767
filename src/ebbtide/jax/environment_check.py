"""Check the flags and variables of an environment against the jaxlib that is installed in it."""

from collections.abc import Mapping
from dataclasses import dataclass

from ebbtide.jax.flag_check import FlagFinding, check_flags
from ebbtide.jax.known_flags import find_jaxlib_version, find_unknown_flags, find_xla_libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCheck:
    """What was found, and in which release's terms."""

    jaxlib_version: str | None
    """None: not installed."""
    findings: tuple[FlagFinding, ...]
    """The serious ones first."""


def check_environment(environ: Mapping[str, str], *, is_scanned: bool) -> EnvironmentCheck:
    """Find what is wrong with an environment for any step that offloads on a GPU.

    Args:
        environ: The variables, such as `os.environ`.
        is_scanned: Whether layers are a `scan`; unrolled ones need fewer flags.
    """
    version, libraries = find_jaxlib_version(), find_xla_libraries()
    findings = check_flags(
        environ,
        version,
        is_scanned=is_scanned,
        find_unknown=lambda names: find_unknown_flags(names, libraries),
    )
    return EnvironmentCheck(jaxlib_version=version, findings=findings)
