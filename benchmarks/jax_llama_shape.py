"""Step time and memory of a scanned, Llama-3-8B-shaped stack in JAX; a process for each row.

    PYTHONPATH=src python3 benchmarks/jax_llama_shape.py --tokens 16384 --out results.json

Random weights, batch 1, bf16, jax's cuDNN attention, gradients with respect to the weights only.
A step is forward and backward. Rows: no remat, full remat, a policy by hand, and ebbtide's plans
for the step at shares of what full remat takes. Rows that offload run without command buffers,
since copies were seen to overlap only so; the others run with them. On a CPU the stack is small,
attention is plain jax.numpy, and no figure means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

GIB = 2**30
NUM_WARM_UP, NUM_STEPS = 3, 10

OVERLAP = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_pipelined_host_offloading=true",
    "--xla_gpu_experimental_parallel_async_compute_limit=8",
    "--xla_gpu_enable_command_buffer=",
)
PLAIN = ("--xla_gpu_enable_latency_hiding_scheduler=true",)

BY_HAND = ("input", "attn.custom_vjp.0.out", "attn.custom_vjp.0.residual.0")
"""What was measured by hand before: the layer input and the whole residual of attention."""

PLAN_PREFIX = "plan:"
"""A row of this name gives the planner that share of what full remat takes."""

ROWS = ("no-remat", "full-remat", "by-hand", "plan:1.0", "plan:1.2", "plan:2.0")


def make_block(is_gpu: bool) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    def norm(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype) * scale

    def block(params: Any, x: Any) -> Any:
        with jax.named_scope("attn"):
            h = norm(x, params["attention_norm"])
            q = jnp.einsum("btd,dnh->btnh", h, params["q"])
            k = jnp.einsum("btd,dkh->btkh", h, params["k"])
            v = jnp.einsum("btd,dkh->btkh", h, params["v"])
            kind = "cudnn" if is_gpu else "xla"
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kind)
            x = x + jnp.einsum("btnh,nhd->btd", mixed, params["o"])
        with jax.named_scope("mlp"):
            h = norm(x, params["mlp_norm"])
            gate, up = h @ params["gate"], h @ params["up"]
            return x + (jax.nn.silu(gate) * up) @ params["down"]

    return block


def make_arguments(tokens: int, layers: int, scale: int) -> tuple[Any, Any]:
    import jax
    import jax.numpy as jnp

    d, f, n, k, h = 4096 // scale, 14336 // scale, 32 // scale, max(8 // scale, 1), 128
    shapes = {
        **{"q": (d, n, h), "k": (d, k, h), "v": (d, k, h), "o": (n, h, d)},
        **{"gate": (d, f), "up": (d, f), "down": (f, d)},
    }
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    params = {
        name: 0.02 * jax.random.normal(key, (layers, *shape), jnp.bfloat16)
        for key, (name, shape) in zip(keys[1:], shapes.items(), strict=True)
    }
    params |= {name: jnp.ones((layers, d), jnp.bfloat16) for name in ("attention_norm", "mlp_norm")}
    return params, jax.random.normal(keys[0], (1, tokens, d), jnp.bfloat16)


def step(block: Callable[..., Any], params: Any, x: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def loss(params: Any) -> Any:
        y, _ = jax.lax.scan(lambda h, p: (block(p, h), None), x, params)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return jax.grad(loss)(params)


def run_row(row: str, tokens: int, layers: int, scale: int) -> dict[str, Any]:
    import jax

    from ebbtide.jax import NamedPolicy, StepMemory, plan_step, with_names

    is_gpu = jax.default_backend() == "gpu"
    block = make_block(is_gpu)
    params, x = make_arguments(tokens, layers, scale)
    facts: dict[str, Any] = {}
    if row == "no-remat":
        body = block
    elif row == "full-remat":
        body = jax.checkpoint(block, prevent_cse=False)
    elif row == "by-hand":
        names = BY_HAND if is_gpu else BY_HAND[:1]
        policy = NamedPolicy(saved=(), offloaded=names)
        body = jax.checkpoint(with_names(block, names), policy=policy.to_jax(), prevent_cse=False)
    else:
        full = jax.jit(lambda *a: step(jax.checkpoint(block, prevent_cse=False), *a))
        full_bytes = StepMemory.of(full.lower(params, x).compile()).device_bytes
        share = float(row.removeprefix(PLAN_PREFIX))
        start = time.perf_counter()
        plan = plan_step(
            step,
            (params, x),
            block=block,
            layers=layers,
            budget=int(share * full_bytes),
            machine=None if is_gpu else "h200-pcie5",
        )
        body = plan.tide.checkpoint(block)
        named = plan.tide.named_policy()
        facts = {
            "plan_s": time.perf_counter() - start,
            "predicted_stack_ms": plan.tide.plan.predicted_step_ns / 1e6,
            "bound_stack_ms": plan.tide.plan.bound_step_ns / 1e6,
            "predicted_peak_gib": plan.tide.plan.peak_bytes / GIB,
            "predicted_host_gib": plan.tide.plan.host_bytes / GIB,
            "budget_gib": plan.budget_bytes / GIB,
            "saved": named.saved,
            "offloaded": named.offloaded,
        }
    start = time.perf_counter()
    compiled = jax.jit(lambda *a: step(body, *a)).lower(params, x).compile()
    compile_s = time.perf_counter() - start
    memory = StepMemory.of(compiled)
    spent_ms: list[float] = []
    for _ in range(NUM_WARM_UP + NUM_STEPS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, x))
        spent_ms.append((time.perf_counter() - start) * 1e3)
    counted = spent_ms[NUM_WARM_UP:]
    return {
        "row": row,
        "step_ms": statistics.median(counted),
        "step_ms_range": [min(counted), max(counted)],
        "temp_gib": memory.temp_bytes / GIB,
        "device_gib": memory.device_bytes / GIB,
        "host_gib": memory.host_bytes / GIB,
        "compile_s": compile_s,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        **facts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--scale", type=int, default=1, help="divides the width; for a trial")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--out", default="")
    parser.add_argument("--row", default="", help="run this one here, and print its JSON")
    given = parser.parse_args()
    if given.row:
        print(json.dumps(run_row(given.row, given.tokens, given.layers, given.scale)))
        return
    results: list[dict[str, Any]] = []
    for row in given.rows.split(","):
        is_moving = row == "by-hand" or row.startswith(PLAN_PREFIX)
        own = OVERLAP if is_moving else PLAIN
        flags = f"{os.environ.get('XLA_FLAGS', '')} {' '.join(own)}"
        size = ["--tokens", str(given.tokens), "--layers", str(given.layers)]
        finished = subprocess.run(
            [sys.executable, __file__, "--row", row, *size, "--scale", str(given.scale)],
            env={**os.environ, "XLA_FLAGS": flags.strip()},
            capture_output=True,
            text=True,
            check=False,
        )
        if finished.returncode:
            note = finished.stderr.strip().splitlines()[-1:]
            results.append({"row": row, "status": "failed", "note": note, "flags": own})
        else:
            measured = json.loads(finished.stdout.splitlines()[-1])
            results.append({"status": "ok", "flags": own, **measured})
        print(json.dumps(results[-1]), flush=True)
        if given.out:
            with open(given.out, "w", encoding="utf-8") as file:
                json.dump({"command": sys.argv, "rows": results}, file, indent=2)


if __name__ == "__main__":
    main()
