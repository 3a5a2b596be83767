"""What a layer sends to other ranks, worked out by hand."""

import pytest

from ebbtide.block import Block
from ebbtide.catalog.calls import Rates, make_block
from ebbtide.catalog.form import Form
from ebbtide.catalog.layers import make_layer
from ebbtide.catalog.models import MODELS
from ebbtide.catalog.networks import Axis

T = 4096
# h, all bytes in bf16.
STREAM = T * 4096 * 2


def sent(model: str, layer: int, axis: Axis, form: Form) -> tuple[int, int]:
    """Return the bytes that one rank sends in forward and in backward."""
    made = make_layer(MODELS[model], layer, form)
    found = [e for call in made.calls for e in call.exchanges]
    assert {e.axis for e in found} == {axis}
    return sum(e.forward_bytes for e in found), sum(e.backward_bytes for e in found)


def test_tensor_parallel_ranks_sum_two_outputs_and_two_gradients() -> None:
    # Megatron (1909.08053): two all-reduces forward and two backward, of 2(t-1)/t of the stream.
    each = 2 * STREAM * 3 // 4
    assert sent("llama-3-8b", 0, Axis.TENSOR, Form(tokens=T, context=T, tensor_parallel=4)) == (
        2 * each,
        2 * each,
    )
    assert sent("gpt2", 0, Axis.TENSOR, Form(tokens=T, context=T, tensor_parallel=4)) == (
        2 * each * 768 // 4096, 2 * each * 768 // 4096,
    )  # fmt: skip


def test_with_sequence_parallelism_backward_gathers_the_inputs_once_more() -> None:
    # Korthikanti et al. (2205.05198): two gathers and two sums each way, and backward gathers the
    # two inputs again for the gradients of the weights.
    each = STREAM * 3 // 4
    given = sent(
        "llama-3-8b",
        0,
        Axis.TENSOR,
        Form(tokens=T, context=T, tensor_parallel=4, is_sequence_parallel=True),
    )
    assert given == (4 * each, 6 * each)


def test_context_parallel_ranks_pass_keys_and_values_round_and_back_with_gradients() -> None:
    # 8 heads of 128 for keys and for values; three other ranks.
    once = 3 * T * 2 * 8 * 128 * 2
    assert sent("llama-3-8b", 0, Axis.CONTEXT, Form(tokens=T, context=T, context_parallel=4)) == (
        once,
        2 * once,
    )


def test_tokens_go_to_experts_and_back_in_both_directions() -> None:
    # 8 experts of 256 a token, of which 7 in 8 are on other ranks.
    there = T * 8 * 7168 * 2 * 7 // 8
    given = sent("deepseek-v3-671b", 60, Axis.EXPERT, Form(tokens=T, context=T, expert_parallel=8))
    assert given == (2 * there, 2 * there)


def test_a_layer_without_experts_sends_nothing_to_any() -> None:
    made = make_layer(MODELS["deepseek-v3-671b"], 0, Form(tokens=T, context=T, expert_parallel=8))
    assert not any(call.exchanges for call in made.calls)


def block(form: Form, rates: Rates) -> Block:
    calls = make_layer(MODELS["llama-3-8b"], 0, form).calls
    return make_block("b", "Layer", calls, rates)


@pytest.mark.parametrize("is_rerun", [False, True])
def test_a_sum_takes_time_and_is_run_again_by_checkpointing_alone(is_rerun: bool) -> None:
    form = Form(tokens=T, context=T, tensor_parallel=4, is_rerun=is_rerun)
    rates = Rates(flops_per_ns=10**6, attention_flops_per_ns=10**6, moved_bytes_per_ns=1000)
    free = block(form, rates)
    # 2 x 3/4 of the stream at 100 bytes a ns.
    slow = block(
        form,
        Rates(
            flops_per_ns=10**6,
            attention_flops_per_ns=10**6,
            moved_bytes_per_ns=1000,
            sent_bytes_per_ns={Axis.TENSOR: 100.0},
        ),
    )
    each_ns = -(-2 * STREAM * 3 // 4 // 100)
    assert slow.forward_ns - free.forward_ns == pytest.approx(2 * each_ns, abs=4)
    assert slow.backward_ns - free.backward_ns == pytest.approx(2 * each_ns, abs=4)
    by_name = {a.name: a for a in slow.activations}
    assert by_name["b.self_attn.o_proj"].is_replayable is is_rerun
    assert by_name["b.self_attn.q_proj"].is_replayable


def test_a_ring_beside_attention_counts_only_where_it_takes_longer() -> None:
    form = Form(tokens=T, context=4 * T, context_parallel=4)
    times: list[int] = []
    for rate in (10**9, 10, 5):
        rates = Rates(
            flops_per_ns=10**6,
            attention_flops_per_ns=500,
            moved_bytes_per_ns=10**9,
            sent_bytes_per_ns={Axis.CONTEXT: float(rate)},
        )
        times.append(block(form, rates).forward_ns)
    # Half of 2 x T x 4T x 2 x 4096 products; the ring of 50 MB is slower at 0.005 bytes a ps.
    attention_ns = T * 4 * T * 2 * 4096 // 500
    ring_bytes = 3 * T * 2 * 8 * 128 * 2
    assert ring_bytes / 10 < attention_ns
    assert times[0] == times[1]
    assert times[2] == times[0] + max(0, ring_bytes // 5 - attention_ns)
