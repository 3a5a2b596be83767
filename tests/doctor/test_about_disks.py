"""Findings about folders to evict to, on facts that a test makes up."""

from dataclasses import replace

from ebbtide.doctor.about_disks import find_about_disk
from ebbtide.doctor.facts import Disk
from ebbtide.doctor.finding import Code, Finding, Severity
from ebbtide.doctor.findings import find
from tests.doctor.machines import GIB, GOOD

DISK = Disk(
    path="/nvme",
    file_system="ext4",
    free_bytes=500 * GIB,
    is_direct=True,
    write_bytes_per_s=3_300_000_000,
    read_bytes_per_s=1_400_000_000,
)


def only(disk: Disk) -> Finding:
    (finding,) = find_about_disk(disk)
    return finding


def test_a_good_disk_has_no_findings() -> None:
    assert find(replace(GOOD, disks=(DISK,))) == ()


def test_a_folder_in_memory() -> None:
    # How fast memory is says nothing.
    found = only(replace(DISK, file_system="tmpfs", write_bytes_per_s=1))
    assert (found.code, found.severity) == (Code.MEMORY_FOLDER, Severity.SERIOUS)
    assert found.what == "/nvme is memory, not a disk"
    assert found.evidence == (
        "disk folder '/nvme' is on tmpfs, which is memory: what is evicted there takes the host's "
        "memory"
    )
    assert found.advice == "Name a folder on a disk."


def test_a_folder_on_a_network() -> None:
    found = only(replace(DISK, file_system="nfs4"))
    assert (found.code, found.severity) == (Code.NETWORK_FOLDER, Severity.SERIOUS)
    assert "on nfs4, a file system over a network" in found.evidence
    assert found.advice == "Name a folder on a disk of this machine."


def test_a_folder_that_takes_no_direct_requests_is_noted() -> None:
    found = only(replace(DISK, file_system="overlay", is_direct=False))
    assert (found.code, found.severity) == (Code.CACHED_FOLDER, Severity.NOTE)
    assert found.evidence == "a direct write was refused on overlay"


def test_a_slow_disk() -> None:
    found = only(replace(DISK, write_bytes_per_s=90_000_000))
    assert (found.code, found.severity) == (Code.SLOW_DISK, Severity.SERIOUS)
    assert found.evidence == "64 MiB were written at 0.09 GB/s"


def test_a_disk_with_less_room_than_was_asked_for() -> None:
    found = only(replace(DISK, cap_bytes=600 * GIB))
    assert (found.code, found.severity) == (Code.FULL_DISK, Severity.SERIOUS)
    assert found.evidence == "500.0 GiB are free, and the cap is 600.0 GiB"


def test_a_disk_that_could_not_be_measured() -> None:
    found = only(Disk(path="/gone", error="it did not end within 4 s"))
    assert (found.code, found.severity) == (Code.UNUSABLE_DISK, Severity.SERIOUS)
    assert (found.what, found.evidence) == (
        "/gone could not be measured",
        "it did not end within 4 s",
    )
