"""A store on several folders, with checksums, and where its folders are bad places."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ebbtide.errors import MemoryTierError
from ebbtide.memory import disk
from ebbtide.memory.arena import Region
from ebbtide.memory.disk import DiskStore
from ebbtide.memory.file_calls import AbstractFileCalls, OpenFile, SystemFileCalls
from ebbtide.memory.stripes import STRIPE_BYTES
from ebbtide.units import DiskSpec

CAP_BYTES = 4 * STRIPE_BYTES


class FilesByFolder(AbstractFileCalls):
    """Real files; what is asked of each is noted by its folder, and can fail or be spoilt."""

    def __init__(self) -> None:
        self.written_bytes: dict[str, int] = {}
        self.failing = ""
        self.spoilt = ""
        self.held: threading.Event | None = None
        self.has_failed = threading.Event()
        self._names: dict[int, str] = {}
        self._real = SystemFileCalls(is_direct=False)

    def open(self, path: Path) -> OpenFile:
        opened = self._real.open(path)
        self._names[opened.descriptor] = path.parent.name
        return opened

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        self._real.allocate(descriptor, num_bytes)

    def write_at(self, descriptor: int, source: memoryview, offset_bytes: int) -> int:
        name = self._names[descriptor]
        if name == self.failing:
            self.has_failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.held is not None and name != self.failing:
            assert self.held.wait(timeout=60)
        self.written_bytes[name] = self.written_bytes.get(name, 0) + source.nbytes
        return self._real.write_at(descriptor, source, offset_bytes)

    def read_at(self, descriptor: int, target: memoryview, offset_bytes: int) -> int:
        num_bytes = self._real.read_at(descriptor, target, offset_bytes)
        if self._names[descriptor] == self.spoilt:
            target[num_bytes // 2] ^= 1
        return num_bytes


@pytest.fixture
def calls() -> FilesByFolder:
    return FilesByFolder()


def folders(path: Path, *cap_bytes: int) -> list[DiskSpec]:
    found: list[DiskSpec] = []
    for index, cap in enumerate(cap_bytes):
        folder = path / f"disk{index}"
        folder.mkdir(exist_ok=True)
        found.append(DiskSpec(path=str(folder), cap_bytes=cap))
    return found


def taken(store: DiskStore, num_bytes: int) -> Region:
    region = store.take(num_bytes)
    assert region is not None
    return region


def test_one_activation_is_spread_by_the_rates(tmp_path: Path, calls: FilesByFolder) -> None:
    with DiskStore(folders(tmp_path, CAP_BYTES, CAP_BYTES), rates=[1.0, 3.0], calls=calls) as store:
        store.reserve(CAP_BYTES)
        content = os.urandom(CAP_BYTES)
        region = taken(store, CAP_BYTES)
        store.write(region, content).result()
        back = bytearray(CAP_BYTES)
        store.read(region, back).result()
        assert back == content
        assert store.statistics().written_bytes == store.statistics().read_bytes == CAP_BYTES
    assert calls.written_bytes == {"disk0": STRIPE_BYTES, "disk1": 3 * STRIPE_BYTES}


def test_rates_are_measured_where_there_are_several(tmp_path: Path, calls: FilesByFolder) -> None:
    with DiskStore(folders(tmp_path, 1 << 20, 1 << 20), calls=calls):
        assert calls.written_bytes == {"disk0": 1 << 20, "disk1": 1 << 20}


def test_one_folder_is_not_measured(tmp_path: Path, calls: FilesByFolder) -> None:
    with DiskStore(folders(tmp_path, 1 << 20), calls=calls):
        assert calls.written_bytes == {}


def test_caps_are_the_folders_own_and_count_together(tmp_path: Path, calls: FilesByFolder) -> None:
    specs = folders(tmp_path, 4096, 3 * 4096)
    with DiskStore(specs, rates=[1.0, 1.0], calls=calls) as store:
        store.reserve(4 * 4096)
        assert store.statistics().cap_bytes == 4 * 4096
        with pytest.raises(MemoryTierError) as caught:
            store.reserve(4 * 4096 + 1)
    assert str(caught.value).startswith(
        f"disk folder '{tmp_path}/disk0' and '{tmp_path}/disk1': the plan needs 20.0 KiB"
    )


def test_a_folder_that_fails_is_named_and_the_buffer_is_held_until_all_parts_are_done(
    tmp_path: Path, calls: FilesByFolder
) -> None:
    calls.failing = "disk1"
    calls.held = threading.Event()
    specs = folders(tmp_path, CAP_BYTES, CAP_BYTES)
    with DiskStore(specs, rates=[1.0, 1.0], calls=calls) as store:
        store.reserve(2 * STRIPE_BYTES)
        copy = store.write(taken(store, 2 * STRIPE_BYTES), bytes(2 * STRIPE_BYTES))
        assert calls.has_failed.wait(timeout=60)
        with pytest.raises(TimeoutError):  # the other part still reads the buffer
            copy.exception(timeout=0.1)
        calls.held.set()
        error = copy.exception()
    assert isinstance(error, MemoryTierError)
    assert str(error) == (
        f"disk folder '{tmp_path}/disk1': writing 16.0 MiB ({STRIPE_BYTES} bytes) at byte 0 of its "
        "file failed (errno 5: Input/output error); activations there cannot be trusted any more. "
        "Check the disk, or name another folder."
    )


def test_a_folder_that_cannot_be_opened_leaves_no_file_open(
    tmp_path: Path, calls: FilesByFolder
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    specs = [*folders(tmp_path, 4096), DiskSpec(path=str(tmp_path / "none"), cap_bytes=1)]
    with pytest.raises(MemoryTierError, match="does not exist"):
        DiskStore(specs, calls=calls)
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_and_threads_are_given_back(tmp_path: Path, calls: FilesByFolder) -> None:
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with DiskStore(folders(tmp_path, 4096, 4096), rates=[1.0, 1.0], calls=calls) as store:
        store.reserve(4096)
        store.write(taken(store, 10), bytes(10)).result()
        assert len(os.listdir("/proc/self/fd")) == before + 2
        assert threading.active_count() > threads
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (before, threads)


def test_a_bit_that_changed_on_disk_is_found(tmp_path: Path, calls: FilesByFolder) -> None:
    with DiskStore(folders(tmp_path, 1 << 20), has_checksums=True, calls=calls) as store:
        store.reserve(1 << 20)
        region, content = taken(store, 1000), os.urandom(1000)
        store.write(region, content).result()
        back = bytearray(1000)
        store.read(region, back).result()
        assert back == content
        calls.spoilt = "disk0"
        error = store.read(region, back).exception()
        assert isinstance(error, MemoryTierError)
        assert str(error) == (
            f"disk folder '{tmp_path}/disk0': 1000 B (1000 bytes) at byte 0 of its file are not "
            "what was written there: their checksum is another. No gradient was made from them. "
            "Check the disk, or name another folder."
        )


def test_a_region_that_is_used_again_has_the_new_checksum(
    tmp_path: Path, calls: FilesByFolder
) -> None:
    with DiskStore(folders(tmp_path, 8192), has_checksums=True, calls=calls) as store:
        store.reserve(8192)
        for size in (8000, 100, 5000):
            region, content = taken(store, size), os.urandom(size)
            store.write(region, content).result()
            back = bytearray(size)
            store.read(region, back).result()
            assert back == content
            store.give_back(region)


def test_without_checksums_nothing_is_compared(tmp_path: Path, calls: FilesByFolder) -> None:
    with DiskStore(folders(tmp_path, 4096), calls=calls) as store:
        store.reserve(4096)
        region = taken(store, 10)
        store.write(region, bytes(10)).result()
        calls.spoilt = "disk0"
        assert store.read(region, bytearray(10)).exception() is None


def test_a_folder_in_memory_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "find_file_system", lambda folder: "tmpfs")
    with DiskStore(folders(tmp_path, 1 << 20, 1 << 20)):
        pass
    messages = [record.getMessage() for record in caplog.records]
    assert [m.partition(", which")[0] for m in messages] == [
        f"disk folder '{tmp_path}/disk{index}' is on tmpfs" for index in range(2)
    ]


def test_files_without_direct_requests_are_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    calls: FilesByFolder,
) -> None:
    monkeypatch.setattr(disk, "find_file_system", lambda folder: "ext4")
    with DiskStore(folders(tmp_path, 1 << 20), calls=calls) as store:
        assert not store.is_direct
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        f"disk folder '{tmp_path}/disk0' takes no direct requests (O_DIRECT): copies go through "
        "the page cache, which holds them in memory as long as some is free."
    )


WRITER = """
import sys, time
from ebbtide.memory.disk import DiskStore
from ebbtide.units import DiskSpec
store = DiskStore([DiskSpec(path=sys.argv[1], cap_bytes=1 << 20)])
store.reserve(1 << 20)
region = store.take(1 << 20)
store.write(region, bytes([int(sys.argv[2])]) * (1 << 20)).result()
print("written", flush=True)
sys.stdin.readline()
back = bytearray(1 << 20)
store.read(region, back).result()
print(set(back), flush=True)
sys.stdin.readline()
"""


def start(folder: Path, value: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(value)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(disk.__file__).parents[2])}


def test_two_processes_share_a_folder_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    with start(tmp_path, 1) as first, start(tmp_path, 2) as second:
        assert list(tmp_path.iterdir()) == []
        for process, value in ((first, 1), (second, 2)):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{{{value}}}\n"
            process.send_signal(signal.SIGKILL)
            assert process.wait(timeout=60) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_impossible_folders_and_rates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folders is empty"):
        DiskStore([])
    for rates in ([1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="one above 0 for each folder"):
            DiskStore(folders(tmp_path, 1, 1), rates=rates)
