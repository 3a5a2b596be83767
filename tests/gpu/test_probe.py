"""A probe of a GPU and its link."""

from pathlib import Path

import psutil
import torch

from ebbtide.torch.probe import probe_machine
from ebbtide.units import DiskSpec

MIB = 2**20

# PCIe 1 x1 carries 0.25 GB/s and NVLink to a Grace CPU 450 each way: whatever is measured lies
# between, unless the wrong thing was timed.
SLOWEST_BYTES_PER_S = 10**8
FASTEST_BYTES_PER_S = 10**12


def test_a_gpu_has_a_link_with_plausible_rates() -> None:
    device = torch.device("cuda", 0)
    machine = probe_machine(device)
    assert machine.name == torch.cuda.get_device_name(device)
    assert machine.device_bytes == torch.cuda.mem_get_info(device)[1]
    assert 0 < machine.host_bytes <= psutil.virtual_memory().total
    for rate in (machine.out_bytes_per_s, machine.in_bytes_per_s, machine.both_bytes_per_s):
        assert SLOWEST_BYTES_PER_S < rate < FASTEST_BYTES_PER_S
    assert "best of 3 x 256.0 MiB pinned, one process" in machine.source
    assert (machine.disk_bytes, machine.disk_write_bytes_per_s) == (0, 0)


def test_a_gpu_without_an_index_is_the_current_one() -> None:
    current = torch.device("cuda", torch.cuda.current_device())
    assert probe_machine(torch.device("cuda")) is probe_machine(current)


def test_what_a_probe_takes_it_gives_back() -> None:
    device = torch.device("cuda", 0)
    before_bytes = torch.cuda.memory_allocated(device)
    probe_machine(device, num_bytes=3 * MIB)
    assert torch.cuda.memory_allocated(device) == before_bytes


def test_a_gpu_may_have_a_disk(tmp_path: Path) -> None:
    disk = DiskSpec(path=str(tmp_path), cap_bytes=2**30)
    machine = probe_machine(torch.device("cuda", 0), disks=[disk], num_bytes=MIB)
    assert machine.disk_bytes == 2**30
    assert machine.disk_write_bytes_per_s > 0
    assert machine.disk_read_bytes_per_s > 0
