"""What ebbtide costs on the host, where a model is too small to hide it.

    PYTHONPATH=src python3 benchmarks/overhead.py --out benchmarks/results/overhead.json

GPT-2 124M shape, random weights, batch 1, bf16, eager. With few tokens the device waits for the
host, so a step takes what it takes to issue. Strategies take turns; a step is forward and backward.

Without a GPU, `--device cpu --tiny` measures the CPU time of steps of a narrow model, with copies
in memory (`host_work.py` says what that leaves out):

    PYTHONPATH=src OMP_NUM_THREADS=1 python3 benchmarks/overhead.py --device cpu --tiny \\
        --out benchmarks/results/overhead-cpu.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from host_work import (
    MOMENTS,
    TINY_CONTEXT,
    TINY_VOCABULARY,
    TINY_WIDTH,
    Turns,
    attached_in_memory,
)

from ebbtide.torch import attach

STRATEGIES = "keep,checkpoint,recompute,offload-inputs,balanced,budget"
TINY_STRATEGIES = f"keep,checkpoint,recompute,offload-inputs,balanced,{MOMENTS}"
NUM_TINY_WARM_UP = 6
"""Until every block follows a script: one step observes, one is checked, two are recorded."""
NUM_TINY_ROUNDS = 60
NUM_WARM_UP = 14
"""A budget's plan is corrected twice by then."""
NUM_STEPS = 10
NUM_ROUNDS = 2


def make_model(context: int, device: str, **options: int) -> Any:
    make_config: Any = transformers.GPT2Config
    config = make_config(n_positions=context, use_cache=False, **options)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    torch.manual_seed(0)
    model: Any = transformers.GPT2LMHeadModel(config)
    return model.to(device, torch.bfloat16)


@contextlib.contextmanager
def strategy(name: str, model: Any, budget_bytes: int) -> Generator[None]:
    """Put `model` under the strategy, and take it off again."""
    if name == "keep":
        yield
    elif name == "checkpoint":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()
    elif name == "budget":
        with attach(model, budget=budget_bytes):
            yield
    else:
        with attach(model, name):
            yield


def measure(name: str, model: Any, ids: torch.Tensor, budget_bytes: int) -> dict[str, Any]:
    """Run steps under one strategy; returns milliseconds of each, and the peak."""
    is_cuda = ids.device.type == "cuda"
    with strategy(name, model, budget_bytes):
        for _ in range(NUM_WARM_UP):
            step(model, ids)
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        times = [step(model, ids) for _ in range(NUM_STEPS)]
        peak_bytes = torch.cuda.max_memory_allocated() if is_cuda else 0
    model.zero_grad(set_to_none=True)
    return {
        "strategy": name,
        "step_ms_all": [round(whole, 2) for _, whole in times],
        "forward_host_ms_all": [round(forward, 2) for forward, _ in times],
        "peak_bytes": peak_bytes,
    }


def step(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Return the milliseconds of the host in the forward, and of the step."""
    model.zero_grad(set_to_none=False)
    wait(ids.device)
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    issued = time.perf_counter()
    loss.backward()
    wait(ids.device)
    return (issued - start) * 1e3, (time.perf_counter() - start) * 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def make_tiny_model() -> Any:
    sizes = {"n_embd": TINY_WIDTH, "vocab_size": TINY_VOCABULARY}
    return make_model(TINY_CONTEXT, "cpu", **sizes, bos_token_id=0, eos_token_id=0).float()


def measure_tiny(names: list[str], num_rounds: int = NUM_TINY_ROUNDS) -> dict[str, dict[str, Any]]:
    """Return a row for each strategy: CPU time of its steps, and its ratio to checkpointing."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    ids = torch.randint(0, TINY_VOCABULARY, (1, TINY_CONTEXT))
    with contextlib.ExitStack() as stack:
        forwards: dict[str, Any] = {}
        for name in names:
            model = make_tiny_model()
            is_plain = name in ("keep", "checkpoint")
            stack.enter_context(
                strategy(name, model, 0) if is_plain else attached_in_memory(model, name)
            )
            forwards[name] = partial(_loss_of, model, ids)
        Turns(forwards=forwards).run(NUM_TINY_WARM_UP)
        turns = Turns(forwards=forwards)
        turns.run(num_rounds)
    ratios = turns.ratios("checkpoint" if "checkpoint" in names else names[0])
    return {
        name: {
            "strategy": name,
            "ratio": round(ratios[name], 3),
            "step_ms_all": [round(ns / 1e6, 2) for ns in turns.step_ns[name]],
            "forward_host_ms_all": [round(ns / 1e6, 2) for ns in turns.forward_ns[name]],
            "peak_bytes": 0,
        }
        for name in names
    }


def _loss_of(model: Any, ids: torch.Tensor) -> Any:
    return model(input_ids=ids, labels=ids).loss


def measure_all(names: list[str], context: int, device: str) -> dict[str, dict[str, Any]]:
    """Return a row for each strategy: times of its steps, and their peak."""
    model = make_model(context, device)
    torch.manual_seed(1)
    ids = torch.randint(0, 50257, (1, context), device=device)
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(NUM_ROUNDS):
        for name in names:
            known = rows.get("checkpoint")
            # As much as checkpointing takes, and a little for the allocator.
            budget_bytes = 0 if known is None else int(1.02 * known["peak_bytes"])
            row = measure(name, model, ids, budget_bytes)
            if name in rows:
                for key in ("step_ms_all", "forward_host_ms_all"):
                    rows[name][key] += row[key]
            else:
                rows[name] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--strategies")
    parser.add_argument("--tiny", action="store_true", help="CPU time of a narrow model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.tiny and options.device != "cpu":
        parser.error("--tiny measures the host alone: give --device cpu with it")
    given = options.strategies or (TINY_STRATEGIES if options.tiny else STRATEGIES)
    names: list[str] = [*given.split(",")]
    rows = (
        measure_tiny(names) if options.tiny else measure_all(names, options.context, options.device)
    )
    for row in rows.values():
        for key in ("step_ms", "forward_host_ms"):
            row[key] = statistics.median(row[f"{key}_all"])
    reference = rows.get("checkpoint", rows[names[0]])["step_ms"]
    print(f"{'strategy':16}{'step ms':>9}{'x ckpt':>8}{'host fwd':>10}{'peak MiB':>10}")
    for name, row in rows.items():
        ratio = row.get("ratio", row["step_ms"] / reference)
        peak_mib = row["peak_bytes"] / 2**20
        print(
            f"{name:16}{row['step_ms']:9.2f}{ratio:8.3f}{row['forward_host_ms']:10.2f}"
            f"{peak_mib:10.1f}"
        )
    facts = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
        "command": "PYTHONPATH=src python3 benchmarks/overhead.py " + " ".join(sys.argv[1:]),
    }
    options.out.write_text(json.dumps({"facts": facts, "rows": list(rows.values())}, indent=1))


if __name__ == "__main__":
    main()
