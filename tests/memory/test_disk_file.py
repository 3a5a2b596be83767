"""One file of the disk tier, with requests that pass the page cache by and requests that do not."""

import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.errors import MemoryTierError
from ebbtide.memory.disk_file import STAGE_BYTES, DiskFile
from ebbtide.memory.file_calls import (
    AbstractFileCalls,
    OpenFile,
    SystemFileCalls,
    aligned_memory,
)

BLOCK = 4096


class CountingCalls(AbstractFileCalls):
    """Real files that take direct requests of whole blocks, whether the disk can or not."""

    def __init__(self, *, most_bytes: int | None = None) -> None:
        self.requests: list[tuple[str, int, int]] = []
        self._most_bytes = most_bytes
        self._real = SystemFileCalls(is_direct=False)

    def open(self, path: Path) -> OpenFile:
        return OpenFile(descriptor=self._real.open(path).descriptor, block_bytes=BLOCK)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        self._real.allocate(descriptor, num_bytes)

    def write_at(self, descriptor: int, source: memoryview, offset_bytes: int) -> int:
        self._check("write", source, offset_bytes)
        return self._real.write_at(descriptor, source[: self._most_bytes], offset_bytes)

    def read_at(self, descriptor: int, target: memoryview, offset_bytes: int) -> int:
        self._check("read", target, offset_bytes)
        return self._real.read_at(descriptor, target[: self._most_bytes], offset_bytes)

    def _check(self, what: str, memory: memoryview, offset_bytes: int) -> None:
        """Refuse what a disk refuses."""
        if address(memory) % BLOCK or memory.nbytes % BLOCK or offset_bytes % BLOCK:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.requests.append((what, memory.nbytes, offset_bytes))


def address(memory: memoryview) -> int:
    import numpy as np

    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


def content(num_bytes: int, skip_bytes: int) -> memoryview:
    memory = aligned_memory(num_bytes, skip_bytes=skip_bytes)
    memory[:] = os.urandom(num_bytes)
    return memory


@pytest.fixture
def calls() -> CountingCalls:
    return CountingCalls()


@pytest.fixture
def file(tmp_path: Path, calls: CountingCalls) -> Iterator[DiskFile]:
    file = DiskFile(tmp_path, calls)
    file.allocate(4 * STAGE_BYTES)
    yield file
    file.close()


def write_and_read(file: DiskFile, source: memoryview, offset_bytes: int, skip_bytes: int) -> bytes:
    file.write(offset_bytes, source)
    back = aligned_memory(source.nbytes, skip_bytes=skip_bytes)
    file.read(offset_bytes, back)
    return bytes(back)


def test_aligned_memory_is_copied_as_it_is_and_only_its_tail_is_not(
    file: DiskFile, calls: CountingCalls
) -> None:
    source = content(3 * BLOCK + 7, 0)
    assert write_and_read(file, source, BLOCK, 0) == bytes(source)
    assert calls.requests == [
        ("write", 3 * BLOCK, BLOCK),
        ("write", BLOCK, 4 * BLOCK),
        ("read", 3 * BLOCK, BLOCK),
        ("read", BLOCK, 4 * BLOCK),
    ]


@pytest.mark.parametrize("skip_bytes", [1, 64, 512])
def test_other_memory_passes_through_the_files_own(
    file: DiskFile, calls: CountingCalls, skip_bytes: int
) -> None:
    source = content(2 * STAGE_BYTES + BLOCK + 1, skip_bytes)
    assert write_and_read(file, source, 0, skip_bytes) == bytes(source)
    assert [size for _, size, _ in calls.requests] == 2 * [STAGE_BYTES, STAGE_BYTES, 2 * BLOCK]


def test_neighbours_are_left_alone(file: DiskFile) -> None:
    before, after = content(BLOCK, 1), content(BLOCK, 1)
    file.write(0, before)
    file.write(3 * BLOCK, after)
    source = content(BLOCK + 100, 1)
    file.write(BLOCK, source)
    assert write_and_read(file, source, BLOCK, 1) == bytes(source)
    for offset, kept in ((0, before), (3 * BLOCK, after)):
        back = bytearray(BLOCK)
        file.read(offset, memoryview(back))
        assert back == kept


@pytest.mark.parametrize("skip_bytes", [0, 1])
def test_direct_requests_that_are_cut_short_go_on_at_a_block(
    tmp_path: Path, skip_bytes: int
) -> None:
    calls = CountingCalls(most_bytes=2 * BLOCK + 100)
    file = DiskFile(tmp_path, calls)
    file.allocate(8 * BLOCK)
    source = content(5 * BLOCK, skip_bytes)
    assert write_and_read(file, source, 0, skip_bytes) == bytes(source)
    assert [offset for _, _, offset in calls.requests] == 2 * [0, 2 * BLOCK, 4 * BLOCK]
    file.close()


def test_a_request_that_makes_no_whole_block_ends(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, CountingCalls(most_bytes=BLOCK - 1))
    file.allocate(BLOCK)
    with pytest.raises(MemoryTierError, match=r"writing stopped after 0 B \(0 bytes\) of 4\.0 KiB"):
        file.write(0, content(BLOCK, 0))
    file.close()


def test_a_real_file_takes_direct_requests_where_it_says_so(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, SystemFileCalls())
    file.allocate(4 * BLOCK)
    for skip_bytes in (0, 1, 512):
        source = content(2 * BLOCK + 513, skip_bytes)
        assert write_and_read(file, source, BLOCK, skip_bytes) == bytes(source)
    assert file.block_bytes in (1, 512, 4096)
    assert file.is_direct == (file.block_bytes > 1)
    file.close()


def test_a_real_file_has_no_name_and_is_its_owners(tmp_path: Path) -> None:
    opened = SystemFileCalls().open(tmp_path / "name")
    status = os.fstat(opened.descriptor)
    assert list(tmp_path.iterdir()) == []
    assert status.st_nlink == 0
    assert stat.S_IMODE(status.st_mode) == 0o600
    os.close(opened.descriptor)


def test_where_files_need_names_the_name_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse_nameless(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse_nameless)
    opened = SystemFileCalls().open(tmp_path / "name")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(opened.descriptor).st_mode) == 0o600
    os.close(opened.descriptor)


def test_what_a_killed_process_left_is_removed_and_nothing_else(
    tmp_path: Path, calls: CountingCalls
) -> None:
    old = time.time() - 3600
    for name in (".ebbtide-1-a", ".ebbtide-2-b", "other"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".ebbtide-link").symlink_to(tmp_path / "other")
    (tmp_path / ".ebbtide-folder").mkdir()
    for name in (".ebbtide-1-a", "other", ".ebbtide-folder"):
        os.utime(tmp_path / name, (old, old))
    DiskFile(tmp_path, calls).close()
    # The second one is young: its process may be between two calls.
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".ebbtide-2-b", ".ebbtide-folder", ".ebbtide-link", "other"]


def test_the_folder_may_go_while_the_file_is_used(tmp_path: Path, calls: CountingCalls) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    file = DiskFile(folder, calls)
    file.allocate(BLOCK)
    folder.rmdir()
    source = content(BLOCK, 0)
    assert write_and_read(file, source, 0, 0) == bytes(source)
    file.allocate(2 * BLOCK)
    assert file.size_bytes == 2 * BLOCK
    assert file.free_bytes() > 0
    file.close()
