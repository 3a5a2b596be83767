"""From a question to the Workload of one device, and the model FLOPs that its step is worth."""

# T tokens, D model width, V vocabulary

from collections.abc import Iterator
from dataclasses import replace

from ebbtide.block import Block
from ebbtide.catalog.calls import Rates, make_blocks
from ebbtide.catalog.form import Implementation
from ebbtide.catalog.layers import make_layer
from ebbtide.catalog.ops import FP32_BYTES
from ebbtide.catalog.shapes import Family
from ebbtide.estimate.resident import Resident, Stage
from ebbtide.estimate.setup import Setup
from ebbtide.workload import Outside, Workload

# cuBLAS keeps a workspace of 32 MiB on Hopper and later, one for the thread of forward and one for
# that of backward; found as the part of measured peaks that does not depend on the batch
# (benchmarks/results/llama-8b-shape.md).
CUBLAS_BYTES = 2 * 32 * 2**20

_CLASS_NAMES = {
    Family.GPT2: "GPT2Block",
    Family.LLAMA: "LlamaDecoderLayer",
    Family.DEEPSEEK: "DeepseekV3DecoderLayer",
}


def make_workload(
    setup: Setup, stage: Stage, resident: Resident, rates: Rates, *, is_rerun: bool
) -> Workload:
    """Return what one device of a stage does for one micro-batch.

    A pipeline's first stage holds several micro-batches: all their blocks come one after the
    other, as many forwards as are in flight and then as many backwards. Their memory is that of
    1F1B at its fullest; the time is that of all of them together.

    Args:
        setup: The question.
        stage: Which layers.
        resident: What the device holds all through.
        rates: What it reaches.
        is_rerun: Random ops and routing may be run again, as checkpointing does.
    """
    shape = setup.shape
    prefix = "transformer.h" if shape.family is Family.GPT2 else "model.layers"
    layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
    names: dict[bool, list[str]] = {}
    order: list[bool] = []
    for micro_batch in range(stage.num_in_flight):
        mark = f"micro_batch_{micro_batch}." if stage.num_in_flight > 1 else ""
        for layer in layers:
            kind = shape.has_experts(layer)
            names.setdefault(kind, []).append(f"{mark}{prefix}.{layer}")
            order.append(kind)
    made: dict[bool, Iterator[Block]] = {}
    for kind in names:
        layer = next(layer for layer in layers if shape.has_experts(layer) is kind)
        equal = make_blocks(
            names[kind],
            _CLASS_NAMES[shape.family],
            make_layer(shape, layer, setup.form(is_rerun=is_rerun)).calls,
            rates,
            is_fused=setup.implementation is Implementation.COMPILED,
        )
        made[kind] = iter(equal)
    return Workload(
        model=shape.class_name,
        blocks=tuple(next(made[kind]) for kind in order),
        outside=_outside(setup, stage, resident, rates),
    )


def model_flops(setup: Setup) -> int:
    """Return the model FLOPs of one micro-batch on one device, the mean over pipeline stages.

    Matrix products and attention, causal attention at half, forward and backward; nothing that is
    run again counts, nor what several tensor-parallel ranks compute alike.
    """
    shape, degrees = setup.shape, setup.degrees
    form = replace(
        setup.form(is_rerun=False),
        tensor_parallel=1,
        is_sequence_parallel=False,
        implementation=Implementation.FUSED,
    )
    total = 0
    made: dict[bool, int] = {}
    for layer in range(shape.num_layers):
        kind = shape.has_experts(layer)
        if kind not in made:
            calls = make_layer(shape, layer, form).calls
            made[kind] = sum(call.flops + call.model_backward_flops for call in calls)
        total += made[kind]
    total += (2 if setup.lora_rank else 3) * 2 * setup.tokens * shape.hidden * shape.vocab
    return total // (degrees.tp * degrees.pp)


def logits_bytes(setup: Setup) -> int:
    """Return the most bytes of logits and what the loss makes of them, at once."""
    tokens = min(setup.tokens, setup.loss_chunk) if setup.loss_chunk else setup.tokens
    num_logits = tokens * -(-setup.shape.vocab // setup.degrees.tp)
    if setup.implementation is Implementation.FUSED:
        # Logits, a copy in fp32, and its gradient in fp32.
        return num_logits * (setup.dtype.width_bytes + 2 * FP32_BYTES)
    # The softmax's logarithm, its gradient, and that of the logits before it, all in fp32.
    return num_logits * 3 * FP32_BYTES


def _outside(setup: Setup, stage: Stage, resident: Resident, rates: Rates) -> Outside:
    shape, width = setup.shape, setup.dtype.width_bytes
    T, D = setup.tokens, shape.hidden
    stream_bytes = T * D * width
    turn_bytes = turn_ns = 0
    constant_bytes = 0
    if shape.family is not Family.GPT2:
        head_width = shape.latents.rope if shape.latents is not None else shape.head_width
        # The rotary tables, cosine and sine.
        constant_bytes = 2 * T * head_width * width
    if setup.implementation is not Implementation.FUSED:
        constant_bytes += CUBLAS_BYTES
    if stage.has_head:
        logits = logits_bytes(setup)
        if setup.implementation is Implementation.FUSED or shape.family is Family.GPT2:
            # The last block's output, which no block counts, its norm and a gradient.
            ends_of_turn = 3 * stream_bytes
        elif width == FP32_BYTES:
            ends_of_turn = 3 * stream_bytes
        else:
            # The last norm's input in fp32, what it makes of it, and its output.
            ends_of_turn = T * D * (FP32_BYTES + 2 * width)
        turn_bytes = logits + ends_of_turn
        vocab = -(-shape.vocab // setup.degrees.tp)
        head_flops = 2 * T * D * vocab
        # Written and read in each of the loss's passes: about ten numbers in fp32 a logit.
        turn_ns = rates.flops_ns((2 if setup.lora_rank else 3) * head_flops)
        turn_ns += rates.moved_ns(T * vocab * 10 * FP32_BYTES)
    return Outside(
        resident_bytes=resident.total,
        turn_bytes=turn_bytes,
        turn_ns=turn_ns,
        # The embedding's output and its gradient.
        ends_bytes=stream_bytes,
        ends_ns=rates.moved_ns(4 * stream_bytes),
        constant_bytes=constant_bytes,
    )
