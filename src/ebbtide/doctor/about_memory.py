"""Findings about the host: how much memory may be pinned, in which pages, and who else runs."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from ebbtide.doctor.facts import Facts, Host
from ebbtide.doctor.finding import Code, Finding, Severity
from ebbtide.units import format_bytes

LITTLE_SHARE: Final = Fraction(1, 2)
"""Of the memory of all GPUs. With less, most of what a full GPU would evict has no place; derived,
not measured."""


def find_about_memory(facts: Facts) -> Iterator[Finding]:
    """Yield what limits pinned memory, what makes pinning slow, and what spoils measurements."""
    host = facts.host
    yield from _refused(facts)
    yield from _memlock(facts)
    yield from _room(facts)
    if host.huge_pages == "never":
        yield Finding(
            code=Code.NO_HUGE_PAGES,
            severity=Severity.NOTE,
            what="the system gives no huge pages, so that pinning memory takes longer",
            evidence="/sys/kernel/mm/transparent_hugepage/enabled is `never`",
            advice=(
                "As root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`. On the "
                "host of one H200, 3 GiB were pinned in 0.5 to 0.7 s with huge pages and in 1.4 to "
                "1.7 without."
            ),
        )
    yield from _busy(host)
    if host.is_wsl:
        yield Finding(
            code=Code.WSL,
            severity=Severity.NOTE,
            what="this is WSL, which lets programs pin only a part of its memory",
            evidence="/proc/version names Microsoft",
            advice="Raise `memory=` in .wslconfig, and cap what is pinned with host=.",
        )


def _refused(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        if gpu.refusal:
            yield Finding(
                code=Code.PINNING_REFUSED,
                severity=Severity.NOTE if gpu.alone is not None else Severity.SERIOUS,
                what=(
                    f"less memory than was asked for could be pinned for GPU {gpu.index}"
                    if gpu.alone is not None
                    else f"GPU {gpu.index} could not be used, or no memory be pinned for it"
                ),
                evidence=gpu.refusal.rstrip("."),
                advice=(
                    "Raise the limit that the message names. Where nothing can be pinned, plans "
                    "move nothing to host memory; a disk tier passes through pinned memory too."
                ),
            )


def _memlock(facts: Facts) -> Iterator[Finding]:
    host = facts.host
    if not (facts.gpus or facts.pci_gpus):
        return  # nobody pins
    room = host.total_bytes if host.limit is None else host.limit.room_bytes
    if host.memlock_bytes is None or room is None or host.memlock_bytes >= room:
        return
    is_refused = any(gpu.refusal and gpu.alone is None for gpu in facts.gpus)
    is_pinned = any(gpu.alone is not None for gpu in facts.gpus)
    shown = "; pinning more than that worked all the same" if is_pinned else ""
    yield Finding(
        code=Code.LOW_MEMLOCK,
        severity=Severity.SERIOUS if is_refused else Severity.NOTE,
        what="RLIMIT_MEMLOCK is below what could be pinned otherwise",
        evidence=(
            f"`ulimit -l` is {format_bytes(host.memlock_bytes)}, and the host leaves "
            f"{format_bytes(room)}{shown}"
        ),
        advice=(
            "Raise it where pinning is refused: `ulimit -l unlimited`, `docker run --ulimit "
            "memlock=-1`, or LimitMEMLOCK=infinity in a systemd unit. NVIDIA's driver does not "
            "charge it on Linux; others may."
        ),
    )


def _room(facts: Facts) -> Iterator[Finding]:
    limit = facts.host.limit
    if limit is None:
        return
    all_bytes = sum(gpu.device_bytes for gpu in facts.gpus)
    if limit.room_bytes < all_bytes * LITTLE_SHARE:
        yield Finding(
            code=Code.LITTLE_HOST_MEMORY,
            severity=Severity.SERIOUS,
            what="host memory has little room beside what the GPUs hold",
            evidence=(
                f"{limit.text}, which leaves {format_bytes(limit.room_bytes)} to be pinned for "
                f"GPUs with {format_bytes(all_bytes)}"
            ),
            advice=f"{limit.advice}, or give a disk tier: attach(disk='FOLDER:SIZE').",
        )
    elif limit.is_of_group:
        yield Finding(
            code=Code.GROUP_LIMIT,
            severity=Severity.NOTE,
            what="a control group limits this process to less memory than the machine has free",
            evidence=f"{limit.text}; {_available(facts.host)}",
            advice=f"{limit.advice} if plans need more than {format_bytes(limit.room_bytes)}.",
        )


def _busy(host: Host) -> Iterator[Finding]:
    if host.load is None or host.cpus is None or host.load < len(host.cpus):
        return
    yield Finding(
        code=Code.BUSY_HOST,
        severity=Severity.NOTE,
        what="other programs keep the processors busy, and what was measured may be too low",
        evidence=(
            f"{host.load:.1f} processes wanted one in the minute before, and this process may use "
            f"{len(host.cpus)}"
        ),
        advice="Measure again while nothing else runs.",
    )


def _available(host: Host) -> str:
    if host.available_bytes is None:
        return "what the machine has free is not known"
    return f"the machine has {format_bytes(host.available_bytes)} free"
