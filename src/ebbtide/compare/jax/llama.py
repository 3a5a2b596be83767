"""One layer of a Llama-like decoder: grouped-query attention, then SwiGLU."""

# B batch, T tokens, D model width, N query heads, K key heads, H head width

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ebbtide.compare.jax.layers import (
    Attend,
    GatedMlp,
    linear_options,
    make_norm,
    name_layer_input,
    rotate,
)
from ebbtide.compare.jax.shapes import LlamaShape


class LlamaBlock(nnx.Module):
    """One layer; `x [B, T, D]` to the next layer's."""

    def __init__(self, shape: LlamaShape, attend: Attend, dtype: Any, rngs: nnx.Rngs) -> None:
        self._theta = shape.rope_theta
        self._attend = attend
        options = linear_options(dtype)
        d, h = shape.d_model, shape.head_dim
        queries, keys = (shape.num_heads, h), (shape.num_kv_heads, h)
        self.attention_norm = make_norm(d, shape.norm_epsilon, dtype, rngs)
        self.query = nnx.LinearGeneral(d, queries, rngs=rngs, **options)
        self.key = nnx.LinearGeneral(d, keys, rngs=rngs, **options)
        self.value = nnx.LinearGeneral(d, keys, rngs=rngs, **options)
        self.out = nnx.LinearGeneral(queries, d, axis=(-2, -1), rngs=rngs, **options)
        self.mlp_norm = make_norm(d, shape.norm_epsilon, dtype, rngs)
        self.mlp = GatedMlp(d, shape.d_ff, options, rngs)

    def __call__(self, x_BTD: Any) -> Any:
        x_BTD = name_layer_input(x_BTD)
        with jax.named_scope("attn"):
            h_BTD = self.attention_norm(x_BTD)
            q_BTNH = checkpoint_name(rotate(self.query(h_BTD), self._theta), "query_proj")
            k_BTKH = checkpoint_name(rotate(self.key(h_BTD), self._theta), "key_proj")
            v_BTKH = checkpoint_name(self.value(h_BTD), "value_proj")
            mixed_BTNH = self._attend(q_BTNH, k_BTKH, v_BTKH)
            x_BTD = x_BTD + checkpoint_name(self.out(mixed_BTNH), "out_proj")
        with jax.named_scope("mlp"):
            return x_BTD + self.mlp(self.mlp_norm(x_BTD))
