"""The page and the picture of what `peers.py` measured, from its JSON files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

HEADS = (
    *("strategy", "status", "step ms", "range", "x keep", "peak GiB", "host GiB", "moved GiB"),
    *("gradients", "bound ms"),
)
INTRODUCTION = (
    "Every strategy and every peer side by side, made by `make gpu-bench` "
    "(`benchmarks/peers.py`): one process a row, the same seed, weights and text in all rows "
    "of a workload. A step is forward, loss and backward under torch's default kernels, but that "
    "cuDNN's attention is off, whose backward adds up in varying order; its time "
    "is the median of the timed ones, with their range. `x keep` "
    "is against the row `keep` of the same call. `moved` is out and in together, in one step. "
    "`gradients`: bit for bit those of `keep` in the training step after the timed passes, under "
    "deterministic kernels; compiled rows are compared with compiled ones. "
    "`bound ms`: no plan within the budget makes a step faster, by the times measured. What the "
    "strategies are: [compare.md](compare.md)."
)
LEADS = {"ebbtide": "C3", "compile-budget": "C0", "torch-sac": "C2"}
"""Colours in the picture, by the beginning of a row's name; others are gray."""


def write_page(
    results: dict[str, dict[str, Any]], names: tuple[str, ...], page: Path, picture: Path | None
) -> str:
    """Return the page about all workloads: a table for each that was run, a list of the others.

    Args:
        results: The JSON objects, by workload.
        names: All workloads, in order.
        page: Where the page will lie; links are relative to it.
        picture: The picture, or `None` if there is none.
    """
    lines = [
        "# Benchmarks",
        "",
        INTRODUCTION,
        "",
    ]
    if picture is not None:
        link = os.path.relpath(picture, page.parent)
        lines += [f"![peak memory against step time, a panel for each workload]({link})", ""]
    for name in names:
        if name in results:
            lines += _write_workload(name, results[name])
    missing = [name for name in names if name not in results]
    if missing:
        lines += ["## Not run", "", *(f"- `{name}`" for name in missing), ""]
    return "\n".join(lines)


def _write_workload(name: str, result: dict[str, Any]) -> list[str]:
    facts = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    blocks = "compiled blocks" if result["is_compiled"] else "eager"
    lines = [
        f"## {name}",
        "",
        f"{result['model']}: {result['parameters'] / 1e6:,.0f} M parameters, {result['dtype']}, "
        f"{result['context']} tokens x {result['batch']}, {blocks}. {result['device']}; {facts}; "
        f"{result['date']}. Optimizer: {result['optimizer']}. Loss: {result['loss']}. "
        f"{result['passes']} timed steps. Weights, gradients and "
        f"optimizer state: {result['state_gib']:.2f} GiB; one copy of the logits: "
        f"{result['logits_gib']:.2f} GiB.",
        "",
        f"    {result['command']}",
        "",
        _join(HEADS),
        _join("---" for _ in HEADS),
        *(_join(_write_row(row)) for row in result["rows"]),
        "",
    ]
    notes = [f"- {row['row']}: {row['note']}" for row in result["rows"] if row["note"]]
    return [*lines, *notes, ""] if notes else lines


def _write_row(row: dict[str, Any]) -> tuple[str, ...]:
    moved = [row[key] for key in ("moved_out_gib", "moved_in_gib") if row[key] is not None]
    spread = row["step_ms_range"]
    if row["grad_equal"] is None:
        gradients = "reference" if row["row"] == "keep" and row["status"] == "ok" else "-"
    elif row["grad_equal"]:
        gradients = "equal"
    else:
        gradients = f"differ: {_number(row['grad_largest_difference'], '.1e')}"
    return (
        row["row"],
        row["status"],
        _number(row["step_ms"], ".1f"),
        f"{spread[0]:.1f} to {spread[1]:.1f}" if spread else "-",
        _number(row["x_keep"], ".3f"),
        _number(row["peak_gib"], ".2f"),
        _number(row["host_gib"], ".2f"),
        _number(sum(moved) if moved else None, ".2f"),
        gradients,
        _number(row["bound_ms"], ".1f"),
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _join(cells: Any) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def find_front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats in both peak and time, by peak."""
    front: list[tuple[float, float]] = []
    for peak, step in sorted(set(points)):
        if not front or step < front[-1][1]:
            front.append((peak, step))
    return front


def draw(results: dict[str, dict[str, Any]], path: Path) -> Path | None:
    """Draw a panel for each workload, with the front of rows that none beats; `None` if empty."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = {
        name: [row for row in result["rows"] if row["step_ms"] and row["peak_gib"]]
        for name, result in results.items()
    }
    shown = {name: rows for name, rows in shown.items() if rows}
    if not shown:
        return None
    columns = min(len(shown), 3)
    height = -(-len(shown) // columns)
    figure: Any = Figure(figsize=(6.5 * columns, 4.8 * height), dpi=100, layout="tight")
    FigureCanvasAgg(figure)
    for place, (name, rows) in enumerate(shown.items(), start=1):
        axes = figure.add_subplot(height, columns, place)
        front = find_front([(row["peak_gib"], row["step_ms"]) for row in rows])
        axes.step(*zip(*front, strict=True), where="post", color="lightgray", zorder=1)
        for row in rows:
            colour = next((c for lead, c in LEADS.items() if row["row"].startswith(lead)), "gray")
            axes.scatter([row["peak_gib"]], [row["step_ms"]], s=30, color=colour, zorder=3)
            axes.annotate(
                row["row"],
                (row["peak_gib"], row["step_ms"]),
                xytext=(5, 4),
                textcoords="offset points",
                fontsize=7,
                color=colour,
            )
        axes.margins(x=0.3, y=0.2)  # room for names to the right
        axes.grid(visible=True, alpha=0.3)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("peak memory in GiB")
        axes.set_ylabel("step time in ms")
    figure.savefig(path)
    return path
