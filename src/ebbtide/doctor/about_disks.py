"""Findings about folders to evict to."""

from collections.abc import Iterator
from typing import Final

from ebbtide.doctor.facts import Disk
from ebbtide.doctor.finding import Code, Finding, Severity
from ebbtide.memory.mounts import MEMORY_TYPES, NETWORK_TYPES, warning_for
from ebbtide.units import format_bytes

SLOW_BYTES_PER_S: Final = 500_000_000
"""What a SATA disk gives. NVMe disks are advertised with 3 GB/s and more; a virtual one that was
measured beside an H200 wrote 3.3 and read 1.4."""


def find_about_disk(disk: Disk) -> Iterator[Finding]:
    """Yield what speaks against evicting to a folder."""
    if disk.file_system in MEMORY_TYPES or disk.file_system in NETWORK_TYPES:
        is_memory = disk.file_system in MEMORY_TYPES
        evidence, _, advice = warning_for(disk.path, disk.file_system).partition(". ")
        yield Finding(
            code=Code.MEMORY_FOLDER if is_memory else Code.NETWORK_FOLDER,
            severity=Severity.SERIOUS,
            what=f"{disk.path} is {'memory' if is_memory else 'on a network'}, not a disk",
            evidence=evidence,
            advice=advice,
        )
    if disk.error:
        yield Finding(
            code=Code.UNUSABLE_DISK,
            severity=Severity.SERIOUS,
            what=f"{disk.path} could not be measured",
            evidence=disk.error.rstrip("."),
            advice="Name a folder that exists, that you may write to, and that answers.",
        )
    if disk.cap_bytes is not None and disk.free_bytes is not None:
        yield from _full(disk, disk.cap_bytes, disk.free_bytes)
    if disk.is_direct is False:
        yield Finding(
            code=Code.CACHED_FOLDER,
            severity=Severity.NOTE,
            what=f"{disk.path} takes no direct requests (O_DIRECT)",
            evidence=f"a direct write was refused on {disk.file_system or 'this file system'}",
            advice=(
                "Copies go through the page cache, which holds them in memory as long as some is "
                "free. Name a folder on ext4 or XFS, say."
            ),
        )
    if disk.file_system not in MEMORY_TYPES:
        yield from _slow(disk)


def _full(disk: Disk, cap_bytes: int, free_bytes: int) -> Iterator[Finding]:
    if free_bytes < cap_bytes:
        yield Finding(
            code=Code.FULL_DISK,
            severity=Severity.SERIOUS,
            what=f"{disk.path} has less room than was asked for",
            evidence=f"{format_bytes(free_bytes)} are free, and the cap is "
            f"{format_bytes(cap_bytes)}",
            advice="Free some, or lower the cap: a plan's space is taken before its first step.",
        )


def _slow(disk: Disk) -> Iterator[Finding]:
    rates = {"written": disk.write_bytes_per_s, "read": disk.read_bytes_per_s}
    slow = [
        f"{done} at {rate / 1e9:.2f} GB/s"
        for done, rate in rates.items()
        if rate is not None and rate < SLOW_BYTES_PER_S
    ]
    if slow:
        yield Finding(
            code=Code.SLOW_DISK,
            severity=Severity.SERIOUS,
            what=f"{disk.path} is slow for activations",
            evidence=f"64 MiB were {' and '.join(slow)}",
            advice=(
                "Name a folder on an NVMe disk, or several on several disks; with host memory to "
                "spare, plan without a disk."
            ),
        )
