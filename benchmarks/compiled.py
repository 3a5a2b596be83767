"""Compiled blocks on one GPU: torch's own recomputation beside ebbtide's plans.

    PYTHONPATH=src python3 benchmarks/compiled.py --out benchmarks/results

Llama-3-8B shape x 8 layers, random weights, batch 1, bf16; a step is forward and backward.
`budget-B` is torch's `activation_memory_budget`; `fit:ROW:S` is ebbtide with a budget of S times
all that the row ROW held on the device at its peak; where no plan fits it, the row says so.
Gradients are compared with those of compiled keep under deterministic settings, at the first
context alone: it takes a compilation more each.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import transformers
from llama_shape import make_model
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from ebbtide.errors import BudgetError
from ebbtide.torch import Tide, attach

GIB = 2**30
STRATEGIES = (
    "keep,budget-0,budget-0.5,offload-inputs,balanced,offload,offload-last:4,"
    "fit:budget-0:1.05,fit:budget-0:1.1,fit:keep:0.5,fit:keep:0.7"
)
NUM_WARM_UP = 3
"""Observed, compiled for the plan and checked; the next one runs free."""
NUM_WARM_UP_TO_FIT = 14
"""Observed, compiled to be measured, measured, checked, and timed until the plan is corrected."""


@contextlib.contextmanager
def strategy(
    name: str, model: Any, backend: str, disk: str | None, budget: int | None
) -> Generator[Tide | None]:
    """Compile the blocks, and take the compiled code off again."""
    if budget is not None:
        chosen = True if backend == "inductor" else backend
        with attach(model, budget=budget, compile=chosen, disk=disk) as tide:
            yield tide
        return
    if name != "keep" and not name.startswith("budget-"):
        chosen = True if backend == "inductor" else backend
        with attach(model, name, compile=chosen, disk=disk) as tide:
            yield tide
        return
    torch.compiler.reset()  # torch's own blocks share one code object
    share = 1.0 if name == "keep" else float(name.removeprefix("budget-"))
    with functorch_config.patch(activation_memory_budget=share):
        for layer in model.model.layers:
            layer.compile(backend=backend)
        try:
            yield None
        finally:
            for layer in model.model.layers:
                layer._compiled_call_impl = None


def step(model: Any, ids: torch.Tensor) -> float:
    """Run forward and backward; returns milliseconds."""
    _wait(ids)
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    _wait(ids)
    return (time.perf_counter() - start) * 1e3


def _wait(ids: torch.Tensor) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize()


def measure(
    name: str,
    model: Any,
    ids: torch.Tensor,
    options: argparse.Namespace,
    folder: str,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the figures of one strategy; the gradients of a strict step stay in the model."""
    counters.clear()
    model.zero_grad(set_to_none=False)
    gc.collect()
    is_cuda = ids.is_cuda
    if is_cuda:
        torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated() if is_cuda else 0
    moves = not name.startswith(("keep", "budget-", "recompute"))
    disk = f"{folder}:4GiB" if moves and not is_cuda else None
    budget = _budget(name, rows, ids.shape[1])
    with strategy(name, model, options.backend, disk, budget) as tide:
        start = time.perf_counter()
        num_warm_up = NUM_WARM_UP if budget is None else NUM_WARM_UP_TO_FIT
        first_peaks = [_peak(model, ids) - base for _ in range(num_warm_up)]
        row: dict[str, Any] = {
            "context": ids.shape[1],
            "strategy": name,
            "first_peak_gib": first_peaks[0] / GIB,
            "ready_s": time.perf_counter() - start,
        }
        num_graphs = counters["stats"].get("unique_graphs", 0)
        if tide is not None:
            tide.reset_statistics()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        times = [step(model, ids) for _ in range(options.steps)]
        row["step_ms_all"] = [round(t, 2) for t in times]
        row["step_ms"] = statistics.median(times)
        row["base_gib"] = base / GIB
        row["peak_gib"] = (torch.cuda.max_memory_allocated() - base) / GIB if is_cuda else 0.0
        if budget is not None and tide is not None and tide.plan is not None:
            row["budget_gib"] = budget / GIB
            row["planned_peak_gib"] = tide.plan.peak_bytes / GIB
            row["predicted_ms"] = tide.plan.predicted_step_ns / 1e6
            row["bound_ms"] = tide.plan.bound_step_ns / 1e6
            row["worst_first_peak_gib"] = max(first_peaks) / GIB
            if options.plans is not None:
                keep_plan(tide, options.plans / f"{ids.shape[1]}-{name.replace(':', '-')}")
        if tide is not None:
            counts = tide.statistics()
            row["out_gib"] = counts.moved_out_bytes / options.steps / GIB
            row["in_gib"] = counts.moved_in_bytes / options.steps / GIB
        row["num_graphs"] = num_graphs
        row["num_recompiled"] = counters["stats"].get("unique_graphs", 0) - num_graphs
        row["num_breaks"] = sum(counters["graph_break"].values())
        model.zero_grad(set_to_none=False)
        if options.is_compared:
            torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                step(model, ids)
            finally:
                torch.use_deterministic_algorithms(False)
    return row


def keep_plan(tide: Tide, folder: Path) -> None:
    """Write a budget's workload, plan and report, to see why a row is slow."""
    assert tide.workload is not None and tide.plan is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "workload.json").write_text(tide.workload.to_json())
    (folder / "plan.json").write_text(tide.plan.to_json())
    (folder / "report.txt").write_text(str(tide.report()))


def _budget(name: str, rows: list[dict[str, Any]], context: int) -> int | None:
    """Return the budget of a row `fit:ROW:S` in bytes; None for another one."""
    if not name.startswith("fit:"):
        return None
    _, whose, share = name.split(":")
    row = next(r for r in rows if (r["context"], r["strategy"]) == (context, whose))
    # On a CPU nothing is counted: a dry run needs a budget all the same.
    held_gib = row["base_gib"] + row["peak_gib"] or 1.0
    return int(held_gib * float(share) * GIB)


def _peak(model: Any, ids: torch.Tensor) -> int:
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    step(model, ids)
    return torch.cuda.max_memory_allocated() if ids.is_cuda else 0


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of the gradients on the CPU."""
    return {name: p.grad.to("cpu", copy=True) for name, p in model.named_parameters()}


def compare(model: Any, wanted: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Compare the gradients in the model with `wanted`, bit for bit and by their norms."""
    num_unequal, worst = 0, 0.0
    for name, parameter in model.named_parameters():
        gradient, other = parameter.grad, wanted[name].to(parameter.device)
        if torch.equal(gradient, other):
            continue
        num_unequal += 1
        difference = (gradient.float() - other.float()).norm() / other.float().norm()
        worst = max(worst, float(difference))
    return {"num_unequal": num_unequal, "worst_relative_difference": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="8192,32768")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divide the widths, for a dry run")
    parser.add_argument("--plans", type=Path, help="a folder for what was measured and planned")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    contexts = [int(context) for context in options.contexts.split(",")]
    model = make_model(options.layers, options.device, options.scale).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    facts = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
        "layers": options.layers,
        "command": _command(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for context in contexts:
            torch.compiler.reset()  # or torch would compile for any context
            torch.manual_seed(1)
            ids = torch.randint(0, 32000 // options.scale, (1, context), device=options.device)
            options.is_compared = context == contexts[0]
            wanted: dict[str, torch.Tensor] = {}
            for name in options.strategies.split(","):
                try:
                    row = measure(name, model, ids, options, folder, rows)
                except BudgetError as error:
                    row = {"context": context, "strategy": name, "refusal": str(error)}
                else:
                    if options.is_compared and not wanted:
                        wanted = gradients_of(model)
                    elif options.is_compared:
                        row |= compare(model, wanted)
                rows.append(row)
                print(_line(row, rows), flush=True)
                write(facts, rows, options.out)


def _command() -> str:
    """Return what was asked for, but for where the files go."""
    asked = shlex.join(sys.argv[1:])
    asked = re.sub(r"--(out|plans) \S+ ?", "", asked).strip()
    return " ".join(filter(None, ["PYTHONPATH=src python3 benchmarks/compiled.py", asked,
                                  "--out benchmarks/results"]))  # fmt: skip


def write(facts: dict[str, Any], rows: list[dict[str, Any]], folder: Path) -> None:
    """Write what there is so far."""
    text = json.dumps({"facts": facts, "rows": rows}, indent=1)
    (folder / "compiled.json").write_text(text)
    (folder / "compiled.md").write_text(report(facts, rows))


def report(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the table as markdown."""
    lines = [
        "# Compiled blocks",
        "",
        f"Llama-3-8B shape x {facts['layers']} layers, each block compiled, random weights, "
        f"vocabulary 32,000, batch 1, bf16. {facts['device']}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}, Python {facts['python']}, {facts['date']}. A step "
        "is forward and backward; times are medians in ms, peaks GiB allocated above weights and "
        "gradients. "
        "`first` is the peak of the first step, `ready` the seconds of the first three with all "
        "compilation. `unequal` counts gradients that differ from those of compiled keep, and "
        "`worst` is the largest difference of one, as a share of its norm: code that is compiled "
        "to recompute rounds elsewhere, torch's own as well.",
        "",
        "```",
        f"$ {facts['command']}",
        _line(None, rows),
        *(_line(row, rows) for row in rows),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any] | None, rows: list[dict[str, Any]]) -> str:
    if row is None:
        return (
            f"{'context':>8} {'strategy':18}{'step ms':>9}{'x keep':>8}{'peak':>8}{'first':>8}"
            f"{'out':>8}{'ready':>8}{'unequal':>9}{'worst':>9}"
        )
    if "refusal" in row:
        return f"{row['context']:8} {row['strategy']:18}  {row['refusal'].split('. ')[0]}"
    keep = next(r for r in rows if r["context"] == row["context"])
    line = (
        f"{row['context']:8} {row['strategy']:18}{row['step_ms']:9.1f}"
        f"{row['step_ms'] / keep['step_ms']:8.3f}{row['peak_gib']:8.2f}"
        f"{row['first_peak_gib']:8.2f}{row.get('out_gib', 0.0):8.2f}{row['ready_s']:8.1f}"
    )
    if "num_unequal" in row:
        line += f"{row['num_unequal']:9}{row['worst_relative_difference']:9.4f}"
    return line


if __name__ == "__main__":
    main()
