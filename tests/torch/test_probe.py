"""What a probe of the CPU answers; tests/gpu/test_probe.py has the GPU's part."""

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ebbtide.errors import MemoryTierError
from ebbtide.machine import Machine
from ebbtide.torch.devices.pinned import PinnedMemory
from ebbtide.torch.probe import probe_machine
from ebbtide.units import DiskSpec
from tests.torch.fakes import FakeDriver

_probe: Any = import_module("ebbtide.torch.probe")

CPU = torch.device("cpu")
MIB = 2**20


def test_a_cpu_has_no_host_tier_and_no_disk_unless_one_is_given() -> None:
    machine = probe_machine(CPU)
    assert machine.name == "cpu"
    assert 0 < machine.device_bytes <= psutil.virtual_memory().total
    assert (machine.host_bytes, machine.disk_bytes) == (0, 0)
    assert (machine.out_bytes_per_s, machine.in_bytes_per_s, machine.both_bytes_per_s) == (0, 0, 0)
    assert (machine.disk_write_bytes_per_s, machine.disk_read_bytes_per_s) == (0, 0)
    assert machine.num_local_ranks == 1
    assert machine.source.startswith(f"probed with torch {torch.__version__}: one process")
    assert Machine.from_json(machine.to_json()) == machine


def test_a_disk_is_written_and_read_back_and_left_as_it_was(tmp_path: Path) -> None:
    machine = probe_machine(CPU, disks=[DiskSpec(path=str(tmp_path), cap_bytes=80 * MIB)])
    assert machine.disk_bytes == 80 * MIB
    assert machine.disk_write_bytes_per_s > 0
    assert machine.disk_read_bytes_per_s > 0
    assert "64.0 MiB on disk" in machine.source
    assert list(tmp_path.iterdir()) == []


def test_no_more_than_the_cap_is_written(tmp_path: Path) -> None:
    machine = probe_machine(CPU, disks=[DiskSpec(path=str(tmp_path), cap_bytes=3 * MIB + 1)])
    assert machine.disk_bytes == 3 * MIB + 1
    assert "3.0 MiB on disk" in machine.source


def test_a_disk_of_no_bytes_is_no_disk() -> None:
    machine = probe_machine(CPU, disks=[DiskSpec(path="/no/such/folder", cap_bytes=0)])
    assert (machine.disk_bytes, machine.disk_write_bytes_per_s) == (0, 0)


def test_a_machine_is_measured_once_in_a_process() -> None:
    assert probe_machine(CPU) is probe_machine(torch.device("cpu"))


def test_ranks_of_the_node_share_its_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert probe_machine(CPU).num_local_ranks == 4


def test_a_folder_that_does_not_exist_is_refused() -> None:
    with pytest.raises(MemoryTierError, match=r"disk folder '/no/such/folder' does not exist"):
        probe_machine(CPU, disks=[DiskSpec(path="/no/such/folder", cap_bytes=MIB)])


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device 'meta' cannot be probed; it must be a CUDA"):
        probe_machine(torch.device("meta"))


def test_a_link_has_two_directions() -> None:
    with pytest.raises(ValueError, match="num_bytes is 1; it must be 2 or more"):
        probe_machine(CPU, num_bytes=1)


@pytest.mark.parametrize("has_others", [False, True])
def test_a_gpu_whose_driver_pins_nothing_has_no_host_tier(
    has_others: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And keeps no other rank waiting: those meet before each of their twelve copies."""
    driver, meetings = FakeDriver(0), list[str]()

    def meet() -> None:
        meetings.append("met")

    def memory_of(_: torch.device) -> PinnedMemory:
        return PinnedMemory(driver, root=tmp_path)

    monkeypatch.setattr(_probe, "pinned_memory_of", memory_of)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (MIB, 2 * MIB))
    # A size of its own: a machine is measured once in a process.
    with caplog.at_level(logging.WARNING, logger="ebbtide"):
        machine = probe_machine(
            torch.device("cuda", 0), num_bytes=MIB + 1, meet=meet if has_others else None
        )
    assert (machine.host_bytes, machine.out_bytes_per_s, machine.in_bytes_per_s) == (0, 0, 0)
    assert machine.device_bytes == 2 * MIB
    assert driver.asked[0] == MIB + 1 and driver.registered == {}
    (record,) = caplog.records
    assert record.getMessage().startswith("1.0 MiB of pinned host memory was refused: ")
    assert record.getMessage().endswith("Plans for a budget move nothing to host memory.")
    assert len(meetings) == (12 if has_others else 0)
    assert machine.num_local_ranks == 2
    assert machine.source.endswith("all ranks of a group at once" if has_others else "one process")
