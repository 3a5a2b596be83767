"""A stack with the fault that `verify` is for, built on purpose: does the check see it?

Layers of a residual network pass on nearly the same values, so that the gradients of a scan that
reads one layer's saved input for another's may be near the right ones. Whether such a fault
stands out from rounding depends on the weights, the input and the backend, so it is tried.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is a floating or complex array, so that it has a gradient."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def inexact_leaves(tree: Tree) -> list[jax.Array]:
    """Return the leaves that have gradients, in their order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


def exact_leaves(tree: Tree) -> list[jax.Array]:
    """Return the other leaves, in their order."""
    return [leaf for leaf in jax.tree.leaves(tree) if not is_inexact(leaf)]


def join_leaves(
    are_inexact: Sequence[bool], inexact: Iterable[jax.Array], exact: Iterable[jax.Array]
) -> list[jax.Array]:
    """Undo the division into leaves with gradients and others."""
    first, second = iter(inexact), iter(exact)
    return [next(first) if flag else next(second) for flag in are_inexact]


def late_stack(
    block: Callable[[Tree, Tree], tuple[Tree, Tree]],
) -> Callable[[Tree, Tree], list[Any]]:
    """Return a scan over `block` whose backward reads each layer's input one layer late.

    Args:
        block: `(carry, layer's parameters) -> (carry, output)`.

    Returns:
        `(stacked parameters, x) -> floating leaves of the last carry and of all outputs`, whose
        values are right and whose gradients are wrong: each layer but the last is differentiated
        at the input of the next one.
    """

    def stack(params: Tree, x: Tree) -> list[Any]:
        params_leaves, params_tree = jax.tree.flatten(params)
        x_leaves, x_tree = jax.tree.flatten(x)
        params_flags = [is_inexact(leaf) for leaf in params_leaves]
        x_flags = [is_inexact(leaf) for leaf in x_leaves]
        params_exact, x_exact = exact_leaves(params), exact_leaves(x)

        def run_layer(
            layer_inexact: list[Any], layer_exact: list[Any], carry: Tree
        ) -> tuple[Tree, Tree]:
            leaves = join_leaves(params_flags, layer_inexact, layer_exact)
            return block(carry, jax.tree.unflatten(params_tree, leaves))

        def forward(
            params_inexact: list[Any], x_inexact: list[Any]
        ) -> tuple[tuple[list[Any], list[Any]], tuple[list[Any], Tree]]:
            def body(carry: Tree, layer: tuple[list[Any], list[Any]]) -> tuple[Tree, Tree]:
                following, output = run_layer(*layer, carry)
                return following, (carry, inexact_leaves(output))

            first = jax.tree.unflatten(x_tree, join_leaves(x_flags, x_inexact, x_exact))
            last, (carries, outputs) = jax.lax.scan(body, first, (params_inexact, params_exact))
            return (inexact_leaves(last), outputs), (params_inexact, carries)

        def backward(
            residuals: tuple[list[Any], Tree], cotangents: tuple[list[Any], list[Any]]
        ) -> tuple[list[Any], list[Any]]:
            params_inexact, carries = residuals
            last, outputs = cotangents
            late = jax.tree.map(_one_late, carries)

            def body(cotangent: list[Any], layer: Tree) -> tuple[list[Any], list[Any]]:
                layer_inexact, layer_exact, carry, to_output = layer

                def run(layer_inexact: list[Any], carry_inexact: list[Any]) -> Tree:
                    leaves = join_leaves(x_flags, carry_inexact, exact_leaves(carry))
                    made = run_layer(layer_inexact, layer_exact, jax.tree.unflatten(x_tree, leaves))
                    return inexact_leaves(made[0]), inexact_leaves(made[1])

                pull = jax.vjp(run, layer_inexact, inexact_leaves(carry))[1]
                to_layer, to_carry = pull((cotangent, to_output))
                return to_carry, to_layer

            layers = (params_inexact, params_exact, late, outputs)
            to_x, to_params = jax.lax.scan(body, last, layers, reverse=True)
            return to_params, to_x

        run_stack = jax.custom_vjp(
            lambda params_inexact, x_inexact: forward(params_inexact, x_inexact)[0]
        )
        run_stack.defvjp(forward, backward)
        last, outputs = run_stack(inexact_leaves(params), inexact_leaves(x))
        return [*last, *outputs]

    return stack


def _one_late(carries: jax.Array) -> jax.Array:
    layers = carries.shape[0]
    return carries[jnp.minimum(jnp.arange(layers) + 1, layers - 1)]
