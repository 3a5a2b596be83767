"""What checking a plan found, for people."""

from ebbtide.check import CheckReport
from ebbtide.commands.columns import align_columns
from ebbtide.units import format_bytes


def write_check(report: CheckReport) -> list[str]:
    """Return "sound" or all faults, and then what the step holds at its peak."""
    lines = ["sound"] if report.is_sound else [f"fault: {fault}" for fault in report.faults]
    if not report.peak_moment:
        return lines
    lines.append(f"peak: {format_bytes(report.peak_bytes)}, in {report.peak_moment}")
    lines += align_columns([["  " + name, format_bytes(size)] for name, size in report.holders])
    tiers = (("host", report.host_bytes), ("disk", report.disk_bytes))
    return lines + [f"on {tier}: {format_bytes(size)}" for tier, size in tiers if size]
