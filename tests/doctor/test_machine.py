"""From facts to the Machine of planners."""

from dataclasses import replace

from ebbtide.doctor.facts import Disk, Rates
from ebbtide.doctor.machine import Refusal, make_machine
from ebbtide.machine import ASSUMED_SLOWDOWN_PPM, Machine
from tests.doctor.machines import FAST, GIB, GOOD, GPU, HOST, PCI

DISK = Disk(
    path="/nvme",
    file_system="ext4",
    free_bytes=80 * GIB,
    is_direct=True,
    write_bytes_per_s=3_000_000_000,
    read_bytes_per_s=2_000_000_000,
)


def made(result: Machine | Refusal) -> Machine:
    assert isinstance(result, Machine)
    return result


def reason(result: Machine | Refusal) -> str:
    assert isinstance(result, Refusal)
    return result.reason


def test_one_gpu() -> None:
    machine = made(make_machine(GOOD))
    assert machine == Machine(
        name="NVIDIA H200",
        device_bytes=140 * GIB,
        host_bytes=840 * GIB,
        out_bytes_per_s=FAST.out_bytes_per_s,
        in_bytes_per_s=FAST.in_bytes_per_s,
        both_bytes_per_s=FAST.both_bytes_per_s,
        slowdown_ppm=ASSUMED_SLOWDOWN_PPM,
        source=("ebbtide doctor: best of 3 pinned copies, one GPU. 840.0 GiB may be pinned now"),
    )
    assert Machine.from_json(machine.to_json()) == machine


def test_of_several_gpus_the_slowest_counts_while_all_copy_and_disks_are_shared() -> None:
    slow = Rates(out_bytes_per_s=20, in_bytes_per_s=40, both_bytes_per_s=50)
    other = Rates(out_bytes_per_s=30, in_bytes_per_s=30, both_bytes_per_s=60)
    gpus = (
        replace(GPU, together=slow),
        replace(GPU, index=1, together=other, device_bytes=80 * GIB),
    )
    machine = made(make_machine(replace(GOOD, gpus=gpus, disks=(DISK,))))
    assert (machine.out_bytes_per_s, machine.in_bytes_per_s, machine.both_bytes_per_s) == (
        *(20, 30, 50),
    )
    assert (machine.num_local_ranks, machine.host_bytes_per_rank) == (2, 420 * GIB)
    assert machine.device_bytes == 80 * GIB
    assert machine.disk_bytes == 35 * GIB  # 7/8 of what is free, for two
    assert (machine.disk_write_bytes_per_s, machine.disk_read_bytes_per_s) == (
        1_500_000_000,
        1_000_000_000,
    )
    assert "2 GPUs, all copying at once, the slowest" in machine.source


def test_a_cap_counts_as_far_as_there_is_room() -> None:
    for cap_bytes, usable_bytes in ((10 * GIB, 10 * GIB), (100 * GIB, 80 * GIB)):
        disk = replace(DISK, cap_bytes=cap_bytes)
        assert made(make_machine(replace(GOOD, disks=(disk,)))).disk_bytes == usable_bytes


def test_a_disk_that_was_not_measured_is_none() -> None:
    broken = Disk(path="/gone", free_bytes=80 * GIB, error="it did not end within 4 s")
    assert made(make_machine(replace(GOOD, disks=(broken,)))).disk_bytes == 0


def test_a_folder_in_memory_is_no_disk() -> None:
    folder = replace(DISK, path="/dev/shm", file_system="tmpfs")
    assert make_machine(replace(GOOD, disks=(folder,))) == make_machine(GOOD)


def test_the_cpu_alone_has_its_free_memory_and_no_host_tier() -> None:
    machine = made(make_machine(replace(GOOD, gpus=(), pci_gpus=(), disks=(DISK,))))
    assert (machine.name, machine.device_bytes, machine.host_bytes) == ("cpu", 900 * GIB, 0)
    assert (machine.out_bytes_per_s, machine.disk_bytes) == (0, 70 * GIB)
    assert machine.slowdown_ppm == 0
    assert Machine.from_json(machine.to_json()) == machine


def test_what_was_not_measured_gives_no_machine() -> None:
    shown = replace(GOOD, gpus=(), pci_gpus=(PCI,))
    assert "could not be measured" in reason(make_machine(shown))
    unmeasured = replace(GPU, index=3, alone=None, together=None)
    assert reason(make_machine(replace(GOOD, gpus=(GPU, unmeasured)))).startswith(
        "the link of GPU 3 was not measured"
    )
    untold = replace(HOST, limit=None, available_bytes=None)
    assert "may be pinned" in reason(make_machine(replace(GOOD, host=untold)))
    cpu = replace(GOOD, gpus=(), pci_gpus=(), host=untold)
    assert "how much memory is free" in reason(make_machine(cpu))
