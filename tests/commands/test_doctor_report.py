"""What `ebbtide doctor` prints for people."""

from dataclasses import replace

from ebbtide.commands.doctor_report import write_facts
from ebbtide.doctor import Disk, Facts, make_machine
from ebbtide.doctor.facts import Host, PciLink, Software
from ebbtide.doctor.finding import Code, Finding, Severity
from tests.doctor.machines import GIB, GOOD, GPU, HOST, LINK, with_gpu, with_link

SERIOUS = Finding(
    code=Code.SLOW_DISK,
    severity=Severity.SERIOUS,
    what="the folder /a is slow",
    evidence="0.1 GB/s",
    advice="Take another.",
)


def lines_of(facts: Facts, *findings: Finding) -> list[str]:
    return list(write_facts(facts, findings, make_machine(facts)))


def test_the_host_is_told_in_three_lines() -> None:
    limited = replace(HOST, memlock_bytes=8 * 2**20)
    start = lines_of(replace(GOOD, host=limited)).index(
        "host: 1.0 TiB of memory, 900.0 GiB free, 840.0 GiB may be pinned"
    )
    assert lines_of(replace(GOOD, host=limited))[start + 1 : start + 3] == [
        "  MemAvailable in /proc/meminfo is 900.0 GiB",
        "  memlock 8.0 MiB; huge pages madvise; 2 NUMA nodes; 16 processors for this process",
    ]


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    lines = lines_of(
        Facts(
            pci_gpus=(),
            gpus=(),
            host=Host(),
            disks=(),
            software=Software(versions={}),
            unknown=("whether it has huge pages",),
        )
    )
    assert lines[:3] == [
        "GPUs: none",
        "host: unknown of memory, unknown free",
        "  memlock unlimited; huge pages unknown; unknown NUMA nodes; unknown processors for this "
        "process",
    ]
    assert "not found out: whether it has huge pages" in lines
    assert lines[-1].startswith("No machine file for planners: the system does not say")


def test_a_link_at_rest_and_one_that_is_not_known() -> None:
    row = lines_of(with_link(replace(LINK, generation=1, is_of_copies=False)))[2]
    assert "1 x16 of 5 x16, at rest" in row
    assert "? x? of ? x?" in lines_of(with_link(PciLink(is_of_copies=True)))[2]
    assert lines_of(with_gpu(replace(GPU, pci=None, alone=None, together=None)))[2].split() == [
        *("0", "NVIDIA", "H200", "140.0", "GiB", "?", "-", *("-",) * 6)
    ]


def test_links_that_only_the_driver_tells_of() -> None:
    gpu = replace(GPU, c2c_bytes_per_s=447_120_000_000, nvlink_bytes_per_s=478_000_000_000)
    assert lines_of(with_gpu(gpu))[3:5] == [
        "GPU 0: C2C 447 GB/s, says its driver",
        "GPU 0: NVLink 478 GB/s, says its driver",
    ]


def test_gpus_that_torch_cannot_use_are_shown_by_address() -> None:
    lines = lines_of(replace(GOOD, gpus=()))
    assert lines[0] == "GPUs that the system shows, and torch cannot use:"
    assert lines[2].split() == [
        *("0000:17:00.0", "NVIDIA", "H200", "5", "x16", "of", "5", "x16", "0")
    ]


def test_folders_have_a_row_each() -> None:
    disks = (
        Disk(path="/a", file_system="ext4", free_bytes=5 * GIB, is_direct=True,
             write_bytes_per_s=1_560_000_000, read_bytes_per_s=790_000_000),
        Disk(path="/b", error="it is not there"),
    )  # fmt: skip
    lines = lines_of(replace(GOOD, disks=disks))
    start = lines.index("disks, in GB/s:")
    assert [line.split() for line in lines[start + 2 : start + 4]] == [
        ["/a", "ext4", "5.0", "GiB", "yes", "1.56", "0.79"],
        ["/b", "unknown", "unknown", "unknown", "-", "-"],
    ]


def test_software_with_its_variables() -> None:
    lines = lines_of(replace(GOOD, host=replace(HOST, driver="580.95.05")))
    start = lines.index("software: torch 2.13.0+cu130 (torch for CUDA 13.0), driver 580.95.05")
    assert lines[start + 1] == "  PYTORCH_ALLOC_CONF=expandable_segments:True"


def test_findings_end_with_what_they_mean() -> None:
    note = replace(SERIOUS, severity=Severity.NOTE)
    assert lines_of(GOOD, SERIOUS, note)[-5:] == [
        "! slow-disk: the folder /a is slow: 0.1 GB/s.",
        "    Take another.",
        "- slow-disk: the folder /a is slow: 0.1 GB/s.",
        "    Take another.",
        "1 of 2 (!) make offloading slow, unsafe or impossible.",
    ]
    assert lines_of(GOOD, note)[-1] == (
        "Nothing of this makes offloading slow, unsafe or impossible."
    )
    assert lines_of(GOOD)[-1] == "Nothing found."
