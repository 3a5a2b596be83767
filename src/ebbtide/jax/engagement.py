"""Whether a compiled step offloads what was planned, beside compute, and at what price.

A name that no value carries, a mistyped memory kind or a missing flag raises nothing in jax: the
program compiles, runs and keeps everything on the device, or copies while compute waits. So what
came out is compared with what was planned: the bytes of host memory that the program takes, host
memory in its text, the form and the place of its copies, and what the compiler recomputes on its
own account. Each finding names the flag or the name to change.
"""

import enum
import warnings
from dataclasses import dataclass
from typing import Any, cast

from jax.stages import Compiled

from ebbtide.jax.hlo import HOST_SPACE, HloTransfers, lines_of, read_transfers
from ebbtide.units import format_bytes

TOLERANCE_PPM = 20_000
"""How far host bytes may be from the prediction: 2 %, for alignment and buffers in flight."""

LATENCY_HIDING = "--xla_gpu_enable_latency_hiding_scheduler=true"
PIPELINING = "--xla_gpu_enable_pipelined_host_offloading=true"
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="
HOST_ACCOUNTING = "--xla_gpu_enable_host_memory_offloading=true"
ASYNC_LIMIT = "--xla_gpu_experimental_parallel_async_compute_limit=8"


@enum.unique
class Fault(enum.Enum):
    """What can be found wrong."""

    NOTHING_MOVED = "nothing-moved"
    """Host bytes were planned, and the program has none."""
    NO_HOST_ON_BACKEND = "no-host-on-backend"
    """The backend drops memory spaces: nothing moved on it, whatever is named."""
    HOST_BYTES = "host-bytes"
    """The program takes more or less host memory than planned."""
    UNPLANNED_HOST = "unplanned-host"
    """No host bytes were planned, and the program has some."""
    PLAIN_COPIES = "plain-copies"
    """Copies run on the compute stream."""
    BARE_COPIES = "bare-copies"
    """Asynchronous copies, for which compute waits at once."""
    REMAT_CLONES = "remat-clones"
    """XLA recomputes on its own account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as planned."""

    fault: Fault
    message: str
    """What was found, for people."""
    change: str
    """The flag or the name to change."""

    def __str__(self) -> str:
        return f"{self.message}. {self.change}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Engagement:
    """What a compiled program does with host memory, beside what was planned."""

    platform: str
    """`gpu`, `cuda` or `cpu`."""
    predicted_host_bytes: int
    """Host memory that the plan moves to."""
    host_bytes: int
    """Temporary host memory of the program."""
    transfers: HloTransfers
    """Copies in its text."""
    findings: tuple[Finding, ...]
    """The most important first; none: engaged as planned."""

    @property
    def is_engaged(self) -> bool:
        """Whether all is as planned."""
        return not self.findings

    def warn(self) -> None:
        """Give each finding as a `UserWarning`."""
        for finding in self.findings:
            warnings.warn(f"ebbtide: {finding}", stacklevel=2)


def check_engagement(compiled: Compiled, *, predicted_host_bytes: int) -> Engagement:
    """Compare a compiled program with what a plan moves to the host.

    Time and memory are bounded by the program's text, of which one line at a time is looked at.

    Args:
        compiled: `jax.jit(step).lower(...).compile()`.
        predicted_host_bytes: The plan's host bytes on one device, with all layers.

    Raises:
        ValueError: `predicted_host_bytes` is negative, or the backend gives no text.
    """
    if predicted_host_bytes < 0:
        raise ValueError(
            f"predicted_host_bytes={predicted_host_bytes}: it must be 0 or more. Pass the plan's "
            "host_bytes."
        )
    text = compiled.as_text()
    if text is None:
        raise ValueError(
            "this backend gives no text of the compiled program, so its copies cannot be checked. "
            "Compile on a GPU."
        )
    return judge(
        read_transfers(lines_of(text)),
        platform=_platform(compiled),
        host_bytes=_host_bytes(compiled),
        predicted_host_bytes=predicted_host_bytes,
    )


def judge(
    transfers: HloTransfers, *, platform: str, host_bytes: int, predicted_host_bytes: int
) -> Engagement:
    """Make findings of what was read; `check_engagement` reads it.

    Args:
        transfers: From `ebbtide.jax.hlo.read_transfers`.
        platform: Of the backend that compiled.
        host_bytes: Temporary host memory of the program.
        predicted_host_bytes: The plan's.
    """
    findings = [
        *_judge_bytes(transfers, platform, host_bytes, predicted_host_bytes),
        *_judge_copies(transfers),
    ]
    if transfers.num_remat_clones:
        findings.append(
            Finding(
                fault=Fault.REMAT_CLONES,
                message=(
                    f"XLA cloned {transfers.num_remat_clones} instructions to save memory, beside "
                    "what the plan recomputes; it counts host buffers as device memory"
                ),
                change=(
                    f"Set {HOST_ACCOUNTING}, or raise --xla_gpu_memory_limit_slop_factor or "
                    "XLA_CLIENT_MEM_FRACTION if memory is really short"
                ),
            )
        )
    return Engagement(
        platform=platform,
        predicted_host_bytes=predicted_host_bytes,
        host_bytes=host_bytes,
        transfers=transfers,
        findings=tuple(findings),
    )


def _host_bytes(compiled: Compiled) -> int:
    sizes = cast(Any, compiled.memory_analysis())
    return int(sizes.host_temp_size_in_bytes)


def _platform(compiled: Compiled) -> str:
    return str(cast(Any, compiled.runtime_executable()).client.platform)


def _judge_bytes(
    transfers: HloTransfers, platform: str, host_bytes: int, predicted_host_bytes: int
) -> list[Finding]:
    is_used = transfers.has_host_space or host_bytes
    planned, used = format_bytes(predicted_host_bytes), format_bytes(host_bytes)
    if not host_bytes and not predicted_host_bytes:
        return []  # Arguments may lie in host memory, such as an optimizer's state.
    if not is_used and platform == "cpu":
        return [
            Finding(
                fault=Fault.NO_HOST_ON_BACKEND,
                message=(
                    f"nothing moved on this backend: {planned} were planned for the host, and "
                    "XLA:CPU has one memory only, so it drops the placement"
                ),
                change="Compile on a GPU to see offloading; gradients can be verified here",
            )
        ]
    if not is_used:
        return [
            Finding(
                fault=Fault.NOTHING_MOVED,
                message=(
                    f"nothing moved: {planned} were planned for the host, and the program has no "
                    f"value in host memory ({HOST_SPACE})"
                ),
                change=(
                    "Check that each offloaded name is put on a value inside the rematted body "
                    "that later operators use (the layer's input, not its output), that "
                    "offload_dst is exactly 'pinned_host', and that JAX_REMAT3 is not set"
                ),
            )
        ]
    if not predicted_host_bytes:
        return [
            Finding(
                fault=Fault.UNPLANNED_HOST,
                message=f"the program takes {used} of host memory, and the plan moves nothing",
                change="Check names_which_can_be_offloaded, or plan for this program",
            )
        ]
    if abs(host_bytes - predicted_host_bytes) * 1_000_000 > TOLERANCE_PPM * predicted_host_bytes:
        is_less = host_bytes < predicted_host_bytes
        return [
            Finding(
                fault=Fault.HOST_BYTES,
                message=f"the program takes {used} of host memory where {planned} were planned",
                change=(
                    "A name that is offloaded is on no value, or on one that is used elsewhere "
                    "too: compare the names with jax.ad_checkpoint.print_saved_residuals"
                    if is_less
                    else "A name is on more values than was planned, or a nested scan keeps a "
                    "stack of its own: give each value a name of its own"
                ),
            )
        ]
    return []


def _judge_copies(transfers: HloTransfers) -> list[Finding]:
    findings: list[Finding] = []
    loop = (transfers.out_in_loop, transfers.in_in_loop)
    rest = (transfers.out_elsewhere, transfers.in_elsewhere)
    num_plain = sum(copies.num_plain for copies in loop)
    if num_plain:
        names = [name for copies in loop for name in copies.plain_names]
        findings.append(
            Finding(
                fault=Fault.PLAIN_COPIES,
                message=(
                    f"{num_plain} of {sum(copies.num_copies for copies in loop)} host copies in "
                    f"loops are plain instructions on the compute stream ({', '.join(names[:4])}): "
                    "compute waits for each of them"
                ),
                change=f"Set {NO_COMMAND_BUFFERS} and {LATENCY_HIDING}",
            )
        )
    num_bare = sum(copies.num_bare for copies in loop)
    if num_bare:
        findings.append(
            Finding(
                fault=Fault.BARE_COPIES,
                message=(
                    f"{num_bare} of {sum(copies.num_copies for copies in loop)} host copies in "
                    "loops start and are waited for with no work between"
                ),
                change=f"Set {PIPELINING}, {LATENCY_HIDING} and {ASYNC_LIMIT}",
            )
        )
    if any(copies.num_copies for copies in loop):
        # Beside a scan, copies before and after it are the program's own inputs and outputs.
        return findings
    num_exposed = sum(copies.num_plain + copies.num_bare for copies in rest)
    num_all = sum(copies.num_copies for copies in rest)
    if num_exposed:
        findings.append(
            Finding(
                fault=Fault.BARE_COPIES,
                message=(
                    f"{num_exposed} of {num_all} host copies are waited for with no work beside "
                    "them, and none is in a loop"
                ),
                change=f"Set {LATENCY_HIDING} and {ASYNC_LIMIT}; unrolled layers need no more",
            )
        )
    return findings
