"""Tricks with the way to a disk folder: what is refused, and what is followed."""

import errno
import os
import stat
from pathlib import Path

import pytest

from ebbtide.errors import MemoryTierError
from ebbtide.memory.disk import DiskStore
from ebbtide.memory.file_calls import SystemFileCalls
from ebbtide.memory.folders import check_folder
from ebbtide.units import DiskSpec

OTHER_USER = 54321


def status(kind: int, mode: int = 0o755, owner: int = 0) -> os.stat_result:
    return os.stat_result((kind | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))


FOLDER, LINK, FILE = status(stat.S_IFDIR), status(stat.S_IFLNK, 0o777), status(stat.S_IFREG)


def refusal(folder: str, places: dict[str, os.stat_result | str]) -> str:
    """Return why a folder is refused on a system with these places; links are where they lead."""

    def status_of(path: str) -> os.stat_result:
        found = places.get(path, FOLDER if path == "/" else None)
        if found is None:
            raise FileNotFoundError(path)
        return LINK if isinstance(found, str) else found

    def read_link(path: str) -> str:
        found = places[path]
        assert isinstance(found, str)
        return found

    try:
        check_folder(Path(folder), status_of=status_of, read_link=read_link)
    except MemoryTierError as error:
        return str(error)
    return ""


def test_links_of_root_are_followed_wherever_they_lead() -> None:
    places: dict[str, os.stat_result | str] = {
        "/scratch": "mnt/../nvme",
        "/mnt": FOLDER,
        "/nvme": FOLDER,
        "/nvme/me": "/disk",
        "/disk": FOLDER,
    }
    assert refusal("/scratch", places) == ""
    assert refusal("/scratch/me", places) == ""


def test_a_link_of_another_user_is_refused() -> None:
    their = status(stat.S_IFLNK, 0o777, OTHER_USER)
    text = refusal("/tmp/scratch/a", {"/tmp": status(stat.S_IFDIR, 0o1777), "/tmp/scratch": their})
    assert text == (
        "disk folder '/tmp/scratch/a': '/tmp/scratch' is a symbolic link that user 54321 made, and "
        "so can lead elsewhere at any time. Name the folder that you mean, for example "
        "'/tmp/scratch/a'."
    )


def test_a_link_of_ones_own_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    check_folder(tmp_path / "link")


def test_links_in_a_circle_and_to_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    (tmp_path / "lost").symlink_to("nowhere")
    with pytest.raises(MemoryTierError, match="leads from link to link for ever"):
        check_folder(tmp_path / "one")
    with pytest.raises(MemoryTierError, match="does not exist"):
        check_folder(tmp_path / "lost")


@pytest.mark.parametrize("name", ["", "a"], ids=["itself", "parent"])
def test_a_folder_open_to_all_is_warned_of_unless_it_is_sticky(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "open" / "a").mkdir(parents=True)
    opened = tmp_path / "open"
    opened.chmod(0o777)
    check_folder(opened / name)
    assert [record.getMessage() for record in caplog.records] == [
        f"disk folder '{opened / name}': everybody may write to '{opened}' and replace what is in "
        "it, since its sticky bit is not set. Where others use this machine, set it "
        f"(chmod +t {opened}), or name a folder that is yours."
    ]
    caplog.clear()
    opened.chmod(0o1777)
    check_folder(opened / name)
    assert caplog.records == []


def test_dots_are_refused_with_where_they_lead(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(MemoryTierError) as caught:
        check_folder(tmp_path / "a" / ".." / "a")
    assert str(caught.value).endswith(f"Name the folder without, for example '{tmp_path}/a'.")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a\0b", "has a NUL in its name"),
        ("a" * 300, "cannot be looked at"),
        ("\ud800", "cannot be looked at"),
        ("missing", "does not exist"),
        ("file/below", "does not exist"),
        ("file", "is not a folder"),
        ("pipe", "is not a folder"),
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MemoryTierError, match=reason):
        DiskStore([DiskSpec(path=f"{tmp_path}/{name}", cap_bytes=4096)])


def test_a_folder_by_a_relative_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    check_folder(Path("a"))
    check_folder(Path("."))
    with pytest.raises(MemoryTierError, match="disk folder 'b' does not exist"):
        check_folder(Path("b"))


def test_a_link_in_place_of_the_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse_nameless(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse_nameless)
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "name").symlink_to("victim")
    with pytest.raises(FileExistsError):
        SystemFileCalls().open(tmp_path / "name")
    assert (tmp_path / "victim").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_files_of_another_user_are_not_removed_as_stale(tmp_path: Path) -> None:
    for name, owner in ((".ebbtide-1-theirs", OTHER_USER), (".ebbtide-1-ours", 0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
        os.chown(tmp_path / name, owner, -1)
    DiskStore([DiskSpec(path=str(tmp_path), cap_bytes=4096)]).close()
    assert [path.name for path in tmp_path.iterdir()] == [".ebbtide-1-theirs"]
