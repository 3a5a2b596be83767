"""A program for one of two processes with two CPU devices each: one plan, and its gradients.

    python -m tests.jax.processes NUMBER PORT

Prints JSON: the plan that this process has, and what of the gradients differs.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ebbtide.jax import Rates, plan_for
from tests.jax import blocks
from tests.jax.blocks import Array

P = jax.sharding.PartitionSpec


def block(mesh: Any) -> Any:
    """Return a feed-forward layer whose width is split over the devices of both processes."""

    def inside(gate: Array, down: Array, x: Array) -> Array:
        with jax.named_scope("mlp"):
            return jax.lax.psum(jnp.tanh(x @ gate) @ down, "model")

    specs = (P(None, "model"), P("model", None), P())
    mapped = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=P())
    return lambda params, x: x + mapped(params["gate"], params["down"], x)


def main(number: int, port: int) -> None:
    """Run one process."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    host = blocks.make_params(jnp.float32, blocks.MLP)
    specs = {"gate": P(None, None, "model"), "down": P(None, "model", None)}

    def spread(leaf: Array, spec: Any) -> Array:
        values = np.asarray(leaf)
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])

    params = {name: spread(leaf, specs[name]) for name, leaf in host.items()}
    x = spread(blocks.make_input(jnp.float32), P())
    layers = blocks.shapes_of_one(host)
    # What each process would measure by itself: they differ.
    rates = Rates(flops_per_s=(1e9, 1e12)[number], memory_bytes_per_s=(1e12, 1e9)[number])
    options: dict[str, Any] = {"machine": "h200-pcie5", "rates": rates, "min_bytes": 0}
    mapped = block(mesh)
    largest = plan_for(mapped, layers, x, layers=blocks.LAYERS, budget="1GiB", **options)
    tide = plan_for(
        mapped, layers, x, layers=blocks.LAYERS, budget=largest.plan.peak_bytes * 2 // 3, **options
    )
    body = tide.checkpoint(mapped)
    gradients = {
        name: blocks.gradients(blocks.scan_stack(one), params, x)
        for name, one in (("plain", mapped), ("planned", body))
    }
    pairs = zip(*(jax.tree.leaves(g) for g in gradients.values()), strict=True)
    largest_difference = max(
        float(np.abs(np.asarray(a.data) - np.asarray(b.data)).max() / np.abs(a.data).max())
        for plain, planned in pairs
        for a, b in zip(plain.addressable_shards, planned.addressable_shards, strict=True)
    )
    policy = tide.named_policy()
    answer = {
        "processes": jax.process_count(),
        "devices": len(jax.devices()),
        "plan": tide.to_json(),
        "names": [policy.saved, policy.offloaded],
        "largest_difference": largest_difference,
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
