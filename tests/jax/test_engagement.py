"""What a compiled program's text and sizes say about offloading, and which flag to change."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from ebbtide.jax.engagement import Engagement, Fault, check_engagement, judge
from ebbtide.jax.hlo import Copies, lines_of, read_transfers
from tests.jax import hlo_texts as texts

STACK_BYTES = 3 * 8 * 8 * 4
NONE = Copies()


def judge_text(
    text: str, *, host_bytes: int = STACK_BYTES, predicted: int = STACK_BYTES
) -> Engagement:
    return judge(
        read_transfers(lines_of(text)),
        platform="cuda",
        host_bytes=host_bytes,
        predicted_host_bytes=predicted,
    )


def faults(engagement: Engagement) -> list[Fault]:
    return [finding.fault for finding in engagement.findings]


def test_a_loop_with_work_between_start_and_done_is_engaged() -> None:
    engagement = judge_text(texts.ENGAGED)
    transfers = engagement.transfers
    assert transfers.has_host_space
    assert transfers.out_in_loop == Copies(num_hidden=1)
    assert transfers.in_in_loop == Copies(num_hidden=1)
    # What lies in the wrappers is counted where they are called, and the entry copies nothing.
    assert (transfers.out_elsewhere, transfers.in_elsewhere) == (NONE, NONE)
    assert engagement.findings == ()
    assert engagement.is_engaged


def test_plain_fusions_on_the_compute_stream_name_command_buffers() -> None:
    engagement = judge_text(texts.PLAIN)
    assert engagement.transfers.out_in_loop == Copies(
        num_plain=1, plain_names=("wrapped_dynamic-update-slice.1",)
    )
    assert engagement.transfers.in_in_loop == Copies(
        num_plain=1, plain_names=("wrapped_dynamic-slice.1",)
    )
    assert faults(engagement) == [Fault.PLAIN_COPIES]
    assert str(engagement.findings[0]) == (
        "2 of 2 host copies in loops are plain instructions on the compute stream "
        "(wrapped_dynamic-update-slice.1, wrapped_dynamic-slice.1): compute waits for each of "
        "them. Set --xla_gpu_enable_command_buffer= and "
        "--xla_gpu_enable_latency_hiding_scheduler=true."
    )


def test_pairs_without_work_between_them_name_the_schedulers() -> None:
    engagement = judge_text(texts.BARE)
    assert engagement.transfers.out_in_loop == Copies(num_bare=1)
    assert engagement.transfers.in_in_loop == Copies(num_bare=1)
    assert faults(engagement) == [Fault.BARE_COPIES]
    assert "xla_gpu_enable_pipelined_host_offloading=true" in engagement.findings[0].change


def test_adding_to_the_counter_hides_nothing_and_an_iteration_does() -> None:
    counter = "  %next = s32[] fusion(%fwd.i), kind=kLoop, calls=%add\n"
    carried = texts.DONE_IN.replace("%dynamic-slice-start.3)", "%bwd.begun)")
    begun = (
        "  %bwd.begun = ((f32[3,8,8]{2,1,0:S(5)}, s32[], s32[]), f32[1,8,8]{2,1,0}, u32[]) "
        "get-tuple-element(%bwd.arg), index=3\n"
    )
    text = texts.scanned((texts.START_OUT, counter, texts.DONE_OUT), (begun, carried))
    transfers = read_transfers(lines_of(text))
    assert transfers.out_in_loop == Copies(num_bare=1)
    assert transfers.in_in_loop == Copies(num_hidden=1)


def test_nothing_on_the_host_names_the_name_and_the_memory_kind() -> None:
    engagement = judge_text(texts.ON_DEVICE, host_bytes=0)
    assert not engagement.transfers.has_host_space
    assert engagement.transfers.out_in_loop == NONE
    assert faults(engagement) == [Fault.NOTHING_MOVED]
    for cause in ("inside the rematted body", "'pinned_host'", "JAX_REMAT3"):
        assert cause in engagement.findings[0].change


def test_clones_of_rematerialisation_are_counted_by_name_and_not_by_metadata() -> None:
    engagement = judge_text(texts.CLONED)
    assert engagement.transfers.num_remat_clones == 2
    assert faults(engagement) == [Fault.REMAT_CLONES]
    assert "--xla_gpu_enable_host_memory_offloading=true" in engagement.findings[0].change
    marked = texts.ENGAGED.replace("checkpoint/dot_general", "x.remat/rematted_computation")
    assert read_transfers(lines_of(marked)).num_remat_clones == 0


@pytest.mark.parametrize(
    ("host_bytes", "expected"),
    [(980, []), (1020, []), (979, [Fault.HOST_BYTES]), (1021, [Fault.HOST_BYTES])],
)
def test_host_bytes_may_be_two_percent_off(host_bytes: int, expected: list[Fault]) -> None:
    assert faults(judge_text(texts.ENGAGED, host_bytes=host_bytes, predicted=1000)) == expected


def test_too_few_and_too_many_host_bytes_have_other_causes() -> None:
    few, many = (
        judge_text(texts.ENGAGED, host_bytes=num, predicted=1000).findings[0] for num in (500, 2000)
    )
    assert "is on no value" in few.change
    assert "nested scan" in many.change


def test_host_memory_that_no_plan_asked_for_is_found() -> None:
    assert faults(judge_text(texts.ENGAGED, predicted=0)) == [Fault.UNPLANNED_HOST]


def test_a_plan_that_moves_nothing_is_engaged_in_a_program_that_moves_nothing() -> None:
    assert judge_text(texts.ON_DEVICE, host_bytes=0, predicted=0).is_engaged
    # The optimizer's state, say, is an argument in host memory.
    assert judge_text(texts.ENGAGED, host_bytes=0, predicted=0).is_engaged


def test_unrolled_layers_copy_outside_of_loops() -> None:
    engagement = judge_text(texts.UNROLLED)
    assert engagement.transfers.out_elsewhere == Copies(num_hidden=1)
    assert engagement.transfers.in_elsewhere == Copies(num_bare=1)
    assert faults(engagement) == [Fault.BARE_COPIES]
    assert engagement.findings[0].message.startswith("1 of 2 host copies are waited for")
    assert "pipelined" not in engagement.findings[0].change


def test_copies_in_what_a_loop_calls_are_in_the_loop() -> None:
    called = texts.UNROLLED.replace("ENTRY %main.2", "%layer").replace(texts.HEAD, "")
    body = texts.body("fwd", "  %y.9 = f32[8,8]{1,0} call(%fwd.x), to_apply=%layer\n")
    text = texts.HEAD + called + body + texts.body("bwd") + texts.CONDITION + texts.ENTRY
    transfers = read_transfers(lines_of(text))
    assert transfers.out_in_loop == Copies(num_hidden=1)
    assert transfers.in_in_loop == Copies(num_bare=1)
    assert (transfers.out_elsewhere, transfers.in_elsewhere) == (NONE, NONE)


def test_text_without_percent_signs_and_with_operand_types_reads_the_same() -> None:
    bare = texts.ENGAGED.replace("%", "")
    typed = texts.PLAIN.replace("(%fwd.stack, ", "(f32[3,8,8]{2,1,0:S(5)} %fwd.stack, ")
    assert read_transfers(lines_of(bare)) == read_transfers(lines_of(texts.ENGAGED))
    assert read_transfers(lines_of(typed)) == read_transfers(lines_of(texts.PLAIN))


def test_a_plain_copy_and_a_bare_dynamic_slice_are_plain() -> None:
    text = texts.scanned(
        ("  %copy.7 = f32[3,8,8]{2,1,0} copy(%fwd.stack)\n",),
        (
            "  %dynamic-slice.9 = f32[1,8,8]{2,1,0} dynamic-slice(%bwd.stack, %bwd.i, %bwd.zero), "
            "dynamic_slice_sizes={1,8,8}\n",
        ),
    )
    assert read_transfers(lines_of(text)).in_in_loop == Copies(
        num_plain=2, plain_names=("copy.7", "dynamic-slice.9")
    )


def test_the_text_is_read_one_line_at_a_time() -> None:
    num_bodies = 2000
    given = 0

    def stream() -> Iterator[str]:
        nonlocal given
        yield from lines_of(texts.HEAD + texts.WRAPPED)
        for _ in range(num_bodies):
            for line in lines_of(texts.body("fwd", texts.START_OUT, texts.DONE_OUT)):
                given += 1
                yield line

    transfers = read_transfers(stream())
    assert transfers.out_elsewhere.num_bare == num_bodies
    assert transfers.num_lines == given + len(list(lines_of(texts.HEAD + texts.WRAPPED)))


def test_a_tuple_of_a_million_letters_is_split_in_one_pass() -> None:
    types = ", ".join(["f32[8,8]{1,0:T(8,128)S(5)}"] * 40_000)
    line = f"  %while.9 = ({types}) while(%tuple.9), condition=%cond, body=%fwd"
    text = texts.ENGAGED.replace("  ROOT %y.1", line + "\n  ROOT %y.1")
    assert read_transfers(lines_of(text)).out_in_loop == Copies(num_hidden=1)


def test_lines_are_those_of_the_text() -> None:
    for text in ("", "a", "a\n", "a\n\nb", "\n"):
        assert list(lines_of(text)) == text.split("\n")[: None if text[-1:] != "\n" else -1] or (
            text == ""
        )


def test_each_finding_is_a_warning() -> None:
    engagement = judge_text(texts.PLAIN, predicted=2 * STACK_BYTES)
    assert faults(engagement) == [Fault.HOST_BYTES, Fault.PLAIN_COPIES]
    with pytest.warns(UserWarning) as caught:
        engagement.warn()
    assert [str(w.message) for w in caught] == [f"ebbtide: {f}" for f in engagement.findings]
    judge_text(texts.ENGAGED).warn()


@pytest.fixture(scope="module")
def on_cpu() -> Any:
    """A rematted scan that offloads by name, compiled here."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(x: Any, w: Any) -> Any:
        return jnp.tanh(checkpoint_name(x, "x") @ w), None

    def loss(ws: Any, x: Any) -> Any:
        body = jax.checkpoint(block, policy=policy, prevent_cse=False)
        return jax.lax.scan(body, x, ws)[0].sum()

    ws = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return jax.jit(jax.grad(loss)).lower(ws, x).compile()


def test_a_program_for_a_cpu_moves_nothing_on_this_backend(on_cpu: Any) -> None:
    engagement = check_engagement(on_cpu, predicted_host_bytes=STACK_BYTES)
    assert engagement.platform == "cpu"
    assert engagement.host_bytes == 0
    assert not engagement.transfers.has_host_space
    assert engagement.transfers.num_lines > 50
    assert faults(engagement) == [Fault.NO_HOST_ON_BACKEND]
    assert "nothing moved on this backend" in engagement.findings[0].message
    assert check_engagement(on_cpu, predicted_host_bytes=0).is_engaged


def test_negative_bytes_are_refused(on_cpu: Any) -> None:
    with pytest.raises(ValueError, match="predicted_host_bytes=-1: it must be 0 or more"):
        check_engagement(on_cpu, predicted_host_bytes=-1)
