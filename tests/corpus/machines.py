"""Machines and budgets that the corpus is planned for."""

from ebbtide.machine import Machine
from ebbtide.workload import Workload


def machine_with(link_gb_per_s: int) -> Machine:
    """Return a machine with room for everything, and a link as fast both ways.

    Copies slow compute down as was measured on PCIe 5 x16.
    """
    rate = link_gb_per_s * 10**9
    return Machine(
        name=f"link-{link_gb_per_s}",
        device_bytes=2**50,
        host_bytes=2**50,
        out_bytes_per_s=rate,
        in_bytes_per_s=rate,
        both_bytes_per_s=2 * rate,
        slowdown_ppm=15_000,
    )


def budget_of(workload: Workload, share: float) -> int:
    """Return what is there without the blocks, and a share of all that autograd saves in them."""
    outside = workload.outside
    assert outside is not None, "the corpus is timed"
    held = max(outside.constant_bytes + outside.turn_bytes, outside.ends_bytes)
    return outside.resident_bytes + held + int(share * workload.num_bytes_saved)
