"""Timed Workloads by published shape: Llama, GPT-2, and DeepSeek's MLA with experts.

All in bf16, batch 1, on one device. Kernels are fused where libraries have fused ones: norms,
rotary embeddings with the projections before them, attention, and SwiGLU.
"""

# T tokens, D model width, F width of the MLP, A heads, K heads of keys and values, W head width,
# V vocabulary, E experts, R experts that a token is routed to

import functools
from collections.abc import Callable, Iterator, Mapping

from ebbtide.block import OpKind
from ebbtide.workload import Outside, Workload
from tests.corpus.calls import INPUT, Call, Output, flops_ns, make_block, moved_ns
from tests.corpus.ops import (
    BF16_BYTES,
    FP32_BYTES,
    INT64_BYTES,
    make_attention,
    make_dropout,
    make_elementwise,
    make_input,
    make_layer_norm,
    make_linear,
    make_rms_norm,
    make_sum,
    make_swiglu_mlp,
)


def llama(
    *,
    num_blocks: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    tokens: int,
    resident_bytes_per_param: int = 4,
    num_shards: int = 1,
    loss_tokens: int | None = None,
) -> Workload:
    """Make a Llama. It saves 12D + 4KW + 6F bytes a token and block, and 4A for the log-sum-exp.

    Args:
        num_blocks: Transformer layers.
        hidden: D.
        ffn: F.
        heads: A; their width is D / A.
        kv_heads: K.
        vocab: V; the head is not tied to the embedding.
        tokens: T.
        resident_bytes_per_param: 4 for bf16 weights and gradients; more with optimizer state.
        num_shards: Ranks that share what is resident.
        loss_tokens: Most tokens whose logits are there at once; all by default.
    """
    T, D = tokens, hidden
    kv_width = hidden // heads * kv_heads
    calls = (
        make_input(T, D),
        make_rms_norm(".input_layernorm", INPUT, T, D),
        make_linear(".self_attn.q_proj", ".input_layernorm", T, D, D),
        make_linear(".self_attn.k_proj", ".input_layernorm", T, D, kv_width),
        make_linear(".self_attn.v_proj", ".input_layernorm", T, D, kv_width),
        make_attention(
            ".self_attn",
            (".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"),
            T,
            heads=heads,
            query_width=hidden,
            value_width=hidden,
        ),
        make_linear(".self_attn.o_proj", ".self_attn:out", T, D, D),
        make_sum(".residual", (INPUT, ".self_attn.o_proj"), T, D),
        make_rms_norm(".post_attention_layernorm", ".residual", T, D),
        *make_swiglu_mlp(".mlp", ".post_attention_layernorm", T, D, ffn),
        make_sum(".output", (".residual", ".mlp.down_proj"), T, D),
    )
    block_params = 2 * D * D + 2 * D * kv_width + 3 * D * ffn + 2 * D
    num_params = num_blocks * block_params + 2 * vocab * D + D
    return Workload(
        model="LlamaForCausalLM",
        blocks=tuple(
            make_block(f"model.layers.{index}", "LlamaDecoderLayer", calls)
            for index in range(num_blocks)
        ),
        outside=_outside(
            tokens=tokens,
            hidden=hidden,
            vocab=vocab,
            resident_bytes=resident_bytes_per_param * num_params // num_shards,
            # The rotary tables, cosine and sine.
            constant_bytes=2 * T * (hidden // heads) * BF16_BYTES,
            loss_tokens=loss_tokens,
        ),
    )


def gpt2(
    *,
    num_blocks: int,
    hidden: int,
    heads: int,
    vocab: int,
    tokens: int,
    resident_bytes_per_param: int = 4,
    loss_tokens: int | None = None,
) -> Workload:
    """Make a GPT-2 with dropout after attention and MLP, and a head tied to the embedding.

    It saves 34D bytes a token and block, 4A for the log-sum-exp, and 16 for means and deviations.
    The dropouts cannot be run again, so what follows them can only be stored.
    """
    T, D, F = tokens, hidden, 4 * hidden
    calls = (
        make_input(T, D),
        make_layer_norm(".ln_1", INPUT, T, D),
        make_linear(".attn.c_attn", ".ln_1:out", T, D, 3 * D, op="aten.addmm"),
        make_attention(
            ".attn", (".attn.c_attn",), T, heads=heads, query_width=hidden, value_width=hidden
        ),
        make_linear(".attn.c_proj", ".attn:out", T, D, D, op="aten.addmm"),
        make_dropout(".attn.resid_dropout", ".attn.c_proj", T, D),
        make_sum(".residual", (INPUT, ".attn.resid_dropout:out"), T, D),
        make_layer_norm(".ln_2", ".residual", T, D),
        make_linear(".mlp.c_fc", ".ln_2:out", T, D, F, op="aten.addmm"),
        make_elementwise(".mlp.act", (".mlp.c_fc",), T * F, op="aten.gelu", uses=(".mlp.c_fc",)),
        make_linear(".mlp.c_proj", ".mlp.act", T, F, D, op="aten.addmm"),
        make_dropout(".mlp.dropout", ".mlp.c_proj", T, D),
        make_sum(".output", (".residual", ".mlp.dropout:out"), T, D),
    )
    num_positions = 1024
    num_params = num_blocks * (12 * D * D + 13 * D) + (vocab + num_positions) * D + 2 * D
    return Workload(
        model="GPT2LMHeadModel",
        blocks=tuple(
            make_block(f"transformer.h.{index}", "GPT2Block", calls) for index in range(num_blocks)
        ),
        outside=_outside(
            tokens=tokens,
            hidden=hidden,
            vocab=vocab,
            resident_bytes=resident_bytes_per_param * num_params,
            constant_bytes=0,
            loss_tokens=loss_tokens,
        ),
    )


def moe(
    *,
    num_blocks: int,
    num_dense_blocks: int,
    hidden: int,
    ffn: int,
    heads: int,
    q_latent: int,
    kv_latent: int,
    nope_width: int,
    rope_width: int,
    value_width: int,
    num_experts: int,
    num_routed: int,
    expert_ffn: int,
    shared_ffn: int,
    vocab: int,
    tokens: int,
    resident_bytes_per_param: int = 4,
    num_shards: int = 1,
    loss_tokens: int | None = None,
) -> Workload:
    """Make a DeepSeek: queries, keys and values from latents; dense blocks, then blocks of experts.

    Combine weights are applied before the experts' down projection. A block of experts saves
    8D + 4 q_latent + 2(2 kv_latent + rope) + 4A(nope + rope) + 4A value + R(2D + 6 expert_ffn)
    + 6 shared_ffn bytes a token; and 4A for the log-sum-exp, 4E for the router and 12R for the
    chosen experts, which are not chosen again. Routing is even, and all experts are here.
    """
    T, D, A, E = tokens, hidden, heads, num_experts
    attention = (
        make_input(T, D),
        make_rms_norm(".input_layernorm", INPUT, T, D),
        make_linear(".self_attn.q_a_proj", ".input_layernorm", T, D, q_latent),
        make_rms_norm(".self_attn.q_a_layernorm", ".self_attn.q_a_proj", T, q_latent),
        make_linear(
            ".self_attn.q_b_proj",
            ".self_attn.q_a_layernorm",
            T,
            q_latent,
            A * (nope_width + rope_width),
        ),
        make_linear(".self_attn.kv_a_proj", ".input_layernorm", T, D, kv_latent + rope_width),
        make_rms_norm(".self_attn.kv_a_layernorm", ".self_attn.kv_a_proj", T, kv_latent),
        make_linear(
            ".self_attn.kv_b_proj",
            ".self_attn.kv_a_layernorm",
            T,
            kv_latent,
            A * (nope_width + value_width),
        ),
        # Keys have a part of their own and one, rotated, that all heads share.
        make_elementwise(
            ".self_attn.key",
            (".self_attn.kv_b_proj", ".self_attn.kv_a_proj"),
            T * A * (nope_width + rope_width),
            op="aten.cat",
        ),
        make_elementwise(
            ".self_attn.value", (".self_attn.kv_b_proj",), T * A * value_width, op="aten.clone"
        ),
        make_attention(
            ".self_attn",
            (".self_attn.q_b_proj", ".self_attn.key", ".self_attn.value"),
            T,
            heads=A,
            query_width=A * (nope_width + rope_width),
            value_width=A * value_width,
        ),
        make_linear(".self_attn.o_proj", ".self_attn:out", T, A * value_width, D),
        make_sum(".residual", (INPUT, ".self_attn.o_proj"), T, D),
        make_rms_norm(".post_attention_layernorm", ".residual", T, D),
    )
    dense = (
        *attention,
        *make_swiglu_mlp(".mlp", ".post_attention_layernorm", T, D, ffn),
        make_sum(".output", (".residual", ".mlp.down_proj"), T, D),
    )
    routed = (
        *attention,
        make_linear(".mlp.gate", ".post_attention_layernorm", T, D, E, width_bytes=FP32_BYTES),
        Call(
            name=".mlp.topk",
            op="aten.topk",
            kind=OpKind.OPAQUE,
            reads=(".mlp.gate",),
            outputs=(
                Output(suffix=":weights", num_bytes=T * num_routed * FP32_BYTES),
                Output(
                    suffix=":indices", num_bytes=T * num_routed * INT64_BYTES, has_gradient=False
                ),
            ),
            uses=(".mlp.gate", ".mlp.topk:indices"),
        ),
        make_elementwise(
            ".mlp.dispatch",
            (".post_attention_layernorm", ".mlp.topk:indices"),
            T * num_routed * D,
            op="aten.index_select",
            uses=(".mlp.topk:indices",),
        ),
        *make_swiglu_mlp(
            ".mlp.experts",
            ".mlp.dispatch",
            T * num_routed,
            D,
            expert_ffn,
            op="aten._grouped_mm",
            scale=".mlp.topk:weights",
        ),
        *make_swiglu_mlp(".mlp.shared_experts", ".post_attention_layernorm", T, D, shared_ffn),
        make_elementwise(
            ".mlp.combine",
            (".mlp.shared_experts.down_proj", ".mlp.experts.down_proj", ".mlp.topk:indices"),
            T * D,
            op="aten.index_add",
            uses=(".mlp.topk:indices",),
        ),
        make_sum(".output", (".residual", ".mlp.combine"), T, D),
    )
    attention_params = (
        D * q_latent
        + q_latent
        + q_latent * A * (nope_width + rope_width)
        + D * (kv_latent + rope_width)
        + kv_latent
        + kv_latent * A * (nope_width + value_width)
        + A * value_width * D
        + 2 * D
    )
    # The router has a bias for each expert.
    routed_params = (D + 1) * E + 3 * D * (E * expert_ffn + shared_ffn)
    num_params = (
        num_blocks * attention_params
        + num_dense_blocks * 3 * D * ffn
        + (num_blocks - num_dense_blocks) * routed_params
        + 2 * vocab * D
        + D
    )
    return Workload(
        model="DeepseekV3ForCausalLM",
        blocks=tuple(
            make_block(
                f"model.layers.{index}",
                "DeepseekV3DecoderLayer",
                dense if index < num_dense_blocks else routed,
            )
            for index in range(num_blocks)
        ),
        outside=_outside(
            tokens=tokens,
            hidden=hidden,
            vocab=vocab,
            resident_bytes=resident_bytes_per_param * num_params // num_shards,
            constant_bytes=2 * T * rope_width * BF16_BYTES,
            loss_tokens=loss_tokens,
        ),
    )


def _outside(
    *,
    tokens: int,
    hidden: int,
    vocab: int,
    resident_bytes: int,
    constant_bytes: int,
    loss_tokens: int | None,
) -> Outside:
    num_logits = (tokens if loss_tokens is None else min(tokens, loss_tokens)) * vocab
    stream_bytes = tokens * hidden * BF16_BYTES
    return Outside(
        resident_bytes=resident_bytes,
        # Logits in bf16, in fp32, and their gradient in fp32; the last block's output, which no
        # block counts, its norm and a gradient.
        turn_bytes=num_logits * (BF16_BYTES + 2 * FP32_BYTES) + 3 * stream_bytes,
        turn_ns=3 * flops_ns(2 * tokens * hidden * vocab),
        # The embedding's output and its gradient.
        ends_bytes=stream_bytes,
        ends_ns=moved_ns(4 * stream_bytes),
        constant_bytes=constant_bytes,
    )


_LLAMA_8B = functools.partial(
    llama, num_blocks=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128_256
)
_SHAPES: Mapping[str, Callable[..., Workload]] = {
    "llama-8b": _LLAMA_8B,
    # With few blocks, the logits of the full vocabulary would be most of the step.
    "llama-8b-x8": functools.partial(_LLAMA_8B, num_blocks=8, vocab=32_000),
    "llama-8b-x12": functools.partial(_LLAMA_8B, num_blocks=12, vocab=32_000),
    "llama-70b": functools.partial(
        llama,
        num_blocks=80,
        hidden=8192,
        ffn=28672,
        heads=64,
        kv_heads=8,
        vocab=128_256,
        num_shards=8,
    ),
    "gpt2": functools.partial(gpt2, num_blocks=12, hidden=768, heads=12, vocab=50_257),
    "deepseek": functools.partial(
        moe,
        num_blocks=61,
        num_dense_blocks=3,
        hidden=7168,
        ffn=18432,
        heads=128,
        q_latent=1536,
        kv_latent=512,
        nope_width=128,
        rope_width=64,
        value_width=128,
        num_experts=256,
        num_routed=8,
        expert_ffn=2048,
        shared_ffn=2048,
        vocab=129_280,
        num_shards=128,
    ),
}
_LENGTHS: Mapping[str, int] = {"8k": 8192, "32k": 32_768, "128k": 131_072}

# Without it, at 128k the logits alone are more than any device has.
_MOST_LOSS_TOKENS = 32_768


class _Corpus(Mapping[str, Workload]):
    """Makes a workload when it is first asked for, and once."""

    def __init__(self) -> None:
        self._made: dict[str, Workload] = {}

    def __getitem__(self, name: str) -> Workload:
        if name not in self._made:
            shape, _, length = name.partition("/")
            make, tokens = _SHAPES[shape], _LENGTHS[length]
            self._made[name] = make(tokens=tokens, loss_tokens=_MOST_LOSS_TOKENS)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return (f"{shape}/{length}" for shape in _SHAPES for length in _LENGTHS)

    def __len__(self) -> int:
        return len(_SHAPES) * len(_LENGTHS)


def make_corpus() -> Mapping[str, Workload]:
    """Return a corpus of which nothing is made yet."""
    return _Corpus()


CORPUS: Mapping[str, Workload] = make_corpus()
"""Workloads by shape and length, for example `CORPUS["llama-8b/32k"]`; always the same object."""
