"""Equal blocks get equal numbers, and blocks that differ do not."""

from dataclasses import replace

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.torch.block_kinds import equalised, signature_of


def a_block(name: str, make_ns: int, held_bytes: int, gradient_bytes: int = 0) -> Block:
    made = Activation(
        name=f"{name}.up",
        op="aten.mm",
        kind=OpKind.MATMUL,
        num_bytes=8,
        inputs=(),
        is_saved=True,
        is_replayable=True,
        group=f"{name}.up",
        make_ns=make_ns,
    )
    event = BackwardEvent(
        uses=(made.name,),
        compute_ns=2 * make_ns,
        held_bytes=held_bytes,
        gradient_bytes=gradient_bytes,
    )
    return Block(name=name, class_name="Layer", activations=(made,), backward=(event,))


def test_times_are_the_median_and_bytes_the_most() -> None:
    blocks = (a_block("a", 5, 10, 3), a_block("b", 100, 30), a_block("c", 7, 20, 4))
    alike, kinds = equalised(blocks)
    assert kinds == (("a", "b", "c"),)
    assert alike == tuple(
        replace(
            a_block(name, 7, 30, 4),
            backward=(replace(a_block(name, 7, 30, 4).backward[0], compute_ns=14),),
        )
        for name in "abc"
    )


def test_a_block_of_another_size_or_class_is_another_kind() -> None:
    first, other = a_block("a", 5, 10), a_block("b", 9, 10)
    wide = replace(other, activations=(replace(other.activations[0], num_bytes=9),))
    assert signature_of(first) == signature_of(other)
    assert signature_of(first) != signature_of(wide)
    assert signature_of(first) != signature_of(replace(other, class_name="Gate"))
    alike, kinds = equalised((first, wide))
    assert kinds == (("a",), ("b",))
    assert alike == (first, wide)
