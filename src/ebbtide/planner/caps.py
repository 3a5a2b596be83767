"""What a step may take, and how fast its copies can be at best."""

from dataclasses import dataclass

from ebbtide.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What a step may take."""

    device_bytes: int
    """Most device memory at every moment."""
    host_bytes: int
    """Most bytes in host memory."""
    disk_bytes: int
    """Most bytes on disk."""


def link_rates(machine: Machine, caps: Caps) -> tuple[float, float]:
    """Return the most bytes a second that can leave and come back.

    Without a host tier all goes through the disk; a CPU has no link before it.
    """
    out_rate, in_rate = machine.out_bytes_per_s, machine.in_bytes_per_s
    if not caps.host_bytes:
        disk = machine.disk_write_bytes_per_s, machine.disk_read_bytes_per_s
        out_rate = min(rate for rate in (out_rate, disk[0], 2**62) if rate)
        in_rate = min(rate for rate in (in_rate, disk[1], 2**62) if rate)
    return float(max(out_rate, 1)), float(max(in_rate, 1))


def slowdowns(machine: Machine) -> tuple[float, float]:
    """Return the compute seconds that moving one byte out and one byte in costs."""
    share = machine.slowdown_ppm * 1e-6
    rates = machine.out_bytes_per_s, machine.in_bytes_per_s
    out_s, in_s = (share / rate if rate else 0.0 for rate in rates)
    return out_s, in_s
