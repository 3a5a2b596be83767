"""What compiling a workload makes of groups, pins, equal blocks and blocks without anything."""

from dataclasses import replace

import pytest

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.errors import PlanError
from ebbtide.plan import Decision
from ebbtide.planner.chain import Call, Moment, compile_chain
from ebbtide.workload import Outside, Workload
from tests.corpus import CORPUS


def made(name: str, num_bytes: int, *inputs: str, group: str, make_ns: int = 0) -> Activation:
    return Activation(
        name=name,
        op="aten.mm",
        kind=OpKind.MATMUL if inputs else OpKind.INPUT,
        num_bytes=num_bytes,
        inputs=inputs,
        is_saved=not name.endswith(".t"),
        is_replayable=bool(inputs),
        group=group,
        make_ns=make_ns,
    )


def a_block(name: str) -> Block:
    """x, then out and lse by one call, then t, which autograd does not save, then y."""
    x, out, lse, t, y = (f"{name}.{local}" for local in ("x", "out", "lse", "t", "y"))
    return Block(
        name=name,
        class_name="Layer",
        activations=(
            made(x, 10, group=x),
            made(out, 20, x, group="call", make_ns=3),
            # Its call also reads a sibling, which is no input of the call.
            made(lse, 4, x, out, group="call", make_ns=3),
            made(t, 5, lse, x, group=t, make_ns=2),
            made(y, 8, t, t, group=y, make_ns=1),
        ),
        backward=(
            BackwardEvent(uses=(y, x), compute_ns=7, held_bytes=40),
            BackwardEvent(uses=(lse, out), compute_ns=9, held_bytes=50),
        ),
        rest_ns=6,
        workspace_bytes=2,
    )


OUTSIDE = Outside(resident_bytes=100, turn_bytes=30, turn_ns=11, ends_bytes=5, ends_ns=13)


def a_step(*blocks: Block) -> Workload:
    return Workload(model="Model", blocks=blocks, outside=OUTSIDE)


def test_a_block_becomes_numbers_in_forward_order() -> None:
    (block,) = compile_chain(a_step(a_block("b"))).classes
    assert block.num_bytes == (10, 20, 4, 5, 8)
    assert block.is_saved == (True, True, True, False, True)
    assert block.call_of == (0, 1, 1, 2, 3)
    assert block.uses == ((4, 0), (2, 1))
    assert block.first_used == (4, 2)
    assert (block.compute_ns, block.held_bytes) == ((7, 9), (40, 50))
    assert (block.rest_ns, block.workspace_bytes) == (6, 2)
    assert block.pins == (None,) * 5
    # Each call's time once: 3 + 2 + 1.
    assert (block.forward_ns, block.backward_ns) == (6 + 6, 16)


def test_gradients_that_the_step_makes_are_held_from_their_event_on() -> None:
    def with_gradients(name: str, *num_bytes: int) -> Block:
        events = zip(a_block(name).backward, num_bytes, strict=True)
        made = tuple(replace(event, gradient_bytes=size) for event, size in events)
        return replace(a_block(name), backward=made)

    outside = replace(OUTSIDE, turn_gradient_bytes=1000, ends_gradient_bytes=70)
    blocks = (with_gradients("a", 3, 0), with_gradients("b", 3, 0), with_gradients("c", 100, 20))
    chain = compile_chain(Workload(model="Model", blocks=blocks, outside=outside))
    assert chain.class_of == (0, 0, 1)
    assert [c.held_bytes for c in chain.classes] == [(40, 50 + 3), (40, 50 + 100)]
    assert [c.gradient_bytes for c in chain.classes] == [3, 120]
    assert chain.gradient_bytes_before() == [1000 + 120 + 3, 1000 + 120, 1000]
    assert chain.most_gradient_bytes == 1000 + 120 + 3 + 3 + 70
    assert chain.ends_bytes == 100 + 1196 + 5


def test_calls_have_each_input_once_and_no_outputs_of_their_own() -> None:
    (block,) = compile_chain(a_step(a_block("b"))).classes
    common = {"is_replayable": True, "is_input": False}
    assert block.calls == (
        Call(outputs=(0,), inputs=(), make_ns=0, is_replayable=False, is_input=True),
        Call(outputs=(1, 2), inputs=(0,), make_ns=3, **common),
        Call(outputs=(3,), inputs=(2, 0), make_ns=2, **common),
        Call(outputs=(4,), inputs=(3,), make_ns=1, **common),
    )


def test_a_call_runs_again_only_if_all_its_outputs_may() -> None:
    block = a_block("b")
    x, out, lse, *rest = block.activations
    opaque = replace(lse, kind=OpKind.OPAQUE, is_replayable=False, make_ns=4)
    chain = compile_chain(a_step(replace(block, activations=(x, out, opaque, *rest))))
    call = chain.classes[0].calls[1]
    assert (call.is_replayable, call.make_ns) == (False, 4)


def test_blocks_that_differ_in_names_alone_are_one_class() -> None:
    slower = replace(a_block("c"), rest_ns=7)
    chain = compile_chain(a_step(a_block("a"), a_block("b"), slower, a_block("d")))
    assert chain.class_of == (0, 0, 1, 0)
    assert [block.rest_ns for block in chain.classes] == [6, 7]
    assert chain.names[3] == ("d.x", "d.out", "d.lse", "d.t", "d.y")
    assert chain.outside == OUTSIDE


def test_a_pinned_block_is_a_class_of_its_own() -> None:
    pins = {"b.y": Decision.HOST, "b.x": Decision.KEEP}
    chain = compile_chain(a_step(a_block("a"), a_block("b")), pins)
    assert chain.class_of == (0, 1)
    assert chain.classes[0].pins == (None,) * 5
    assert chain.classes[1].pins == (Decision.KEEP, None, None, None, Decision.HOST)


def test_a_fused_block_is_a_class_of_its_own_with_one_moment() -> None:
    fused = replace(a_block("b"), is_fused=True)
    chain = compile_chain(a_step(a_block("a"), fused, a_block("c")))
    assert chain.class_of == (0, 1, 0)
    by_call, as_one = chain.classes
    assert as_one == replace(by_call, is_fused=True)
    assert [(m.outputs, m.spent_ns) for m in by_call.moments] == [
        ((0,), 0),
        ((1, 2), 3),
        ((3,), 2),
        ((4,), 1),
    ]
    assert (by_call.tail_ns, as_one.tail_ns) == (6, 0)
    # All calls and the rest.
    assert as_one.moments == (Moment(outputs=(0, 1, 2, 3, 4), spent_ns=12),)
    assert as_one.forward_ns == by_call.forward_ns == 12


def test_the_base_time_is_all_compute() -> None:
    chain = compile_chain(a_step(a_block("a"), a_block("b")))
    assert chain.outside_ns == 11 + 13
    assert chain.base_ns == 2 * (12 + 16) + 24


@pytest.mark.parametrize("name", ["llama-8b/8k", "deepseek/8k", "gpt2/32k"])
def test_the_base_time_of_a_model_is_that_of_its_blocks(name: str) -> None:
    workload = CORPUS[name]
    chain = compile_chain(workload)
    assert workload.outside is not None
    assert chain.base_ns == workload.outside.turn_ns + workload.outside.ends_ns + sum(
        block.forward_ns + block.backward_ns for block in workload.blocks
    )
    assert len(chain.classes) == (2 if name.startswith("deepseek") else 1)


def test_a_block_without_activations_still_takes_its_time() -> None:
    empty = Block(name="b", class_name="Layer", activations=(), rest_ns=6)
    chain = compile_chain(a_step(empty))
    (block,) = chain.classes
    nothing = Call(outputs=(), inputs=(), make_ns=0, is_replayable=False, is_input=False)
    assert block.calls == (nothing,)
    assert chain.base_ns == 6 + 24


def test_a_workload_without_times_is_refused() -> None:
    message = (
        "the workload of Model has no times, and a budget needs them: it was written by hand or by "
        "an older version. Observe it again: ebbtide observe."
    )
    for workload in (
        replace(a_step(a_block("b")), outside=None),
        a_step(replace(a_block("b"), backward=())),
    ):
        with pytest.raises(PlanError) as raised:
            compile_chain(workload)
        assert str(raised.value) == message
