"""The flag sets that rows are compiled with. XLA reads them once, so each has its own process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ebbtide.jax.flags import (
    ASYNC_LIMIT,
    COMMAND_BUFFER,
    HOST_LIMIT,
    HOST_PREALLOCATE,
    LATENCY_HIDING,
    NUM_ASYNC,
    OVERLAP_LIMIT,
    PIPELINING,
    XLA_FLAGS,
)
from ebbtide.jax.known_flags import find_unknown_flags, find_xla_libraries

MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"

MOST_MEMORY = "0.92"
"""XLA takes three quarters of the device by itself. Eight of a hundred are left for cuDNN, the
CUDA context and what XLA loads."""

TUNED_FOLDER = "xla_gpu_per_fusion_autotune_cache_dir"
"""Where XLA keeps which kernel is the fastest for a product, and looks before it tries them."""

_PIPELINED = {LATENCY_HIDING: "true", PIPELINING: "true", ASYNC_LIMIT: str(NUM_ASYNC)}

FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        # Said, since containers switch the scheduler on in XLA_FLAGS.
        "none": {LATENCY_HIDING: "false", PIPELINING: "false"},
        "lhs": {LATENCY_HIDING: "true", PIPELINING: "false"},
        "pipelined": _PIPELINED,
        "overlap": {**_PIPELINED, COMMAND_BUFFER: "", OVERLAP_LIMIT: "1"},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEnvironment:
    """What one row's process is started with."""

    variables: Mapping[str, str]
    """All to set, `XLA_FLAGS` among them."""
    xla_flags: str
    """Ours alone."""
    left_out: tuple[str, ...]
    """Flags that the installed XLA does not know: it would end the process."""


def choose_environment(
    flag_set: str,
    environ: Mapping[str, str],
    *,
    host_bytes: int | None,
    tuned: Path | None = None,
) -> RowEnvironment:
    """Return what a row with a flag set is started with, beside `environ`.

    Args:
        flag_set: One of `FLAGS`.
        environ: The present environment; its `XLA_FLAGS` come first, so that ours count.
        host_bytes: Most pinned host memory; `None` for XLA's own limit.
        tuned: Folder that all rows share for the kernels that XLA tried; `None` for none.
    """
    wanted = FLAGS[flag_set]
    shared = (
        {}
        if tuned is None or TUNED_FOLDER in environ.get(XLA_FLAGS, "")
        else {TUNED_FOLDER: str(tuned)}
    )
    left_out = find_unknown_flags({**wanted, **shared}, find_xla_libraries())

    def write(flags: Mapping[str, str]) -> str:
        return " ".join(
            f"--{name}={value}" for name, value in flags.items() if name not in left_out
        )

    ours = write(wanted)
    parts = (environ.get(XLA_FLAGS, ""), ours, write(shared))
    variables = {XLA_FLAGS: " ".join(part for part in parts if part)}
    if MEMORY_FRACTION not in environ and OLD_MEMORY_FRACTION not in environ:
        variables[MEMORY_FRACTION] = MOST_MEMORY
    if host_bytes is not None and HOST_LIMIT not in environ:
        variables |= {HOST_LIMIT: str(max(1, host_bytes // 2**30)), HOST_PREALLOCATE: "false"}
    return RowEnvironment(variables=variables, xla_flags=ours, left_out=left_out)


def describe_left_out(left_out: tuple[str, ...]) -> str:
    """Return a note on flags that were not given; empty if all were."""
    if not left_out:
        return ""
    return f"without {', '.join(left_out)}, which this jaxlib does not know"
