from typing import cast

import pytest

from ebbtide.catalog import MACHINES, find_machine
from ebbtide.catalog.machines import with_disk
from ebbtide.errors import PlanError
from ebbtide.machine import Machine


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_found_by_its_name(name: str) -> None:
    assert find_machine(name) is MACHINES[name]
    assert find_machine(name).name == name


def test_the_catalog_has_these_machines() -> None:
    assert list(MACHINES) == [
        "h200-pcie5",
        "a100-pcie4",
        "h100-pcie5",
        "b200-pcie5",
        "rtx4090",
        "gh200",
        "gb200-nvl72",
        "gb300-nvl72",
        "vera-rubin",
    ]


def test_the_h200_has_the_figures_that_were_measured() -> None:
    machine = find_machine("h200-pcie5")
    assert machine.device_bytes == 143_771 * 2**20
    assert machine.host_bytes_per_rank == 2**40
    assert (machine.out_bytes_per_s, machine.in_bytes_per_s) == (55_200_000_000, 55_300_000_000)
    assert machine.both_bytes_per_s == 100_600_000_000


def test_the_a100_has_the_figures_that_were_published() -> None:
    machine = find_machine("a100-pcie4")
    assert machine.device_bytes == 80 * 2**30
    assert (machine.out_bytes_per_s, machine.in_bytes_per_s) == (25_000_000_000, 25_000_000_000)
    assert machine.both_bytes_per_s == 36_000_000_000


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_machine_says_where_its_figures_are_from(machine: Machine) -> None:
    assert machine.source.startswith(("Measured", "Published"))
    assert "of host memory are an assumption" in machine.source


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_both_directions_together_are_faster_than_one_and_no_faster_than_their_sum(
    machine: Machine,
) -> None:
    alone = (machine.out_bytes_per_s, machine.in_bytes_per_s)
    assert max(alone) < machine.both_bytes_per_s <= sum(alone)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_machine_reads_back_from_json(machine: Machine) -> None:
    assert Machine.from_json(machine.to_json()) == machine


def test_the_catalog_is_read_only() -> None:
    catalog = cast(dict[str, Machine], MACHINES)
    with pytest.raises(TypeError, match="does not support item assignment"):
        catalog["mine"] = MACHINES["h200-pcie5"]


def test_an_unknown_name_lists_the_known_ones_nearest_first() -> None:
    with pytest.raises(PlanError) as caught:
        find_machine("h200-pcie6")
    assert str(caught.value) == (
        "unknown machine 'h200-pcie6'; valid names, nearest first: h200-pcie5, b200-pcie5, "
        "h100-pcie5, a100-pcie4, gh200, gb200-nvl72, gb300-nvl72, rtx4090, vera-rubin. "
        "Name one of these, or read a file with Machine.from_json()."
    )


def test_a_disk_is_added_with_the_speed_of_an_nvme() -> None:
    with_one = with_disk(find_machine("rtx4090"), 10**12)
    assert with_one.disk_bytes == 10**12
    assert (with_one.disk_write_bytes_per_s, with_one.disk_read_bytes_per_s) == (
        3 * 10**9,
        7 * 10**9,
    )


def test_links_of_grace_and_vera_are_per_gpu_and_direction_not_as_advertised() -> None:
    # 900 GB/s of C2C are the total of both directions, for two GPUs; 1.8 TB/s as well.
    for name, advertised in (("gb200-nvl72", 900), ("gb300-nvl72", 900), ("vera-rubin", 1800)):
        machine = find_machine(name)
        most = advertised * 10**9 // 2 // 2
        assert 0.8 * most < machine.out_bytes_per_s < most
        assert machine.num_local_ranks == 4
    rubin, grace = find_machine("vera-rubin"), find_machine("gb300-nvl72")
    assert rubin.out_bytes_per_s == 2 * grace.out_bytes_per_s
