"""The dimensions of the models that are trained in JAX, and the arithmetic of one step.

Imports no jax: the command checks names and sizes before anything is loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

from ebbtide.naming import unknown_name_message

SMOLLM2 = "smollm2-135m"
TORCH_SMOLLM2 = "smollm2"
"""The same model under the name that it has in a run with torch."""
LLAMA_8B_SHAPE = "llama-8b-shape"
DEEPSEEK_MOE_SHAPE = "deepseek-moe-shape"
LLAMA_TINY_SHAPE = "llama-tiny-shape"
DEEPSEEK_TINY_SHAPE = "deepseek-tiny-shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """A decoder of equal layers: grouped-query attention, then SwiGLU."""

    vocab_size: int
    """Token ids."""
    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Width between the two products of the MLP."""
    num_layers: int
    """Blocks."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    rope_theta: float
    """Base of the rotary positions."""
    norm_epsilon: float
    """Added to the mean square in each norm."""
    max_positions: int
    """Most tokens in a sequence."""
    is_tied: bool = False
    """The head has the embedding's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekShape:
    """A decoder with multi-head latent attention: dense layers first, then layers with experts."""

    vocab_size: int
    """Token ids."""
    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Width between the two products of a dense layer's MLP."""
    d_expert: int
    """The same of one expert, routed or shared."""
    num_dense_layers: int
    """Layers with one MLP, which come first."""
    num_moe_layers: int
    """Layers with experts."""
    num_heads: int
    """Heads of queries, keys and values alike."""
    q_rank: int
    """Width of the latent queries."""
    kv_rank: int
    """Width of the latent keys and values."""
    d_nope: int
    """Part of a query's and a key's head without positions."""
    d_rope: int
    """Part with rotary positions; all heads share the key's."""
    d_value: int
    """Width of a value's head."""
    num_experts: int
    """Routed experts in a layer."""
    num_experts_per_token: int
    """Of them, those that a token goes to."""
    num_shared_experts: int
    """Experts that each token goes to."""
    capacity_factor: float
    """Room of an expert over its even share of the tokens; what does not fit is passed by."""
    routed_scale: float
    """What the routed experts' sum is multiplied by."""
    rope_theta: float
    """Base of the rotary positions."""
    norm_epsilon: float
    """Added to the mean square in each norm."""
    max_positions: int
    """Most tokens in a sequence."""

    @property
    def num_layers(self) -> int:
        """Layers of both kinds."""
        return self.num_dense_layers + self.num_moe_layers

    def capacity(self, num_tokens: int) -> int:
        """Return how many tokens one expert takes of `num_tokens`."""
        even = num_tokens * self.num_experts_per_token / self.num_experts
        return max(1, min(num_tokens, round(even * self.capacity_factor)))


Shape = LlamaShape | DeepseekShape

# Llama-3-8B's dimensions; the vocabulary is that of the same shape in torch.
LLAMA_8B = LlamaShape(
    vocab_size=32_000,
    d_model=4096,
    d_ff=14_336,
    num_layers=8,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500_000.0,
    norm_epsilon=1e-5,
    max_positions=131_072,
)

# DeepSeek-V3's kind of layers and its heads, narrowed until weights, gradients and AdamW's state
# of 8 layers take about 26 GiB in bfloat16.
DEEPSEEK_MOE = DeepseekShape(
    vocab_size=32_000,
    d_model=2048,
    d_ff=10_944,
    d_expert=1408,
    num_dense_layers=3,
    num_moe_layers=5,
    num_heads=16,
    q_rank=768,
    kv_rank=512,
    d_nope=128,
    d_rope=64,
    d_value=128,
    num_experts=64,
    num_experts_per_token=8,
    num_shared_experts=1,
    capacity_factor=1.25,
    routed_scale=2.5,
    rope_theta=10_000.0,
    norm_epsilon=1e-6,
    max_positions=131_072,
)

LLAMA_TINY = LlamaShape(
    vocab_size=256,
    d_model=64,
    d_ff=160,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=10_000.0,
    norm_epsilon=1e-5,
    max_positions=4096,
    is_tied=True,
)

DEEPSEEK_TINY = replace(
    DEEPSEEK_MOE,
    vocab_size=256,
    d_model=64,
    d_ff=160,
    d_expert=32,
    num_moe_layers=3,
    num_heads=4,
    q_rank=24,
    kv_rank=16,
    d_nope=16,
    d_rope=8,
    d_value=16,
    num_experts=8,
    num_experts_per_token=2,
    max_positions=4096,
)

SHAPES: dict[str, Shape] = {
    LLAMA_8B_SHAPE: LLAMA_8B,
    DEEPSEEK_MOE_SHAPE: DEEPSEEK_MOE,
    LLAMA_TINY_SHAPE: LLAMA_TINY,
    DEEPSEEK_TINY_SHAPE: DEEPSEEK_TINY,
}
"""Random weights, with a number of layers to choose."""

TITLES = {
    LLAMA_8B_SHAPE: "Llama-3-8B dimensions",
    DEEPSEEK_MOE_SHAPE: "DeepSeek-V3's kind of layers, narrowed for one GPU",
    LLAMA_TINY_SHAPE: "a tiny Llama, for trials",
    DEEPSEEK_TINY_SHAPE: "a tiny model of DeepSeek-V3's kind of layers, for trials",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxModelSource:
    """Everything needed to build the same model again in another process."""

    name: str
    """One of `SHAPES`; empty for weights of a folder."""
    layers: int | None
    """Layers of a shape; `None` for its default."""
    folder: str
    """Folder with `config.json` and `model.safetensors`; empty for random weights."""
    title: str
    """What a reader should call it."""


def find_shape(source: JaxModelSource) -> Shape:
    """Return the model's dimensions.

    Raises:
        ValueError: The folder has no Llama, or `layers` leaves no layer with experts.
    """
    if source.folder:
        return read_llama_shape(Path(source.folder))
    return choose_shape(source.name, source.layers)


def choose_shape(name: str, layers: int | None) -> Shape:
    """Return one of `SHAPES` with a number of layers.

    Raises:
        ValueError: There is no such shape, or `layers` leaves no layer with experts.
    """
    if name not in SHAPES:
        valid = (SMOLLM2, *SHAPES)
        raise ValueError(f"{unknown_name_message('model', name, valid)} (or a folder)")
    shape = SHAPES[name]
    if layers is None:
        return shape
    match shape:
        case LlamaShape():
            return replace(shape, num_layers=layers)
        case DeepseekShape():
            if layers <= shape.num_dense_layers:
                raise ValueError(
                    f"--layers {layers}: the first {shape.num_dense_layers} layers of {name} are "
                    f"dense; give {shape.num_dense_layers + 1} or more"
                )
            return replace(shape, num_moe_layers=layers - shape.num_dense_layers)
        case _:
            assert_never(shape)


def read_llama_shape(folder: Path) -> LlamaShape:
    """Read the dimensions of a Llama that transformers saved.

    Raises:
        ValueError: The folder has no `config.json`, or it is of a model with parts that are not
            built here.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"--model {folder}: there is no config.json in it; give a Llama's folder")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {
        "model_type": (config.get("model_type"), "llama"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "rope_type": (rope.get("rope_type", "default"), "default"),
    }
    for key, (value, wanted) in found.items():
        if value != wanted:
            raise ValueError(
                f"--model {folder}: its {key} is {value!r}; --framework jax builds models with "
                f"{key} {wanted!r} only"
            )
    heads = config["num_attention_heads"]
    return LlamaShape(
        vocab_size=config["vocab_size"],
        d_model=config["hidden_size"],
        d_ff=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        norm_epsilon=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )


def count_parameters(shape: Shape) -> int:
    """Return the number of weights, tied ones once; nothing is made, and jax is not asked."""
    d = shape.d_model
    ends = shape.vocab_size * d + d
    match shape:
        case LlamaShape():
            width = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
            layers = shape.num_layers * (d * width + 3 * d * shape.d_ff + 2 * d)
            return ends + layers + (0 if shape.is_tied else shape.vocab_size * d)
        case DeepseekShape():
            attention = _count_latent_products(shape) + shape.q_rank + shape.kv_rank
            expert = 3 * d * shape.d_expert
            dense = 3 * d * shape.d_ff
            moe = d * shape.num_experts + expert * (shape.num_experts + shape.num_shared_experts)
            layers = shape.num_layers * (attention + 2 * d)
            layers += shape.num_dense_layers * dense + shape.num_moe_layers * moe
            return ends + layers + shape.vocab_size * d
        case _:
            assert_never(shape)


def _count_latent_products(shape: DeepseekShape) -> int:
    """Return the weights of latent attention's products."""
    heads = shape.num_heads
    return (
        shape.d_model * (shape.q_rank + shape.kv_rank + shape.d_rope)
        + shape.q_rank * heads * (shape.d_nope + shape.d_rope)
        + shape.kv_rank * heads * (shape.d_nope + shape.d_value)
        + heads * shape.d_value * shape.d_model
    )


def count_model_flops(shape: Shape, *, batch: int, context: int) -> int:
    """Return the arithmetic of one training step, 2 x M x N x K for each product of the model.

    Backward is twice the forward pass. What is recomputed is not counted, nor are the embedding,
    norms, routing's sort, padding, and the half of attention that a causal mask hides. A token
    counts for all experts that it is sent to, also where they had no room for it.
    """
    tokens = batch * context
    forward = 2 * tokens * shape.d_model * shape.vocab_size
    match shape:
        case LlamaShape():
            width = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
            weights = shape.d_model * width + 3 * shape.d_model * shape.d_ff
            scores = 2 * context * shape.num_heads * shape.head_dim  # both products, halved
            forward += shape.num_layers * tokens * (2 * weights + scores)
        case DeepseekShape():
            attention = _count_latent_products(shape)
            widths = shape.d_nope + shape.d_rope + shape.d_value
            scores = context * shape.num_heads * widths
            num_active = shape.num_experts_per_token + shape.num_shared_experts
            experts = (
                3 * shape.d_model * shape.d_expert * num_active + shape.d_model * shape.num_experts
            )
            dense = 3 * shape.d_model * shape.d_ff
            forward += shape.num_layers * tokens * (2 * attention + scores)
            forward += shape.num_dense_layers * tokens * 2 * dense
            forward += shape.num_moe_layers * tokens * 2 * experts
        case _:
            assert_never(shape)
    return 3 * forward
