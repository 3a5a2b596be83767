"""The object that `ebbtide doctor --json` prints."""

import json
from dataclasses import replace
from typing import Any, cast

from ebbtide.commands.doctor_json import describe_facts
from ebbtide.doctor import Disk, Facts, Refusal, make_machine
from ebbtide.doctor.facts import Gpu, Host, PciLink, Software
from ebbtide.doctor.finding import Code, Finding, Severity
from tests.doctor.machines import GIB, GOOD, GPU, HOST, with_gpu, with_link

UNKNOWN = Facts(pci_gpus=(), gpus=(), host=Host(), disks=(), software=Software(versions={}))
NOTE = Finding(
    code=Code.NO_GPU, severity=Severity.NOTE, what="none", evidence="shown", advice="Nothing."
)


def describe(facts: Facts, *findings: Finding, seconds: float = 8.04) -> dict[str, Any]:
    form = describe_facts(facts, findings, make_machine(facts), seconds)
    # As it is printed: all must be JSON.
    return cast(dict[str, Any], json.loads(json.dumps(form)))


def test_a_machine_that_is_known_in_full() -> None:
    form = describe(GOOD)
    assert (form["is_fit"], form["seconds"], form["unknown"]) == (True, 8.0, [])
    (shown,) = form["pci_gpus"]
    assert (shown["vendor"], shown["numa_node"]) == ("NVIDIA", 0)
    assert shown["pcie"]["ceiling_bytes_per_s"] == 63_015_384_615  # 32 GT/s x 16 x 128 / 130 / 8
    host = form["host"]
    assert host["pinnable_bytes"] == 840 * GIB
    assert host["limit"] == "MemAvailable in /proc/meminfo is 900.0 GiB"
    assert host["node_cpus"] == {"0": list(range(8)), "1": list(range(8, 16))}
    assert (host["cpus"], host["nodes"]) == (list(range(16)), [0, 1])
    assert form["software"] == {
        "versions": {"torch": "2.13.0+cu130"},
        "torch_build": "CUDA 13.0",
        "variables": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    }
    assert form["machine"]["name"] == "NVIDIA H200"
    assert form["no_machine_because"] == ""


def test_what_is_not_known_is_null_or_empty() -> None:
    form = describe(UNKNOWN)
    assert (form["links"], form["pci_gpus"], form["disks"], form["findings"]) == ([], [], [], [])
    host = form["host"]
    assert (host["limit"], host["huge_pages"], host["driver"]) == ("", "", "")
    assert {host[key] for key in ("total_bytes", "pinnable_bytes", "cpus", "nodes", "load")} == {
        None
    }
    assert form["machine"] is None
    assert form["no_machine_because"] == cast(Refusal, make_machine(UNKNOWN)).reason


def test_a_gpu_without_a_link_that_was_read() -> None:
    alone = Gpu(index=3, name="a GPU", pci_address="0000:01:00.0", device_bytes=2, free_bytes=1)
    (link,) = describe(with_gpu(alone))["links"]
    assert (link["gpu"], link["pcie"], link["numa_node"]) == (3, None, None)
    assert (link["alone"], link["together"], link["c2c_bytes_per_s"]) == (None, None, None)
    (unread,) = describe(with_link(PciLink(generation=5)))["links"]
    assert (unread["pcie"]["width"], unread["pcie"]["ceiling_bytes_per_s"]) == (None, None)


def test_notes_leave_a_machine_fit_and_serious_findings_do_not() -> None:
    assert describe(GOOD, NOTE)["is_fit"] is True
    form = describe(GOOD, NOTE, replace(NOTE, severity=Severity.SERIOUS))
    assert form["is_fit"] is False
    assert form["findings"][0] == {
        "code": "no-gpu",
        "severity": "note",
        "what": "none",
        "evidence": "shown",
        "advice": "Nothing.",
    }


def test_folders_and_their_errors() -> None:
    disks = Disk(path="/a", write_bytes_per_s=5, read_bytes_per_s=6), Disk(path="/b", error="no")
    first, second = describe(replace(GOOD, disks=disks))["disks"]
    assert (first["path"], first["write_bytes_per_s"], first["error"]) == ("/a", 5, "")
    assert (second["write_bytes_per_s"], second["error"]) == (None, "no")


def test_a_host_without_a_lock_limit() -> None:
    assert describe(GOOD)["host"]["memlock_bytes"] is None
    limited = replace(GOOD, gpus=(GPU,), host=replace(HOST, memlock_bytes=8 * 2**20))
    assert describe(limited)["host"]["memlock_bytes"] == 8 * 2**20
