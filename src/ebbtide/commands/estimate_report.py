"""What `ebbtide estimate` prints for people."""

from collections.abc import Iterator, Sequence

from ebbtide.catalog.maxtext import maxtext_name
from ebbtide.catalog.networks import Axis
from ebbtide.commands.columns import align_columns
from ebbtide.estimate.answer import Answer
from ebbtide.estimate.breakeven import BreakEven
from ebbtide.estimate.search import Largest
from ebbtide.estimate.setup import Setup
from ebbtide.estimate.strategies import Row, Status, Strategy
from ebbtide.machine import Machine

GIB, MIB = 2**30, 2**20
BAR_WIDTH = 50
"""Characters for all of the device's memory."""
MOST_BAR_WIDTH = 78
"""More is cut, with a mark."""

MARKS = {
    "weights": "W",
    "gradients": "G",
    "optimizer": "O",
    "activations": "a",
    "logits": "l",
    "copy_buffers": "c",
    "communication": "x",
}
"""Holder to its letter in the picture."""

NO_FIGURE = "-"


def write_answer(answer: Answer) -> Iterator[str]:
    """Yield the lines of one answer."""
    setup, degrees = answer.setup, answer.setup.degrees
    yield (
        f"{setup.shape.name}: {answer.num_parameters / 1e9:.2f}e9 parameters, "
        f"{setup.shape.num_layers} layers; {degrees.num_devices} x {answer.machine.name}; "
        f"{setup.batch} x {setup.context} tokens a micro-batch, {setup.tokens} on a device; "
        f"{setup.implementation.value}, {setup.dtype.value}, {setup.optimizer.value}"
    )
    yield ""
    yield from align_columns([_HEAD, *(_cells(row, answer) for row in answer.rows)])
    for row in answer.rows:
        if row.short:
            yield f"{row.strategy.value}: short of {row.short}"
    yield ""
    yield "peak by holder, GiB"
    yield from align_columns(
        [
            ("strategy", *(name.replace("_", " ") for name in MARKS)),
            *(
                (row.strategy.value, *(f"{row.holders[name] / GIB:.1f}" for name in MARKS))
                for row in answer.rows
                if row.holders
            ),
        ]
    )
    yield from _collectives(answer)
    yield ""
    yield from _picture(answer)
    yield ""
    yield from _layers(answer)
    yield ""
    if answer.break_even is not None:
        yield _break_even(answer.break_even, answer.machine)
    for text in answer.assumptions:
        yield f"assumed: {text}"
    yield f"verdict: {answer.verdict.sentence}"


def write_largest(axis: str, found: Largest, setup: Setup, machine: Machine) -> Iterator[str]:
    """Yield the lines of `--max`."""
    yield f"largest {axis} of {setup.shape.name} on {machine.name}, all else as asked"
    names = {
        "keep": "everything kept",
        "remat": "checkpointing",
        "offload": "checkpointing with its inputs on the host",
    }
    yield from align_columns(
        [(text, str(getattr(found, name) or "none")) for name, text in names.items()]
    )


def write_sweep(axis: str, points: Sequence[tuple[float, Answer]]) -> Iterator[str]:
    """Yield the lines of `--what-if`: step times in seconds, or OOM."""
    title = f"{axis} x" if axis == "bandwidth" else axis
    yield from align_columns(
        [
            (title, *(strategy.value for strategy in Strategy), "advice"),
            *(
                (
                    f"{value:g}",
                    *(
                        "OOM" if row.status is Status.OOM else f"{row.step_ns / 1e9:.3f} s"
                        for row in answer.rows
                    ),
                    answer.verdict.advice.value,
                )
                for value, answer in points
            ),
        ]
    )


_HEAD = ("strategy", "status", "step s", "TFLOP/s", "MFU", "peak GiB", "host GiB", "disk GiB")


def _cells(row: Row, answer: Answer) -> tuple[str, ...]:
    if not row.step_ns:
        figures = (NO_FIGURE, NO_FIGURE, NO_FIGURE)
    else:
        figures = (
            f"{row.step_ns / 1e9:.3f}",
            f"{row.flops_per_s / 1e12:.1f}",
            f"{row.flops_per_s / answer.peak_flops_per_s:.1%}",
        )
    return (
        row.strategy.value,
        row.status.value,
        *figures,
        f"{row.peak_bytes / GIB:.1f}",
        f"{row.host_bytes / GIB:.1f}",
        f"{row.disk_bytes / GIB:.1f}",
    )


def _collectives(answer: Answer) -> Iterator[str]:
    """Yield what collectives take under each plan, if there are any."""
    axes = [axis for axis in Axis if any(axis in row.collectives for row in answer.rows)]
    if not axes:
        return
    yield ""
    yield "collectives of a step, seconds, each alone"
    yield from align_columns(
        [
            ("strategy", *(axis.value for axis in axes)),
            *(
                (row.strategy.value, *(f"{row.collectives.get(a, 0) / 1e9:.3f}" for a in axes))
                for row in answer.rows
                if row.step_ns
            ),
        ]
    )


def _picture(answer: Answer) -> Iterator[str]:
    """Yield a bar for each strategy, its letters by holder, the device's end marked."""
    budget = answer.limits.budget_bytes
    legend = ", ".join(f"{mark} {name.replace('_', ' ')}" for name, mark in MARKS.items())
    yield f"peaks; | is the budget of {budget / GIB:.1f} GiB; {legend}"
    width = max(len(strategy.value) for strategy in Strategy)
    for row in answer.rows:
        if not row.holders:
            continue
        bar, held, drawn = "", 0, 0
        for name, mark in MARKS.items():
            held += row.holders[name]
            # Cut while drawn: a budget may be as small as a byte.
            upto = round(held * BAR_WIDTH / max(1, budget))
            upto = min(upto, 2 * MOST_BAR_WIDTH)
            bar += mark * (upto - drawn)
            drawn = upto
        bar = bar.ljust(BAR_WIDTH)
        bar = bar[:BAR_WIDTH] + "|" + bar[BAR_WIDTH:]
        if len(bar) > MOST_BAR_WIDTH:
            bar = bar[: MOST_BAR_WIDTH - 1] + ">"
        yield f"{row.strategy.value.ljust(width)}  {bar}".rstrip()


def _layers(answer: Answer) -> Iterator[str]:
    for kind, sizes in answer.per_layer.items():
        total = sum(sizes.values())
        per_token = total / answer.setup.tokens / 1024
        title = "a layer" if len(answer.per_layer) == 1 else f"a layer ({kind})"
        yield f"{title} saves {total / MIB:.1f} MiB, {per_token:.1f} KiB a token"
        yield from align_columns(
            [
                ("  activation", "MaxText", "MiB"),
                *(
                    (f"  {name}", maxtext_name(f".{name}") or NO_FIGURE, f"{size / MIB:.1f}")
                    for name, size in sizes.items()
                ),
            ]
        )


def _break_even(found: BreakEven, machine: Machine) -> str:
    def say(context: int | None) -> str:
        if context is None:
            return "never"
        return "at any context" if context == 0 else f"from {context} tokens on"

    return (
        f"offloading is free on {machine.name}: of all that is saved {say(found.everything)}; "
        f"with what is cheap made again {say(found.dear)}"
    )
