"""Workloads at another batch shape, and on a device of another pace."""

from dataclasses import replace
from fractions import Fraction

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.planner.scale import Scale, pace_workload, scale_workload
from ebbtide.workload import Outside, Workload


def made(name: str, op: str, kind: OpKind) -> Activation:
    return Activation(
        name=name,
        op=op,
        kind=kind,
        num_bytes=100,
        inputs=(),
        is_saved=True,
        is_replayable=kind is not OpKind.INPUT,
        group=name,
        make_ns=10,
    )


WORKLOAD = Workload(
    model="Model",
    blocks=(
        Block(
            name="b",
            class_name="Layer",
            activations=(
                made("b.x", "", OpKind.INPUT),
                made("b.mm", "aten.mm", OpKind.MATMUL),
                made("b.sdpa", "aten.sdpa", OpKind.ATTENTION),
                made("b.scores", "aten._softmax", OpKind.ELEMENTWISE),
            ),
            backward=(
                BackwardEvent(uses=("b.sdpa",), compute_ns=20, held_bytes=7),
                BackwardEvent(uses=("b.mm",), compute_ns=20, held_bytes=7),
            ),
            rest_ns=3,
            workspace_bytes=5,
        ),
    ),
    outside=Outside(
        resident_bytes=1000, turn_bytes=50, turn_ns=30, ends_bytes=11, ends_ns=9, constant_bytes=4
    ),
)


def test_bytes_grow_with_the_tokens_and_attention_with_their_square() -> None:
    scaled = scale_workload(WORKLOAD, Scale(rows=Fraction(2), length=Fraction(3)))
    (block,) = scaled.blocks
    sizes = {a.name: (a.num_bytes, a.make_ns) for a in block.activations}
    # Six times the tokens; eighteen times the pairs of tokens.
    assert sizes == {
        "b.x": (600, 60),
        "b.mm": (600, 60),
        "b.sdpa": (600, 180),
        "b.scores": (1800, 180),
    }
    assert [(e.compute_ns, e.held_bytes) for e in block.backward] == [(360, 42), (120, 42)]
    assert (block.rest_ns, block.workspace_bytes) == (18, 30)
    assert scaled.outside == Outside(
        resident_bytes=1000, turn_bytes=300, turn_ns=180, ends_bytes=11, ends_ns=54,
        constant_bytes=24,
    )  # fmt: skip
    assert scaled.fingerprint == WORKLOAD.fingerprint


def test_gradients_of_parameters_do_not_grow_with_the_tokens() -> None:
    (block,) = WORKLOAD.blocks
    first, second = block.backward
    events = (replace(first, gradient_bytes=5), replace(second, gradient_bytes=9))
    assert WORKLOAD.outside is not None
    outside = replace(WORKLOAD.outside, turn_gradient_bytes=8, ends_gradient_bytes=6)
    workload = replace(WORKLOAD, blocks=(replace(block, backward=events),), outside=outside)
    scaled = scale_workload(workload, Scale(rows=Fraction(2), length=Fraction(3)))
    # Of the 7 that the first event holds, 5 are such gradients; of the second one's, all.
    assert [(e.held_bytes, e.gradient_bytes) for e in scaled.blocks[0].backward] == [
        (5 + 6 * 2, 5),
        (7, 9),
    ]
    assert scaled.outside is not None
    assert (scaled.outside.turn_gradient_bytes, scaled.outside.ends_gradient_bytes) == (8, 6)


def test_of_a_fused_block_only_attentions_share_grows_with_the_square() -> None:
    (block,) = WORKLOAD.blocks
    event = BackwardEvent(uses=("b.mm", "b.sdpa"), compute_ns=430, held_bytes=0)
    fused = replace(block, backward=(event,), is_fused=True)
    workload = replace(WORKLOAD, blocks=(fused,))
    scaled = scale_workload(workload, Scale(rows=Fraction(2), length=Fraction(3)))
    # Of the 43 ns of forward, attention takes 10: of 430 ns 100 grow by 18, the others by 6.
    assert block.forward_ns == 43
    assert scaled.blocks[0].backward[0].compute_ns == 100 * 18 + 330 * 6


def test_what_is_not_whole_is_rounded_up() -> None:
    scaled = scale_workload(WORKLOAD, Scale(rows=Fraction(1), length=Fraction(1, 3)))
    (block,) = scaled.blocks
    assert block.activations[0].num_bytes == 34
    assert block.rest_ns == 1


def test_a_pace_changes_times_alone() -> None:
    paced = pace_workload(WORKLOAD, Fraction(3, 2))
    (block,), (before,) = paced.blocks, WORKLOAD.blocks
    assert [a.make_ns for a in block.activations] == [15] * 4
    assert [e.compute_ns for e in block.backward] == [30, 30]
    assert block.rest_ns == 5
    assert paced.outside is not None and WORKLOAD.outside is not None
    assert (paced.outside.turn_ns, paced.outside.ends_ns) == (45, 14)
    assert [a.num_bytes for a in block.activations] == [a.num_bytes for a in before.activations]
    assert replace(paced.outside, turn_ns=30, ends_ns=9) == WORKLOAD.outside
