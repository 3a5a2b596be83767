"""Pinned host memory: exact regions, and refusals that say what was met and what to change."""

from __future__ import annotations

import logging
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.errors import PinnedMemoryError
from ebbtide.memory.limits import ProcessLimits
from ebbtide.memory.pages import PageWishes, read_mapping
from ebbtide.torch.devices import pinned
from ebbtide.torch.devices.pinned import CudaDriver, PinnedMemory, pinned_memory_of
from tests.torch.fakes import FakeDriver

MIB = 2**20
GIB = 2**30


@pytest.fixture(autouse=True)
def limits_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test depend on the limits that it is run under."""
    monkeypatch.setattr(pinned, "read_process_limits", ProcessLimits)


def refusal(memory: PinnedMemory, num_bytes: int) -> PinnedMemoryError:
    with pytest.raises(PinnedMemoryError) as caught:
        memory.pin(num_bytes)
    message = str(caught.value)
    assert "pinned host memory" in message
    assert "cuda out of memory" not in message.lower()
    assert "out of memory" not in message.lower()
    return caught.value


def test_a_region_has_exactly_the_size_and_is_registered_as_a_whole(tmp_path: Path) -> None:
    driver = FakeDriver()
    region = PinnedMemory(driver, root=tmp_path).pin(3 * MIB + 1)
    assert driver.registered == {region.buffer.data_ptr(): 3 * MIB + 1}
    assert region.buffer.shape == (3 * MIB + 1,) and region.buffer.dtype is torch.uint8
    region.buffer.fill_(7)
    assert int(region.buffer.sum(dtype=torch.int64)) == 7 * (3 * MIB + 1)
    assert isinstance(region.wishes, PageWishes)
    region.close()
    assert driver.registered == {}


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="reads what Linux says")
def test_a_closed_region_takes_no_memory_though_its_buffer_lives(tmp_path: Path) -> None:
    region = PinnedMemory(FakeDriver(), root=tmp_path).pin(8 * MIB)
    buffer = region.buffer.fill_(1)
    before = read_mapping(buffer.data_ptr())
    assert before is not None and {"hg", "dc"} <= before.flags
    region.close()
    after = read_mapping(buffer.data_ptr())
    assert after is not None
    assert after.resident_bytes <= before.resident_bytes - 8 * MIB


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_process_unregisters_nothing(tmp_path: Path) -> None:
    driver = FakeDriver()
    region = PinnedMemory(driver, root=tmp_path).pin(MIB)
    child = os.fork()
    if child == 0:
        region.close()
        os._exit(7 if len(driver.registered) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    region.close()
    assert driver.registered == {}


def test_the_pages_come_from_the_wished_node_if_the_kernel_can(tmp_path: Path) -> None:
    region = PinnedMemory(FakeDriver(), numa_node=1000, root=tmp_path).pin(MIB)
    assert region.wishes is not None and region.wishes.numa_node is None


def test_what_the_system_gave_is_in_the_debug_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="ebbtide"):
        PinnedMemory(FakeDriver(), root=tmp_path).pin(2 * MIB)
    (record,) = caplog.records
    assert record.message.startswith("pinned 2.0 MiB of host memory: ")
    assert record.message.endswith("of it in huge pages, hidden from forks, NUMA node any")


# -- refused beforehand ----------------------------------------------------------------------------


def test_more_than_the_machine_has_free_is_never_mapped(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {32 * MIB} kB\n")
    driver = FakeDriver()
    error = refusal(PinnedMemory(driver, root=tmp_path), 33 * GIB)
    assert str(error) == (
        "33.0 GiB of pinned host memory was refused: MemAvailable in /proc/meminfo is 32.0 GiB. "
        "Free memory of the host, or cap it with host='30720MiB'."
    )
    assert error.room_bytes == 30 * GIB
    assert driver.asked == []


def test_more_than_the_container_may_have_names_its_limit(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(f"{16 * GIB}\n")
    (group / "memory.current").write_text(f"{8 * GIB}\n")
    error = refusal(PinnedMemory(FakeDriver(), root=tmp_path), 8 * GIB)
    assert str(error) == (
        "8.0 GiB of pinned host memory was refused: memory.max of the control group, "
        "/sys/fs/cgroup/memory.max, is 16.0 GiB, of which 8.0 GiB is in use. Raise the "
        "container's memory limit (`docker run --memory`, `resources.limits.memory` in "
        "Kubernetes, `--mem` in Slurm), or cap it with host='7680MiB'."
    )


# -- refused by the system -------------------------------------------------------------------------


def test_a_mapping_that_fails_names_the_limit_of_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    memory = PinnedMemory(FakeDriver(), root=tmp_path)
    error = refusal(memory, 2 * GIB)
    assert str(error).startswith(
        "2.0 GiB of pinned host memory was refused: mmap failed (Cannot allocate memory). The "
        "host has not that much memory, or vm.overcommit_memory forbids"
    )
    assert error.room_bytes is None
    monkeypatch.setattr(pinned, "read_process_limits", lambda: ProcessLimits(address_bytes=GIB))
    assert str(refusal(memory, 2 * GIB)) == (
        "2.0 GiB of pinned host memory was refused: mmap failed (Cannot allocate memory), and "
        "RLIMIT_AS (`ulimit -v`) is 1.0 GiB. Raise it: `ulimit -v unlimited`, or cap it with "
        "host='1GiB', say."
    )


# -- refused by the driver -------------------------------------------------------------------------


def test_a_driver_that_refuses_names_the_limit_of_locked_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pinned, "read_process_limits", lambda: ProcessLimits(memlock_bytes=64 * 1024)
    )
    assert str(refusal(PinnedMemory(FakeDriver(0), root=tmp_path), 2 * MIB)) == (
        "2.0 MiB of pinned host memory was refused: cudaHostRegister answered 2 "
        "(cudaErrorMemoryAllocation), and RLIMIT_MEMLOCK (`ulimit -l`) is 64.0 KiB. Raise it: "
        "`ulimit -l unlimited`, `docker run --ulimit memlock=-1`, or LimitMEMLOCK=infinity in a "
        "systemd unit; or cap it with host='1GiB', say."
    )
    # Below the limit it cannot be what was met.
    assert "no limit of the system says why: RLIMIT_MEMLOCK (`ulimit -l`) is 64.0 KiB" in str(
        refusal(PinnedMemory(FakeDriver(0), root=tmp_path), 64 * 1024)
    )


def test_a_driver_that_refuses_without_a_limit_says_so(tmp_path: Path) -> None:
    assert str(refusal(PinnedMemory(FakeDriver(0, status=999), root=tmp_path), MIB)) == (
        "1.0 MiB of pinned host memory was refused: cudaHostRegister answered 999 (see "
        "cudaError_t), and no limit of the system says why: RLIMIT_MEMLOCK (`ulimit -l`) is "
        "unlimited. Look for the driver's own words in the kernel's log (`dmesg`), or cap it with "
        "host='1GiB', say."
    )


def test_wsl_is_named(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text("Linux version 5.15.1-microsoft-standard-WSL2\n")
    error = refusal(PinnedMemory(FakeDriver(0, status=304), root=tmp_path), MIB)
    assert "cudaHostRegister answered 304 (cudaErrorOperatingSystem), and WSL lets" in str(error)
    assert "Raise `memory=` in .wslconfig" in str(error)


# -- the real driver, as far as there is one without a GPU -----------------------------------------


class Runtime:
    """What `torch.cuda.cudart()` returns, without a GPU."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append(("register", address, num_bytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        self.calls.append(("unregister", address))


@pytest.mark.parametrize("status", [0, 2])
def test_an_error_of_the_runtime_is_taken_before_an_operator_meets_it(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime reports an error again to whoever starts the next kernel in the thread."""
    runtime, device = Runtime(status), torch.device("cuda", 1)
    current: list[Any] = []
    ones = torch.ones

    class On:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_: object) -> None:
            current.pop()

    def start_kernel(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        runtime.calls.append(("kernel", str(device), str(current[-1])))
        ones(*size, dtype=dtype)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch, "ones", start_kernel)
    assert CudaDriver(device).register(4096, 512) == status
    kernels = [("kernel", "cuda:1", "cuda:1")] if status else []
    assert runtime.calls == [("register", 4096, 512, 0), *kernels]


def test_copies_of_the_device_pass_before_its_pages_are_unpinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, device = Runtime(0), torch.device("cuda", 1)

    def synchronize(waited_for: torch.device) -> None:
        runtime.calls.append(("wait", str(waited_for)))

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    CudaDriver(device).unregister(4096)
    assert runtime.calls == [("wait", "cuda:1"), ("unregister", 4096)]


def test_the_node_is_looked_up_by_the_pci_address_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Properties:
        pci_domain_id, pci_bus_id, pci_device_id = 1, 0xC1, 0

    asked: list[str] = []

    def find_node(address: str) -> int | None:
        asked.append(address)
        return 0

    def properties_of(device: torch.device) -> Properties:
        assert device == torch.device("cuda", 1)
        return Properties()

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)
    monkeypatch.setattr(pinned, "find_node", find_node)
    assert isinstance(pinned_memory_of(torch.device("cuda", 1)), PinnedMemory)
    assert asked == ["0001:c1:00.0"]
