"""Latent attention and experts against the same mathematics written out for one token at a time."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ebbtide.compare.jax.deepseek import Experts, LatentAttention
from ebbtide.compare.jax.layers import AttentionKind, make_attend, rotate
from ebbtide.compare.jax.shapes import DEEPSEEK_TINY, DeepseekShape

# B batch, T tokens, D model width, M = B * T

B, T, D = 2, 6, DEEPSEEK_TINY.d_model
ROOMY = replace(DEEPSEEK_TINY, capacity_factor=8.0)
TOLERANCE = 2e-5


def make_hidden(seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((B, T, D)), jnp.float32)


def weight(layer: Any) -> Any:
    return np.asarray(layer.kernel[...])


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def run_expert(experts: Experts, number: int, h_D: Any) -> Any:
    gate, up, down = (weight(part)[number] for part in (experts.gate, experts.up, experts.down))
    return (silu(h_D @ gate) * (h_D @ up)) @ down


def run_experts(experts: Experts, shape: DeepseekShape, h_MD: Any, *, room: int) -> Any:
    """Each token by itself: its experts that have room left, in the order of tokens."""
    taken = [0] * shape.num_experts
    rows: list[Any] = []
    shared = experts.shared
    for h_D in h_MD:
        made_D = (silu(h_D @ weight(shared.gate)) * (h_D @ weight(shared.up))) @ weight(shared.down)
        scores_E = 1 / (1 + np.exp(-(h_D @ weight(experts.router))))
        best = np.argsort(-scores_E, kind="stable")[: shape.num_experts_per_token]
        for number in best:
            taken[number] += 1
            if taken[number] <= room:
                share = shape.routed_scale * scores_E[number] / scores_E[best].sum()
                made_D = made_D + share * run_expert(experts, number, h_D)
        rows.append(made_D)
    return np.stack(rows)


def test_each_token_has_the_weighted_sum_of_its_experts() -> None:
    experts = Experts(ROOMY, jnp.float32, nnx.Rngs(1))
    h_BTD = make_hidden()
    expected = run_experts(experts, ROOMY, np.asarray(h_BTD).reshape(-1, D), room=B * T)
    found = jax.jit(experts)(h_BTD).reshape(-1, D)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_tokens_that_find_no_room_are_passed_by() -> None:
    tight = replace(ROOMY, capacity_factor=0.5)
    room = tight.capacity(B * T)
    experts = Experts(tight, jnp.float32, nnx.Rngs(1))
    h_BTD = make_hidden()
    h_MD = np.asarray(h_BTD).reshape(-1, D)
    expected = run_experts(experts, tight, h_MD, room=room)
    found = jax.jit(experts)(h_BTD).reshape(-1, D)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    everything = run_experts(experts, tight, h_MD, room=B * T)
    assert np.abs(everything - expected).max() > 0.01


def test_latent_attention_is_attention_of_the_keys_and_values_it_makes() -> None:
    shape = DEEPSEEK_TINY
    attend = make_attend(AttentionKind.REFERENCE)
    attention = LatentAttention(shape, attend, jnp.float32, nnx.Rngs(2))
    h_BTD = make_hidden(1)

    def norm(x: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + shape.norm_epsilon)

    h = np.asarray(h_BTD)
    q = np.einsum(
        "btr,rnh->btnh", norm(h @ weight(attention.query_down)), weight(attention.query_up)
    )
    latent = h @ weight(attention.kv_down)
    kv = np.einsum("btr,rnh->btnh", norm(latent[..., : shape.kv_rank]), weight(attention.kv_up))
    turned_q = np.asarray(rotate(jnp.asarray(q[..., shape.d_nope :]), shape.rope_theta))
    # One key with positions for all heads.
    turned_k = np.asarray(
        rotate(jnp.asarray(latent[:, :, None, shape.kv_rank :]), shape.rope_theta)
    )
    scores = np.einsum("btnh,bsnh->bnts", q[..., : shape.d_nope], kv[..., : shape.d_nope])
    scores = scores + np.einsum("btnh,bsxh->bnts", turned_q, turned_k)
    scores = scores / np.sqrt(shape.d_nope + shape.d_rope)
    scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    mixed = np.einsum("bnts,bsnh->btnh", weights, kv[..., shape.d_nope :])
    expected = np.einsum("btnh,nhd->btd", mixed, weight(attention.out))
    np.testing.assert_allclose(jax.jit(attention)(h_BTD), expected, atol=TOLERANCE)


def test_positions_turn_by_the_distance_alone() -> None:
    q = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (8,)), (1, T, 1, 8))
    k = jnp.broadcast_to(jax.random.normal(jax.random.key(1), (8,)), (1, T, 1, 8))
    products = np.asarray(jnp.einsum("btnh,bsnh->ts", rotate(q, 100.0), rotate(k, 100.0)))
    for distance in range(1, T):
        diagonal = np.diagonal(products, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)
    assert len(set(np.round(products[:, 0], 4))) == T
