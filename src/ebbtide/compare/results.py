"""What a comparison measured: one row a strategy, and the facts the rows share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from statistics import median
from typing import Any

BYTES_PER_GIB = 1 << 30
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


class Status(StrEnum):
    """How a strategy's run ended."""

    OK = "ok"
    OOM = "OOM"
    ERROR = "error"
    NOT_INSTALLED = "not installed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxFigures:
    """What only a row of a run in JAX has. `None` means that there is nothing to report."""

    micro_batch: int
    """Sequences in one forward and backward pass on one device."""
    global_batch: int
    """Sequences between two steps of the optimizer, on all devices."""
    model_flops: int
    """Arithmetic of one step on one device; what is recomputed is not counted."""
    compile_ns: int | None = None
    """Lowering and compiling the step."""
    xla_flags: str = ""
    """The row's own flags, after those of the environment."""
    grad_relative_difference: float | None = None
    """Largest difference of an element, over the largest element of the reference's leaf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy's measurements. `None` means that there is nothing to report, never zero."""

    strategy: str
    """The name as in `--strategies`."""
    status: Status
    """How the run ended; every measurement is `None` unless it is `OK`."""
    step_ns: tuple[int, ...] = ()
    """Each counted step's forward, loss, backward and optimizer step together."""
    forward_ns: tuple[int, ...] = ()
    """Each counted step's forward and loss."""
    peak_bytes: int | None = None
    """Peak memory over the counted steps; the facts' `memory_meaning` says of what."""
    reserved_bytes: int | None = None
    """What the allocator held at its peak, use and beyond."""
    moved_out_bytes: int | None = None
    """Bytes copied out of device memory in one step."""
    moved_in_bytes: int | None = None
    """Bytes copied back into device memory in one step."""
    host_bytes: int | None = None
    """Host memory that held activations, at its peak."""
    disk_bytes: int | None = None
    """Disk space that held activations, at its peak."""
    loss: float | None = None
    """Training loss of the last step."""
    perplexity_before: float | None = None
    """Perplexity on the held-out text before the first step."""
    perplexity_after: float | None = None
    """Perplexity on the held-out text after the last step."""
    grad_equal: bool | None = None
    """Whether every compared gradient has the reference's bits; `None` without a reference."""
    grad_largest_difference: float | None = None
    """Largest absolute difference from the reference; `None` also if a gradient is not finite."""
    bound_ns: int | None = None
    """Least time of forward and backward under any plan; only of a plan for a budget."""
    note: str = ""
    """What a reader must know about this row."""
    jax: JaxFigures | None = None
    """What only runs in JAX have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What every row of a comparison shares."""

    model: str
    """Which model, and where its weights come from."""
    parameters: int
    """Number of trained parameters, tied ones counted once."""
    context: int
    """Tokens in one sequence."""
    batch: int
    """Sequences in one step."""
    device: str
    """The device and its name."""
    dtype: str
    """Type of weights, gradients and activations."""
    versions: dict[str, str]
    """Version of Python and of each package that matters."""
    memory_meaning: str
    """What `peak_gib` and `reserved_gib` count."""
    command: str
    """The command that makes these numbers again."""
    date: str
    """When the run started, UTC."""
    steps: int
    """Counted steps behind each median."""
    warm_up_steps: int
    """Optimizer steps taken before the counted ones."""
    passes: int
    """Forward and backward passes behind each time, under torch's default kernels; 0: the steps
    were timed."""
    optimizer: str
    """Which optimizer, with its learning rate."""
    seed: int
    """Seed of random weights and of dropout."""
    text: str
    """Where the training and held-out text come from."""
    tokenizer: str
    """How text became token ids."""
    held_out_tokens: int
    """Tokens behind each perplexity."""
    state_bytes: int
    """Weights, gradients and optimizer state: part of every peak, whatever the strategy."""
    logits_bytes: int
    """One copy of the logits; a loss that is not chunked holds several."""
    loss: str
    """How the loss is computed."""
    is_loss_chunked: bool
    """Whether it is computed in chunks, so that the logits are never there at once."""
    is_compiled: bool
    """Whether each block was compiled, under the strategies that support that."""
    gradient_reference: str | None
    """The strategy whose gradients the others are compared with."""
    compiled_gradient_reference: str | None
    """The same for rows on compiled blocks, in a run whose other rows are not compiled."""
    disturbance: str
    """Why the times cannot be relied on; empty if nothing is known against them."""
    disk: str
    """Where ebbtide's plans put what they evict to disk; empty if they had no disk."""
    framework: str = "torch"
    """`torch` or `jax`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A finished comparison."""

    facts: Facts
    rows: tuple[Row, ...]


def read_row(record: dict[str, Any]) -> Row:
    """Build a row from `write_row`'s record."""
    known = {field.name: record[field.name] for field in fields(Row)}
    known["status"] = Status(known["status"])
    known["step_ns"] = tuple(known["step_ns"])
    known["forward_ns"] = tuple(known["forward_ns"])
    known["jax"] = JaxFigures(**known["jax"]) if known["jax"] else None
    return Row(**known)


def write_row(row: Row) -> dict[str, Any]:
    """Return the row as JSON values, in bytes and ns."""
    return asdict(row)


def take_median(values_ns: tuple[int, ...]) -> int | None:
    """Return the median in ns; `None` of nothing."""
    return round(median(values_ns)) if values_ns else None


def to_gib(size_bytes: int | None) -> float | None:
    """Convert to GiB, to six decimals (1 KiB)."""
    return None if size_bytes is None else round(size_bytes / BYTES_PER_GIB, 6)


def to_ms(time_ns: int | None) -> float | None:
    """Convert to ms, to three decimals."""
    return None if time_ns is None else round(time_ns / NS_PER_MS, 3)


def take_tflops(row: Row) -> float | None:
    """Return the arithmetic of the model a second and device, in 10^12; `None` without a time."""
    step_ns = take_median(row.step_ns)
    return None if row.jax is None or not step_ns else row.jax.model_flops / step_ns / 1e3


def describe_row(row: Row) -> dict[str, Any]:
    """Return one entry of the published `rows`; those of a run in JAX have more keys."""
    common = {
        "strategy": row.strategy,
        "status": row.status.value,
        "step_ms": to_ms(take_median(row.step_ns)),
        "forward_ms": to_ms(take_median(row.forward_ns)),
        "peak_gib": to_gib(row.peak_bytes),
        "reserved_gib": to_gib(row.reserved_bytes),
        "moved_out_gib": to_gib(row.moved_out_bytes),
        "moved_in_gib": to_gib(row.moved_in_bytes),
        "host_gib": to_gib(row.host_bytes),
        "disk_gib": to_gib(row.disk_bytes),
        "loss": row.loss,
        "perplexity_before": row.perplexity_before,
        "perplexity_after": row.perplexity_after,
        "grad_equal": row.grad_equal,
        "grad_largest_difference": row.grad_largest_difference,
        "bound_ms": to_ms(row.bound_ns),
        "note": row.note,
    }
    if row.jax is None:
        return common
    return {
        **common,
        "micro_batch": row.jax.micro_batch,
        "global_batch": row.jax.global_batch,
        "tflops_per_device": take_tflops(row),
        "compile_s": None if row.jax.compile_ns is None else row.jax.compile_ns / NS_PER_S,
        "xla_flags": row.jax.xla_flags,
        "grad_relative_difference": row.jax.grad_relative_difference,
    }


def describe_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return the published JSON object: the facts, `step_ms_ranges` and `rows`."""
    facts = asdict(comparison.facts)
    facts["state_gib"] = to_gib(facts.pop("state_bytes"))
    facts["logits_gib"] = to_gib(facts.pop("logits_bytes"))
    facts["step_ms_ranges"] = {
        row.strategy: [to_ms(min(row.step_ns)), to_ms(max(row.step_ns))]
        for row in comparison.rows
        if row.step_ns
    }
    return {**facts, "rows": [describe_row(row) for row in comparison.rows]}
