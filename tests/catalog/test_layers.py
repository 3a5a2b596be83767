"""Bytes of a layer, beside the formulas and figures that others published."""

from dataclasses import replace

import pytest

from ebbtide.block import Block
from ebbtide.catalog.calls import make_block
from ebbtide.catalog.form import Attention, Form, Implementation
from ebbtide.catalog.layers import make_layer
from ebbtide.catalog.models import MODELS
from tests.corpus.shapes import RATES

KIB = 1024
SMALL = (":mean", ":rstd", ":lse", ".topk:weights", ".topk:indices", ".gate", ":rsqrt")
"""A number or a few for each token, which formulas leave out."""


def block_of(name: str, form: Form, layer: int = -1) -> Block:
    shape = MODELS[name]
    layer %= shape.num_layers
    return make_block("", "Layer", make_layer(shape, layer, form).calls, RATES)


def main_bytes(block: Block) -> int:
    """Saved bytes without what formulas leave out."""
    return sum(a.num_bytes for a in block.activations if a.is_saved and not a.name.endswith(SMALL))


def sizes(block: Block) -> dict[str, int]:
    return {a.name: a.num_bytes for a in block.activations}


def flash(tokens: int = 1024, **more: object) -> Form:
    return replace(Form(tokens=tokens, context=tokens), **more)  # pyright: ignore[reportArgumentType]


# Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2205.05198,
# equations 1 to 4; s tokens of a sequence, b sequences, h width, a heads, t ranks.


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-xl"])
@pytest.mark.parametrize(("s", "b"), [(1024, 1), (2048, 4)])
def test_a_gpt2_layer_without_flash_attention_is_that_of_korthikanti(
    name: str, s: int, b: int
) -> None:
    h, a = MODELS[name].hidden, MODELS[name].heads
    form = Form(tokens=s * b, context=s, attention=Attention.MATRIX)
    assert main_bytes(block_of(name, form)) == 34 * s * b * h + 5 * a * s * s * b


@pytest.mark.parametrize("t", [2, 4, 8])
def test_its_tensor_parallel_form(t: int) -> None:
    s, b, h, a = 2048, 2, 1024, 16
    form = Form(tokens=s * b, context=s, attention=Attention.MATRIX, tensor_parallel=t)
    expected = 10 * s * b * h + 24 * s * b * h // t + 5 * a * s * s * b // t
    assert main_bytes(block_of("gpt2-medium", form)) == expected


@pytest.mark.parametrize("t", [2, 4, 8])
def test_its_tensor_and_sequence_parallel_form(t: int) -> None:
    s, b, h, a = 2048, 2, 1024, 16
    form = Form(
        tokens=s * b,
        context=s,
        attention=Attention.MATRIX,
        tensor_parallel=t,
        is_sequence_parallel=True,
    )
    expected = (34 * s * b * h + 5 * a * s * s * b) // t
    assert main_bytes(block_of("gpt2-medium", form)) == expected


def test_full_recomputation_of_gpt2_keeps_two_bytes_a_number_of_the_input() -> None:
    block = block_of("gpt2", flash(is_rerun=True))
    assert sizes(block)[".input"] == 2 * 1024 * 768
    # Nothing else has to be stored where the random state is restored.
    assert [a.name for a in block.activations if not a.is_replayable] == [".input"]


# docs of the shapes: 12h + 4gh + 6f, 8h + 4gh + 4f, and 2h bytes a token.


@pytest.mark.parametrize(
    ("name", "full", "lean", "checkpoint"),
    [("llama-3-8b", 136, 92, 8), ("llama-3-70b", 268, 180, 16)],
)
def test_fused_llama_is_that_of_the_formulas(
    name: str, full: int, lean: int, checkpoint: int
) -> None:
    tokens = 4096
    block = block_of(name, flash(tokens))
    assert main_bytes(block) == full * KIB * tokens
    # Lean: both norms and the product of gate and up are made again.
    remade = (".input_layernorm", ".post_attention_layernorm", ".mlp.product")
    assert main_bytes(block) - sum(sizes(block)[r] for r in remade) == lean * KIB * tokens
    assert sizes(block)[".input"] == checkpoint * KIB * tokens


def test_eager_llama_8b_is_what_was_measured() -> None:
    # Measured on an H200: 196.1 KiB a token and layer (benchmarks/results/llama-8b-shape.md).
    block = block_of("llama-3-8b", flash(implementation=Implementation.EAGER))
    assert block.num_bytes_saved / 1024 / KIB == pytest.approx(196.13, abs=0.005)
    # 20h + 4gh + 8f, a log-sum-exp for 32 heads, and a deviation for two norms.
    h, kv, f = 4096, 1024, 14_336
    assert block.num_bytes_saved == 1024 * (20 * h + 4 * kv + 8 * f + 4 * 32 + 2 * 4)


def test_compiled_llama_8b_is_the_fused_one_and_the_norms_deviations() -> None:
    block = block_of("llama-3-8b", flash(implementation=Implementation.COMPILED))
    assert block.num_bytes_saved == 1024 * (136 * KIB + 4 * 32 + 2 * 4)


def test_deepseek_v3_is_455_kb_a_token_and_layer() -> None:
    tokens = 4096
    block = block_of("deepseek-v3-671b", flash(tokens))
    assert main_bytes(block) == 454_784 * tokens
    attention = [".input", ".input_layernorm", ".residual", ".post_attention_layernorm"]
    parts = {
        name: size
        for name, size in sizes(block).items()
        if name in attention or name.startswith(".self_attn")
    }
    saved = {a.name for a in block.activations if a.is_saved}
    in_attention = sum(
        size for name, size in parts.items() if name in saved and not name.endswith(SMALL)
    )
    # 8h + 4 q_lora + 2 (2 kv_lora + rope) + 4 heads (nope + rope) + 4 heads value
    assert in_attention == 229_504 * tokens


def test_deepseek_v3_has_three_dense_layers_and_58_of_experts() -> None:
    shape = MODELS["deepseek-v3-671b"]
    assert [shape.has_experts(i) for i in range(61)] == [False] * 3 + [True] * 58


def test_405b_queries_keys_and_values_are_576_mib_a_layer() -> None:
    # NVIDIA's post on host offloading in JAX, Llama 3.1 405B, batch 2, 8192 tokens.
    block = block_of("llama-3.1-405b", Form(tokens=2 * 8192, context=8192))
    qkv = sum(sizes(block)[f".self_attn.{letter}_proj"] for letter in "qkv")
    assert qkv == 576 * 2**20
    assert 126 * qkv / 2**30 == 70.875


def test_llama_2_7b_layer_outputs_are_those_of_the_seed() -> None:
    # 32k x 4096 x 32 layers x 2 bytes: the outputs alone, not what autograd keeps.
    for context, billions in ((32_000, 8.4), (32_768, 8.6), (131_072, 34.4)):
        block = block_of("llama-2-7b", flash(context))
        outputs = 32 * sizes(block)[".input"]
        assert outputs == context * 4096 * 32 * 2
        assert outputs / 1e9 == pytest.approx(billions, abs=0.05)
        # The full set: 16h + 6f a token, with as many heads of keys as of queries.
        full = 32 * main_bytes(block)
        assert full == 32 * context * (16 * 4096 + 6 * 11_008)
        assert full / outputs == pytest.approx(16.06, abs=0.005)


def test_keys_and_values_are_what_the_formula_says() -> None:
    # 2 x batch x kv_heads x context x head width x layers x 2 bytes.
    batch, context = 3, 4096
    block = block_of("llama-3-70b", Form(tokens=batch * context, context=context))
    held = 80 * (sizes(block)[".self_attn.k_proj"] + sizes(block)[".self_attn.v_proj"])
    assert held == 2 * batch * 8 * context * 128 * 80 * 2


@pytest.mark.parametrize("implementation", Implementation)
@pytest.mark.parametrize("t", [2, 4, 8])
def test_matrices_and_heads_are_split_among_tensor_parallel_ranks(
    implementation: Implementation, t: int
) -> None:
    one = sizes(block_of("llama-3-8b", flash(implementation=implementation)))
    split = sizes(block_of("llama-3-8b", flash(implementation=implementation, tensor_parallel=t)))
    whole = {
        name
        for name in one
        if "layernorm" in name or name.endswith(("o_proj", "down_proj", "residual", "output"))
    } | {".input"}
    assert {name: size for name, size in one.items() if name in whole} == {
        name: size for name, size in split.items() if name in whole
    }
    for name in set(one) - whole:
        assert split[name] * t == one[name], name


def test_lora_keeps_what_adapters_need_and_computes_less() -> None:
    full, lora = (block_of("llama-3-8b", flash(lora_rank=r)) for r in (0, 16))
    adapters = make_layer(MODELS["llama-3-8b"], 0, flash(lora_rank=16)).lora_parameters
    h, kv, f = 4096, 1024, 14_336
    assert adapters == 16 * (4 * h + 2 * (h + kv) + 3 * (h + f))
    # Each of seven products keeps what the first half of its adapter makes.
    assert lora.num_bytes_saved - full.num_bytes_saved == 1024 * 7 * 16 * 2
    assert lora.backward_ns < 0.7 * full.backward_ns
