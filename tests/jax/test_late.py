"""The stack with the fault on purpose: right values, gradients at the next layer's input."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ebbtide.jax.late import exact_leaves, inexact_leaves, is_inexact, join_leaves, late_stack


def block(carry: Any, weight: Any) -> tuple[Any, Any]:
    return carry * weight, carry + weight


def test_leaves_are_divided_and_joined_again() -> None:
    leaves = [jnp.float32(1.5), jnp.int32(2), jnp.ones(2), jnp.zeros(1, bool)]
    flags = [is_inexact(leaf) for leaf in leaves]
    assert flags == [True, False, True, False]
    joined = join_leaves(flags, inexact_leaves(leaves), exact_leaves(leaves))
    assert all(a is b for a, b in zip(joined, leaves, strict=True))


def test_values_are_right() -> None:
    weights = jnp.asarray([2.0, 3.0, 5.0])
    last, outputs = late_stack(block)(weights, jnp.float32(7.0))
    assert float(last) == 7 * 30
    assert np.asarray(outputs).tolist() == [9.0, 17.0, 47.0]


def test_each_layer_but_the_last_is_differentiated_at_the_next_ones_input() -> None:
    weights = jnp.asarray([2.0, 3.0, 5.0])
    # Inputs are 7, 14 and 42. Right: 7 x 15, 14 x 5, 42.
    right = jax.grad(lambda w: jax.lax.scan(block, jnp.float32(7.0), w)[0])(weights)
    assert np.asarray(right).tolist() == [105.0, 70.0, 42.0]
    late = jax.grad(lambda w: late_stack(block)(w, jnp.float32(7.0))[0])(weights)
    assert np.asarray(late).tolist() == [14.0 * 15, 42.0 * 5, 42.0]
