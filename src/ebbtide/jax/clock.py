"""How long a block takes: compile its forward and its backward, and time them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ebbtide.jax.observe import Observation, Pace, Rates

NUM_RUNS = 3
"""Timed runs, after one that is not; the fastest counts: what disturbs a run only adds to it."""

COPY_BYTES = {"cpu": 16 * 2**20}
"""Array for the memory's rate: larger than the caches, and quick."""
DEVICE_COPY_BYTES = 256 * 2**20
"""The same for devices other than a CPU: launching a program takes as long as a small array."""


def measure(
    observation: Observation, block: Callable[..., Any], params: Any, x: Any, *rest: Any
) -> Pace:
    """Compile and run one block, forward and backward, with nothing recomputed.

    Takes the memory of one block with all it keeps. Shapes are filled with numbers; arrays are
    used as they are.

    Args:
        observation: Of the block.
        block: `block(params, x, *rest)`.
        params: Its parameters, or shapes and dtypes.
        x: Its input.
        rest: Its other arguments.

    Returns:
        Times of the whole, and rates to share them out by.
    """
    arguments = [_filled(argument) for argument in (params, x, *rest)]
    forward_ns = time_ns(jax.jit(block), arguments)
    output, pull_back = jax.block_until_ready(
        jax.jit(lambda *given: jax.vjp(block, *given))(*arguments)
    )
    backward_ns = time_ns(jax.jit(lambda kept, given: kept(given)), (pull_back, output))
    dtype = next(
        leaf.dtype
        for leaf in jax.tree.leaves(arguments[1])
        if jax.dtypes.issubdtype(leaf.dtype, jnp.inexact)
    )
    largest = max((value.cost.flops for value in observation.values), default=0)
    return Pace(
        rates=measure_rates(largest, dtype),
        forward_ns=max(forward_ns, 1),
        backward_ns=max(backward_ns, 1),
    )


def measure_rates(flops: int, dtype: Any) -> Rates:
    """Time a square matrix product of about so many operations, and a sum of two arrays."""
    side = max(64, round((max(flops, 2) / 2) ** (1 / 3)))
    factor = jnp.ones((side, side), dtype)
    product_ns = time_ns(jax.jit(jnp.matmul), (factor, factor))
    num_bytes = COPY_BYTES.get(jax.default_backend(), DEVICE_COPY_BYTES)
    values = jnp.ones(num_bytes // factor.dtype.itemsize, dtype)
    sum_ns = time_ns(jax.jit(jnp.add), (values, values))
    return Rates(
        flops_per_s=2 * side**3 / (product_ns * 1e-9),
        memory_bytes_per_s=3 * num_bytes / (sum_ns * 1e-9),
    )


def time_ns(program: Callable[..., Any], arguments: Sequence[Any]) -> int:
    """Return the time of the fastest of some runs, the first left out."""
    jax.block_until_ready(program(*arguments))
    spent: list[int] = []
    for _ in range(NUM_RUNS):
        start = time.perf_counter_ns()
        jax.block_until_ready(program(*arguments))
        spent.append(time.perf_counter_ns() - start)
    return max(min(spent), 1)


def _filled(argument: Any) -> Any:
    """Replace shapes by arrays."""
    random = np.random.default_rng(0)

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape) if leaf.shape else _one_key()
        if jax.dtypes.issubdtype(leaf.dtype, jnp.inexact):
            # Small, so that nothing overflows; not equal, so that nothing is skipped.
            return jnp.asarray(0.02 * random.standard_normal(leaf.shape, np.float32), leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(fill, argument)


def _one_key() -> Any:
    return jax.random.key(0)
