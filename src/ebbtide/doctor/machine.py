"""From what was found out to the Machine that planners take, or a reason why there is none."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from ebbtide.doctor.facts import Disk, Facts, Gpu, Rates
from ebbtide.machine import ASSUMED_SLOWDOWN_PPM, Machine
from ebbtide.memory.mounts import MEMORY_TYPES
from ebbtide.units import format_bytes

DISK_SHARE: Final = Fraction(7, 8)
"""Of what is free in a folder that was given without a cap; the rest is left to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why no Machine can be written."""

    reason: str
    """A sentence for people, with what to do."""


def make_machine(facts: Facts) -> Machine | Refusal:
    """Return what planners need of this machine.

    Of several GPUs each figure is that of the slowest, and of the smallest, while all of them
    copy (design rule 12). Without a GPU it is what `attach` uses on the CPU: free memory as the
    device, no host tier, and the disks. A folder in memory is no disk.
    """
    disks = [
        disk
        for disk in facts.disks
        if disk.write_bytes_per_s and disk.read_bytes_per_s and disk.file_system not in MEMORY_TYPES
    ]
    if facts.gpus:
        return _of_gpus(facts, disks)
    if facts.pci_gpus:
        return Refusal(
            reason="the system shows GPUs that could not be measured, so that a Machine of the CPU "
            "alone would mislead. Fix what the findings name, or take one of the catalog"
        )
    room = facts.host.available_bytes
    if room is None:
        return Refusal(
            reason="the system does not say how much memory is free. Write a Machine by hand: "
            "docs/formats.md"
        )
    return _machine("cpu", room, 0, None, disks, num_ranks=1, source="no GPU: the CPU's memory")


def _of_gpus(facts: Facts, disks: Sequence[Disk]) -> Machine | Refusal:
    measured = [(gpu, gpu.together or gpu.alone) for gpu in facts.gpus]
    rates = [rate for _, rate in measured if rate is not None]
    if len(rates) < len(measured):
        missing = ", ".join(str(gpu.index) for gpu, rate in measured if rate is None)
        return Refusal(
            reason=f"the link of GPU {missing} was not measured. Look at the findings; with "
            "CUDA_VISIBLE_DEVICES it can be left out"
        )
    if facts.host.limit is None:
        return Refusal(
            reason="the system does not say how much memory may be pinned. Write a Machine by "
            "hand: docs/formats.md"
        )
    slowest = Rates(
        out_bytes_per_s=min(rate.out_bytes_per_s for rate in rates),
        in_bytes_per_s=min(rate.in_bytes_per_s for rate in rates),
        both_bytes_per_s=min(rate.both_bytes_per_s for rate in rates),
    )
    num_gpus = len(rates)
    is_together = num_gpus > 1 and all(gpu.together is not None for gpu in facts.gpus)
    copying = "all copying at once" if is_together else "each copying alone"
    source = f"{num_gpus} GPUs, {copying}, the slowest" if num_gpus > 1 else "one GPU"
    return _machine(
        _name(facts.gpus),
        min(gpu.device_bytes for gpu in facts.gpus),
        facts.host.limit.room_bytes,
        slowest,
        disks,
        num_ranks=num_gpus,
        source=f"best of 3 pinned copies, {source}",
    )


def _machine(
    name: str,
    device_bytes: int,
    host_bytes: int,
    rates: Rates | None,
    disks: Sequence[Disk],
    *,
    num_ranks: int,
    source: str,
) -> Machine:
    disk_bytes = sum(_usable_bytes(disk) for disk in disks) // num_ranks
    shared = f" and shared by {num_ranks} ranks" if num_ranks > 1 else ""
    pinned = f". {format_bytes(host_bytes)} may be pinned now" if host_bytes else ""
    told = f", disks measured with 64 MiB each{shared}" if disk_bytes else ""
    has_disk = disk_bytes > 0
    return Machine(
        name=name,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        out_bytes_per_s=0 if rates is None else rates.out_bytes_per_s,
        in_bytes_per_s=0 if rates is None else rates.in_bytes_per_s,
        both_bytes_per_s=0 if rates is None else rates.both_bytes_per_s,
        disk_bytes=disk_bytes,
        disk_write_bytes_per_s=_share(disks, "write", num_ranks) if has_disk else 0,
        disk_read_bytes_per_s=_share(disks, "read", num_ranks) if has_disk else 0,
        slowdown_ppm=0 if rates is None else ASSUMED_SLOWDOWN_PPM,
        num_local_ranks=num_ranks,
        source=f"ebbtide doctor: {source}{told}{pinned}",
    )


def _share(disks: Sequence[Disk], way: str, num_ranks: int) -> int:
    """Return what one rank gets of the disks while all ranks use them: they were measured once."""
    if way == "write":
        rates = [disk.write_bytes_per_s or 0 for disk in disks]
    else:
        rates = [disk.read_bytes_per_s or 0 for disk in disks]
    return max(1, sum(rates) // num_ranks)


def _usable_bytes(disk: Disk) -> int:
    free_bytes = disk.free_bytes or 0
    if disk.cap_bytes is not None:
        return min(disk.cap_bytes, free_bytes)
    return int(free_bytes * DISK_SHARE)


def _name(gpus: Sequence[Gpu]) -> str:
    names = sorted({gpu.name for gpu in gpus})
    return ", ".join(names)
