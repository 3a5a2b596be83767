"""What `ebbtide doctor --json` prints: bytes, bytes per second; null: not known."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from ebbtide.doctor.about_links import ceiling_bytes_per_s
from ebbtide.doctor.facts import Facts, Gpu, Host, PciGpu, PciLink
from ebbtide.doctor.finding import Finding, Severity
from ebbtide.doctor.machine import Refusal
from ebbtide.machine import Machine


def describe_facts(
    facts: Facts, findings: Sequence[Finding], machine: Machine | Refusal, seconds: float
) -> dict[str, object]:
    """Return the object for one machine; docs/doctor.md has every key."""
    is_refused = isinstance(machine, Refusal)
    return {
        "is_fit": all(finding.severity is not Severity.SERIOUS for finding in findings),
        "seconds": round(seconds, 1),
        "links": [_describe_link(gpu) for gpu in facts.gpus],
        "pci_gpus": [_describe_pci(gpu) for gpu in facts.pci_gpus],
        "host": _describe_host(facts.host),
        "disks": [asdict(disk) for disk in facts.disks],
        "software": {
            "versions": dict(facts.software.versions),
            "torch_build": facts.software.torch_build,
            "variables": dict(facts.software.variables),
        },
        "findings": [
            {
                "code": finding.code.value,
                "severity": finding.severity.value,
                "what": finding.what,
                "evidence": finding.evidence,
                "advice": finding.advice,
            }
            for finding in findings
        ],
        "unknown": list(facts.unknown),
        "machine": None if is_refused else json.loads(machine.to_json()),
        "no_machine_because": machine.reason if is_refused else "",
    }


def _describe_link(gpu: Gpu) -> dict[str, object]:
    return {
        "gpu": gpu.index,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "pci_address": gpu.pci_address,
        "numa_node": None if gpu.pci is None else gpu.pci.numa_node,
        "device_bytes": gpu.device_bytes,
        "free_bytes": gpu.free_bytes,
        "pcie": None if gpu.pci is None else _describe_pcie(gpu.pci.link),
        "alone": None if gpu.alone is None else asdict(gpu.alone),
        "together": None if gpu.together is None else asdict(gpu.together),
        "c2c_bytes_per_s": gpu.c2c_bytes_per_s,
        "nvlink_bytes_per_s": gpu.nvlink_bytes_per_s,
        "refusal": gpu.refusal,
    }


def _describe_pcie(link: PciLink) -> dict[str, object]:
    return {
        **asdict(link),
        "ceiling_bytes_per_s": ceiling_bytes_per_s(link.generation, link.width),
    }


def _describe_pci(gpu: PciGpu) -> dict[str, object]:
    return {
        "pci_address": gpu.address,
        "vendor": gpu.vendor,
        "name": gpu.name,
        "numa_node": gpu.numa_node,
        "pcie": _describe_pcie(gpu.link),
    }


def _describe_host(host: Host) -> dict[str, object]:
    return {
        "total_bytes": host.total_bytes,
        "available_bytes": host.available_bytes,
        "pinnable_bytes": None if host.limit is None else host.limit.room_bytes,
        "limit": "" if host.limit is None else host.limit.text,
        "memlock_bytes": host.memlock_bytes,
        "huge_pages": host.huge_pages,
        "node_cpus": {str(node): sorted(cpus) for node, cpus in host.node_cpus.items()},
        "cpus": None if host.cpus is None else sorted(host.cpus),
        "nodes": None if host.nodes is None else sorted(host.nodes),
        "load": host.load,
        "is_wsl": host.is_wsl,
        "driver": host.driver,
    }
