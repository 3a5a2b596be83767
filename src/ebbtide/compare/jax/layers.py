"""The parts that both decoders have: attention with names, rotary positions, the gated MLP.

Layers are flax's. Names are MaxText's, so that its policies read the same here; what attention
keeps, its output and log-sum-exp, is named by `ebbtide.jax.nameable`.
"""

# B batch, T tokens, D model width, N query heads, K key heads, H head width

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ebbtide.integrations.maxtext_names import LAYER_INPUT
from ebbtide.jax import nameable, reference_attention

CONTEXT = "context"
"""Attention's output is `context.out`, its log-sum-exp `context.residual.0`."""

Attend = Callable[[Any, Any, Any], Any]
"""Query [B, T, N, H], key [B, T, K, H] and value [B, T, K, H] to [B, T, N, H]; causal."""


class AttentionKind(StrEnum):
    """Which kernel attends."""

    CUDNN = "cudnn"
    """cuDNN's fused kernel; GPUs only, 16-bit types only."""
    REFERENCE = "reference"
    """Plain jax.numpy; makes the scores in full."""


def make_attend(kind: AttentionKind) -> Attend:
    """Return causal attention with names on what its backward keeps."""
    match kind:
        case AttentionKind.CUDNN:
            return nameable(
                lambda q, k, v: jax.nn.dot_product_attention(
                    q, k, v, is_causal=True, implementation="cudnn"
                ),
                CONTEXT,
            )
        case AttentionKind.REFERENCE:
            return nameable(lambda q, k, v: reference_attention(q, k, v)[0], CONTEXT)
        case _:
            assert_never(kind)


def name_layer_input(x_BTD: Any) -> Any:
    """Name the carry inside of the block: on the block's output the name would do nothing."""
    return checkpoint_name(x_BTD, LAYER_INPUT)


def rotate(x_BTNH: Any, theta: float) -> Any:
    """Turn the two halves of each head by their positions; the angles are made anew each time."""
    num_tokens, width = x_BTNH.shape[1], x_BTNH.shape[-1]
    rates = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = jnp.arange(num_tokens, dtype=jnp.float32)[:, None] * rates
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


class GatedMlp(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`, with MaxText's names of a dense MLP."""

    def __init__(self, d_model: int, d_ff: int, options: dict[str, Any], rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(d_model, d_ff, rngs=rngs, **options)
        self.up = nnx.Linear(d_model, d_ff, rngs=rngs, **options)
        self.down = nnx.Linear(d_ff, d_model, rngs=rngs, **options)

    def __call__(self, h_BTD: Any) -> Any:
        gate = checkpoint_name(self.gate(h_BTD), "mlpwi_0")
        up = checkpoint_name(self.up(h_BTD), "mlpwi_1")
        return checkpoint_name(self.down(nnx.silu(gate) * up), "mlpwo")


def linear_options(dtype: Any) -> dict[str, Any]:
    """Return what all products have in common: no bias, one type."""
    return {"use_bias": False, "dtype": dtype, "param_dtype": dtype}


def make_norm(width: int, epsilon: float, dtype: Any, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Return a norm without a shift, reckoned in float32."""
    return nnx.RMSNorm(width, epsilon=epsilon, dtype=dtype, param_dtype=dtype, rngs=rngs)
