"""Machines whose figures were measured or published; each says where they are from.

Unchecked: that a machine at hand is like the one in the list. Where it is slower, a plan stalls
more than predicted; probe it instead.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.naming import unknown_name_message
from ebbtide.units import parse_bytes

_ALL = (
    Machine(
        name="h200-pcie5",
        # What the driver reports of the 141 GB on the package.
        device_bytes=parse_bytes("143771 MiB"),
        host_bytes=parse_bytes("1 TiB"),
        out_bytes_per_s=55_200_000_000,
        in_bytes_per_s=55_300_000_000,
        both_bytes_per_s=100_600_000_000,
        slowdown_ppm=15_000,
        source=(
            "Measured on one NVIDIA H200, PCIe 5 x16, driver 580, torch 2.11, pinned memory, one "
            "GPU of the host copying; a matrix product ran 3 % slower beside copies both ways. "
            "Where two GPUs share an uplink, each gets about half. The 1 TiB of host memory are "
            "an assumption."
        ),
    ),
    Machine(
        name="a100-pcie4",
        # The nominal size; drivers report a little less or more.
        device_bytes=parse_bytes("80 GiB"),
        host_bytes=parse_bytes("1 TiB"),
        out_bytes_per_s=25_000_000_000,
        in_bytes_per_s=25_000_000_000,
        both_bytes_per_s=36_000_000_000,
        source=(
            "Published: NVIDIA/nvbandwidth issue 53, 8 A100 with PCIe 4; about 25 GB/s in each "
            "direction alone, and together 25 GB/s out but only 11 GB/s in. Not reproduced. The "
            "1 TiB of host memory are an assumption."
        ),
    ),
    Machine(
        name="h100-pcie5",
        device_bytes=parse_bytes("80 GiB"),
        host_bytes=parse_bytes("1 TiB"),
        out_bytes_per_s=55_200_000_000,
        in_bytes_per_s=55_300_000_000,
        both_bytes_per_s=100_600_000_000,
        slowdown_ppm=15_000,
        source=(
            "Measured on an H200 with the same link; the H100 was not. Nominal device memory. The "
            "1 TiB of host memory are an assumption."
        ),
    ),
    Machine(
        name="b200-pcie5",
        device_bytes=parse_bytes("180 GB"),
        host_bytes=parse_bytes("1 TiB"),
        out_bytes_per_s=55_200_000_000,
        in_bytes_per_s=55_300_000_000,
        both_bytes_per_s=100_600_000_000,
        slowdown_ppm=15_000,
        source=(
            "Measured on an H200 with the same link; the B200 was not. Device memory as in the "
            "data sheet of HGX B200. The 1 TiB of host memory are an assumption."
        ),
    ),
    Machine(
        name="rtx4090",
        device_bytes=parse_bytes("24 GiB"),
        host_bytes=parse_bytes("64 GiB"),
        out_bytes_per_s=24_000_000_000,
        in_bytes_per_s=24_000_000_000,
        both_bytes_per_s=36_000_000_000,
        source=(
            "Published: PCIe 4 x16 carries about 25 GB/s with pinned memory (nvbandwidth issue "
            "53); one less is taken, and its figure for both ways. Not measured. The 64 GiB of "
            "host memory are an assumption."
        ),
    ),
    Machine(
        name="gh200",
        device_bytes=parse_bytes("96 GB"),
        host_bytes=parse_bytes("480 GB"),
        out_bytes_per_s=295_000_000_000,
        in_bytes_per_s=342_000_000_000,
        both_bytes_per_s=342_000_000_001,
        source=(
            "Published: nvbandwidth on one GH200, 295 GB/s out and 342 in, of 450 advertised in "
            "each direction; four on one board got 170 out and 411 in. Both ways at once was not "
            "published: no more than one way is taken. The 480 GB "
            "of host memory are an assumption: as advertised, all of it free."
        ),
    ),
    Machine(
        name="gb200-nvl72",
        device_bytes=parse_bytes("186 GB"),
        host_bytes=parse_bytes("960 GB"),
        out_bytes_per_s=193_000_000_000,
        in_bytes_per_s=211_000_000_000,
        both_bytes_per_s=351_000_000_000,
        num_local_ranks=4,
        source=(
            "Published for four GB300, which have the same Grace and link: 193 GB/s out and 211 "
            "in, and both ways at once 182 and 169, of 900 advertised as the total of both "
            "directions for two GPUs. torchtitan has 350 GB/s for one GPU with local memory, 120 "
            "with the other CPU's. Two CPUs with 480 GB for four GPUs, all of it free: the 960 GB "
            "of host memory are an assumption."
        ),
    ),
    Machine(
        name="gb300-nvl72",
        device_bytes=parse_bytes("279 GB"),
        host_bytes=parse_bytes("960 GB"),
        out_bytes_per_s=193_000_000_000,
        in_bytes_per_s=211_000_000_000,
        both_bytes_per_s=351_000_000_000,
        num_local_ranks=4,
        source=(
            "Published: nvbandwidth on four GB300, 193 GB/s out and 211 in, and both ways at once "
            "182 and 169, with all four active; 900 advertised as the total of both directions "
            "for two GPUs. Two CPUs with 480 GB for four GPUs, all of it free: the 960 GB of host "
            "memory are an assumption."
        ),
    ),
    Machine(
        name="vera-rubin",
        device_bytes=parse_bytes("288 GB"),
        host_bytes=parse_bytes("3000 GB"),
        out_bytes_per_s=386_000_000_000,
        in_bytes_per_s=422_000_000_000,
        both_bytes_per_s=702_000_000_000,
        num_local_ranks=4,
        source=(
            "Published: 1.8 TB/s of NVLink-C2C, the total of both directions, twice that of "
            "GB300; twice what was measured there is taken. Nothing was measured. Two CPUs with "
            "1.5 TB for four GPUs, all of it free: the 3000 GB of host memory are an assumption."
        ),
    ),
)

MACHINES: Mapping[str, Machine] = MappingProxyType({machine.name: machine for machine in _ALL})
"""Name to machine; read-only."""


def find_machine(name: str) -> Machine:
    """Return the machine of the catalog with this name.

    Raises:
        PlanError: There is none; the message lists the names, nearest first.
    """
    if name not in MACHINES:
        raise PlanError(
            f"{unknown_name_message('machine', name, MACHINES)}. "
            "Name one of these, or read a file with Machine.from_json()."
        )
    return MACHINES[name]


NVME_WRITE_BYTES_PER_S, NVME_READ_BYTES_PER_S = 3_000_000_000, 7_000_000_000
"""Of one NVMe disk: 3 to 7 GB/s are advertised, writing slower than reading. Assumed, and
optimistic for long writes: a virtual disk that was measured wrote 3.3 and read 1.4 GB/s."""


def with_disk(machine: Machine, disk_bytes: int) -> Machine:
    """Return the machine with so many bytes on an NVMe disk; its own bandwidths stay."""
    return replace(
        machine,
        disk_bytes=disk_bytes,
        disk_write_bytes_per_s=machine.disk_write_bytes_per_s or NVME_WRITE_BYTES_PER_S,
        disk_read_bytes_per_s=machine.disk_read_bytes_per_s or NVME_READ_BYTES_PER_S,
    )
