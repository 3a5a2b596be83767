import errno
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from ebbtide.errors import MemoryTierError, RuntimeStateError
from ebbtide.memory.arena import Region
from ebbtide.memory.disk import DiskStatistics, DiskStore
from ebbtide.memory.file_calls import AbstractFileCalls, OpenFile, SystemFileCalls
from ebbtide.memory.stripes import STRIPE_BYTES
from tests.disk_folders import in_folder

CAP_BYTES = 1 << 20


class FaultyFileCalls(AbstractFileCalls):
    """The real calls, except for what a test makes fail."""

    def __init__(
        self,
        *,
        open_errno: int = 0,
        allocate_errno: int = 0,
        copy_errno: int = 0,
        max_bytes: int | None = None,
        is_direct: bool = False,
    ) -> None:
        self.sizes: list[int] = []
        self.allocated_bytes = 0
        self._real = SystemFileCalls(is_direct=is_direct)
        self._open_errno = open_errno
        self._allocate_errno = allocate_errno
        self._copy_errno = copy_errno
        self._max_bytes = max_bytes

    def open(self, path: Path) -> OpenFile:
        fail_with(self._open_errno)
        return self._real.open(path)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        fail_with(self._allocate_errno)
        self._real.allocate(descriptor, num_bytes)
        # Blocks of 512 bytes that the disk gave, which a file with holes does not have.
        self.allocated_bytes = os.fstat(descriptor).st_blocks * 512

    def write_at(self, descriptor: int, source: memoryview, offset_bytes: int) -> int:
        fail_with(self._copy_errno)
        self.sizes.append(source.nbytes)
        if self._max_bytes == 0:
            return 0
        return self._real.write_at(descriptor, source[: self._max_bytes], offset_bytes)

    def read_at(self, descriptor: int, target: memoryview, offset_bytes: int) -> int:
        fail_with(self._copy_errno)
        self.sizes.append(target.nbytes)
        if self._max_bytes == 0:
            return 0
        return self._real.read_at(descriptor, target[: self._max_bytes], offset_bytes)


class HeldFileCalls(FaultyFileCalls):
    """Writes that wait until a test lets them go."""

    def __init__(self) -> None:
        super().__init__()
        self.started = threading.Event()
        self.released = threading.Event()

    def write_at(self, descriptor: int, source: memoryview, offset_bytes: int) -> int:
        self.started.set()
        assert self.released.wait(timeout=60)
        return super().write_at(descriptor, source, offset_bytes)


def fail_with(number: int) -> None:
    if number:
        raise OSError(number, os.strerror(number))


def taken(store: DiskStore, num_bytes: int) -> Region:
    region = store.take(num_bytes)
    assert region is not None
    return region


def numbered(num_bytes: int, first: int = 0) -> bytes:
    return bytes((first + index) % 251 for index in range(num_bytes))


def write_and_read(store: DiskStore, region: Region, content: bytes) -> bytes:
    store.write(region, content).result()
    back = bytearray(len(content))
    store.read(region, back).result()
    return bytes(back)


def wait_until_closing(store: DiskStore) -> None:
    """Return once `close`, which another thread has called, has begun."""
    while True:
        try:
            store.take(1)
        except RuntimeStateError:
            return


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(in_folder(tmp_path, CAP_BYTES)) as store:
        store.reserve(CAP_BYTES)
        yield store


def test_what_was_written_is_read_back(store: DiskStore) -> None:
    region = taken(store, 1000)
    assert write_and_read(store, region, numbered(1000)) == numbered(1000)


def test_regions_do_not_disturb_each_other(store: DiskStore) -> None:
    contents = [numbered(700 + index, first=index) for index in range(50)]
    regions = [taken(store, len(content)) for content in contents]
    wait([store.write(*pair) for pair in zip(regions, contents, strict=True)])
    back = [bytearray(len(content)) for content in contents]
    wait([store.read(*pair) for pair in zip(regions, back, strict=True)])
    assert back == contents


def test_a_region_given_back_is_used_again(store: DiskStore) -> None:
    first = taken(store, CAP_BYTES)
    assert store.take(1) is None
    store.give_back(first)
    second = taken(store, CAP_BYTES)
    assert second.offset_bytes == 0


def test_a_buffer_of_any_item_size_is_copied_as_bytes(store: DiskStore) -> None:
    content = memoryview(bytearray(numbered(64))).cast("q")
    region = taken(store, 64)
    store.write(region, content).result()
    back = bytearray(64)
    store.read(region, memoryview(back).cast("h")).result()
    assert bytes(back) == numbered(64)


def test_short_copies_are_continued(tmp_path: Path) -> None:
    calls = FaultyFileCalls(max_bytes=300)
    with DiskStore(in_folder(tmp_path, CAP_BYTES), calls=calls) as store:
        store.reserve(8192)
        taken(store, 512)
        region = taken(store, 1000)
        assert write_and_read(store, region, numbered(1000)) == numbered(1000)
    assert calls.sizes == 2 * [1000, 700, 400, 100]


def test_requests_are_cut_at_16_mib(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    num_bytes = STRIPE_BYTES + 5
    with DiskStore(in_folder(tmp_path, 2 * STRIPE_BYTES), calls=calls) as store:
        store.reserve(num_bytes)
        content = os.urandom(num_bytes)
        assert write_and_read(store, taken(store, num_bytes), content) == content
    assert STRIPE_BYTES == 16 * 1024 * 1024
    # Requests run side by side.
    assert sorted(calls.sizes) == 2 * [5] + 2 * [STRIPE_BYTES]


def test_the_folder_stays_empty_while_the_store_is_open(tmp_path: Path) -> None:
    with DiskStore(in_folder(tmp_path, CAP_BYTES)) as store:
        store.reserve(CAP_BYTES)
        write_and_read(store, taken(store, 1000), numbered(1000))
        assert list(tmp_path.iterdir()) == []


def test_space_is_allocated_when_it_is_reserved(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    with DiskStore(in_folder(tmp_path, CAP_BYTES), calls=calls) as store:
        store.reserve(CAP_BYTES)
    assert calls.allocated_bytes >= CAP_BYTES


def test_nothing_can_be_taken_before_space_is_reserved(tmp_path: Path) -> None:
    with DiskStore(in_folder(tmp_path, CAP_BYTES)) as store:
        assert store.take(1) is None


def test_reserving_more_keeps_what_is_written(tmp_path: Path) -> None:
    with DiskStore(in_folder(tmp_path, CAP_BYTES)) as store:
        store.reserve(1000)
        region = taken(store, 1000)
        store.write(region, numbered(1000)).result()
        store.reserve(5000)
        assert store.statistics().reserved_bytes == 8192
        assert taken(store, 4096).offset_bytes == 4096
        back = bytearray(1000)
        store.read(region, back).result()
        assert bytes(back) == numbered(1000)


def test_reserving_less_changes_nothing(store: DiskStore) -> None:
    store.reserve(0)
    assert store.statistics().reserved_bytes == CAP_BYTES


def test_statistics_count_bytes_and_regions(store: DiskStore) -> None:
    region = taken(store, 1000)
    other = taken(store, 100)
    write_and_read(store, region, numbered(1000))
    store.give_back(other)
    assert store.take(2 * CAP_BYTES) is None
    assert store.statistics() == DiskStatistics(
        cap_bytes=CAP_BYTES,
        reserved_bytes=CAP_BYTES,
        held_bytes=1000,
        peak_taken_bytes=8192,
        num_regions=1,
        num_refused=1,
        written_bytes=1000,
        read_bytes=1000,
    )


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    with pytest.raises(MemoryTierError) as caught:
        DiskStore(in_folder(folder, CAP_BYTES))
    assert str(caught.value) == (
        f"disk folder '{folder}' does not exist; ebbtide makes a file in it, but never the folder. "
        "Create it, or name another one."
    )
    assert not folder.exists()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(MemoryTierError) as caught:
        DiskStore(in_folder(path, CAP_BYTES))
    assert str(caught.value) == (
        f"disk folder '{path}' is not a folder; ebbtide makes a file of its own in a folder. "
        f"Name a folder, for example '{tmp_path}'."
    )


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, number: int) -> None:
    with pytest.raises(MemoryTierError) as caught:
        DiskStore(in_folder(tmp_path, CAP_BYTES), calls=FaultyFileCalls(open_errno=number))
    assert str(caught.value) == (
        f"disk folder '{tmp_path}': no file can be made in it ({os.strerror(number)}); ebbtide "
        "needs to write there. Give yourself permission to write, or name another folder."
    )


def test_a_cap_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with DiskStore(in_folder(tmp_path, 5000)) as store:
        store.reserve(4096)
        with pytest.raises(MemoryTierError) as caught:
            store.reserve(4097)
        assert store.statistics().reserved_bytes == 4096
    assert str(caught.value) == (
        f"disk folder '{tmp_path}': the plan needs 8.0 KiB (8192 bytes), but the cap is 4.0 KiB "
        "(4096 bytes); the cap is never exceeded. Raise the cap, or use a plan that moves less."
    )


def test_a_disk_with_too_little_free_space_is_refused(tmp_path: Path) -> None:
    wanted_bytes = 1 << 60
    with DiskStore(in_folder(tmp_path, wanted_bytes)) as store:
        with pytest.raises(MemoryTierError) as caught:
            store.reserve(wanted_bytes)
        assert store.statistics().reserved_bytes == 0
    message = str(caught.value)
    assert message.startswith(
        f"disk folder '{tmp_path}': the plan needs {1 << 20}.0 TiB ({wanted_bytes} bytes) more, "
        "but the disk has only "
    )
    assert message.endswith(
        "free; all space is reserved before the first step. Free space there, name a folder on a "
        "larger disk, or use a plan that moves less."
    )


def test_what_is_free_counts_in_whole_pages_and_without_what_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        f_bavail, f_frsize = 13, 1024

    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: Found)
    with DiskStore(in_folder(tmp_path, CAP_BYTES)) as store:
        store.reserve(4096)
        with pytest.raises(MemoryTierError) as caught:
            store.reserve(5 * 4096)
        store.reserve(4 * 4096)  # the system still says that 13 KiB are free
    assert (
        "the plan needs 16.0 KiB (16384 bytes) more, but the disk has only 12.0 KiB (12288 bytes) "
        "free" in str(caught.value)
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_while_space_is_reserved_is_refused(
    tmp_path: Path, number: int
) -> None:
    calls = FaultyFileCalls(allocate_errno=number)
    with DiskStore(in_folder(tmp_path, CAP_BYTES), calls=calls) as store:
        with pytest.raises(MemoryTierError) as caught:
            store.reserve(1024)
        assert store.take(1) is None
    assert str(caught.value) == (
        f"disk folder '{tmp_path}': reserving 4.0 KiB (4096 bytes) failed, since the disk or your "
        f"quota is full (errno {number}: {os.strerror(number)}); other programs may have "
        "filled it. Free space there, or name another folder."
    )


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_allocate_ahead_is_used_without(
    tmp_path: Path, number: int
) -> None:
    calls = FaultyFileCalls(allocate_errno=number)
    with DiskStore(in_folder(tmp_path, CAP_BYTES), calls=calls) as store:
        store.reserve(CAP_BYTES)
        region = taken(store, 1000)
        # The file has its full length, though nothing was written.
        assert store.read(region, bytearray(1000)).exception() is None
        assert write_and_read(store, region, numbered(1000)) == numbered(1000)


class Bytes(bytearray):
    """Memory whose end can be noted."""


def test_the_memory_is_let_go_before_the_copy_is_told_done(tmp_path: Path) -> None:
    """Whoever waited makes other memory then, and the two together would be over the peak."""
    calls, is_there = HeldFileCalls(), list[bool]()
    with DiskStore(in_folder(tmp_path, CAP_BYTES), calls=calls) as store:
        store.reserve(CAP_BYTES)
        region, memory = taken(store, 4096), Bytes(4096)
        known = weakref.ref(memory)
        future = store.write(region, memoryview(memory))
        future.add_done_callback(lambda _: is_there.append(known() is not None))
        del memory
        calls.released.set()
        future.result()
    assert is_there == [False]


def test_a_failing_copy_is_told_by_its_future(tmp_path: Path) -> None:
    calls = FaultyFileCalls(copy_errno=errno.EIO)
    with DiskStore(in_folder(tmp_path, CAP_BYTES), calls=calls) as store:
        store.reserve(1024)
        region = taken(store, 1000)
        write_error = store.write(region, numbered(1000)).exception()
        read_error = store.read(region, bytearray(1000)).exception()
        assert store.statistics().written_bytes == 0
    assert isinstance(write_error, MemoryTierError)
    assert isinstance(read_error, MemoryTierError)
    assert str(write_error) == (
        f"disk folder '{tmp_path}': writing 1000 B (1000 bytes) at byte 0 of its file failed "
        "(errno 5: Input/output error); activations there cannot be trusted any more. Check the "
        "disk, or name another folder."
    )
    assert "reading 1000 B (1000 bytes) at byte 0 of its file failed (errno 5: " in str(read_error)


def test_a_disk_that_fills_up_while_writing_is_told_by_the_future(tmp_path: Path) -> None:
    calls = FaultyFileCalls(copy_errno=errno.ENOSPC)
    with DiskStore(in_folder(tmp_path, CAP_BYTES), calls=calls) as store:
        store.reserve(1024)
        error = store.write(taken(store, 10), numbered(10)).exception()
    assert isinstance(error, MemoryTierError)
    assert "writing 10 B (10 bytes) at byte 0 of its file failed, since the disk or" in str(error)


@pytest.mark.parametrize("verb", ["reading", "writing"])
def test_a_copy_that_makes_no_progress_ends(tmp_path: Path, verb: str) -> None:
    with DiskStore(in_folder(tmp_path, CAP_BYTES), calls=FaultyFileCalls(max_bytes=0)) as store:
        store.reserve(1024)
        region = taken(store, 10)
        copies = {"reading": store.read, "writing": store.write}
        error = copies[verb](region, bytearray(10)).exception()
    assert str(error) == (
        f"disk folder '{tmp_path}': {verb} stopped after 0 B (0 bytes) of 10 B (10 bytes), at "
        "byte 0 of its file; the file must hold what was reserved. Check the disk, or name another "
        "folder."
    )


def test_a_buffer_of_another_size_is_refused(store: DiskStore) -> None:
    region = taken(store, 10)
    with pytest.raises(ValueError, match="buffer has 9 bytes, but the region has 10"):
        store.write(region, bytes(9))
    with pytest.raises(ValueError, match="buffer has 11 bytes, but the region has 10"):
        store.read(region, bytearray(11))


def test_a_buffer_that_is_not_contiguous_is_refused(store: DiskStore) -> None:
    with pytest.raises(ValueError, match="buffer is not contiguous"):
        store.write(taken(store, 10), memoryview(bytearray(20))[::2])


def test_reading_into_a_read_only_buffer_is_refused(store: DiskStore) -> None:
    with pytest.raises(ValueError, match="buffer is read-only"):
        store.read(taken(store, 10), memoryview(bytes(10)))


def test_giving_back_twice_is_a_bug(store: DiskStore) -> None:
    region = taken(store, 10)
    store.give_back(region)
    with pytest.raises(AssertionError, match="bug in ebbtide"):
        store.give_back(region)


def test_a_closed_store_refuses_every_use(tmp_path: Path) -> None:
    store = DiskStore(in_folder(tmp_path, CAP_BYTES))
    store.reserve(1024)
    region = taken(store, 10)
    store.close()
    store.close()
    store.give_back(region)
    message = rf"the store in disk folder '{tmp_path}' is closed; .* Make a new one\."
    with pytest.raises(RuntimeStateError, match=message):
        store.take(10)
    with pytest.raises(RuntimeStateError, match=message):
        store.reserve(10)
    with pytest.raises(RuntimeStateError, match=message):
        store.write(region, bytes(10))
    with pytest.raises(RuntimeStateError, match=message):
        store.read(region, bytearray(10))
    assert store.statistics().reserved_bytes == 4096


def test_closing_waits_for_copies_that_run_and_fails_those_that_wait(tmp_path: Path) -> None:
    calls = HeldFileCalls()
    store = DiskStore(in_folder(tmp_path, CAP_BYTES), num_threads=1, calls=calls)
    store.reserve(8192)
    running = store.write(taken(store, 10), bytes(10))
    waiting = store.write(taken(store, 10), bytes(10))
    assert calls.started.wait(timeout=60)
    closing = threading.Thread(target=store.close)
    closing.start()
    wait_until_closing(store)
    assert not running.done()
    assert not waiting.done()
    calls.released.set()
    closing.join()
    assert running.result() is None
    assert isinstance(waiting.exception(), RuntimeStateError)
    assert store.statistics().written_bytes == 10


def test_closing_gives_the_descriptor_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with DiskStore(in_folder(tmp_path, CAP_BYTES)) as store:
        store.reserve(1024)
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_impossible_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cap_bytes is -1"):
        DiskStore(in_folder(tmp_path, -1))
    with pytest.raises(ValueError, match="num_threads is 0"):
        DiskStore(in_folder(tmp_path, 1), num_threads=0)
