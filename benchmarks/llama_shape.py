"""Step time and peak memory of Llama-3-8B-shaped blocks under each strategy, in one process.

    PYTHONPATH=src python3 benchmarks/llama_shape.py --contexts 8192,32768 --out results.json

Random weights, vocabulary 32,000, batch 1, bf16, eager, Hugging Face model with SDPA. A step is
forward and backward (no optimizer), as in the published tables that it is set beside. Peaks are
read after the warm-up steps, so they are those of the plan and not of the observed first step;
that one's is printed too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Generator
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from ebbtide.torch import Tide, attach

GIB = 2**30

NUM_WARM_UP = 9
"""Steps under a plan before the counted ones: a budget's plan is corrected after five."""

BUDGET_PREFIX = "budget:"
"""A strategy of this name gives ebbtide's planner so many bytes."""

# cuBLAS is deterministic only with a workspace of its own; read when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def make_model(num_layers: int, device: str, scale: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=4096 // scale,
        intermediate_size=14336 // scale,
        num_hidden_layers=num_layers,
        num_attention_heads=32 // min(scale, 8),
        num_key_value_heads=8 // min(scale, 8),
        vocab_size=32000 // scale,
        max_position_embeddings=131072,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
        return model.to(torch.bfloat16)


@contextlib.contextmanager
def strategy(name: str, model: LlamaForCausalLM) -> Generator[Tide | None]:
    """Put `model` under the strategy, and take it off again."""
    if name == "keep":
        yield None
    elif name in ("checkpoint", "checkpoint-offload"):
        kwargs: dict[str, Any] = {"use_reentrant": False}
        if name == "checkpoint-offload":
            kwargs["offload"] = True
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        model.train()
        try:
            yield None
        finally:
            model.gradient_checkpointing_disable()
    elif name == "save-on-cpu":
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            yield None
    elif name.startswith(BUDGET_PREFIX):
        with attach(model, budget=int(name.removeprefix(BUDGET_PREFIX))) as tide:
            yield tide
    else:
        with attach(model, name) as tide:
            yield tide


def measure(
    name: str, model: LlamaForCausalLM, ids: torch.Tensor, num_steps: int, reference: Any
) -> dict[str, Any]:
    """Run steps under one strategy; returns one row."""
    gc.collect()
    torch.cuda.empty_cache()
    row: dict[str, Any] = {"strategy": name, "context": ids.shape[1]}
    base = 2 * sum(p.numel() * p.element_size() for p in model.parameters()) / GIB
    try:
        with strategy(name, model) as tide:
            torch.cuda.reset_peak_memory_stats()
            _step(model, ids)
            row["first_step_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            _step(model, ids)
            torch.cuda.empty_cache()
            # Planned; checked in the first, and timed in some to correct the prediction.
            for _ in range(NUM_WARM_UP if name.startswith(BUDGET_PREFIX) else 1):
                _step(model, ids)
            region = None if tide is None else tide.host_region_address
            link = _link_gb_s()
            if tide is not None:
                tide.reset_statistics()
            torch.cuda.reset_peak_memory_stats()
            times = [_step(model, ids) for _ in range(num_steps)]
            peak_gib = torch.cuda.max_memory_allocated() / GIB
            row["link_gb_s_all"] = [link, _link_gb_s()]
            row |= {
                "step_ms_all": [round(t[0], 1) for t in times],
                "forward_ms_all": [round(t[1], 1) for t in times],
                "forward_host_ms_all": [round(t[2], 1) for t in times],
                "peak_gib": peak_gib,
                "peak_above_weights_gib": peak_gib - base,
                "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            }
            if tide is not None:
                counts = tide.statistics()
                row |= {
                    "moved_out_gib": counts.moved_out_bytes / GIB / num_steps,
                    "moved_in_gib": counts.moved_in_bytes / GIB / num_steps,
                    "host_gib": counts.host.peak_held_bytes / GIB,
                    "host_taken_gib": tide.host_taken_bytes / GIB,
                    "is_host_region_unchanged": region == tide.host_region_address,
                    "fetches_avoided": counts.num_resurrections // num_steps,
                    "recomputed_ops": counts.num_recomputed_ops // num_steps,
                    "not_understood": counts.num_kept_not_understood,
                }
                if tide.plan is not None:
                    plan = tide.plan
                    row |= {
                        "predicted_ms": plan.predicted_step_ns / 1e6,
                        "bound_ms": plan.bound_step_ns / 1e6,
                        "predicted_peak_gib": plan.peak_bytes / GIB,
                    }
            if reference is not None:
                row["grad_equal"] = _compare(model, ids, reference)
            row["status"] = "ok"
    except torch.cuda.OutOfMemoryError:
        row["status"] = "OOM"
    model.zero_grad(set_to_none=True)
    return row


def merge(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Put the rounds of one context together: medians of all steps, means of all predictions."""
    merged: list[dict[str, Any]] = []
    for rows in zip(*rounds, strict=True):
        row = dict(rows[0])
        row["link_gb_s_all"] = [speed for r in rows for speed in r.get("link_gb_s_all", ())]
        for key in ("step_ms", "forward_ms", "forward_host_ms"):
            times = [t for r in rows for t in r.get(f"{key}_all", ())]
            if times:
                row[f"{key}_all"], row[key] = times, statistics.median(times)
        for key in ("predicted_ms", "bound_ms"):
            found = [r[key] for r in rows if key in r]
            if found:
                row[key] = statistics.fmean(found)
        merged.append(row)
    return merged


def _link_gb_s() -> float:
    """Return how fast the device copies out now, in GB/s: others may use the link as well."""
    target = _host_buffer()
    source = torch.empty(target.shape, dtype=torch.uint8, device="cuda")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    marks[0].record()
    for _ in range(4):
        target.copy_(source, non_blocking=True)
    marks[1].record()
    marks[1].synchronize()
    return round(4 * target.numel() / 1e6 / marks[0].elapsed_time(marks[1]), 1)


@functools.cache
def _host_buffer() -> torch.Tensor:
    return torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=True)


def _step(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[float, float, float]:
    """Return the milliseconds of a step, of its forward, and of the host until that is issued."""
    model.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    start = time.perf_counter()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    loss = model(input_ids=ids, labels=ids).loss
    marks[1].record()
    issued = time.perf_counter()
    loss.backward()
    torch.cuda.synchronize()
    end = time.perf_counter()
    return (end - start) * 1e3, marks[0].elapsed_time(marks[1]), (issued - start) * 1e3


def gradients(model: LlamaForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of one step under deterministic kernels, on the host."""
    _deterministic_step(model, ids)
    return [p.grad.cpu().pin_memory() for p in model.parameters() if p.grad is not None]


def _deterministic_step(model: LlamaForCausalLM, ids: torch.Tensor) -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward is not deterministic
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)


def _compare(model: LlamaForCausalLM, ids: torch.Tensor, reference: Any) -> bool:
    _deterministic_step(model, ids)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return all(torch.equal(a, b.to(a.device)) for a, b in zip(found, reference, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="8192,32768,65536")
    parser.add_argument(
        "--strategies",
        default="keep,checkpoint,checkpoint-offload,recompute,offload-inputs,offload,balanced",
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="turns of all strategies")
    parser.add_argument("--scale", type=int, default=1, help="divide the widths, for a dry run")
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    model = make_model(options.layers, "cuda", options.scale)
    rows: list[dict[str, Any]] = []
    for context in map(int, options.contexts.split(",")):
        torch.manual_seed(1)
        ids = torch.randint(0, 32000 // options.scale, (1, context), device="cuda")
        reference = gradients(model, ids)
        rounds: list[list[dict[str, Any]]] = []
        for number in range(options.rounds):
            # Strategies take turns, so that a slow phase of the machine meets all of them.
            expected = None if number else reference
            names = options.strategies.split(",")
            rounds.append([measure(n, model, ids, options.steps, expected) for n in names])
        rows += merge(rounds)
    print(table(rows))
    if options.out:
        facts = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "python": sys.version.split()[0],
            "layers": options.layers,
            "command": _command(),
        }
        with open(options.out, "w") as file:
            json.dump({"facts": facts, "rows": rows, "table": table(rows)}, file, indent=1)


def _command() -> str:
    """Return the command as it is given in the repository's root."""
    words = [a.rpartition("/")[2] if a.endswith(".json") else a for a in sys.argv[1:]]
    return " ".join(["PYTHONPATH=src python3 benchmarks/llama_shape.py", *words])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, with ratios to keep within the same context."""
    lines = [
        f"{'context':>8} {'strategy':20} {'step ms':>8} {'x keep':>7} {'fwd ms':>7} {'peak':>7} "
        f"{'resv':>7} {'first':>7} {'out':>6} {'in':>6} {'host':>6} {'grads':>6}"
    ]

    def number(row: dict[str, Any], key: str) -> str:
        return f"{row[key]:.2f}" if key in row else "-"

    for row in rows:
        if row["status"] != "ok":
            lines.append(f"{row['context']:>8} {row['strategy']:20} {row['status']}")
            continue
        keep = [r for r in rows if r["strategy"] == "keep" and r["context"] == row["context"]]
        ratio = row["step_ms"] / keep[0]["step_ms"] if keep and "step_ms" in keep[0] else 0.0
        lines.append(
            f"{row['context']:>8} {row['strategy']:20} {row['step_ms']:8.1f} {ratio:7.3f} "
            f"{row['forward_ms']:7.1f} {number(row, 'peak_above_weights_gib'):>7} "
            f"{number(row, 'reserved_gib'):>7} {number(row, 'first_step_peak_gib'):>7} "
            f"{number(row, 'moved_out_gib'):>6} {number(row, 'moved_in_gib'):>6} "
            f"{number(row, 'host_gib'):>6} {row.get('grad_equal')!s:>6}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
