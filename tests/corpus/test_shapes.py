import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ebbtide.block import Activation, Block, OpKind
from ebbtide.workload import Outside, Workload
from tests.corpus import CORPUS
from tests.corpus.shapes import make_corpus

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "workload.json"
TOKENS = {"8k": 8192, "32k": 32_768, "128k": 131_072}


def num_tokens(name: str) -> int:
    return TOKENS[name.partition("/")[2]]


def outside_of(name: str) -> Outside:
    outside = CORPUS[name].outside
    assert outside is not None
    return outside


def activations_of(block: Block) -> Mapping[str, Activation]:
    """By name without the block's."""
    return {
        activation.name.removeprefix(block.name): activation for activation in block.activations
    }


def test_the_corpus_has_every_shape_at_every_length() -> None:
    assert list(CORPUS) == [
        f"{shape}/{length}"
        for shape in ("llama-8b", "llama-8b-x8", "llama-8b-x12", "llama-70b", "gpt2", "deepseek")
        for length in TOKENS
    ]
    assert len(CORPUS) == 18


def test_a_workload_is_made_once() -> None:
    assert CORPUS["gpt2/8k"] is CORPUS["gpt2/8k"]


def test_a_name_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        CORPUS["gpt3/8k"]
    assert "gpt2/9k" not in CORPUS
    assert "gpt2" not in CORPUS


def test_all_of_the_corpus_is_made_in_two_seconds() -> None:
    start = time.process_time()
    workloads = list(make_corpus().values())
    assert len(workloads) == len(CORPUS)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", CORPUS)
def test_every_workload_is_timed_and_reads_back(name: str) -> None:
    workload = CORPUS[name]
    assert workload.is_timed
    assert Workload.from_json(workload.to_json()) == workload


def test_no_two_workloads_of_one_length_have_one_fingerprint() -> None:
    prints = {name: CORPUS[name].fingerprint for name in CORPUS}
    assert len({prints[name] for name in CORPUS if name.endswith("/8k")}) == 6
    assert prints["llama-8b/8k"] == prints["llama-8b/128k"]


@pytest.mark.parametrize("name", CORPUS)
def test_equal_blocks_share_a_class(name: str) -> None:
    form = json.loads(CORPUS[name].to_json())
    assert len(form["classes"]) == (2 if name.startswith("deepseek") else 1)
    assert len(form["blocks"]) == len(CORPUS[name].blocks)


@pytest.mark.parametrize(
    ("shape", "num_blocks", "num_params", "num_shards"),
    [
        ("llama-8b", 32, 8_030_261_248, 1),
        ("llama-70b", 80, 70_553_706_496, 8),
        ("gpt2", 12, 124_439_808, 1),
        # 671.03e9 is what is published, with the router's biases.
        ("deepseek", 61, 671_026_419_200, 128),
    ],
)
def test_parameters_are_as_many_as_published(
    shape: str, num_blocks: int, num_params: int, num_shards: int
) -> None:
    assert len(CORPUS[f"{shape}/8k"].blocks) == num_blocks
    # Weights and gradients, in bf16.
    assert outside_of(f"{shape}/8k").resident_bytes == num_params * 4 // num_shards


@pytest.mark.parametrize("length", TOKENS)
@pytest.mark.parametrize(
    ("shape", "bytes_per_token"),
    [
        # 12h + 4gh + 6f is 136 KiB; and 4 bytes of log-sum-exp for each of 32 heads.
        ("llama-8b", 136 * 1024 + 4 * 32),
        ("llama-70b", 268 * 1024 + 4 * 64),
        # 34h; the log-sum-exp of 12 heads; mean and deviation of two norms.
        ("gpt2", 34 * 768 + 4 * 12 + 16),
        # 454,784 for attention and experts; 128 heads; 256 router logits; 8 chosen experts.
        ("deepseek", 454_784 + 4 * 128 + 4 * 256 + 12 * 8),
    ],
)
def test_saved_bytes_of_a_token_and_block_are_the_published_ones(
    shape: str, length: str, bytes_per_token: int
) -> None:
    block = CORPUS[f"{shape}/{length}"].blocks[-1]
    assert block.num_bytes_saved == bytes_per_token * TOKENS[length]


def test_the_lean_set_of_llama_is_the_published_one() -> None:
    # 8h + 4gh + 4f: norms and the product of gate and up are made again.
    cheap = (OpKind.NORM, OpKind.ELEMENTWISE)
    block = CORPUS["llama-8b/8k"].blocks[0]
    lean = [
        activation
        for name, activation in activations_of(block).items()
        if activation.is_saved and (activation.kind not in cheap or name == ".residual")
    ]
    assert sum(activation.num_bytes for activation in lean) == (92 * 1024 + 4 * 32) * 8192


def test_forward_takes_what_its_operations_take() -> None:
    # 2 operations a parameter and token, and 2sh a token for causal attention, at 400e12 a second.
    tokens, hidden, ffn, kv_width = 32_768, 4096, 14_336, 1024
    num_params = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * ffn
    dear_ns = (2 * num_params * tokens + 2 * tokens * tokens * hidden) / 400_000
    block = CORPUS["llama-8b/32k"].blocks[0]
    moved_bytes = tokens * 2 * ((2 + 2 + 3 + 3) * hidden + 3 * ffn)
    assert block.forward_ns == pytest.approx(dear_ns + moved_bytes / 3500, abs=20)
    assert 2 * dear_ns < block.backward_ns < 2.5 * dear_ns


def test_a_block_of_llama_has_these_activations() -> None:
    block = CORPUS["llama-8b/8k"].blocks[31]
    assert block.name == "model.layers.31"
    assert {name: activation.inputs for name, activation in activations_of(block).items()} == {
        name: tuple(block.name + read for read in reads)
        for name, reads in {
            ".input": (),
            ".input_layernorm": (".input",),
            ".self_attn.q_proj": (".input_layernorm",),
            ".self_attn.k_proj": (".input_layernorm",),
            ".self_attn.v_proj": (".input_layernorm",),
            ".self_attn:out": (".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"),
            ".self_attn:lse": (".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"),
            ".self_attn.o_proj": (".self_attn:out",),
            ".residual": (".input", ".self_attn.o_proj"),
            ".post_attention_layernorm": (".residual",),
            ".mlp.gate_proj": (".post_attention_layernorm",),
            ".mlp.up_proj": (".post_attention_layernorm",),
            ".mlp.product": (".mlp.gate_proj", ".mlp.up_proj"),
            ".mlp.down_proj": (".mlp.product",),
            ".output": (".residual", ".mlp.down_proj"),
        }.items()
    }
    unsaved = [
        name for name, activation in activations_of(block).items() if not activation.is_saved
    ]
    assert unsaved == [".self_attn.o_proj", ".mlp.down_proj", ".output"]
    groups = [activation.group for activation in block.activations]
    assert groups.count(f"{block.name}.self_attn") == 2
    assert len(set(groups)) == len(groups) - 1


def test_backward_of_llama_asks_in_reverse_order_with_these_gradients() -> None:
    block = CORPUS["llama-8b/8k"].blocks[0]
    tokens_bytes = 8192 * 2
    h, f, kv, q_fp32 = 4096, 14_336, 1024, 2 * 4096
    assert [
        (
            tuple(name.removeprefix(block.name) for name in event.uses),
            event.held_bytes // tokens_bytes,
        )
        for event in block.backward
    ] == [
        # The gradient of the block's output goes to the residual, and is held until its end.
        ((".mlp.product",), h + f),
        ((".mlp.gate_proj", ".mlp.up_proj"), h + 3 * f),
        ((".post_attention_layernorm",), h + 2 * f + h),
        ((".post_attention_layernorm",), h + f + 2 * h),
        ((".residual",), h + 2 * h),
        ((".self_attn:out",), h + h),
        (
            (
                ".self_attn.q_proj",
                ".self_attn.k_proj",
                ".self_attn.v_proj",
                ".self_attn:out",
                ".self_attn:lse",
            ),
            h + h + h + 2 * kv + q_fp32,
        ),
        ((".input_layernorm",), h + h + 2 * kv + h),
        ((".input_layernorm",), h + h + kv + 2 * h),
        ((".input_layernorm",), h + h + 2 * h),
        ((".input",), h + 2 * h),
    ]


@pytest.mark.parametrize("name", CORPUS)
def test_every_saved_activation_is_asked_for_and_every_event_takes_time(name: str) -> None:
    for block in CORPUS[name].blocks:
        used = {use for event in block.backward for use in event.uses}
        assert used == {activation.name for activation in block.activations if activation.is_saved}
        assert all(event.compute_ns > 0 and event.held_bytes > 0 for event in block.backward)


@pytest.mark.parametrize("name", CORPUS)
def test_outputs_of_one_call_have_its_time_and_inputs(name: str) -> None:
    for block in CORPUS[name].blocks:
        calls: dict[str, tuple[int, tuple[str, ...]]] = {}
        for activation in block.activations:
            call = (activation.make_ns, activation.inputs)
            assert calls.setdefault(activation.group, call) == call


def test_what_follows_a_dropout_can_only_be_stored() -> None:
    block = activations_of(CORPUS["gpt2/8k"].blocks[0])
    dropout = block[".attn.resid_dropout:out"]
    assert (dropout.kind, dropout.is_replayable, dropout.is_saved) == (OpKind.RANDOM, False, False)
    assert dropout.name in block[".residual"].inputs
    assert block[".attn.resid_dropout:mask"].is_saved


def test_keys_and_values_share_the_latent_that_makes_them() -> None:
    block = activations_of(CORPUS["deepseek/8k"].blocks[0])
    shared = block[".self_attn.kv_b_proj"]
    assert not shared.is_saved
    assert shared.name in block[".self_attn.key"].inputs
    assert shared.name in block[".self_attn.value"].inputs
    assert shared.inputs == (block[".self_attn.kv_a_layernorm"].name,)


def test_the_first_three_blocks_are_dense_and_the_others_have_experts() -> None:
    blocks = CORPUS["deepseek/8k"].blocks
    has_experts = [".mlp.experts.gate_proj" in activations_of(block) for block in blocks]
    assert has_experts == [False] * 3 + [True] * 58
    indices = activations_of(blocks[3])[".mlp.topk:indices"]
    assert (indices.kind, indices.is_replayable) == (OpKind.OPAQUE, False)


@pytest.mark.parametrize("name", CORPUS)
def test_the_turn_holds_logits_of_at_most_32k_tokens(name: str) -> None:
    vocab = {"gpt2": 50_257, "deepseek": 129_280, "llama-8b-x8": 32_000, "llama-8b-x12": 32_000}
    logits = min(num_tokens(name), 32_768) * vocab.get(name.partition("/")[0], 128_256)
    stream_bytes = CORPUS[name].blocks[0].activations[0].num_bytes
    assert outside_of(name).turn_bytes == logits * (2 + 4 + 4) + 3 * stream_bytes
    assert outside_of(name).ends_bytes == stream_bytes


def test_the_turn_takes_three_times_the_head() -> None:
    head_ns = 2 * 8192 * 4096 * 128_256 / 400_000
    assert outside_of("llama-8b/8k").turn_ns == pytest.approx(3 * head_ns, abs=3)


def test_the_example_in_the_documents_is_of_the_corpus() -> None:
    # Written by: EXAMPLE.write_text(CORPUS["llama-8b-x8/8k"].to_json())
    text = EXAMPLE.read_text(encoding="utf-8")
    workload = CORPUS["llama-8b-x8/8k"]
    assert text == workload.to_json()
    assert Workload.from_json(text) == workload
