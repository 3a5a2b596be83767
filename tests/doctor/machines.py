"""Folders and facts of machines that a test makes up."""

from dataclasses import replace
from pathlib import Path

from ebbtide.doctor.facts import Facts, Gpu, Host, PciGpu, PciLink, Rates, Software
from ebbtide.memory.limits import HostLimit

GIB = 2**30
ADDRESS = "0000:17:00.0"

LINK = PciLink(
    generation=5,
    width=16,
    most_generation=5,
    most_width=16,
    slot_generation=5,
    slot_width=16,
    is_of_copies=True,
)
FAST = Rates(
    out_bytes_per_s=55_200_000_000,
    in_bytes_per_s=55_300_000_000,
    both_bytes_per_s=100_600_000_000,
)
PCI = PciGpu(address=ADDRESS, vendor="NVIDIA", name="NVIDIA H200", link=LINK, numa_node=0)
GPU = Gpu(
    index=0,
    name="NVIDIA H200",
    pci_address=ADDRESS,
    device_bytes=140 * GIB,
    free_bytes=139 * GIB,
    pci=PCI,
    alone=FAST,
    together=FAST,
)
HOST = Host(
    total_bytes=1024 * GIB,
    available_bytes=900 * GIB,
    limit=HostLimit(
        text="MemAvailable in /proc/meminfo is 900.0 GiB",
        room_bytes=840 * GIB,
        advice="Free memory of the host",
    ),
    huge_pages="madvise",
    node_cpus={0: frozenset(range(8)), 1: frozenset(range(8, 16))},
    cpus=frozenset(range(16)),
    nodes=frozenset({0, 1}),
)
SOFTWARE = Software(
    versions={"torch": "2.13.0+cu130"},
    torch_build="CUDA 13.0",
    variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
)
GOOD = Facts(pci_gpus=(PCI,), gpus=(GPU,), host=HOST, disks=(), software=SOFTWARE)
"""A machine with one GPU, of which nothing is wrong."""


def with_gpu(gpu: Gpu, facts: Facts = GOOD) -> Facts:
    return replace(facts, gpus=(gpu,))


def with_link(link: PciLink, gpu: Gpu = GPU) -> Facts:
    return with_gpu(replace(gpu, pci=replace(PCI, link=link)))


def write(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def write_pci(
    root: Path,
    address: str,
    *,
    speed: str = "32.0 GT/s PCIe",
    width: int = 16,
    most_speed: str = "32.0 GT/s PCIe",
    slot_speed: str = "32.0 GT/s PCIe",
    slot_width: int = 16,
    node: int = 0,
    vendor: str = "0x10de",
    kind: str = "0x030200",
) -> None:
    """Write a device below a port, and a link to it, as the kernel does."""
    port = root / "sys/devices/pci0000:00/0000:00:01.0"
    write(port / "max_link_speed", slot_speed)
    write(port / "max_link_width", slot_width)
    device = port / address
    for name, text in {
        "vendor": vendor,
        "class": kind,
        "current_link_speed": speed,
        "current_link_width": width,
        "max_link_speed": most_speed,
        "max_link_width": 16,
        "numa_node": node,
    }.items():
        write(device / name, text)
    shown = root / "sys/bus/pci/devices" / address
    shown.parent.mkdir(parents=True, exist_ok=True)
    shown.symlink_to(device)


def write_host(root: Path, *, huge_pages: str = "always [madvise] never") -> None:
    """Write what a host with two NUMA nodes says, to a process that may use one of them."""
    write(root / "proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemAvailable: {32 * 2**20} kB")
    write(
        root / "proc/self/status", "Name: python\nCpus_allowed_list: 8-11,15\nMems_allowed_list: 1"
    )
    write(root / "proc/version", "Linux version 6.8.0")
    write(root / "proc/loadavg", "1.25 0.80 0.50 2/345 6789")
    write(
        root / "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 2025",
    )
    write(root / "sys/kernel/mm/transparent_hugepage/enabled", huge_pages)
    for node, cpus in enumerate(("0-7", "8-15")):
        write(root / f"sys/devices/system/node/node{node}/cpulist", cpus)
