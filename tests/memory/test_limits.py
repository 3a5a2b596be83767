"""What Linux says of host memory, from folders that a test writes."""

import sys
from pathlib import Path

import pytest

from ebbtide.memory.limits import (
    ProcessLimits,
    find_tightest_limit,
    read_process_limits,
)

MIB = 2**20
GIB = 2**30


def write(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(root: Path, available_bytes: int) -> Path:
    """Write what a machine has free."""
    write(
        root / "proc/meminfo",
        f"MemTotal: {1 << 30} kB\nMemFree: 5 kB\nMemAvailable: {available_bytes // 1024} kB",
    )
    return root


def group_2(
    root: Path, path: str, *, most: int | str, used: int, cached: int = 0, high: str | int = "max"
) -> None:
    folder = root / "sys/fs/cgroup" / path
    write(folder / "memory.max", most)
    write(folder / "memory.high", high)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 1\nfile 9\ninactive_file {cached}\nactive_file 0\nshmem 2")


def room_of(root: Path) -> int:
    limit = find_tightest_limit(root)
    assert limit is not None
    return limit.room_bytes


def test_a_sixteenth_of_what_the_machine_has_available_is_left(tmp_path: Path) -> None:
    limit = find_tightest_limit(machine(tmp_path, 32 * GIB))
    assert limit is not None
    assert limit.room_bytes == 30 * GIB
    assert limit.text == "MemAvailable in /proc/meminfo is 32.0 GiB"
    assert limit.advice == "Free memory of the host"


def test_a_system_that_tells_nothing_has_no_limit(tmp_path: Path) -> None:
    assert find_tightest_limit(tmp_path) is None


def test_a_control_group_leaves_what_it_does_not_hold(tmp_path: Path) -> None:
    write(machine(tmp_path, 64 * GIB) / "proc/self/cgroup", "0::/pods/mine")
    group_2(tmp_path, "pods/mine", most=20 * GIB, used=6 * GIB, cached=2 * GIB)
    limit = find_tightest_limit(tmp_path)
    assert limit is not None
    assert limit.room_bytes == 15 * GIB
    assert limit.text == (
        "memory.max of the control group, /sys/fs/cgroup/pods/mine/memory.max, is 20.0 GiB, of "
        "which 4.0 GiB is in use"
    )
    assert limit.advice.startswith("Raise the container's memory limit (`docker run --memory`")


def test_the_groups_around_the_process_count_too(tmp_path: Path) -> None:
    write(machine(tmp_path, 64 * GIB) / "proc/self/cgroup", "0::/pods/mine")
    group_2(tmp_path, "pods/mine", most="max", used=6 * GIB)
    group_2(tmp_path, "pods", most=22 * GIB, used=6 * GIB)
    assert room_of(tmp_path) == 15 * GIB
    group_2(tmp_path, "pods/mine", most="max", used=6 * GIB, high=7 * GIB)
    assert room_of(tmp_path) == 15 * GIB // 16


def test_a_container_whose_own_group_is_the_topmost_folder(tmp_path: Path) -> None:
    for path in ("/", "/../../outside", "/docker/0123"):
        write(machine(tmp_path, 64 * GIB) / "proc/self/cgroup", f"0::{path}")
        group_2(tmp_path, "", most=16 * GIB, used=0)
        assert room_of(tmp_path) == 15 * GIB


def test_a_group_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    write(machine(tmp_path, 64 * GIB) / "proc/self/cgroup", "0::/")
    group_2(tmp_path, "", most=4 * GIB, used=5 * GIB)
    assert room_of(tmp_path) == 0


def test_a_control_group_of_version_1(tmp_path: Path) -> None:
    write(
        machine(tmp_path, 64 * GIB) / "proc/self/cgroup",
        "9:name=systemd:/\n4:cpu,memory:/docker/01\n1:cpu:/\n0::/",
    )
    folder = tmp_path / "sys/fs/cgroup/memory"
    write(folder / "memory.limit_in_bytes", 0x7FFFFFFFFFFFF000)
    write(folder / "memory.usage_in_bytes", 50 * GIB)
    assert room_of(tmp_path) == 60 * GIB
    write(folder / "docker/01/memory.limit_in_bytes", 20 * GIB)
    write(folder / "docker/01/memory.usage_in_bytes", 6 * GIB)
    write(folder / "docker/01/memory.stat", f"cache 7\ntotal_inactive_file {2 * GIB}")
    limit = find_tightest_limit(tmp_path)
    assert limit is not None
    assert limit.room_bytes == 15 * GIB
    assert "/sys/fs/cgroup/memory/docker/01/memory.limit_in_bytes, is 20.0 GiB" in limit.text


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says")
def test_this_machine_has_some_room() -> None:
    assert 16 * MIB < room_of(Path("/")) < 2**50


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limits")
def test_the_limits_of_a_process_are_the_soft_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    soft = {resource.RLIMIT_MEMLOCK: 64 * 1024, resource.RLIMIT_AS: resource.RLIM_INFINITY}

    def getrlimit(kind: int) -> tuple[int, int]:
        return soft[kind], resource.RLIM_INFINITY

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    assert read_process_limits() == ProcessLimits(memlock_bytes=65536, address_bytes=None)
