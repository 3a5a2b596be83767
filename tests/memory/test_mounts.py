from pathlib import Path

import pytest

from ebbtide.memory.mounts import find_file_system, is_memory_backed, warning_for

TABLE = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 21 0:26 / {root}/mem rw shared:2 - tmpfs tmpfs rw
31 21 0:27 / {root}/me rw - nfs4 server:/x rw
32 21 0:28 / {root}/with\\040space rw - cifs //server/x rw
33 21 0:29 / {root}/twice rw - ext4 /dev/vdb rw
34 33 0:30 / {root}/twice rw - tmpfs tmpfs rw
not a mount
35 21 0:31 / {root}/cut
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE.format(root=tmp_path))
    for name in ("mem/deep", "memory", "me", "with space", "twice", "cut"):
        (tmp_path / name).mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("mem", "tmpfs"),
        ("mem/deep", "tmpfs"),
        ("memory", "ext4"),  # begins like a mount, and is none
        ("me", "nfs4"),
        ("with space", "cifs"),
        ("twice", "tmpfs"),  # the later mount hides the earlier
        ("cut", "ext4"),
    ],
)
def test_the_innermost_mount_says_what_a_folder_lies_on(
    tmp_path: Path, table: Path, folder: str, kind: str
) -> None:
    assert find_file_system(tmp_path / folder, table) == kind


def test_a_link_is_followed(tmp_path: Path, table: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "mem")
    assert find_file_system(tmp_path / "link", table) == "tmpfs"


def test_without_a_table_nothing_is_known(tmp_path: Path) -> None:
    assert find_file_system(tmp_path, tmp_path / "missing") == ""


def test_a_folder_below_a_file_system_in_memory_takes_memory(tmp_path: Path, table: Path) -> None:
    assert is_memory_backed(tmp_path / "mem" / "not yet there", table)
    assert not is_memory_backed(tmp_path / "memory", table)
    assert not is_memory_backed(tmp_path, tmp_path / "missing")


def test_memory_and_networks_are_warned_of() -> None:
    assert warning_for("/x", "ext4") == warning_for("/x", "") == ""
    assert warning_for("/x", "tmpfs") == (
        "disk folder '/x' is on tmpfs, which is memory: what is evicted there takes the host's "
        "memory. Name a folder on a disk."
    )
    assert warning_for("/x", "nfs4") == (
        "disk folder '/x' is on nfs4, a file system over a network: it may be slow, and others "
        "share it. Name a folder on a disk of this machine."
    )
