"""What a folder lies on, as far as it makes a bad place for activations."""

import os
from collections.abc import Iterator
from pathlib import Path

MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
NETWORK_TYPES = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.sshfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "smb3",
        "virtiofs",
    }
)

MOUNTS_PATH = Path("/proc/self/mountinfo")


def find_file_system(folder: str | os.PathLike[str], mounts_path: Path = MOUNTS_PATH) -> str:
    """Return the type of the file system that holds `folder`, such as "ext4"; "" if unknown.

    Args:
        folder: A folder that exists.
        mounts_path: The table of mounts, in the form of Linux's `/proc/self/mountinfo`.
    """
    try:
        table = mounts_path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
    real = os.path.realpath(folder)
    best, kind = "", ""
    for point, name in _mounts(table):
        inside = point == "/" or real == point or real.startswith(f"{point}/")
        # The later of two mounts on one point hides the earlier.
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind


def is_memory_backed(folder: str | os.PathLike[str], mounts_path: Path = MOUNTS_PATH) -> bool:
    """Whether files under `folder` take memory instead of disk; False if that is unknown."""
    return find_file_system(folder, mounts_path) in MEMORY_TYPES


def warning_for(folder: str | os.PathLike[str], file_system: str) -> str:
    """Return what speaks against evicting to `folder`; "" if nothing does."""
    place = f"disk folder {str(folder)!r} is on {file_system}"
    if file_system in MEMORY_TYPES:
        return (
            f"{place}, which is memory: what is evicted there takes the host's memory. "
            "Name a folder on a disk."
        )
    if file_system in NETWORK_TYPES:
        return (
            f"{place}, a file system over a network: it may be slow, and others share it. "
            "Name a folder on a disk of this machine."
        )
    return ""


def _mounts(table: str) -> Iterator[tuple[str, str]]:
    for line in table.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if dash and len(fields) > 4 and after:
            yield _unescaped(fields[4]), after.split(" ")[0]


def _unescaped(text: str) -> str:
    """Undo the octal escapes that the kernel writes for spaces, tabs, newlines and backslashes."""
    for escape, letter in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        text = text.replace(escape, letter)
    return text
