"""How long planning takes for blocks of full size, and verifying beside a step, on a CPU.

    PYTHONPATH=src python3 benchmarks/jax_planning.py --out benchmarks/results/jax-planning-cpu.json

Planning is observing and solving, from shapes and given rates: nothing is compiled, so that it
takes the same on a host with a GPU. Verifying compiles five programs; what jax spends in tracing,
lowering and compiling is taken off by its own events, and what is left is set beside one step,
forward and backward, of the stack that was planned.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from ebbtide.compare.jax.layers import AttentionKind
from ebbtide.compare.jax.model import LanguageModel, shapes_of_one
from ebbtide.compare.jax.shapes import choose_shape
from ebbtide.jax import Rates, plan_for
from ebbtide.jax.clock import time_ns

H200 = Rates(flops_per_s=6e14, memory_bytes_per_s=4.1e12)
NUM_RUNS = 3
PLANNED = (
    ("llama-8b-shape", 8, 16384),
    ("llama-8b-shape", 32, 16384),
    ("deepseek-moe-shape", 8, 8192),
)
VERIFIED = (("llama-tiny-shape", 8, 512), ("llama-tiny-shape", 32, 512))

COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


def make_model(name: str, layers: int, dtype: Any) -> LanguageModel:
    """Return one of compare's models."""
    return LanguageModel(choose_shape(name, layers), attention=AttentionKind.REFERENCE, dtype=dtype)


def time_planning(name: str, layers: int, tokens: int) -> dict[str, Any]:
    """Plan each stack of a model for three quarters of what it keeps, from shapes."""
    model = make_model(name, layers, jnp.bfloat16)
    described = model.describe_params()
    x = jax.ShapeDtypeStruct((1, tokens, model.shape.d_model), jnp.bfloat16)
    spent_s: dict[str, float] = {}
    for stack in model.stacks:
        one = shapes_of_one(described[stack.name])
        arguments: dict[str, Any] = {"machine": "h200-pcie5", "rates": H200}

        def plan(budget: int, stack: Any = stack, one: Any = one, given: Any = arguments) -> Any:
            return plan_for(stack.block, one, x, layers=stack.layers, budget=budget, **given)

        budget = plan(2**42).plan.peak_bytes * 3 // 4
        runs = [time_s(lambda budget=budget, plan=plan: plan(budget)) for _ in range(NUM_RUNS)]
        spent_s[stack.name] = median(runs)
    return {"model": name, "layers": layers, "tokens": tokens, "seconds": spent_s}


def time_verifying(name: str, layers: int, tokens: int) -> dict[str, Any]:
    """Verify a plan that moves something, and time a step of the stack."""
    model = make_model(name, layers, jnp.float32)
    params = model.draw_params(0)
    (stack,) = model.stacks
    x = jax.random.normal(jax.random.key(1), (1, tokens, model.shape.d_model), jnp.float32)
    one = jax.tree.map(lambda leaf: leaf[0], params[stack.name])
    given: dict[str, Any] = {
        "machine": "h200-pcie5",
        "rates": H200,
        "decide": {"decoder_layer_input": "HOST"},
    }
    largest = plan_for(stack.block, one, x, layers=layers, budget="1TiB", **given)
    budget = largest.plan.peak_bytes * 3 // 4
    tide = plan_for(stack.block, one, x, layers=layers, budget=budget, **given)
    body = tide.checkpoint(stack.block)

    def find_loss(params: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda h, p: (body(p, h), None), x, params)[0] ** 2)

    step_s = time_ns(jax.jit(jax.grad(find_loss)), (params[stack.name], x)) / 1e9
    spent: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event in COMPILING:
            spent.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    found: list[Any] = []
    total_s = time_s(lambda: found.append(tide.verify(stack.block, one, x)))
    jax.monitoring.clear_event_listeners()
    found[0].refuse_if_different()
    # Tracing within tracing is counted twice, so that this is no more than it was.
    run_s = max(0.0, total_s - sum(spent))
    return {
        "model": name,
        "layers": layers,
        "tokens": tokens,
        "step_s": step_s,
        "verify_s": total_s,
        "compile_s": sum(spent),
        "other_s": run_s,
        "steps": run_s / step_s,
    }


def time_s(run: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {
        "command": "PYTHONPATH=src python3 benchmarks/jax_planning.py",
        "day": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, CPU of a shared machine",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "planning": [time_planning(*case) for case in PLANNED],
        "verifying": [time_verifying(*case) for case in VERIFIED],
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
