"""The folders of a disk store in tests."""

from pathlib import Path

from ebbtide.units import DiskSpec


def in_folder(path: Path, cap_bytes: int) -> list[DiskSpec]:
    """Return one folder with its cap."""
    return [DiskSpec(path=str(path), cap_bytes=cap_bytes)]
