"""What a layer's calls send to other ranks: bytes of one rank, by kind of parallelism.

What is sent in forward is part of a call that ebbtide never runs again (design rule 9);
checkpointing does, and pays for it.
"""

# T tokens, N and M the widths that a product goes from and to, t ranks

from dataclasses import replace

from ebbtide.catalog.calls import Call, Exchange
from ebbtide.catalog.form import Form
from ebbtide.catalog.networks import Axis
from ebbtide.catalog.shapes import Family, Shape


def spread(call: Call, form: Form, N: int, *, is_first: bool) -> Call:
    """Add what it takes that each tensor-parallel rank reads the call's input, of width N.

    With sequence parallelism the input is gathered, and once more for the gradient of the weights.
    The input's gradient is summed up.

    Args:
        call: One that reads all of its input and makes a part of its output.
        form: Of the layer.
        N: Width of the input.
        is_first: No earlier call reads the same input; later ones read what was gathered.
    """
    t = form.tensor_parallel
    if t == 1:
        return call
    part = form.tokens * N * form.width_bytes * (t - 1) // t
    gathered = part if form.is_sequence_parallel else 0
    sent = Exchange(
        axis=Axis.TENSOR, forward_bytes=gathered, backward_bytes=gathered + _sum_of(part, form)
    )
    return replace(
        call,
        exchanges=(*call.exchanges, sent) if is_first else call.exchanges,
        is_kept_from_rerun=call.is_kept_from_rerun or (bool(gathered) and not form.is_rerun),
    )


def sum_up(call: Call, form: Form, M: int) -> Call:
    """Add the sum over tensor-parallel ranks of the call's output, of width M."""
    t = form.tensor_parallel
    if t == 1:
        return call
    part = form.tokens * M * form.width_bytes * (t - 1) // t
    gathered = part if form.is_sequence_parallel else 0
    return _sending(call, form, Axis.TENSOR, forward=_sum_of(part, form), backward=gathered)


def pass_round(call: Call, form: Form, shape: Shape) -> Call:
    """Add keys and values that go round context-parallel ranks, in backward with gradients."""
    if form.context_parallel == 1:
        return call
    width = 2 * shape.kv_heads * shape.head_width
    if shape.family is Family.DEEPSEEK:
        width = shape.query_width + shape.value_width
    of_rank = form.tokens * (width // form.tensor_parallel) * form.width_bytes
    sent = (form.context_parallel - 1) * of_rank
    return _sending(call, form, Axis.CONTEXT, forward=sent, backward=2 * sent, is_beside=True)


def send_to_experts(call: Call, form: Form, num_bytes: int) -> Call:
    """Add what goes to other ranks' experts, or comes back from them, of so many bytes in all."""
    ranks = form.expert_parallel
    if ranks == 1:
        return call
    sent = num_bytes * (ranks - 1) // ranks
    return _sending(call, form, Axis.EXPERT, forward=sent, backward=sent)


def _sum_of(part: int, form: Form) -> int:
    """Return what a rank sends for a sum, of which each keeps a part, or all: twice as much."""
    return part if form.is_sequence_parallel else 2 * part


def _sending(
    call: Call, form: Form, axis: Axis, *, forward: int, backward: int, is_beside: bool = False
) -> Call:
    sent = Exchange(axis=axis, forward_bytes=forward, backward_bytes=backward, is_beside=is_beside)
    return replace(
        call,
        exchanges=(*call.exchanges, sent),
        is_kept_from_rerun=call.is_kept_from_rerun or not form.is_rerun,
    )
