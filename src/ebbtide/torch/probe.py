"""Measure the Machine at hand: what its tiers can hold, and how fast its links copy.

Known weakness: each figure is the best of a few short copies. Where ranks share an uplink, one
that starts late or ends early copies alone for that part, and its figure is then a little high.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import psutil
import torch
from torch import Tensor

from ebbtide.machine import ASSUMED_SLOWDOWN_PPM, Machine
from ebbtide.memory.disk_rates import NUM_BYTES as DISK_BYTES
from ebbtide.memory.disk_rates import measure_rates
from ebbtide.memory.limits import find_tightest_limit
from ebbtide.torch.devices.pinned import pinned_memory_of
from ebbtide.torch.link import NUM_COPIES, LinkTrial, Way, time_copies
from ebbtide.torch.ranks import count_local_ranks
from ebbtide.torch.tiers import take_what_there_is
from ebbtide.units import DiskSpec, format_bytes

log = logging.getLogger("ebbtide")

LINK_BYTES = 256 * 2**20
"""Copied in one timing: 5 ms at 55 GB/s, where launching a copy takes some microseconds."""


def probe_machine(
    device: torch.device,
    *,
    disks: Sequence[DiskSpec] = (),
    num_bytes: int = LINK_BYTES,
    meet: Callable[[], None] | None = None,
) -> Machine:
    """Measure one device with its links; takes under a second, but for slow disks.

    Without `meet` it is measured once in a process; the same arguments give the same machine
    from then on.

    Args:
        device: A CUDA device, or the CPU, which has no host tier: it is the host's memory.
        disks: Folders that exist, and the most bytes in each. Default: no disk tier.
        num_bytes: Pinned and device memory that is taken for the measurement and given back.
        meet: Waits for other ranks, each of which makes this call with as many disks and bytes:
            called before each copy, so that all copy at once (design rule 12). Default: this
            process copies when it likes.

    Returns:
        Its `host_bytes` is what may be pinned on the whole node now, 0 where the driver pins
        nothing, with a warning; `device_bytes` is all that the device has, on the CPU what is free.

    Raises:
        MemoryTierError: The disk folder cannot be written.
        ValueError: The device is neither CUDA nor the CPU, or `num_bytes` is below 2.
    """
    if device.type not in ("cuda", "cpu"):
        raise ValueError(
            f"device {str(device)!r} cannot be probed; it must be a CUDA device or the CPU. Write "
            "a Machine for it, with published figures"
        )
    if num_bytes < 2:
        raise ValueError(f"num_bytes is {num_bytes}; it must be 2 or more, a byte each way")
    # torch's stubs say that an index is always there.
    if device.type == "cuda" and device.index is None:  # pyright: ignore[reportUnnecessaryComparison]
        device = torch.device("cuda", torch.cuda.current_device())
    if meet is None:
        return _probe_alone(device, tuple(disks), num_bytes, count_local_ranks())
    copying = "all ranks of a group at once"
    return _probe(device, tuple(disks), num_bytes, count_local_ranks(), meet, copying)


@cache
def _probe_alone(
    device: torch.device, disks: tuple[DiskSpec, ...], num_bytes: int, num_local_ranks: int
) -> Machine:
    return _probe(device, disks, num_bytes, num_local_ranks, _meet_nobody, "one process")


def _meet_nobody() -> None:
    """Start to copy at once."""


def _probe(
    device: torch.device,
    disks: tuple[DiskSpec, ...],
    num_bytes: int,
    num_local_ranks: int,
    meet: Callable[[], None],
    copying: str,
) -> Machine:
    free_bytes = int(psutil.virtual_memory().available)
    used = [spec for spec in disks if spec.cap_bytes > 0]
    disk_rates = measure_rates(used, wait_for_others=meet) if used else []
    is_cuda = device.type == "cuda"
    link = _measure_link(device, num_bytes, meet) if is_cuda else _LinkRates()
    limit = find_tightest_limit()
    room_bytes = free_bytes if limit is None else limit.room_bytes
    measured = [f"best of {NUM_COPIES} x {format_bytes(num_bytes)} pinned"] if is_cuda else []
    disk_bytes = sum(spec.cap_bytes for spec in used)
    measured += [f"{format_bytes(min(DISK_BYTES, disk_bytes))} on disk"] if used else []
    return Machine(
        name=torch.cuda.get_device_name(device) if is_cuda else "cpu",
        device_bytes=torch.cuda.mem_get_info(device)[1] if is_cuda else free_bytes,
        host_bytes=room_bytes if link.out_bytes_per_s else 0,
        out_bytes_per_s=link.out_bytes_per_s,
        in_bytes_per_s=link.in_bytes_per_s,
        both_bytes_per_s=link.both_bytes_per_s,
        disk_bytes=disk_bytes,
        disk_write_bytes_per_s=sum(rate.write_bytes_per_s for rate in disk_rates),
        disk_read_bytes_per_s=sum(rate.read_bytes_per_s for rate in disk_rates),
        slowdown_ppm=ASSUMED_SLOWDOWN_PPM if is_cuda else 0,
        num_local_ranks=num_local_ranks,
        source=f"probed with torch {torch.__version__}: {', '.join((*measured, copying))}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkRates:
    out_bytes_per_s: int = 0
    in_bytes_per_s: int = 0
    both_bytes_per_s: int = 0


def _measure_link(device: torch.device, num_bytes: int, meet: Callable[[], None]) -> _LinkRates:
    """Measure with less where the system does not pin so much; all rates are 0 without any."""
    taken = take_what_there_is(pinned_memory_of(device).pin, num_bytes)
    if taken.region is None:
        log.warning("%s Plans for a budget move nothing to host memory.", taken.refusal)
        for _ in range(len(Way) * (1 + NUM_COPIES)):
            meet()  # they measure without this one
        return _LinkRates()
    try:
        with torch.cuda.device(device):
            num_bytes = taken.region.buffer.numel()
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return _measure_copies(memory, taken.region.buffer, meet)
    finally:
        taken.region.close()


def _measure_copies(memory: Tensor, host: Tensor, meet: Callable[[], None]) -> _LinkRates:
    """Copy `memory` out, in, and one half each way at once."""
    trial = LinkTrial(memory, host)
    rates = {way: time_copies([trial], way, wait_for_others=meet)[0] for way in Way}
    return _LinkRates(
        out_bytes_per_s=rates[Way.OUT],
        in_bytes_per_s=rates[Way.IN],
        both_bytes_per_s=rates[Way.BOTH],
    )
