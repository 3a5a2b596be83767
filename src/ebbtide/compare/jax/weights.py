"""Load a Llama that transformers saved into the tree of arrays that is trained here."""

# L layers, D model width, N query heads, K key heads, H head width, F MLP width, V token ids

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from ebbtide.compare.jax.model import ENDS, Params
from ebbtide.compare.jax.shapes import LlamaShape

WEIGHTS_FILE = "model.safetensors"


def load_llama(folder: Path, shape: LlamaShape, dtype: Any) -> Params:
    """Read the weights; products are transposed, since flax multiplies from the left.

    Args:
        folder: With `model.safetensors`.
        shape: Its dimensions.
        dtype: What the weights are turned into.

    Raises:
        ValueError: The file is missing, or lacks a weight.
    """
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(
            f"--model {folder}: there is no {WEIGHTS_FILE} in it; save the model in one file with "
            "save_pretrained(folder, max_shard_size='1TB')"
        )
    tensors = load_file(path)
    d, h = shape.d_model, shape.head_dim

    def take(name: str, *lengths: int) -> Any:
        if name not in tensors:
            raise ValueError(f"{path} has no {name}; give the folder of a Llama")
        found = tensors[name].T if tensors[name].ndim == 2 else tensors[name]
        return jnp.asarray(np.ascontiguousarray(found).reshape(lengths), dtype)

    def stack(name: str, *lengths: int) -> Any:
        layers = range(shape.num_layers)
        return jnp.stack([take(f"model.layers.{i}.{name}.weight", *lengths) for i in layers])

    embedding = jnp.asarray(tensors["model.embed_tokens.weight"], dtype)
    ends: dict[str, Any] = {
        "embed": {"embedding": embedding},
        "norm": {"scale": take("model.norm.weight", d)},
    }
    if not shape.is_tied:
        ends["head"] = {"kernel": take("lm_head.weight", d, shape.vocab_size)}
    layers = {
        "attention_norm": {"scale": stack("input_layernorm", d)},
        "query": {"kernel": stack("self_attn.q_proj", d, shape.num_heads, h)},
        "key": {"kernel": stack("self_attn.k_proj", d, shape.num_kv_heads, h)},
        "value": {"kernel": stack("self_attn.v_proj", d, shape.num_kv_heads, h)},
        "out": {"kernel": stack("self_attn.o_proj", shape.num_heads, h, d)},
        "mlp_norm": {"scale": stack("post_attention_layernorm", d)},
        "mlp": {
            "gate": {"kernel": stack("mlp.gate_proj", d, shape.d_ff)},
            "up": {"kernel": stack("mlp.up_proj", d, shape.d_ff)},
            "down": {"kernel": stack("mlp.down_proj", shape.d_ff, d)},
        },
    }
    return {ENDS: ends, "layers": layers}
