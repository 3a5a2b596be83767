"""Findings about links, on facts that a test makes up."""

from dataclasses import replace

import pytest

from ebbtide.doctor.about_links import ceiling_bytes_per_s
from ebbtide.doctor.facts import Facts, PciLink, Rates
from ebbtide.doctor.finding import Code, Finding, Severity
from ebbtide.doctor.findings import find
from tests.doctor.machines import FAST, GOOD, GPU, HOST, LINK, PCI, with_gpu, with_link


def only(facts: Facts) -> Finding:
    (finding,) = find(facts)
    return finding


def test_a_good_machine_has_no_findings() -> None:
    assert find(GOOD) == ()


@pytest.mark.parametrize(
    ("generation", "width", "gb_per_s"),
    [(1, 16, 4.0), (3, 16, 15.754), (4, 16, 31.508), (5, 16, 63.015), (5, 8, 31.508)],
)
def test_lanes_carry_what_the_specification_says(
    generation: int, width: int, gb_per_s: float
) -> None:
    ceiling = ceiling_bytes_per_s(generation, width)
    assert ceiling is not None and ceiling / 1e9 == pytest.approx(gb_per_s, abs=0.001)
    assert ceiling_bytes_per_s(None, width) is None


def test_a_link_with_fewer_lanes_than_both_ends_have_is_narrow() -> None:
    slow = Rates(
        out_bytes_per_s=27_000_000_000, in_bytes_per_s=27_000_000_000, both_bytes_per_s=50 * 10**9
    )
    gpu = replace(GPU, alone=slow, together=slow)
    found = only(with_link(replace(LINK, width=8), gpu))
    assert (found.code, found.severity) == (Code.NARROW_LINK, Severity.SERIOUS)
    assert found.evidence == "0000:17:00.0 runs at PCIe 5 x8, and both ends can do PCIe 5 x16"


def test_an_older_generation_counts_only_while_copies_run() -> None:
    slow = Rates(out_bytes_per_s=12 * 10**9, in_bytes_per_s=12 * 10**9, both_bytes_per_s=20 * 10**9)
    low = replace(LINK, generation=3)
    found = only(with_link(low, replace(GPU, alone=slow, together=slow)))
    assert found.code is Code.NARROW_LINK
    assert "runs at PCIe 3 x16, and both ends can do PCIe 5 x16" in found.evidence
    # At rest the link of a GPU is down, and its rate in use says that all is well.
    assert find(with_link(replace(LINK, generation=1, is_of_copies=False))) == ()


def test_a_slot_that_carries_less_than_the_gpu() -> None:
    slow = Rates(out_bytes_per_s=27 * 10**9, in_bytes_per_s=27 * 10**9, both_bytes_per_s=50 * 10**9)
    link = replace(LINK, generation=4, slot_generation=4)
    found = only(with_link(link, replace(GPU, alone=slow, together=slow)))
    assert (found.code, found.severity) == (Code.SMALL_SLOT, Severity.SERIOUS)
    assert found.evidence == ("0000:17:00.0 could do PCIe 5 x16, and the port above it PCIe 4 x16")


def test_a_gpu_that_torch_cannot_use_may_still_have_a_narrow_link() -> None:
    shown = replace(PCI, link=replace(LINK, width=4, is_of_copies=False))
    codes = [finding.code for finding in find(replace(GOOD, gpus=(), pci_gpus=(shown,)))]
    assert codes == [Code.GPU_OUT_OF_REACH, Code.NARROW_LINK]


def test_a_link_far_below_what_was_negotiated_is_slow() -> None:
    slow = replace(FAST, out_bytes_per_s=31_000_000_000)
    found = only(with_gpu(replace(GPU, alone=slow, together=slow)))
    assert (found.code, found.severity) == (Code.SLOW_LINK, Severity.SERIOUS)
    assert (
        found.evidence == "out 31.0 GB/s (49 %) of the 63.0 GB/s that PCIe 5 x16 carries each way"
    )


def test_tables_that_copies_outrun_are_not_believed() -> None:
    """Virtual machines make up a link, and PCIe knows nothing of a chip-to-chip one."""
    made_up = replace(LINK, generation=1, width=1)
    assert find(with_link(made_up)) == ()
    grace = replace(GPU, alone=None, together=None, c2c_bytes_per_s=447_120_000_000)
    assert find(with_link(made_up, grace)) == ()
    assert find(with_link(PciLink())) == ()


def test_gpus_that_share_an_uplink() -> None:
    together = Rates(
        out_bytes_per_s=27_600_000_000,
        in_bytes_per_s=50_000_000_000,
        both_bytes_per_s=38_000_000_000,
    )
    found = only(with_gpu(replace(GPU, together=together)))
    assert (found.code, found.severity) == (Code.SHARED_UPLINK, Severity.SERIOUS)
    assert found.evidence == (
        "GB/s while all GPUs copy, of those alone: out 27.6 of 55.2, both ways 38.0 of 100.6"
    )


def test_a_link_that_carries_one_way_at_a_time_is_noted() -> None:
    rates = replace(FAST, both_bytes_per_s=56_000_000_000)
    found = only(with_gpu(replace(GPU, alone=rates, together=rates)))
    assert (found.code, found.severity) == (Code.ONE_WAY_LINK, Severity.NOTE)
    assert found.evidence == "out 55.2, in 55.3, both together 56.0 GB/s"


def test_a_process_that_is_kept_from_the_gpus_node() -> None:
    facts = replace(GOOD, host=replace(HOST, cpus=frozenset({8, 9, 10, 15})))
    found = only(facts)
    assert (found.code, found.severity) == (Code.FAR_NODE, Severity.SERIOUS)
    assert found.evidence == (
        "0000:17:00.0 is on node 0, and this process may use none of the node's processors (0-7); "
        "it may run on 8-10,15"
    )
    assert "numactl --cpunodebind=0 --preferred=0" in found.advice
    no_memory = only(replace(GOOD, host=replace(HOST, nodes=frozenset({1}))))
    assert no_memory.code is Code.FAR_NODE
    assert "may use none of the node's memory" in no_memory.evidence


def test_a_process_that_may_use_a_part_of_the_node_is_near_enough() -> None:
    assert find(replace(GOOD, host=replace(HOST, cpus=frozenset({7, 8})))) == ()
    assert find(with_gpu(replace(GPU, pci=replace(PCI, numa_node=None)))) == ()
