"""Machines whose figures were measured or published; each says where they are from.

Unchecked: that a machine at hand is like the one in the list. Where it is slower, a plan stalls
more than predicted; probe it instead.
"""

from collections.abc import Mapping
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
