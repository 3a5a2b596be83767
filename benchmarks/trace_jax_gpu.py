"""Record three steps of a planned scan in JAX under jax.profiler, and hold them against counts.

    PYTHONPATH=src:. python3 benchmarks/trace_jax_gpu.py --out FOLDER

Four layers of an MLP, 2048 wide, bf16, 8192 tokens, planned by `ebbtide.jax.plan_for` so that the
input of each layer and the product before its activation function are offloaded. The trace must
show that every step copies these bytes out and back in, in pinned memory, and under these names.
Writes `jax-offload.xplane.pb` into the folder, and ends with 1 where the figures differ. `--tiny`
tries the program itself where there is no GPU, and then finds no device and ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.jax_llama_shape import OVERLAP
from ebbtide.trace import analyse, read_trace
from ebbtide.trace.findings import LARGE_BYTES, find

# D model width, F width of the MLP, L layers, T tokens
NUM_STEPS = 3
NUM_WARM_UP = 3
LAYERS = 4
OFFLOADED = ("input", "mlp.dot_general.0")
BYTES_OF_BF16 = 2


def make_step(width_D: int, num_tokens_T: int) -> tuple[Any, Any, Any]:
    """Return the step, and its parameters and input."""
    import jax
    import jax.numpy as jnp

    from ebbtide.jax import plan_for
    from ebbtide.jax.observe import Rates

    def block(params: Any, x_TD: Any) -> Any:
        with jax.named_scope("mlp"):
            return x_TD + jax.nn.gelu(x_TD @ params["up"]) @ params["down"]

    one = {
        "up": jax.ShapeDtypeStruct((width_D, 4 * width_D), jnp.bfloat16),
        "down": jax.ShapeDtypeStruct((4 * width_D, width_D), jnp.bfloat16),
    }
    tide = plan_for(
        block,
        one,
        jax.ShapeDtypeStruct((num_tokens_T, width_D), jnp.bfloat16),
        layers=LAYERS,
        budget="64GiB",
        decide={"*": "RECOMPUTE"} | dict.fromkeys(OFFLOADED, "HOST"),
        machine="h200-pcie5",
        # Nothing is left to decide, so times do not matter.
        rates=Rates(flops_per_s=7e14, memory_bytes_per_s=4e12),
        min_bytes=1024,
    )
    print(tide.report())
    body = tide.checkpoint(block)

    def loss(params: Any, x_TD: Any) -> Any:
        y_TD, _ = jax.lax.scan(lambda h, p: (body(p, h), None), x_TD, params)
        return jnp.mean(y_TD.astype(jnp.float32) ** 2)

    up, down, start = jax.random.split(jax.random.key(0), 3)
    shape = (LAYERS, width_D, 4 * width_D)
    params = {
        "up": 0.02 * jax.random.normal(up, shape, jnp.bfloat16),
        "down": 0.02 * jax.random.normal(down, (LAYERS, 4 * width_D, width_D), jnp.bfloat16),
    }
    x_TD = jax.random.normal(start, (num_tokens_T, width_D), jnp.bfloat16)
    return jax.jit(jax.grad(loss)), params, x_TD


def record(step: Any, params: Any, x_TD: Any, path: Path) -> None:
    """Write the `xplane.pb` of some steps, without Python's calls."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    # The program says which value a copy moves.
    options.enable_hlo_proto = True
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        for number in range(NUM_STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                jax.block_until_ready(step(params, x_TD))
        jax.profiler.stop_trace()
        (found,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        shutil.copyfile(found, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    width_D, num_tokens_T = (64, 128) if given.tiny else (2048, given.tokens)
    # XLA reads them once, when jax is imported.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {' '.join(OVERLAP)}".strip()
    import jax

    step, params, x_TD = make_step(width_D, num_tokens_T)
    for _ in range(NUM_WARM_UP):
        jax.block_until_ready(step(params, x_TD))
    path = given.out / "jax-offload.xplane.pb"
    record(step, params, x_TD, path)
    trace = read_trace(path)
    num_bytes = path.stat().st_size
    print(f"{path}: {num_bytes} bytes, {trace.num_events} events, notes {trace.notes}")
    if not trace.devices:
        return 1
    seen = analyse(trace.devices[0].timeline)
    # Of each layer, its input and the product of four times its width; XLA takes one pass out of
    # the loop, and moves what is that layer's by kernels, of which a trace has no bytes.
    expected_bytes = NUM_STEPS * (LAYERS - 1) * num_tokens_T * 5 * width_D * BYTES_OF_BF16
    result: dict[str, Any] = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "xla_flags": os.environ["XLA_FLAGS"],
        "steps": [(s.name, (s.end_ns - s.start_ns) / 1e6) for s in seen.steps],
        "compute_busy_ms": seen.compute_busy_ns / 1e6,
        "idle_ms": {reason.value: ns / 1e6 for reason, ns in seen.idle_by_reason_ns.items()},
        "compute_lost_ms": seen.compute_lost_ns / 1e6,
        "findings": [f.evidence for f in find(trace.devices[0], seen)],
        "expected_bytes": expected_bytes,
    }
    is_right = True
    for word, figures in (("out", seen.copy_out), ("in", seen.copy_in)):
        result[f"copy_{word}"] = {
            "num_copies": figures.num_copies,
            "bytes": figures.num_bytes,
            "pinned_bytes": figures.pinned_bytes,
            "gb_per_s": figures.gb_per_s,
            "hidden_ms": figures.hidden_ns / 1e6,
            "exposed_ms": figures.exposed_ns / 1e6,
        }
        # Beside what is offloaded there may be scalars.
        is_right &= 0 <= figures.num_bytes - expected_bytes < LARGE_BYTES
        is_right &= figures.pinned_bytes >= expected_bytes
    named = {m.name for m in seen.moved if m.num_bytes >= LARGE_BYTES}
    is_right &= named == set(OFFLOADED)
    result["moved"] = [(m.lane.value, m.name, m.num_copies, m.num_bytes) for m in seen.moved]
    print(json.dumps(result, indent=2))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
