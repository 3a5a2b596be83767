"""The two kinds of layer of a DeepSeek-V3-like decoder.

Attention is multi-head latent attention: queries, and keys with values, come from narrow latent
vectors, and one key with rotary positions serves all heads. The MLP is dense in the first layers;
in the others each token goes to shared experts and to the best of the routed ones.

An expert takes a fixed number of tokens, so that shapes do not depend on routing: tokens are
sorted by expert, gathered, and what does not fit is passed by. Differs from DeepSeek-V3: no bias
that evens the experts' loads out, no groups of experts, and tokens may be passed by.
"""

# B batch, T tokens, D model width, M = B * T, N heads, H head width, E experts, C room of an
# expert, A experts of a token, F width of an expert

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
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
from ebbtide.compare.jax.shapes import DeepseekShape


class LatentAttention(nnx.Module):
    """Multi-head latent attention with MaxText's names."""

    def __init__(self, shape: DeepseekShape, attend: Attend, dtype: Any, rngs: nnx.Rngs) -> None:
        self._shape = shape
        self._attend = attend
        options = linear_options(dtype)
        n = shape.num_heads
        self.query_down = nnx.Linear(shape.d_model, shape.q_rank, rngs=rngs, **options)
        self.query_norm = make_norm(shape.q_rank, shape.norm_epsilon, dtype, rngs)
        query = (n, shape.d_nope + shape.d_rope)
        self.query_up = nnx.LinearGeneral(shape.q_rank, query, rngs=rngs, **options)
        latent = shape.kv_rank + shape.d_rope
        self.kv_down = nnx.Linear(shape.d_model, latent, rngs=rngs, **options)
        self.kv_norm = make_norm(shape.kv_rank, shape.norm_epsilon, dtype, rngs)
        pair = (n, shape.d_nope + shape.d_value)
        self.kv_up = nnx.LinearGeneral(shape.kv_rank, pair, rngs=rngs, **options)
        self.out = nnx.LinearGeneral(
            (n, shape.d_value), shape.d_model, axis=(-2, -1), rngs=rngs, **options
        )

    def __call__(self, h_BTD: Any) -> Any:
        shape = self._shape
        latent_q = checkpoint_name(self.query_down(h_BTD), "query_wa_proj")
        latent_q = checkpoint_name(self.query_norm(latent_q), "mla_q")
        q_nope, q_rope = jnp.split(self.query_up(latent_q), [shape.d_nope], axis=-1)
        q_rope = rotate(q_rope, shape.rope_theta)
        q_BTNH = checkpoint_name(jnp.concatenate([q_nope, q_rope], axis=-1), "query_proj")
        latent = checkpoint_name(self.kv_down(h_BTD), "kv_wa_proj")
        latent_kv, k_rope = jnp.split(latent, [shape.kv_rank], axis=-1)
        latent_kv = checkpoint_name(self.kv_norm(latent_kv), "mla_kv")
        k_nope, v_BTNH = jnp.split(self.kv_up(latent_kv), [shape.d_nope], axis=-1)
        k_rope = rotate(k_rope[:, :, None, :], shape.rope_theta)
        k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:-1], shape.d_rope))
        k_BTNH = checkpoint_name(jnp.concatenate([k_nope, k_rope], axis=-1), "key_proj")
        v_BTNH = checkpoint_name(v_BTNH, "value_proj")
        # Kernels want one width for keys and values: zeros attend to nothing.
        more = k_BTNH.shape[-1] - shape.d_value
        wide_BTNH = jnp.pad(v_BTNH, ((0, 0), (0, 0), (0, 0), (0, more)))
        mixed_BTNH = self._attend(q_BTNH, k_BTNH, wide_BTNH)[..., : shape.d_value]
        return checkpoint_name(self.out(mixed_BTNH), "out_proj")


class Experts(nnx.Module):
    """Shared and routed experts, each a SwiGLU."""

    def __init__(self, shape: DeepseekShape, dtype: Any, rngs: nnx.Rngs) -> None:
        self._shape = shape
        options = linear_options(dtype)
        e, d, f = shape.num_experts, shape.d_model, shape.d_expert
        # Routing is reckoned in float32: in bfloat16 scores are often equal.
        self.router = nnx.Linear(d, e, rngs=rngs, **(options | {"dtype": jnp.float32}))
        one = {key: value for key, value in options.items() if key != "use_bias"}
        self.gate = nnx.Einsum("ecd,edf->ecf", (e, d, f), rngs=rngs, **one)
        self.up = nnx.Einsum("ecd,edf->ecf", (e, d, f), rngs=rngs, **one)
        self.down = nnx.Einsum("ecf,efd->ecd", (e, f, d), rngs=rngs, **one)
        self.shared = GatedMlp(d, f * shape.num_shared_experts, options, rngs)

    def __call__(self, h_BTD: Any) -> Any:
        h_MD = h_BTD.reshape(-1, h_BTD.shape[-1])
        weights_MA, chosen_MA = self.choose_experts(h_MD)
        routed_MD = self._run_routed(h_MD, weights_MA, chosen_MA)
        return self.shared(h_BTD) + routed_MD.reshape(h_BTD.shape)

    def choose_experts(self, h_MD: Any) -> tuple[Any, Any]:
        """Return each token's weights and experts, [M, A]; the weights of a token sum to 1."""
        scores_ME = jax.nn.sigmoid(self.router(h_MD))
        best_MA, chosen_MA = jax.lax.top_k(scores_ME, self._shape.num_experts_per_token)
        return best_MA / best_MA.sum(axis=-1, keepdims=True), chosen_MA

    def _run_routed(self, h_MD: Any, weights_MA: Any, chosen_MA: Any) -> Any:
        e, a = self._shape.num_experts, chosen_MA.shape[1]
        c = self._shape.capacity(h_MD.shape[0])
        flat = chosen_MA.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts_E = jnp.bincount(flat, length=e)
        starts_E = jnp.cumsum(counts_E) - counts_E
        place_EC = starts_E[:, None] + jnp.arange(c)
        is_taken_EC = jnp.arange(c) < counts_E[:, None]
        token_EC = order[jnp.minimum(place_EC, flat.shape[0] - 1)] // a
        given_ECD = jnp.where(is_taken_EC[..., None], h_MD[token_EC], 0)
        gate = checkpoint_name(self.gate(given_ECD), "moe_mlpwi_0")
        up = checkpoint_name(self.up(given_ECD), "moe_mlpwi_1")
        made_ECD = checkpoint_name(self.down(nnx.silu(gate) * up), "moe_mlpwo")
        # Where each of a token's experts has put what it made for it.
        rank = jnp.argsort(order) - starts_E[flat]
        slot_MA = (flat * c + jnp.minimum(rank, c - 1)).reshape(chosen_MA.shape)
        is_seen_MA = (rank < c).reshape(chosen_MA.shape)
        back_MAD = made_ECD.reshape(e * c, -1)[slot_MA]
        weights_MA = jnp.where(is_seen_MA, weights_MA * self._shape.routed_scale, 0)
        return jnp.einsum("mad,ma->md", back_MAD, weights_MA.astype(back_MAD.dtype))


class DenseBlock(nnx.Module):
    """One of the first layers: latent attention, then one MLP."""

    def __init__(self, shape: DeepseekShape, attend: Attend, dtype: Any, rngs: nnx.Rngs) -> None:
        self.attention_norm = make_norm(shape.d_model, shape.norm_epsilon, dtype, rngs)
        self.attention = LatentAttention(shape, attend, dtype, rngs)
        self.mlp_norm = make_norm(shape.d_model, shape.norm_epsilon, dtype, rngs)
        self.mlp = GatedMlp(shape.d_model, shape.d_ff, linear_options(dtype), rngs)

    def __call__(self, x_BTD: Any) -> Any:
        x_BTD = name_layer_input(x_BTD)
        with jax.named_scope("attn"):
            x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        with jax.named_scope("mlp"):
            return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class MoeBlock(nnx.Module):
    """One of the other layers: latent attention, then experts."""

    def __init__(self, shape: DeepseekShape, attend: Attend, dtype: Any, rngs: nnx.Rngs) -> None:
        self.attention_norm = make_norm(shape.d_model, shape.norm_epsilon, dtype, rngs)
        self.attention = LatentAttention(shape, attend, dtype, rngs)
        self.mlp_norm = make_norm(shape.d_model, shape.norm_epsilon, dtype, rngs)
        self.experts = Experts(shape, dtype, rngs)

    def __call__(self, x_BTD: Any) -> Any:
        x_BTD = name_layer_input(x_BTD)
        with jax.named_scope("attn"):
            x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        with jax.named_scope("moe"):
            return x_BTD + self.experts(self.mlp_norm(x_BTD))
