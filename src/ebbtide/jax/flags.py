"""The flags and variables under which XLA:GPU hides offloading, with the reason for each.

None of them is a default, so that offloading by a policy alone is slower than recomputing: on one
H200 an offloaded scan took 749 ms with command buffers and 477 without, where keeping everything
took 472 (jax 0.11.2). `docs/jax-flags.md` has the same as a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.plan import Plan
from ebbtide.units import format_bytes

LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
PIPELINING = "xla_gpu_enable_pipelined_host_offloading"
ASYNC_LIMIT = "xla_gpu_experimental_parallel_async_compute_limit"
COMMAND_BUFFER = "xla_gpu_enable_command_buffer"
OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
SLOP_FACTOR = "xla_gpu_memory_limit_slop_factor"

DEFAULT_HOST_LIMIT_GIB = 64
"""XLA's own cap of pinned host memory (`GetGpuHostAllocator`); the variable counts in GiB."""

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
HOST_PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"

XLA_FLAGS = "XLA_FLAGS"

NUM_ASYNC = 8
"""Copies and other asynchronous work in flight. XLA's own limit is 2, in which a copy out and one
in leave no room; 8 was measured on an H200, and trials with 4 are known (openxla/xla#33269)."""

DEFAULT_SLOP_PERCENT = 95
"""XLA's own."""

# XLA's pool of pinned memory grows in regions, and holds what the process stages beside the stack.
# Room that is not used is not pinned.
_HOST_ROOM_DIVISOR = 8
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One flag or variable."""

    name: str
    """`xla_...` for a flag, upper case for a variable."""
    value: str
    """As it is written after `=`."""
    reason: str
    """Why, in a sentence."""
    source: str
    """Where that is known from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSet:
    """Flags and variables for one plan on one machine. None, if the plan moves nothing."""

    flags: tuple[Setting, ...] = ()
    """What goes into `XLA_FLAGS`."""
    variables: tuple[Setting, ...] = ()
    """What is set beside it."""

    @property
    def xla_flags(self) -> str:
        """The value of `XLA_FLAGS`."""
        return " ".join(f"--{flag.name}={flag.value}" for flag in self.flags)

    def environment(self, existing: str = "") -> Mapping[str, str]:
        """Return all variables to set before jax is imported.

        Args:
            existing: The present value of `XLA_FLAGS`; ours come after it and so count.
        """
        made = {variable.name: variable.value for variable in self.variables}
        if self.flags:
            made[XLA_FLAGS] = f"{existing} {self.xla_flags}".strip()
        return MappingProxyType(made)

    def __str__(self) -> str:
        lines = [f"{s.name}={s.value}: {s.reason} ({s.source})" for s in self.flags]
        lines += [f"{s.name}={s.value}: {s.reason} ({s.source})" for s in self.variables]
        return "\n".join(lines) or "no flags: the plan moves nothing to the host"


def xla_flags(machine: Machine, plan: Plan, *, is_scanned: bool = True) -> FlagSet:
    """Choose the flags under which a plan's copies hide behind compute.

    Set them before jax is imported: XLA reads them once. A plan that moves nothing gets none,
    since command buffers make such a step faster.

    Args:
        machine: Says how much device memory there is, and how much host memory a rank may pin.
        plan: Says what it moves, and for an unrolled stack how much memory it may take.
        is_scanned: Whether the layers are a `scan`; only its copies can be pipelined.

    Raises:
        PlanError: The plan moves more to the host than the machine's ranks may pin.
    """
    if not plan.host_bytes:
        return FlagSet()
    flags = [
        Setting(
            name=LATENCY_HIDING,
            value="true",
            reason="starts copies early and waits late; without it they stand beside their users",
            source="openxla/xla#18139",
        ),
        Setting(
            name=PIPELINING,
            value="true" if is_scanned else "false",
            reason=(
                "moves a scan's copies one iteration on, so that a whole layer hides them"
                if is_scanned
                else "there is no loop to pipeline; the default has changed twice, so it is said"
            ),
            source="openxla/xla#32297, #37979, #45393",
        ),
        Setting(
            name=ASYNC_LIMIT,
            value=str(NUM_ASYNC),
            reason="copies in flight in both directions; XLA's limit is 2",
            source="openxla/xla#33269",
        ),
    ]
    if is_scanned:
        flags.append(
            Setting(
                name=COMMAND_BUFFER,
                value="",
                reason="in a command buffer host slices run on the compute stream: 749 ms, 477 off",
                source="measured on an H200, jax 0.11.2",
            )
        )
    flags += [
        Setting(
            name=OVERLAP_LIMIT,
            value="1",
            reason="with more, a reloaded value was read before its copy ended",
            source="marin-community/marin#8753",
        ),
        _slop_factor(machine, plan, is_scanned),
    ]
    return FlagSet(flags=tuple(flags), variables=_host_memory(machine, plan))


def _slop_factor(machine: Machine, plan: Plan, is_scanned: bool) -> Setting:
    percent = DEFAULT_SLOP_PERCENT
    reason = "the scheduler's own; a scan's copies are bounded by its iterations"
    if not is_scanned and plan.budget_bytes and machine.device_bytes:
        percent = max(1, min(percent, 100 * plan.budget_bytes // machine.device_bytes))
        reason = "the budget; seeing no shortage the scheduler delays copies, 14.6 GiB for 7.9"
    return Setting(
        name=SLOP_FACTOR,
        value=str(percent),
        reason=reason,
        source="measured on an H200, jax 0.11.2",
    )


def _host_memory(machine: Machine, plan: Plan) -> tuple[Setting, ...]:
    may_bytes = machine.host_bytes_per_rank
    if plan.host_bytes > may_bytes:
        raise PlanError(
            f"plan {plan.name!r} moves {format_bytes(plan.host_bytes)} to the host, and a rank of "
            f"{machine.name} may pin {format_bytes(may_bytes)}. Plan for this machine."
        )
    wanted_bytes = plan.host_bytes + plan.host_bytes // _HOST_ROOM_DIVISOR
    least_gib = -(-plan.host_bytes // _GIB)
    limit_gib = min(-(-wanted_bytes // _GIB) + 1, max(may_bytes // _GIB, least_gib))
    return (
        Setting(
            name=HOST_LIMIT,
            value=str(limit_gib),
            reason="room for the plan's host bytes; a full pool is reported as a GPU out of memory",
            source="openxla/xla#20633",
        ),
        Setting(
            name=HOST_PREALLOCATE,
            value="false",
            reason="pins what is used, not the limit, when the process starts",
            source="NVIDIA's MaxText recipe of September 2026",
        ),
    )
