"""What `ebbtide doctor` prints for people."""

from collections.abc import Iterator, Sequence

from ebbtide.commands.columns import align_columns
from ebbtide.doctor.facts import Disk, Facts, Gpu, Host, PciLink, Rates
from ebbtide.doctor.finding import Finding, Severity
from ebbtide.doctor.machine import Refusal
from ebbtide.machine import Machine
from ebbtide.units import format_bytes


def write_facts(
    facts: Facts, findings: Sequence[Finding], machine: Machine | Refusal
) -> Iterator[str]:
    """Yield the lines for one machine."""
    yield from _write_gpus(facts)
    yield from _write_host(facts.host)
    if facts.disks:
        yield from _write_disks(facts.disks)
    versions = ", ".join(f"{name} {version}" for name, version in facts.software.versions.items())
    build = f" (torch for {facts.software.torch_build})" if facts.software.torch_build else ""
    driver = f", driver {facts.host.driver}" if facts.host.driver else ""
    yield f"software: {versions}{build}{driver}"
    for name, value in facts.software.variables.items():
        yield f"  {name}={value}"
    for sentence in facts.unknown:
        yield f"not found out: {sentence}"
    yield ""
    yield from _write_findings(findings)
    if isinstance(machine, Refusal):
        yield f"No machine file for planners: {machine.reason}."


def _write_gpus(facts: Facts) -> Iterator[str]:
    if facts.gpus:
        yield "GPUs, and GB/s of their links to pinned host memory:"
        yield from align_columns(
            [
                ["gpu", "name", "memory", "pcie", "node", "out", "in", "both",
                 "all: out", "in", "both"],
                *([str(gpu.index), gpu.name, format_bytes(gpu.device_bytes), _pcie(gpu),
                   _number(None if gpu.pci is None else gpu.pci.numa_node),
                   *_rates(gpu.alone), *_rates(gpu.together)] for gpu in facts.gpus),
            ]
        )  # fmt: skip
        for gpu in facts.gpus:
            for name, rate in (("C2C", gpu.c2c_bytes_per_s), ("NVLink", gpu.nvlink_bytes_per_s)):
                if rate is not None:
                    yield f"GPU {gpu.index}: {name} {rate / 1e9:.0f} GB/s, says its driver"
        return
    if not facts.pci_gpus:
        yield "GPUs: none"
        return
    yield "GPUs that the system shows, and torch cannot use:"
    yield from align_columns(
        [
            ["address", "name", "pcie", "node"],
            *([gpu.address, gpu.name or gpu.vendor, _link(gpu.link), _number(gpu.numa_node)]
              for gpu in facts.pci_gpus),
        ]
    )  # fmt: skip


def _write_host(host: Host) -> Iterator[str]:
    free = _size(host.available_bytes)
    pinned = "" if host.limit is None else f", {format_bytes(host.limit.room_bytes)} may be pinned"
    yield f"host: {_size(host.total_bytes)} of memory, {free} free{pinned}"
    if host.limit is not None:
        yield f"  {host.limit.text}"
    memlock = "unlimited" if host.memlock_bytes is None else format_bytes(host.memlock_bytes)
    num_cpus = "unknown" if host.cpus is None else str(len(host.cpus))
    yield (
        f"  memlock {memlock}; huge pages {host.huge_pages or 'unknown'}; "
        f"{len(host.node_cpus) or 'unknown'} NUMA nodes; {num_cpus} processors for this process"
    )


def _write_disks(disks: Sequence[Disk]) -> Iterator[str]:
    yield "disks, in GB/s:"
    yield from align_columns(
        [
            ["folder", "file system", "free", "O_DIRECT", "write", "read"],
            *(
                [disk.path, disk.file_system or "unknown", _size(disk.free_bytes),
                 {True: "yes", False: "no", None: "unknown"}[disk.is_direct],
                 _rate(disk.write_bytes_per_s, 2), _rate(disk.read_bytes_per_s, 2)]
                for disk in disks
            ),
        ]
    )  # fmt: skip


def _write_findings(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        mark = "!" if finding.severity is Severity.SERIOUS else "-"
        yield f"{mark} {finding.code.value}: {finding.what}: {finding.evidence}."
        yield f"    {finding.advice}"
    num_serious = sum(finding.severity is Severity.SERIOUS for finding in findings)
    if num_serious:
        yield f"{num_serious} of {len(findings)} (!) make offloading slow, unsafe or impossible."
    elif findings:
        yield "Nothing of this makes offloading slow, unsafe or impossible."
    else:
        yield "Nothing found."


def _pcie(gpu: Gpu) -> str:
    return "?" if gpu.pci is None else _link(gpu.pci.link)


def _link(link: PciLink) -> str:
    now = f"{link.generation or '?'} x{link.width or '?'}"
    most = f"{link.most_generation or '?'} x{link.most_width or '?'}"
    # At rest a GPU takes its link down, so the figures may be lower than in use.
    return f"{now} of {most}{'' if link.is_of_copies else ', at rest'}"


def _rates(rates: Rates | None) -> list[str]:
    if rates is None:
        return ["-"] * 3
    return [
        _rate(rates.out_bytes_per_s, 1),
        _rate(rates.in_bytes_per_s, 1),
        _rate(rates.both_bytes_per_s, 1),
    ]


def _rate(rate: int | None, digits: int) -> str:
    return "-" if rate is None else f"{rate / 1e9:.{digits}f}"


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)


def _number(number: int | None) -> str:
    return "-" if number is None else str(number)
