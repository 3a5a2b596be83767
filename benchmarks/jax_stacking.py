"""What a scan's stack costs compute, for each GiB that is kept in it and that is moved to the host.

    XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true \
    --xla_gpu_enable_pipelined_host_offloading=true --xla_gpu_enable_command_buffer=" \
    python benchmarks/jax_stacking.py --out stacking.json

Each layer of a forward scan runs square matrix products, each layer of a backward scan as many, and
then reads a value of the same size: one and the same for all layers, or the layer's own, which the
forward scan stacked in device memory or in pinned host memory. What the second and the third take
more than the first is the price of `ebbtide.jax.stacking`. `--products` must be so many that
copies are hidden: "hidden" says whether one layer computes for longer than its copies both ways.
On a CPU nothing moves, and the prices say nothing of a GPU.
"""

import argparse
import json
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ebbtide.errors import PlanError
from ebbtide.jax.clock import measure_rates, time_ns
from ebbtide.jax.probe import probe_machine

# L layers, R rows, D width

WAYS = ("none", "kept", "moved")


def make_program(way: str, layers: int, products: int) -> Callable[[Any, Any], Any]:
    """Return `program(x_RD, weight_DD)`: two scans, with a stack between them as `way` says."""

    def multiply(x_RD: Any, weight_DD: Any) -> Any:
        for _ in range(products):
            x_RD = x_RD @ weight_DD
        return x_RD

    def program(x_RD: Any, weight_DD: Any) -> Any:
        def forward(x_RD: Any, _: None) -> tuple[Any, Any]:
            made_RD = multiply(x_RD, weight_DD)
            if way == "moved":
                return made_RD, jax.device_put(made_RD, jax.memory.Space.Host)
            return made_RD, made_RD if way == "kept" else None

        def backward(grad_RD: Any, kept_RD: Any) -> tuple[Any, None]:
            if way == "moved":
                kept_RD = jax.device_put(kept_RD, jax.memory.Space.Device)
            return multiply(grad_RD, weight_DD) * (x_RD if way == "none" else kept_RD), None

        last_RD, stack_LRD = jax.lax.scan(forward, x_RD, None, length=layers)
        return jax.lax.scan(backward, last_RD, stack_LRD, length=layers, reverse=True)[0]

    return program


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time the three programs."""
    x_RD = jnp.full((options.rows, options.width), 0.5, options.dtype)
    weight_DD = jnp.eye(options.width, dtype=options.dtype)
    spent_ns = {
        way: time_ns(
            jax.jit(make_program(way, options.layers, options.products)), (x_RD, weight_DD)
        )
        for way in WAYS
    }
    gib = options.layers * x_RD.nbytes / 2**30
    rates = measure_rates(2 * options.rows * options.width**2, x_RD.dtype)
    prices = {
        f"{way}_ms_per_gib": (spent_ns[way] - spent_ns["none"]) / 1e6 / gib for way in WAYS[1:]
    }
    pass_ms = 2**30 / rates.memory_bytes_per_s * 1e3
    try:
        link = probe_machine()
    except PlanError:  # a CPU has none
        hidden = None
    else:
        copies_ns = x_RD.nbytes * (1e9 / link.out_bytes_per_s + 1e9 / link.in_bytes_per_s)
        hidden = spent_ns["none"] / options.layers > copies_ns
    return {
        "ms": {way: ns / 1e6 for way, ns in spent_ns.items()},
        "gib": gib,
        "hidden": hidden,
        "memory_bytes_per_s": rates.memory_bytes_per_s,
        **prices,
        **{f"{way}_passes": prices[f"{way}_ms_per_gib"] / pass_ms for way in WAYS[1:]},
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--products", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "day": datetime.now(UTC).strftime("%Y-%m-%d"),
        "options": {k: v for k, v in vars(options).items() if k != "out"},
        **measure(options),
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
