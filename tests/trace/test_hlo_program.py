"""Copies are followed back to the operation that made what they move, in programs made here."""

from collections.abc import Sequence

import pytest

from ebbtide.trace.hlo_program import HloProgram
from ebbtide.trace.names import name_scope
from ebbtide.trace.wire import WireError
from tests.trace.planes import bytes_field, number_field, varint

STACK, UP = "jit(loss)/jvp()/while/body", "mlp.dot_general.0"


def instruction(
    number: int,
    name: str,
    opcode: str,
    operands: Sequence[int] = (),
    *,
    called: Sequence[int] = (),
    scope: str = "",
    index: int = 0,
    parameter: int = 0,
) -> bytes:
    out = bytes_field(1, name) + bytes_field(2, opcode) + number_field(35, number)
    if scope:
        out += bytes_field(7, bytes_field(1, opcode) + bytes_field(2, f"{STACK}/{scope}/{opcode}"))
    out += number_field(9, parameter) + number_field(13, index)
    # Both ways of writing repeated numbers.
    out += bytes_field(36, b"".join(map(varint, operands)))
    return out + b"".join(number_field(38, computation) for computation in called)


def proto(**computations: tuple[int, list[bytes]]) -> bytes:
    """A module of computations: for each its root's number and its instructions, in order."""
    module = bytes_field(1, "jit_loss")
    for number, (name, (root, instructions)) in enumerate(computations.items(), 1):
        body = bytes_field(1, name) + number_field(5, number) + number_field(6, root)
        module += bytes_field(3, body + b"".join(bytes_field(2, i) for i in instructions))
    return bytes_field(1, module)


def program(**computations: tuple[int, list[bytes]]) -> HloProgram:
    return HloProgram(memoryview(proto(**computations)))


def fused(first: int, opcode: str, num_operands: int) -> tuple[int, list[bytes]]:
    """A fused computation of one instruction on all its parameters; the root is `first`."""
    numbers = range(first + 1, first + 1 + num_operands)
    return first, [
        *(instruction(n, f"p{n}", "parameter", parameter=n - first - 1) for n in numbers),
        instruction(first, f"inner.{first}", opcode, numbers),
    ]


def scanned(*, pipelined: bool = False, scope: str = name_scope(UP)) -> HloProgram:
    return HloProgram(memoryview(scanned_proto(pipelined=pipelined, scope=scope)))


def scanned_proto(*, pipelined: bool = False, scope: str = name_scope(UP)) -> bytes:
    """A scan's forward and backward loop, and a stack in host memory that goes through both.

    Elements of the loops' tuples: the stack, and in the pipelined form what the iteration before
    made. XLA writes the update as a fusion in an asynchronous computation.
    """
    update = [instruction(21, "update-start", "async-start", [12, 13], called=[2])]
    update += [instruction(22, "update-done", "async-done", [21])]
    made = [instruction(14, "gemm", "custom-call", [11], scope=scope)]
    made += [instruction(15, "made", "get-tuple-element", [14], index=0)]
    source = [instruction(13, "view", "bitcast", [16 if pipelined else 15])]
    if pipelined:
        source.insert(0, instruction(16, "before", "get-tuple-element", [11], index=1))
    return proto(
        update_fusion=fused(100, "dynamic-update-slice", 2),
        update_async=(
            110,
            [
                instruction(111, "p111", "parameter", parameter=0),
                instruction(112, "p112", "parameter", parameter=1),
                instruction(110, "wrapped_update", "fusion", [111, 112], called=[1]),
            ],
        ),
        forward=(
            23,
            [
                instruction(11, "state", "parameter"),
                instruction(12, "stack", "get-tuple-element", [11], index=0),
                *made,
                *source,
                *update,
                instruction(23, "next", "tuple", [22, 15]),
            ],
        ),
        slice_fusion=fused(120, "dynamic-slice", 2),
        backward=(
            44,
            [
                instruction(40, "state.1", "parameter"),
                instruction(41, "stack.1", "get-tuple-element", [40], index=1),
                instruction(42, "counter", "get-tuple-element", [40], index=0),
                instruction(43, "wrapped_slice", "fusion", [41, 42], called=[4]),
                instruction(44, "next.1", "tuple", [42, 41]),
            ],
        ),
        entry=(
            57,
            [
                instruction(50, "host", "custom-call"),
                instruction(51, "first", "custom-call", scope=scope),
                instruction(52, "begin", "tuple", [50, 51]),
                instruction(53, "while", "while", [52], called=[3]),
                instruction(54, "filled", "get-tuple-element", [53], index=0),
                instruction(55, "zero", "constant"),
                instruction(56, "begin.1", "tuple", [55, 54]),
                instruction(57, "while.1", "while", [56], called=[5]),
            ],
        ),
    )


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_stack_of_a_scan_is_followed_through_loops_tuples_and_fusions(pipelined: bool) -> None:
    found = scanned(pipelined=pipelined)
    assert found.activation_moved_by("wrapped_update") == UP
    assert found.activation_moved_by("wrapped_slice") == UP


def test_a_value_whose_maker_has_no_scope_has_no_name() -> None:
    found = scanned(scope="mlp")
    assert found.activation_moved_by("wrapped_update") is None
    assert found.activation_moved_by("wrapped_slice") is None
    assert found.activation_moved_by("of another program") is None


def test_unrolled_layers_copy_a_value_out_and_the_same_one_in() -> None:
    found = program(
        entry=(
            6,
            [
                instruction(1, "gemm", "fusion", scope=name_scope("attn.out")),
                instruction(2, "copy-start", "copy-start", [1]),
                instruction(3, "copy-done", "copy-done", [2]),
                instruction(4, "held", "tuple", [3]),
                instruction(5, "back", "get-tuple-element", [4], index=0),
                instruction(6, "copy-start.1", "copy-start", [5]),
            ],
        )
    )
    assert found.activation_moved_by("copy-start") == "attn.out"
    assert found.activation_moved_by("copy-start.1") == "attn.out"


def test_of_a_fusion_with_several_results_the_one_that_is_copied_has_the_name() -> None:
    first, second = name_scope("first"), name_scope("second")
    found = program(
        fusion=(
            12,
            [
                instruction(10, "a", "add", scope=first),
                instruction(11, "b", "multiply", scope=second),
                instruction(12, "both", "tuple", [10, 11]),
            ],
        ),
        entry=(
            3,
            [
                # A fusion has the scopes of one of its results.
                instruction(1, "loop_fusion", "fusion", called=[1], scope=first),
                instruction(2, "second", "get-tuple-element", [1], index=1),
                instruction(3, "copy-start", "copy-start", [2]),
            ],
        ),
    )
    assert found.activation_moved_by("copy-start") == "second"


def test_a_view_that_has_the_scope_of_its_reader_does_not_give_its_name() -> None:
    found = program(
        entry=(
            3,
            [
                instruction(1, "gemm", "custom-call", scope=name_scope("made")),
                instruction(2, "view", "bitcast", [1], scope=name_scope("reader")),
                instruction(3, "copy-start", "copy-start", [2]),
            ],
        )
    )
    assert found.activation_moved_by("copy-start") == "made"


def test_a_value_that_may_be_one_of_two_has_no_name() -> None:
    found = program(
        body=(
            13,
            [
                instruction(10, "state", "parameter"),
                instruction(11, "made", "add", scope=name_scope("one")),
                instruction(13, "next", "tuple", [11]),
            ],
        ),
        entry=(
            5,
            [
                instruction(1, "made.1", "multiply", scope=name_scope("other")),
                instruction(2, "begin", "tuple", [1]),
                instruction(3, "while", "while", [2], called=[1]),
                instruction(4, "end", "get-tuple-element", [3], index=0),
                instruction(5, "copy-start", "copy-start", [4]),
            ],
        ),
    )
    assert found.activation_moved_by("copy-start") is None


def test_what_is_no_program_ends() -> None:
    """Elements of elements without end, a computation that calls itself, and a missing operand."""
    endless = program(
        body=(
            11,
            [
                instruction(10, "state", "parameter"),
                instruction(11, "deeper", "get-tuple-element", [10], index=0),
            ],
        ),
        itself=(20, [instruction(20, "again", "fusion", called=[2])]),
        entry=(
            3,
            [
                instruction(1, "while", "while", [99], called=[1]),
                instruction(2, "copy-start", "copy-start", [1]),
                instruction(3, "copy-start.1", "copy-start", [20]),
            ],
        ),
    )
    assert endless.activation_moved_by("copy-start") is None
    assert endless.activation_moved_by("again") is None
    assert endless.activation_moved_by("copy-start.1") is None


def test_a_program_with_ever_more_ways_ends() -> None:
    """Each of many bodies takes another element of the loop's state: 50 to the power of 8 ways."""
    ways = range(50)
    bodies = {
        f"body{i}": (
            1000 + i,
            [
                instruction(100 + i, f"state{i}", "parameter"),
                instruction(1000 + i, f"next{i}", "get-tuple-element", [100 + i], index=i),
            ],
        )
        for i in ways
    }
    called = [i + 1 for i in ways]
    entry = [
        instruction(1, "while", "while", [99], called=called),
        instruction(2, "copy-start", "copy-start", [1]),
    ]
    assert program(**bodies, entry=(2, entry)).activation_moved_by("copy-start") is None


def test_two_instructions_with_one_number_are_refused() -> None:
    with pytest.raises(WireError, match="two instructions have the number 1"):
        program(entry=(1, [instruction(1, "a", "add"), instruction(1, "b", "add")]))
