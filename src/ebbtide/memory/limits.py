"""How much host memory may be pinned before the kernel has to kill somebody.

Pinned pages cannot be swapped or dropped, and Linux promises pages that it does not have: who
asks for too many gets no error, but is killed when the pages are touched. So what is left is
read beforehand, of the machine and of every control group around the process.

RLIMIT_MEMLOCK is not among these limits. NVIDIA's driver pins pages without charging it, and it
is 8 MiB on most machines where gigabytes are pinned every day; it is named where a driver refuses.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from ebbtide.units import format_bytes

RESERVE_SHARE = Fraction(1, 16)
"""Of what is free; not pinned, since the step itself and other programs go on to need some."""

# A control group of version 1 without a limit has a number near 2**63, by its page size.
_NO_LIMIT_BYTES = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimit:
    """One limit on host memory, and what it leaves."""

    text: str
    """Its name and value, for people."""
    room_bytes: int
    """What may be pinned under it, a reserve taken off."""
    advice: str
    """How to raise it: half a sentence."""
    is_of_group: bool = False
    """Of a control group around the process, and not of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What `ulimit` says; None: no limit, or a system without such limits."""

    memlock_bytes: int | None = None
    """RLIMIT_MEMLOCK, `ulimit -l`."""
    address_bytes: int | None = None
    """RLIMIT_AS, `ulimit -v`."""


def find_tightest_limit(root: Path = Path("/")) -> HostLimit | None:
    """Return the limit that leaves least; None where the system tells of none.

    Args:
        root: The folder that holds `proc` and `sys`.
    """
    limits = [*_machine_limits(root), *_group_limits(root)]
    return min(limits, key=lambda limit: limit.room_bytes, default=None)


def read_process_limits() -> ProcessLimits:
    """Return the limits of this process that pinning or mapping may meet."""
    if sys.platform == "win32":
        return ProcessLimits()
    import resource

    def soft(kind: int) -> int | None:
        value = resource.getrlimit(kind)[0]
        return None if value == resource.RLIM_INFINITY else value

    return ProcessLimits(
        memlock_bytes=soft(resource.RLIMIT_MEMLOCK), address_bytes=soft(resource.RLIMIT_AS)
    )


def _less_reserve(free_bytes: int) -> int:
    return max(0, free_bytes - int(free_bytes * RESERVE_SHARE))


def _machine_limits(root: Path) -> Iterator[HostLimit]:
    kib = _read_table(root / "proc/meminfo").get("MemAvailable")
    if kib is not None:
        yield HostLimit(
            text=f"MemAvailable in /proc/meminfo is {format_bytes(kib * 1024)}",
            room_bytes=_less_reserve(kib * 1024),
            advice="Free memory of the host",
        )


def _group_limits(root: Path) -> Iterator[HostLimit]:
    """Read every control group that the process is in, up to the topmost that can be seen."""
    for line in _read_lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            top = root / "sys/fs/cgroup"
            for folder in _folders_up(top, path):
                for name in ("memory.max", "memory.high"):
                    yield from _limit_of(
                        folder / name,
                        folder / "memory.current",
                        folder / "memory.stat",
                        ("inactive_file", "active_file"),
                        root,
                    )
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            for folder in _folders_up(top, path):
                yield from _limit_of(
                    folder / "memory.limit_in_bytes",
                    folder / "memory.usage_in_bytes",
                    folder / "memory.stat",
                    ("total_inactive_file", "total_active_file"),
                    root,
                )


def _folders_up(top: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part]
    # Seen from a container, its own group may lie above the topmost folder that is mounted.
    parts = [] if ".." in parts else parts
    for length in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:length])


def _limit_of(
    limit: Path, used: Path, statistics: Path, cached: tuple[str, str], root: Path
) -> Iterator[HostLimit]:
    limit_bytes, used_bytes = _read_number(limit), _read_number(used)
    if limit_bytes is None or used_bytes is None or limit_bytes >= _NO_LIMIT_BYTES:
        return
    # Pages of files are counted as used, and are dropped before anybody is killed.
    table = _read_table(statistics)
    cached_bytes = min(used_bytes, sum(table.get(name, 0) for name in cached))
    held_bytes = used_bytes - cached_bytes
    yield HostLimit(
        text=(
            f"{limit.name} of the control group, /{limit.relative_to(root)}, is "
            f"{format_bytes(limit_bytes)}, of which {format_bytes(held_bytes)} is in use"
        ),
        room_bytes=_less_reserve(max(0, limit_bytes - held_bytes)),
        advice=(
            "Raise the container's memory limit (`docker run --memory`, `resources.limits.memory` "
            "in Kubernetes, `--mem` in Slurm)"
        ),
        is_of_group=True,
    )


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None where there is none, as in `max`."""
    words = " ".join(_read_lines(path)).split()
    return int(words[0]) if words and words[0].isdecimal() else None


def _read_table(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines such as `name 123` or `Name: 123 kB`."""
    rows = [line.split() for line in _read_lines(path)]
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
