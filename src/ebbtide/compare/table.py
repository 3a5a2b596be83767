"""Show a comparison: a table for the terminal, a page, a JSON object and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ebbtide.compare.jax.meanings import list_flag_notes, list_jax_meanings
from ebbtide.compare.plot import draw_memory_against_time
from ebbtide.compare.results import (
    NS_PER_S,
    Comparison,
    Facts,
    Row,
    describe_comparison,
    take_median,
    take_tflops,
    to_gib,
    to_ms,
)

NOTHING = "-"
# No table is wider; only a bound for measuring it.
MAX_WIDTH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the printed table."""

    title: str
    cells: tuple[str, ...]


def list_columns(comparison: Comparison) -> tuple[Column, ...]:
    """Return the columns in which at least one row has something to say."""
    facts = comparison.facts
    references = (facts.gradient_reference, facts.compiled_gradient_reference)
    writers: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("strategy", lambda row: row.strategy),
        ("status", lambda row: row.status.value),
        ("micro-batch", lambda row: NOTHING if row.jax is None else str(row.jax.micro_batch)),
        ("global batch", lambda row: NOTHING if row.jax is None else str(row.jax.global_batch)),
        ("step ms", lambda row: _write_number(to_ms(take_median(row.step_ns)), ".1f")),
        ("forward ms", lambda row: _write_number(to_ms(take_median(row.forward_ns)), ".1f")),
        ("TFLOP/s", lambda row: _write_number(take_tflops(row), ".4g")),
        ("peak GiB", lambda row: _write_number(to_gib(row.peak_bytes), ".2f")),
        ("reserved GiB", lambda row: _write_number(to_gib(row.reserved_bytes), ".2f")),
        ("out GiB", lambda row: _write_number(to_gib(row.moved_out_bytes), ".2f")),
        ("in GiB", lambda row: _write_number(to_gib(row.moved_in_bytes), ".2f")),
        ("host GiB", lambda row: _write_number(to_gib(row.host_bytes), ".2f")),
        ("disk GiB", lambda row: _write_number(to_gib(row.disk_bytes), ".2f")),
        ("compile s", lambda row: _write_number(_read_compile_s(row), ".1f")),
        ("loss", lambda row: _write_number(row.loss, ".4f")),
        ("perplexity before", lambda row: _write_number(row.perplexity_before, ".2f")),
        ("after", lambda row: _write_number(row.perplexity_after, ".2f")),
        ("gradients", lambda row: _write_gradients(row, references)),
        ("bound ms", lambda row: _write_number(to_ms(row.bound_ns), ".1f")),
    )
    columns = (
        Column(title=title, cells=tuple(write(row) for row in comparison.rows))
        for title, write in writers
    )
    return tuple(column for column in columns if set(column.cells) != {NOTHING})


def print_table(comparison: Comparison, console: Console) -> None:
    """Print the table, what its columns mean, and the rows' notes.

    The table is never cut to the console's width: a pipe gets it whole.
    """
    columns = list_columns(comparison)
    table = Table(title=_write_title(comparison.facts), title_justify="left")
    for column in columns:
        is_text = column.title in ("strategy", "status", "gradients")
        table.add_column(column.title, justify="left" if is_text else "right", no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    unbounded = console.options.update(max_width=MAX_WIDTH)
    width = Measurement.get(console, unbounded, table).maximum
    Console(file=console.file, width=width).print(table)
    for line in (*list_meanings(comparison), *list_notes(comparison)):
        console.print(f"- {line}", highlight=False, markup=False, soft_wrap=True)


def write_json(comparison: Comparison) -> str:
    """Return the published JSON object as text."""
    return json.dumps(describe_comparison(comparison), indent=2, allow_nan=False)


def write_files(comparison: Comparison, folder: Path) -> tuple[Path, ...]:
    """Write `results.md`, `results.json` and `memory-vs-step.png` into `folder`.

    The picture is left out when no strategy finished. Files of these names are replaced.
    """
    record = write_record(comparison, folder)
    page = folder / "results.md"
    page.write_text(write_page(comparison), encoding="utf-8")
    picture = draw_memory_against_time(comparison, folder / "memory-vs-step.png")
    return (page, record) if picture is None else (page, record, picture)


def write_record(comparison: Comparison, folder: Path) -> Path:
    """Write `results.json` into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "results.json"
    record.write_text(write_json(comparison) + "\n", encoding="utf-8")
    return record


def write_page(comparison: Comparison) -> str:
    """Return the results as a Markdown page that needs no other explanation."""
    facts = comparison.facts
    columns = list_columns(comparison)
    lines = [
        "# One model, every strategy",
        "",
        f"{_write_title(facts)}. One training step is forward, loss, backward and optimizer step.",
        "",
        _write_cells(column.title for column in columns),
        _write_cells("---" for _ in columns),
        *(_write_cells(cells) for cells in zip(*(c.cells for c in columns), strict=True)),
        "",
        "## What the columns mean",
        "",
        *(f"- {line}" for line in list_meanings(comparison)),
    ]
    notes = list_notes(comparison)
    if notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    lines += ["", "## The run", "", "| fact | value |", "| --- | --- |"]
    lines += [_write_cells(pair) for pair in _list_facts(facts)]
    lines += ["", "The same numbers again:", "", f"    {facts.command}", ""]
    return "\n".join(lines)


def list_meanings(comparison: Comparison) -> tuple[str, ...]:
    """Return one sentence for each thing in the table that a name cannot say."""
    facts = comparison.facts
    if facts.framework == "jax":
        return list_jax_meanings(comparison)
    steps = "1 step" if facts.steps == 1 else f"median of {facts.steps} steps"
    num_before = facts.warm_up_steps
    warm_up = f"{num_before} warm-up step{'' if num_before == 1 else 's'}"
    trained = f"{steps} after {warm_up}, with deterministic algorithms"
    timed = f"step and forward: {trained}; the optimizer is {facts.optimizer}."
    if facts.passes:
        passes = "1 pass" if facts.passes == 1 else f"median of {facts.passes} passes"
        timed = (
            f"step, forward and memory: {passes} of forward and backward before training, with "
            f"torch's default kernels (cuDNN's attention is off) and no optimizer step. All else: "
            f"{trained}; the optimizer is {facts.optimizer}."
        )
    meanings = [
        timed,
        f"memory: {facts.memory_meaning}. Weights, gradients and optimizer state alone are "
        f"{to_gib(facts.state_bytes):.2f} GiB, below which no strategy here can go; one copy of "
        f"the logits is {to_gib(facts.logits_bytes):.2f} GiB, {_write_copies(facts)}.",
        "out and in: bytes moved out of device memory and back in one step; host: the most pinned "
        "host memory that was taken; disk: the most bytes that were held there"
        + (f", in {facts.disk}." if facts.disk else "."),
        f"perplexity: on {facts.held_out_tokens} held-out tokens before and after all "
        f"{facts.warm_up_steps + facts.steps} steps; loss: of the last step.",
    ]
    meanings.append(
        f"gradients: compared with those of {facts.gradient_reference}, bit for bit; a number is "
        "the largest absolute difference."
        if facts.gradient_reference
        else "gradients: not compared, since no run of keep or checkpoint finished."
    )
    if facts.compiled_gradient_reference:
        meanings.append(
            f"rows on compiled blocks: compared with those of {facts.compiled_gradient_reference}, "
            "since compiling changes bits."
        )
    if any(row.bound_ns for row in comparison.rows):
        meanings.append(
            "bound: no plan within the budget makes forward and backward faster, by the times "
            "measured; the optimizer is not in it."
        )
    if facts.disturbance:
        meanings.append(f"times: {facts.disturbance}.")
    return tuple(meanings)


def list_notes(comparison: Comparison) -> tuple[str, ...]:
    """Return the rows' notes, each with its strategy, and how far timings spread."""
    notes = [f"{row.strategy}: {row.note}" for row in comparison.rows if row.note]
    spreads = [
        f"{row.strategy} {min(row.step_ns) / 1e6:.1f} to {max(row.step_ns) / 1e6:.1f}"
        for row in comparison.rows
        if len(row.step_ns) > 1
    ]
    if spreads:
        notes.append(f"range of step ms: {', '.join(spreads)}")
    return (*notes, *list_flag_notes(comparison))


def _write_title(facts: Facts) -> str:
    return (
        f"{facts.model}: {facts.parameters / 1e6:,.1f} M parameters, {facts.dtype}, batch "
        f"{facts.batch}, {facts.context} tokens, {facts.device}"
    )


def _list_facts(facts: Facts) -> tuple[tuple[str, str], ...]:
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    return (
        ("model", facts.model),
        ("parameters", f"{facts.parameters:,}"),
        ("context", f"{facts.context} tokens"),
        ("batch", str(facts.batch)),
        ("dtype", facts.dtype),
        ("optimizer", facts.optimizer),
        ("loss", facts.loss),
        ("blocks", "compiled" if facts.is_compiled else "eager"),
        ("steps", f"{facts.warm_up_steps} warm-up, {facts.steps} counted"),
        ("text", facts.text),
        ("tokenizer", facts.tokenizer),
        ("seed", str(facts.seed)),
        ("device", facts.device),
        ("disk", facts.disk or NOTHING),
        ("versions", versions),
        ("date", facts.date),
    )


def _write_number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _write_copies(facts: Facts) -> str:
    if facts.is_loss_chunked:
        return "which the chunked loss never holds at once"
    return (
        "and the loss holds several, which no strategy here avoids: --chunked-loss computes it in "
        "chunks"
    )


def _write_gradients(row: Row, references: tuple[str | None, ...]) -> str:
    if row.strategy in references:
        return "reference"
    if row.grad_equal is None:
        return NOTHING
    if row.grad_equal:
        return "equal"
    difference = f"differ: {_write_number(row.grad_largest_difference, '.1e')}"
    if row.jax is None:
        return difference
    return f"{difference}, {_write_number(row.jax.grad_relative_difference, '.1e')} of the largest"


def _read_compile_s(row: Row) -> float | None:
    if row.jax is None or row.jax.compile_ns is None:
        return None
    return row.jax.compile_ns / NS_PER_S


def _write_cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
