"""One question answered: rows, bytes by name, the break-even context, assumptions, a verdict."""

from collections.abc import Mapping
from dataclasses import dataclass

from ebbtide.catalog.accelerators import ACCELERATORS
from ebbtide.estimate.breakeven import BreakEven, break_even
from ebbtide.estimate.setup import Dtype, Setup
from ebbtide.estimate.strategies import Estimator, Limits, Row
from ebbtide.estimate.verdict import Verdict, judge
from ebbtide.machine import Machine

MEASURED_ERROR = (
    "on an H200, for 8 layers of Llama 3 8B's shape at 8192 to 65,536 tokens, kept and "
    "recomputed, eager and compiled, such estimates were within 2 % of measured peaks and 6 % of "
    "measured step times (docs/estimate.md); elsewhere nothing was measured"
)
"""How far estimates were from measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that is known about one question."""

    setup: Setup
    """The question."""
    machine: Machine
    """Where."""
    limits: Limits
    """Of memory."""
    num_parameters: int
    """Of the whole model."""
    rows: tuple[Row, ...]
    """One for each strategy."""
    per_layer: Mapping[str, Mapping[str, int]]
    """Kind of layer to our local names, without the mark before them, to bytes on one device."""
    break_even: BreakEven | None
    """From which context on offloading is free; None for a measured run, which is of one."""
    peak_flops_per_s: int
    """Of the device, published."""
    assumptions: tuple[str, ...]
    """What the estimate stands on."""
    verdict: Verdict
    """What to do."""


def make_answer(estimator: Estimator) -> Answer:
    """Answer the question that an estimator was made for."""
    setup = estimator.setup
    rows = estimator.rows()
    return Answer(
        setup=setup,
        machine=estimator.machine,
        limits=estimator.limits,
        num_parameters=setup.shape.num_parameters,
        rows=rows,
        per_layer=_per_layer(estimator),
        break_even=(
            break_even(setup, estimator.machine, estimator.rates)
            if estimator.measured is None
            else None
        ),
        peak_flops_per_s=estimator.accelerator.peak_flops_per_s(setup.dtype.value),
        assumptions=_assumptions(estimator),
        verdict=judge(rows),
    )


def _per_layer(estimator: Estimator) -> dict[str, dict[str, int]]:
    """Return bytes by name for each kind of layer; saved ones alone."""
    shape = estimator.setup.shape
    first = estimator.stages[0]
    kinds: dict[str, dict[str, int]] = {}
    blocks = [(i + first.first_layer, b) for i, b in enumerate(estimator.workloads[0].blocks)]
    last = estimator.stages[-1]
    if last is not first:
        later = enumerate(estimator.workloads[-1].blocks, last.first_layer)
        blocks = [*blocks[: first.num_layers], *later]
    for layer, block in blocks:
        kind = "experts" if shape.has_experts(layer) else "dense"
        if kind not in kinds:
            kinds[kind] = {
                a.name.removeprefix(block.name).lstrip(".:"): a.num_bytes
                for a in block.activations
                if a.is_saved
            }
    return kinds


def _about_collectives(estimator: Estimator) -> str:
    setup, network = estimator.setup, estimator.network
    if setup.degrees.num_devices == 1:
        return "one device: no collectives"
    if network is None:
        return (
            f"collectives take no time, since the catalog knows no network of "
            f"{estimator.machine.name}; their buffers are counted"
        )
    return (
        f"collectives at {network.reached_inner_bytes_per_ns:.0f} GB/s among {network.domain} "
        f"devices and {network.reached_outer_bytes_per_ns:.0f} GB/s beyond, shares of published "
        "links, without latency; tp, ep and pp are waited for; fsdp, cp and dp run beside compute "
        f"and count where they take longer ({network.source.rstrip('.')})"
    )


def _assumptions(estimator: Estimator) -> tuple[str, ...]:
    setup, rates = estimator.setup, estimator.rates
    found = [
        f"products at {rates.flops_per_ns / 1e3:.0f} TFLOP/s, attention at "
        f"{rates.attention_flops_per_ns / 1e3:.0f}, other ops at "
        f"{rates.moved_bytes_per_ns / 1e3:g} TB/s: shares of published peaks, fitted on an H200",
        _about_collectives(estimator),
        "gradients are there all through the step, and the allocator loses nothing",
        MEASURED_ERROR,
    ]
    if estimator.measured is not None:
        found[0] = "times and bytes of blocks as in the measured run"
    if setup.context > setup.shape.num_positions > 0:
        found.append(
            f"{setup.shape.name} is published with positions for {setup.shape.num_positions} "
            "tokens; its table is counted with as many rows"
        )
    if setup.shape.experts is not None:
        found.append("every expert gets as many tokens as every other")
    if setup.dtype is Dtype.FP8:
        found.append("fp8 makes products faster; weights and activations stay in bf16")
    if estimator.machine.name in ACCELERATORS:
        found.append(f"peak rates: {estimator.accelerator.source}")
    if estimator.machine.name in ACCELERATORS and estimator.machine.source:
        found.append(f"machine: {estimator.machine.source}")
    return tuple(found)
