"""Dimensions of the models in JAX: counted parameters and arithmetic against the model itself."""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Jaxpr

from ebbtide.compare.jax.layers import AttentionKind
from ebbtide.compare.jax.model import LanguageModel, count_params
from ebbtide.compare.jax.shapes import (
    DEEPSEEK_MOE,
    DEEPSEEK_TINY,
    LLAMA_8B,
    LLAMA_TINY,
    DeepseekShape,
    LlamaShape,
    Shape,
    choose_shape,
    count_model_flops,
    count_parameters,
    read_llama_shape,
)

# B batch, T tokens
B, T = 2, 16

# No padding of values and no padding of experts: each product that runs is the model's own.
EVEN = replace(DEEPSEEK_TINY, d_value=24, capacity_factor=1.0)


def make_model(shape: Shape) -> LanguageModel:
    return LanguageModel(shape, attention=AttentionKind.REFERENCE, dtype=jnp.float32)


def count_products(jaxpr: Any) -> int:
    """2 x M x N x K of every product, with a scan's as often as it runs."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * prod(eqn.outvars[0].aval.shape)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in eqn.params.values():
            body = getattr(inner, "jaxpr", inner)
            if isinstance(body, Jaxpr):
                total += times * count_products(body)
    return total


@pytest.mark.parametrize("shape", [LLAMA_TINY, replace(LLAMA_TINY, is_tied=False), DEEPSEEK_TINY])
def test_parameters_are_counted_as_the_model_makes_them(shape: Shape) -> None:
    assert count_parameters(shape) == count_params(make_model(shape).describe_params())


def test_the_large_shapes_have_the_parameters_that_they_are_named_for() -> None:
    of_layer = count_parameters(replace(LLAMA_8B, num_layers=2)) - count_parameters(
        replace(LLAMA_8B, num_layers=1)
    )
    assert of_layer == 218_112_000  # a layer of Llama-3-8B
    assert 3e9 < count_parameters(DEEPSEEK_MOE) < 3.5e9


@pytest.mark.parametrize(
    ("shape", "heads_width", "not_the_models"),
    [
        (LLAMA_TINY, 4 * (16 + 16), 0),
        # The weighted sum of a token's experts is no product of weights.
        (EVEN, 4 * (24 + 24), 3 * 2 * B * T * 2 * 64),
    ],
)
def test_the_arithmetic_is_that_of_the_products_with_attention_halved(
    shape: LlamaShape | DeepseekShape, heads_width: int, not_the_models: int
) -> None:
    model = make_model(shape)
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
    traced = jax.make_jaxpr(lambda p, i: model.write_logits(model.plain_blocks, p, i))(
        model.describe_params(), ids
    )
    scores = shape.num_layers * 2 * B * T * T * heads_width
    forward = count_products(traced.jaxpr) - scores // 2 - not_the_models
    assert count_model_flops(shape, batch=B, context=T) == 3 * forward


def test_layers_can_be_chosen() -> None:
    assert choose_shape("llama-tiny-shape", 7).num_layers == 7
    deepseek = choose_shape("deepseek-tiny-shape", 4)
    assert isinstance(deepseek, DeepseekShape)
    assert (deepseek.num_dense_layers, deepseek.num_moe_layers) == (3, 1)
    assert choose_shape("llama-8b-shape", None) == LLAMA_8B


def test_a_deepseek_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--layers 3: the first 3 layers .* give 4 or more"):
        choose_shape("deepseek-moe-shape", 3)


def test_an_unknown_model_lists_the_nearest() -> None:
    with pytest.raises(ValueError, match="llama-8b-shap") as caught:
        choose_shape("llama-8b-shap", None)
    assert "llama-8b-shape" in str(caught.value)


def test_room_of_an_expert_is_its_share_and_a_quarter() -> None:
    assert DEEPSEEK_TINY.capacity(64) == 20  # 64 x 2 / 8 x 1.25
    assert DEEPSEEK_TINY.capacity(1) == 1


CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "tie_word_embeddings": True,
}


def write_config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def test_a_llamas_folder_has_its_dimensions(tmp_path: Path) -> None:
    shape = read_llama_shape(write_config(tmp_path))
    assert (shape.head_dim, shape.num_kv_heads, shape.rope_theta) == (16, 2, 5e5)
    assert shape.is_tied
    older = read_llama_shape(write_config(tmp_path, rope_parameters=None, rope_theta=1e4))
    assert older.rope_theta == 1e4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_type is 'llama3'"),
    ],
)
def test_a_model_with_other_parts_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read_llama_shape(write_config(tmp_path, **changes))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_llama_shape(tmp_path)
