"""Timed Workloads by published shape: Llama, GPT-2, and DeepSeek's MLA with experts.

All in bf16, batch 1, on one device. Kernels are fused where libraries have fused ones: norms,
rotary embeddings with the projections before them, attention, and SwiGLU.
"""

# T tokens

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ebbtide.catalog.calls import Rates, make_block
from ebbtide.catalog.form import Form
from ebbtide.catalog.layers import make_layer
from ebbtide.catalog.models import MODELS
from ebbtide.catalog.ops import BF16_BYTES, FP32_BYTES
from ebbtide.catalog.shapes import Family, Shape
from ebbtide.workload import Outside, Workload

# What an H200 reaches in bf16 matmuls of these sizes, and of its 4.8 TB/s in elementwise ops.
RATES = Rates(flops_per_ns=400_000, attention_flops_per_ns=400_000, moved_bytes_per_ns=3_500)


def build(
    shape: Shape,
    *,
    tokens: int,
    class_name: str,
    prefix: str,
    resident_bytes_per_param: int = 4,
    num_shards: int = 1,
    loss_tokens: int | None = None,
) -> Workload:
    """Make the workload of a shape of the catalog, with fused kernels.

    Args:
        shape: Of the model.
        tokens: T.
        class_name: Of a block.
        prefix: Of the blocks' names.
        resident_bytes_per_param: 4 for bf16 weights and gradients; more with optimizer state.
        num_shards: Ranks that share what is resident.
        loss_tokens: Most tokens whose logits are there at once; all by default.
    """
    form = Form(tokens=tokens, context=tokens)
    rotary_width = 0
    if shape.family is not Family.GPT2:
        rotary_width = shape.latents.rope if shape.latents else shape.head_width
    return Workload(
        model=shape.class_name,
        blocks=tuple(
            make_block(f"{prefix}.{index}", class_name, make_layer(shape, index, form).calls, RATES)
            for index in range(shape.num_layers)
        ),
        outside=_outside(
            tokens=tokens,
            hidden=shape.hidden,
            vocab=shape.vocab,
            resident_bytes=resident_bytes_per_param * shape.num_parameters // num_shards,
            # The rotary tables, cosine and sine.
            constant_bytes=2 * tokens * rotary_width * BF16_BYTES,
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
        turn_ns=3 * RATES.flops_ns(2 * tokens * hidden * vocab),
        # The embedding's output and its gradient.
        ends_bytes=stream_bytes,
        ends_ns=RATES.moved_ns(4 * stream_bytes),
        constant_bytes=constant_bytes,
    )


_LLAMA_8B = MODELS["llama-3-8b"]
_LLAMA = functools.partial(build, class_name="LlamaDecoderLayer", prefix="model.layers")
_SHAPES: Mapping[str, Callable[..., Workload]] = {
    "llama-8b": functools.partial(_LLAMA, _LLAMA_8B),
    # With few blocks, the logits of the full vocabulary would be most of the step.
    "llama-8b-x8": functools.partial(_LLAMA, replace(_LLAMA_8B, num_layers=8, vocab=32_000)),
    "llama-8b-x12": functools.partial(_LLAMA, replace(_LLAMA_8B, num_layers=12, vocab=32_000)),
    "llama-70b": functools.partial(_LLAMA, MODELS["llama-3-70b"], num_shards=8),
    "gpt2": functools.partial(
        build, MODELS["gpt2"], class_name="GPT2Block", prefix="transformer.h"
    ),
    "deepseek": functools.partial(
        build,
        MODELS["deepseek-v3-671b"],
        class_name="DeepseekV3DecoderLayer",
        prefix="model.layers",
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
