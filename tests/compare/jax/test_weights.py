"""A saved Llama's tensors land where the model reads them."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from ebbtide.compare.jax.shapes import LlamaShape, choose_shape
from ebbtide.compare.jax.weights import WEIGHTS_FILE, load_llama

# Transposed products, by their name in transformers and here.
PLACES = {
    "self_attn.q_proj": ("query",),
    "self_attn.o_proj": ("out",),
    "mlp.gate_proj": ("mlp", "gate"),
    "mlp.down_proj": ("mlp", "down"),
}


def tiny() -> LlamaShape:
    shape = choose_shape("llama-tiny-shape", 2)
    assert isinstance(shape, LlamaShape), [f.name for f in fields(shape)]
    return shape


def tensors_of(shape: LlamaShape) -> dict[str, Any]:
    """Numbers that are all different, so that nothing can be at another's place unseen."""
    d, wide = shape.d_model, shape.num_heads * shape.head_dim
    narrow = shape.num_kv_heads * shape.head_dim
    of_layer = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (wide, d),
        "self_attn.k_proj": (narrow, d),
        "self_attn.v_proj": (narrow, d),
        "self_attn.o_proj": (d, wide),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (shape.d_ff, d),
        "mlp.up_proj": (shape.d_ff, d),
        "mlp.down_proj": (d, shape.d_ff),
    }
    lengths = {
        "model.embed_tokens.weight": (shape.vocab_size, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (shape.vocab_size, d),
        **{
            f"model.layers.{i}.{name}.weight": size
            for i in range(shape.num_layers)
            for name, size in of_layer.items()
        },
    }
    first = 0
    tensors: dict[str, Any] = {}
    for name, size in lengths.items():
        count = int(np.prod(size))
        tensors[name] = np.arange(first, first + count, dtype=np.float32).reshape(size)
        first += count
    return tensors


def test_products_are_transposed_and_stacked_by_layer(tmp_path: Path) -> None:
    shape = tiny()
    tensors = tensors_of(shape)
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    params = load_llama(tmp_path, shape, jnp.float32)
    for name, place in PLACES.items():
        found: Any = params["layers"]
        for key in place:
            found = found[key]
        for i in range(shape.num_layers):
            saved = tensors[f"model.layers.{i}.{name}.weight"]
            kernel = np.asarray(found["kernel"][i]).reshape(saved.T.shape)
            assert np.array_equal(kernel, saved.T), (name, i)
    ends = params["ends"]
    assert np.array_equal(ends["embed"]["embedding"], tensors["model.embed_tokens.weight"])
    assert np.array_equal(ends["norm"]["scale"], tensors["model.norm.weight"])
    assert ("head" in ends) is not shape.is_tied


def test_a_missing_file_and_a_missing_weight_are_named(tmp_path: Path) -> None:
    shape = tiny()
    with pytest.raises(ValueError, match=r"there is no model\.safetensors in it; save the model"):
        load_llama(tmp_path, shape, jnp.float32)
    tensors = tensors_of(shape)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=r"has no model\.layers\.1\.mlp\.up_proj\.weight; give"):
        load_llama(tmp_path, shape, jnp.float32)
