"""A program for a process with four CPU devices: a sharded stack with and without a policy.

Prints JSON: paths of gradients that differ, residuals of one block, and what was observed.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

from ebbtide.jax import NamedPolicy, check_policy, observe, with_names
from tests.jax import blocks
from tests.jax.blocks import Array

MESH = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
P = jax.sharding.PartitionSpec


def block(params: dict[str, Array], x: Array) -> Array:
    """A feed-forward layer whose width is split over four devices."""

    def inside(gate: Array, down: Array, x: Array) -> Array:
        with jax.named_scope("mlp"):
            return jax.lax.psum(jnp.tanh(x @ gate) @ down, "model")

    specs = (P(None, "model"), P("model", None), P())
    mapped = jax.shard_map(inside, mesh=MESH, in_specs=specs, out_specs=P())
    return x + mapped(params["gate"], params["down"], x)


def main() -> None:
    """Run the comparison."""
    params, x = blocks.make_params(jnp.float32, blocks.MLP), blocks.make_input(jnp.float32)
    one = blocks.shapes_of_one(params)
    # XLA for CPUs rounds tanh by where it is fused, so the test makes none again.
    policy = NamedPolicy(saved=(), offloaded=("input", "mlp.tanh.0"))
    residuals = check_policy(policy, block, one, x)
    rematted: Any = jax.checkpoint(
        with_names(block, policy.names), policy=policy.to_jax(), prevent_cse=False
    )
    plain = blocks.gradients(blocks.scan_stack(block), params, x)
    moved = blocks.gradients(blocks.scan_stack(rematted), params, x)
    values = {value.name: value for value in observe(block, one, x).values}
    answer = {
        "devices": len(jax.devices()),
        "differing": blocks.differing(moved, plain),
        "residuals": sorted([r.name, r.is_on_host] for r in residuals if r.name),
        "bytes": values["mlp.dot_general.0"].num_bytes,
        "collectives": sorted(v.name for v in values.values() if v.kind.value == "opaque"),
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
