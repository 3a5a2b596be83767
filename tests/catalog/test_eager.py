"""What Hugging Face's modules keep, op by op, is what `eager` says: byte for byte."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from ebbtide.block import Block
from ebbtide.catalog.calls import make_block
from ebbtide.catalog.form import Form, Implementation
from ebbtide.catalog.layers import make_layer
from ebbtide.catalog.models import MODELS
from ebbtide.catalog.shapes import Shape
from tests.corpus.shapes import RATES

TOKENS = 64

# In two dtypes: with fp32 the norms' casts copy nothing.
WIDTHS = {torch.bfloat16: 2, torch.float32: 4}


def small(name: str, *, heads: int) -> Shape:
    """The model with the widths of a toy."""
    shape = MODELS[name]
    return replace(
        shape,
        num_layers=2,
        hidden=64,
        heads=heads,
        # On a CPU torch makes a copy of keys and values for each query head, on a GPU it does not.
        kv_heads=heads,
        head_width=64 // heads,
        ffn=4 * 64 if name == "gpt2" else 160,
        vocab=128,
    )


def make_model(shape: Shape) -> Any:
    common: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    if shape.name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=shape.num_layers,
                n_embd=shape.hidden,
                n_head=shape.heads,
                # With them torch takes other paths on a CPU: no fused attention, wider masks.
                attn_pdrop=0.0,
                resid_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
                **common,
            )
        )
    classes: dict[str, tuple[Any, Any]] = {
        "llama-3-8b": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3-14b": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral-7b": (transformers.MistralConfig, transformers.MistralForCausalLM),
    }
    config, model = classes[shape.name]
    return model(
        config(
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_width,
            **common,
        )
    )


def bytes_saved(model: Any, tokens: int) -> int:
    """Return what autograd saves between the first layer's end and the second one's."""
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    given = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    keep: list[torch.Tensor] = []
    is_on = False

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if is_on and storage.data_ptr() not in given and tensor.numel():
            storages[storage.data_ptr()] = storage.nbytes()
            keep.append(tensor)
        return tensor

    def start(*_: Any) -> None:
        nonlocal is_on
        is_on = True

    def ignore_tables(_: Any, args: Any, kwargs: Any) -> None:
        tables = kwargs.get("position_embeddings") or ()
        given.update(table.untyped_storage().data_ptr() for table in tables)

    def stop(*_: Any) -> None:
        nonlocal is_on
        is_on = False

    layers[1].register_forward_pre_hook(ignore_tables, with_kwargs=True)
    layers[1].register_forward_pre_hook(start)
    layers[1].register_forward_hook(stop)
    ids = torch.zeros((1, tokens), dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()
        model(input_ids=ids)
    return sum(storages.values())


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "qwen3-14b"])
def test_eager_modules_keep_what_the_catalog_says(name: str, dtype: torch.dtype) -> None:
    shape = small(name, heads=4)
    saved = make_eager(shape, WIDTHS[dtype]).num_bytes_saved
    assert bytes_saved(make_model(shape).to(dtype), TOKENS) == saved


def test_eager_gpt2_keeps_what_the_catalog_says() -> None:
    shape = small("gpt2", heads=4)
    block = make_eager(shape, 4)
    masks = sum(a.num_bytes for a in block.activations if a.name.endswith(":mask"))
    assert masks == 2 * TOKENS * shape.hidden
    assert bytes_saved(make_model(shape), TOKENS) == block.num_bytes_saved - masks


def make_eager(shape: Shape, width_bytes: int) -> Block:
    form = Form(
        tokens=TOKENS,
        context=TOKENS,
        implementation=Implementation.EAGER,
        width_bytes=width_bytes,
    )
    return make_block("layers.1", "Layer", make_layer(shape, 1, form).calls, RATES)
