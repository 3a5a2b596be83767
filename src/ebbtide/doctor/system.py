"""Read what Linux says of a machine: PCI, NUMA, memory. Nothing is measured, and nothing changes.

Everything is below a root that tests replace. What is not there, cannot be read or makes no sense
is None, "" or left out: containers and virtual machines hide a part of it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ebbtide.doctor.facts import Host, PciGpu, PciLink
from ebbtide.memory.limits import find_tightest_limit, read_process_limits
from ebbtide.memory.numa import find_node

VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD"}

# PCI classes of a VGA controller, a 3D controller and a processing accelerator. The screens of
# servers' management chips are VGA controllers too, but of other vendors.
_GPU_CLASSES: Final = ("0x0300", "0x0302", "0x1200")

# What a lane carries by generation, as the kernel writes it: "16.0 GT/s PCIe".
_GENERATIONS: Final = {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16.0": 4, "32.0": 5,
                       "64.0": 6}  # fmt: skip

_WIDTHS: Final = frozenset({1, 2, 4, 8, 12, 16, 32})

_NODE = re.compile(r"node(\d+)")


def read_gpus(root: Path = Path("/")) -> tuple[PciGpu, ...]:
    """Return the GPUs in the system's PCI tables, by address."""
    found: list[PciGpu] = []
    for folder in _folders(root / "sys/bus/pci/devices"):
        vendor = VENDORS.get(_read(folder / "vendor"))
        if vendor is None or _read(folder / "class")[:6] not in _GPU_CLASSES:
            continue
        found.append(
            PciGpu(
                address=folder.name.lower(),
                vendor=vendor,
                name=_name_of(folder.name, root),
                link=read_link(folder.name, root),
                numa_node=find_node(folder.name, root),
            )
        )
    return tuple(found)


def read_link(address: str, root: Path = Path("/"), *, is_of_copies: bool = False) -> PciLink:
    """Return how a PCI device is linked now.

    Args:
        address: Such as `0000:17:00.0`.
        root: The folder that holds `sys`.
        is_of_copies: What the record says of it; the caller knows whether copies run.
    """
    folder = root / "sys/bus/pci/devices" / address.lower()
    try:
        port = folder.resolve().parent
    except OSError:
        port = folder / "no port"
    return PciLink(
        generation=_generation(folder / "current_link_speed"),
        width=_width(folder / "current_link_width"),
        most_generation=_generation(folder / "max_link_speed"),
        most_width=_width(folder / "max_link_width"),
        slot_generation=_generation(port / "max_link_speed"),
        slot_width=_width(port / "max_link_width"),
        is_of_copies=is_of_copies,
    )


def read_host(root: Path = Path("/")) -> Host:
    """Return what the host has, and what this process may use of it."""
    memory = _read_pairs(root / "proc/meminfo")
    status = _read_pairs(root / "proc/self/status")
    cpus, nodes = status.get("Cpus_allowed_list"), status.get("Mems_allowed_list")
    version = _read(root / "proc/driver/nvidia/version")
    driver = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", version)
    return Host(
        total_bytes=_kib(memory.get("MemTotal")),
        available_bytes=_kib(memory.get("MemAvailable")),
        limit=find_tightest_limit(root),
        memlock_bytes=read_process_limits().memlock_bytes,
        huge_pages=_chosen(_read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        node_cpus=_node_cpus(root),
        cpus=None if cpus is None else parse_list(cpus),
        nodes=None if nodes is None else parse_list(nodes),
        load=_load(_read(root / "proc/loadavg")),
        is_wsl="microsoft" in _read(root / "proc/version").lower(),
        driver=driver[0] if driver else "",
    )


def parse_list(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it: `0-3,8`; what is none is left out."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last.isdecimal() or not last):
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _name_of(address: str, root: Path) -> str:
    told = _read_pairs(root / "proc/driver/nvidia/gpus" / address.lower() / "information")
    return told.get("Model", "")


def _node_cpus(root: Path) -> Mapping[int, frozenset[int]]:
    found: dict[int, frozenset[int]] = {}
    for folder in _folders(root / "sys/devices/system/node"):
        match = _NODE.fullmatch(folder.name)
        if match:
            found[int(match[1])] = parse_list(_read(folder / "cpulist"))
    return found


def _generation(path: Path) -> int | None:
    return _GENERATIONS.get(_read(path).partition(" ")[0])


def _width(path: Path) -> int | None:
    """Return the lanes; None where a virtual machine writes 0 or 255."""
    text = _read(path)
    return int(text) if text.isdecimal() and int(text) in _WIDTHS else None


def _chosen(text: str) -> str:
    """Return the word in brackets: `always [madvise] never`."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def _kib(text: str | None) -> int | None:
    number = (text or "").partition(" ")[0]
    return int(number) * 1024 if number.isdecimal() else None


def _load(text: str) -> float | None:
    """Return the first number of three."""
    match = re.match(r"\d+\.\d+", text)
    return float(match[0]) if match else None


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _read_pairs(path: Path) -> dict[str, str]:
    """Return the lines `name: value` of a file."""
    pairs = (line.partition(":") for line in _read(path).splitlines())
    return {name.strip(): value.strip() for name, mark, value in pairs if mark}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
