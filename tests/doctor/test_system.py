"""What Linux says of a machine, from folders that a test writes."""

from pathlib import Path

from ebbtide.doctor.facts import PciGpu, PciLink
from ebbtide.doctor.system import parse_list, read_gpus, read_host, read_link
from tests.doctor.machines import ADDRESS, GIB, write, write_host, write_pci


def test_a_gpu_is_read_with_its_link_its_port_and_its_node(tmp_path: Path) -> None:
    write_host(tmp_path)
    write_pci(tmp_path, ADDRESS, speed="16.0 GT/s PCIe", width=8, slot_width=8, node=1)
    write(
        tmp_path / "proc/driver/nvidia/gpus" / ADDRESS / "information",
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 42",
    )
    link = PciLink(
        generation=4,
        width=8,
        most_generation=5,
        most_width=16,
        slot_generation=5,
        slot_width=8,
    )
    assert read_gpus(tmp_path) == (
        PciGpu(address=ADDRESS, vendor="NVIDIA", name="NVIDIA H200", link=link, numa_node=1),
    )


def test_what_is_no_gpu_is_left_out(tmp_path: Path) -> None:
    write_pci(tmp_path, "0000:01:00.0", vendor="0x1a03", kind="0x030000")  # a server's own screen
    write_pci(tmp_path, "0000:02:00.0", kind="0x020700")  # a network card of NVIDIA's
    write_pci(tmp_path, "0000:03:00.0", vendor="0x1002", kind="0x120000")
    assert [(gpu.address, gpu.vendor, gpu.name) for gpu in read_gpus(tmp_path)] == [
        ("0000:03:00.0", "AMD", "")
    ]


def test_what_a_virtual_machine_makes_up_is_not_known(tmp_path: Path) -> None:
    write_pci(tmp_path, ADDRESS, speed="Unknown", width=255, slot_speed="Unknown", slot_width=0)
    link = read_link(ADDRESS, tmp_path, is_of_copies=True)
    assert (link.generation, link.width) == (None, None)
    assert (link.slot_generation, link.slot_width) == (None, None)
    assert link.is_of_copies


def test_a_system_that_shows_nothing_has_nothing(tmp_path: Path) -> None:
    assert read_gpus(tmp_path) == ()
    assert read_link(ADDRESS, tmp_path) == PciLink()
    host = read_host(tmp_path)
    assert (host.total_bytes, host.available_bytes, host.limit) == (None, None, None)
    assert host.load is None
    assert (host.huge_pages, dict(host.node_cpus), host.cpus, host.nodes) == ("", {}, None, None)


def test_a_host_is_read_with_what_the_process_may_use(tmp_path: Path) -> None:
    write_host(tmp_path)
    host = read_host(tmp_path)
    assert (host.total_bytes, host.available_bytes) == (64 * GIB, 32 * GIB)
    assert host.limit is not None and host.limit.room_bytes == 30 * GIB
    assert host.huge_pages == "madvise"
    assert host.node_cpus == {0: frozenset(range(8)), 1: frozenset(range(8, 16))}
    assert host.cpus == {8, 9, 10, 11, 15}
    assert host.nodes == {1}
    assert (host.driver, host.is_wsl, host.load) == ("580.95.05", False, 1.25)
    write(tmp_path / "proc/version", "Linux version 5.15.153.1-microsoft-standard-WSL2")
    assert read_host(tmp_path).is_wsl


def test_lists_of_the_kernel() -> None:
    assert parse_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_list("") == parse_list("\n") == parse_list("none") == frozenset()
