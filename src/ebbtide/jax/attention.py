"""Attention whose residuals have names, so that a policy can keep or move them.

A fused attention kernel keeps its output and the log-sum-exp of its rows for backward. Both are
made inside a `custom_vjp`, where names placed from outside do not reach: if only the output is
named, backward runs the forward kernel again for the other. `nameable` puts names on all of them.

`reference_attention` is the same mathematics in plain jax.numpy, with the same residuals: what is
shown with it on a CPU holds for a kernel in the same place.
"""

# B batch, T query tokens, S key tokens, N query heads, K key heads, G = N / K, H head width

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ebbtide.jax.internals import Array


def nameable(kernel: Callable[..., Any], name: str = "attention") -> Callable[..., Any]:
    """Return the kernel with names on everything that its backward keeps.

    Outputs are `NAME.out` (`NAME.out.0` and so on where there are several), what else is kept is
    `NAME.residual.0` and so on, in the kernel's own order. A value that is kept twice has one
    name, and arguments and empty values get none. The results and gradients are the kernel's,
    bit for bit; forward-mode derivatives are not there.

    Args:
        kernel: Differentiable, with arrays as its arguments; close over everything else:
            `nameable(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))`.
        name: What the names begin with; different for each call in a block.
    """

    def forward(*arguments: Any) -> tuple[Any, Any]:
        output, pull_back = jax.vjp(kernel, *arguments)
        names = _Names(arguments)
        leaves, tree = jax.tree.flatten(output)
        outputs = [
            names.give(leaf, f"{name}.out" if len(leaves) == 1 else f"{name}.out.{i}")
            for i, leaf in enumerate(leaves)
        ]
        kept, kept_tree = jax.tree.flatten(pull_back)
        number = 0
        residuals: list[Any] = []
        for leaf in kept:
            residuals.append(names.give(leaf, f"{name}.residual.{number}"))
            number += names.is_new
        return jax.tree.unflatten(tree, outputs), jax.tree.unflatten(kept_tree, residuals)

    def backward(pull_back: Any, cotangent: Any) -> Any:
        return pull_back(cotangent)

    call = jax.custom_vjp(kernel)
    call.defvjp(forward, backward)
    return call


class _Names:
    """Gives each value one name, however often it is met."""

    def __init__(self, arguments: Any) -> None:
        # The values are held, so no other one gets their id meanwhile.
        self._named: dict[int, tuple[Any, Any]] = {
            id(leaf): (leaf, leaf) for leaf in jax.tree.leaves(arguments)
        }
        self.is_new = False
        """Whether the last value was named just now."""

    def give(self, value: Any, name: str) -> Any:
        known = self._named.get(id(value))
        is_array = hasattr(value, "aval") and value.dtype != jax.dtypes.float0
        # A kernel's empty stand-ins for arguments that it was not given are no residuals.
        self.is_new = known is None and is_array and bool(value.shape) and value.size > 0
        if known is not None:
            return known[1]
        named = checkpoint_name(value, name) if self.is_new else value
        self._named[id(value)] = (value, named)
        return named


def reference_attention(
    query: Array, key: Array, value: Array, *, is_causal: bool = True
) -> tuple[Array, Array]:
    """Attend with softmax, keeping what a fused kernel keeps.

    Args:
        query: [B, T, N, H].
        key: [B, S, K, H]; N is a multiple of K, and each key head serves N / K query heads.
        value: [B, S, K, H].
        is_causal: Whether a token sees none after it.

    Returns:
        The output, [B, T, N, H] in the query's dtype; gradients come through it alone. And the
        log-sum-exp of the scores, [B, N, T] in f32, of which no gradient is taken.

    Raises:
        ValueError: N is no multiple of K.
    """
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"query has {query.shape[2]} heads and key {key.shape[2]}; the first must be a "
            "multiple of the second"
        )
    return _attend(is_causal, query, key, value)


def _scores(is_causal: bool, query: Array, key: Array) -> Array:
    """Return scaled and masked scores [B, K, G, T, S] in f32."""
    b, t, n, h = query.shape
    grouped = query.reshape(b, t, key.shape[2], n // key.shape[2], h)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores = scores * (h**-0.5)
    if not is_causal:
        return scores
    seen = jnp.tril(jnp.ones((t, key.shape[1]), dtype=bool))
    return jnp.where(seen, scores, -jnp.inf)


def _mix(is_causal: bool, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    scores = _scores(is_causal, query, key)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None]).astype(value.dtype)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, value)
    b, k, g, t = lse.shape
    return mixed.reshape(query.shape), lse.reshape(b, k * g, t)


def _attend_forward(is_causal: bool, query: Array, key: Array, value: Array) -> tuple[Any, Any]:
    output, lse = _mix(is_causal, query, key, value)
    return (output, lse), (query, key, value, output, lse)


def _attend_backward(is_causal: bool, residuals: Any, cotangents: Any) -> tuple[Array, ...]:
    query, key, value, output, lse = residuals
    b, t, n, h = query.shape
    k = key.shape[2]
    grouped = (b, t, k, n // k, h)
    scores = _scores(is_causal, query, key)
    weights = jnp.exp(scores - lse.reshape(b, k, n // k, t)[..., None])
    given = cotangents[0].reshape(grouped)
    # The gradient of softmax needs only the sum over each row, which output and cotangent give.
    rows = (given.astype(jnp.float32) * output.reshape(grouped).astype(jnp.float32)).sum(-1)
    of_weights = jnp.einsum("btkgh,bskh->bkgts", given, value, preferred_element_type=jnp.float32)
    of_scores = weights * (of_weights - rows.transpose(0, 2, 3, 1)[..., None]) * (h**-0.5)
    of_scores = of_scores.astype(query.dtype)
    of_query = jnp.einsum("bkgts,bskh->btkgh", of_scores, key).reshape(query.shape)
    of_key = jnp.einsum("bkgts,btkgh->bskh", of_scores, query.reshape(grouped))
    of_value = jnp.einsum("bkgts,btkgh->bskh", weights.astype(value.dtype), given)
    return of_query, of_key.astype(key.dtype), of_value.astype(value.dtype)


_attend = jax.custom_vjp(_mix, nondiff_argnums=(0,))
_attend.defvjp(_attend_forward, _attend_backward)
