"""Which modules of a model are taken for its blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.errors import ModelError
from ebbtide.plan import Decision
from ebbtide.torch.blocks import find_blocks
from tests.torch import models
from tests.torch.models import VOCABULARY, WIDTH, Gated, Stack, tokens
from tests.torch.training import (
    attach_here,
    differences,
    language_step,
    seeded,
    train,
    train_attached,
)


def from_transformers(kind: str, **config: Any) -> nn.Module:
    """Build a small model of a class of transformers, such as `Mistral`."""
    import transformers

    sizes = {"vocab_size": VOCABULARY, "use_cache": False}
    causal = getattr(transformers, f"{kind}ForCausalLM", None)
    conditional = getattr(transformers, f"{kind}ForConditionalGeneration", None)
    build = causal if conditional is None else conditional
    assert build is not None
    return build(getattr(transformers, f"{kind}Config")(**sizes, **config))


def decoder_only(kind: str, **config: Any) -> nn.Module:
    return from_transformers(
        kind,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **config,
    )


def t5(*, num_decoder_layers: int) -> nn.Module:
    return from_transformers(
        "T5",
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_decoder_layers=num_decoder_layers,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.1,
    )


def bart() -> nn.Module:
    return from_transformers(
        "Bart",
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=2,
        encoder_ffn_dim=WIDTH,
        decoder_ffn_dim=WIDTH,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


FOUND: dict[str, tuple[Callable[[], nn.Module], str, str, int]] = {
    "Llama": (models.llama, "model.layers", "LlamaDecoderLayer", 3),
    "Qwen2": (lambda: decoder_only("Qwen2"), "model.layers", "Qwen2DecoderLayer", 3),
    "Mistral": (lambda: decoder_only("Mistral"), "model.layers", "MistralDecoderLayer", 3),
    "GPT-2": (models.gpt2, "transformer.h", "GPT2Block", 3),
    # The layers, although each holds a longer run of experts.
    "Mixtral": (
        lambda: decoder_only("Mixtral", num_local_experts=8),
        "model.layers",
        "MixtralDecoderLayer",
        3,
    ),
    "Qwen2-MoE": (
        lambda: decoder_only(
            "Qwen2Moe",
            num_experts=8,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        "model.layers",
        "Qwen2MoeDecoderLayer",
        3,
    ),
    # The longer of encoder and decoder, the first if they are alike.
    "T5 with a longer decoder": (lambda: t5(num_decoder_layers=3), "decoder.block", "T5Block", 3),
    "T5": (lambda: t5(num_decoder_layers=2), "encoder.block", "T5Block", 2),
    "BART": (bart, "model.encoder.layers", "BartEncoderLayer", 3),
    "TransformerEncoder": (encoder, "layers", "TransformerEncoderLayer", 3),
    "a stack": (lambda: Stack(Gated), "blocks", "Gated", 3),
    "experts in layers": (lambda: Stack(lambda: models.Router(8), 2), "blocks", "Router", 2),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_repeated_layers_of_a_model_are_its_blocks(name: str) -> None:
    build, prefix, class_name, num_blocks = FOUND[name]
    model = seeded(build)
    found = find_blocks(model)
    assert list(found) == [f"{prefix}.{index}" for index in range(num_blocks)]
    assert {type(block).__name__ for block in found.values()} == {class_name}
    assert all(found[path] is model.get_submodule(path) for path in found)


def test_a_sequential_is_a_list_of_blocks_itself() -> None:
    model = nn.Sequential(Gated(), Gated(), nn.Linear(WIDTH, WIDTH))
    assert list(find_blocks(model)) == ["0", "1"]


def test_modules_of_one_class_must_stand_side_by_side() -> None:
    model = nn.Sequential(Gated(), nn.ReLU(), Gated(), nn.ReLU(), Gated())
    with pytest.raises(ModelError, match="Sequential has no repeated blocks"):
        find_blocks(model)


def test_the_longest_run_is_taken_and_the_first_of_equals() -> None:
    model: Any = nn.Sequential(
        nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Tanh(), nn.Tanh(), nn.Tanh()
    )
    assert list(find_blocks(model)) == ["3", "4", "5"]
    assert list(find_blocks(model[:5])) == ["0", "1"]


def test_a_module_that_stands_in_a_list_twice_is_one_block() -> None:
    block = Gated()
    model = nn.Sequential(block, block)
    with pytest.raises(ModelError, match="has no repeated blocks"):
        find_blocks(model)
    assert find_blocks(model, "0") == {"0": block}


def test_blocks_come_in_the_order_of_the_model_whatever_the_order_of_names() -> None:
    model = Stack(Gated)
    assert list(find_blocks(model, ["blocks.2", "blocks.0"])) == ["blocks.0", "blocks.2"]
    assert list(find_blocks(model, ["blocks.[12]", "blocks.*"])) == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]


def test_a_star_stands_for_one_step_of_a_path() -> None:
    model = nn.Sequential(Stack(Gated, 2), Stack(Gated, 2))
    assert list(find_blocks(model, "*.blocks.*")) == [
        "0.blocks.0",
        "0.blocks.1",
        "1.blocks.0",
        "1.blocks.1",
    ]
    assert list(find_blocks(model, "*")) == ["0", "1"]
    assert list(find_blocks(model, "0.*.1")) == ["0.blocks.1"]


@pytest.mark.parametrize("pattern", ["blocks.3", "block.*", "", "blocks.*.no"])
def test_a_name_without_a_match_is_refused_with_the_nearest_paths(pattern: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_blocks(Stack(Gated), pattern)
    assert str(caught.value).startswith(f"unknown block {pattern!r}; valid names, nearest first: ")
    assert "blocks.2" in str(caught.value)


def translation_step(model: nn.Module, index: int) -> Tensor:
    """Train a model with an encoder and a decoder."""
    loss = model(input_ids=tokens(2, 12), labels=tokens(2, 9)).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("plan", ["recompute", "offload", "balanced"])
def test_encoder_and_decoder_may_both_be_named(plan: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return t5(num_decoder_layers=2)

    model = seeded(build)
    with attach_here(model, plan, tmp_path, blocks=["encoder.block.*", "decoder.block.*"]) as tide:
        trace = train_attached(tide, model, translation_step)
        assert tide.workload is not None
        assert [block.name for block in tide.workload.blocks] == [
            "encoder.block.0",
            "encoder.block.1",
            "decoder.block.0",
            "decoder.block.1",
        ]
        assert tide.plan is not None
        # Every decoder block saves the encoder's output, of 12 tokens each; it moves once.
        encoded_bytes = 4 * 2 * 12 * WIDTH
        encoded = [
            a.name
            for block in tide.workload.blocks
            for a in block.activations
            if a.name.startswith("decoder") and a.num_bytes == encoded_bytes and not a.inputs
        ]
        num_moved = sum(tide.plan.decision(name) is Decision.DISK for name in encoded)
        moved_bytes = tide.plan.disk_bytes - max(num_moved - 1, 0) * encoded_bytes
        assert tide.statistics().moved_out_bytes == moved_bytes
        assert (moved_bytes > 0) == (plan != "recompute")
    assert differences(trace, train(seeded(build), translation_step)) == []


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2-MoE"])
def test_a_mixture_of_experts_has_the_same_gradients(kind: str, tmp_path: Path) -> None:
    """How many tokens an expert gets varies, so nothing is asserted about the bytes."""
    build = FOUND[kind][0]
    torch.use_deterministic_algorithms(True)
    try:
        for plan in ("recompute", "offload", "balanced"):
            model = seeded(build)
            with attach_here(model, plan, tmp_path) as tide:
                trace = train_attached(tide, model, language_step)
                assert tide.statistics().num_recomputed_ops > 0
            assert differences(trace, train(seeded(build), language_step)) == []
    finally:
        torch.use_deterministic_algorithms(False)
