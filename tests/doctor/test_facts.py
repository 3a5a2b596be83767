"""The records of a machine: what nobody found out is None or empty, never a number."""

from dataclasses import FrozenInstanceError, asdict

import pytest

from ebbtide.doctor.facts import Disk, Facts, Gpu, Host, PciLink, Software
from tests.doctor.machines import GOOD


def test_a_link_that_was_not_read_has_no_figures() -> None:
    link = asdict(PciLink())
    assert link.pop("is_of_copies") is False
    assert set(link.values()) == {None}


def test_a_host_that_says_nothing_has_no_figures() -> None:
    host = asdict(Host())
    assert (host.pop("huge_pages"), host.pop("driver"), host.pop("node_cpus")) == ("", "", {})
    assert host.pop("is_wsl") is False
    assert set(host.values()) == {None}


def test_a_gpu_and_a_folder_that_were_not_measured_have_no_rates() -> None:
    gpu = Gpu(index=0, name="", pci_address="", device_bytes=1, free_bytes=1)
    assert (gpu.pci, gpu.alone, gpu.together) == (None, None, None)
    assert (gpu.c2c_bytes_per_s, gpu.nvlink_bytes_per_s, gpu.refusal) == (None, None, "")
    disk = Disk(path="/a")
    assert (disk.write_bytes_per_s, disk.read_bytes_per_s, disk.is_direct) == (None, None, None)
    assert (disk.free_bytes, disk.cap_bytes, disk.file_system, disk.error) == (None, None, "", "")


def test_facts_cannot_be_changed_and_are_equal_where_all_is() -> None:
    facts = Facts(pci_gpus=(), gpus=(), host=Host(), disks=(), software=Software(versions={}))
    assert facts.unknown == ()
    assert facts == Facts(
        pci_gpus=(), gpus=(), host=Host(), disks=(), software=Software(versions={})
    )
    assert facts != GOOD
    with pytest.raises(FrozenInstanceError):
        facts.gpus = GOOD.gpus  # pyright: ignore[reportAttributeAccessIssue]
