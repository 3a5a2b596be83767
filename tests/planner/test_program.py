"""Moments of one block, worked out by hand from docs/planner.md, and against the oracle."""

import random
from dataclasses import replace

import pytest

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.check import check_plan
from ebbtide.plan import Decision
from ebbtide.planner.chain import BlockClass, compile_chain
from ebbtide.planner.menu import Option
from ebbtide.planner.program import Program, make_program
from ebbtide.workload import Outside, Workload
from tests.planner.exhaustive import plan_with, random_machine, random_workload

OUTSIDE = Outside(resident_bytes=0, turn_bytes=0, turn_ns=0, ends_bytes=0, ends_ns=0)


def made(
    name: str,
    num_bytes: int,
    make_ns: int,
    *inputs: str,
    is_saved: bool = True,
    group: str | None = None,
) -> Activation:
    """An activation; the input of its block if it reads nothing."""
    return Activation(
        name=name,
        op="aten.mm",
        kind=OpKind.MATMUL if inputs else OpKind.INPUT,
        num_bytes=num_bytes,
        inputs=inputs,
        is_saved=is_saved,
        is_replayable=bool(inputs),
        group=group or name,
        make_ns=make_ns,
    )


def event(compute_ns: int, held_bytes: int, *uses: str) -> BackwardEvent:
    return BackwardEvent(uses=uses, compute_ns=compute_ns, held_bytes=held_bytes)


def compiled(block: Block) -> BlockClass:
    return compile_chain(Workload(model="Model", blocks=(block,), outside=OUTSIDE)).classes[0]


def program_of(block: Block, *stored: int) -> Program:
    option = Option(stored=frozenset(stored), num_bytes=0, replay_ns=0, replayed=frozenset())
    return make_program(compiled(block), option)


X, H, T, Y = range(4)


def chain_block(*held_bytes: int) -> Block:
    """y is made from h by way of t, which autograd does not save."""
    held_y, held_h, held_x = held_bytes or (4, 6, 2)
    return Block(
        name="b",
        class_name="Layer",
        activations=(
            made("x", 10, 0),
            made("h", 20, 3, "x"),
            made("t", 5, 2, "h", is_saved=False),
            made("y", 8, 1, "t"),
        ),
        backward=(event(7, held_y, "y"), event(8, held_h, "h"), event(9, held_x, "x")),
        rest_ns=30,
        workspace_bytes=2,
    )


def test_a_block_that_stores_all_replays_nothing() -> None:
    program = program_of(chain_block(), X, H, Y)
    # The last call's time has the block's rest.
    assert program.call_ns == (0, 3, 2, 31)
    # t is alive from its call to y's; and 2 of workspace.
    assert program.transient_bytes == (2, 2, 7, 7)
    assert (program.event_ns, program.replay_ns) == ((7, 8, 9), (0, 0, 0))
    assert program.scratch_bytes == (4, 6, 2)
    assert program.made_at == {X: 0, H: 1, Y: 3}
    assert program.first_need == program.last_need == {Y: 0, H: 1, X: 2}
    # x is an input, h is read by t, t by y, and y by nothing.
    assert program.last_held == (3, 2, 3, 3)
    assert program.num_bytes == (10, 20, 5, 8)


def test_a_replay_takes_the_time_of_its_calls_and_drops_its_inputs_at_their_last_use() -> None:
    program = program_of(chain_block(), X, H)
    assert program.transient_bytes == (2, 2, 7, 15)
    assert program.replay_ns == (3, 0, 0)
    assert program.event_ns == (10, 8, 9)
    # Making y: t 5 + y 8 + gradients 4. The event: y + 4. Then y is gone.
    assert program.scratch_bytes == (17, 6, 2)
    assert program.first_need == {H: 0, X: 2}
    assert program.last_need == {H: 1, X: 2}


def test_what_an_earlier_event_replayed_is_there_for_a_later_one() -> None:
    program = program_of(chain_block(), X)
    # h from call 1 to t's; t to y's; y to the end, as nothing reads it.
    assert program.transient_bytes == (2, 22, 27, 15)
    assert program.replay_ns == (6, 0, 0)
    # Making y: h 20, which event 1 uses, t 5, y 8, gradients 4. Event 1: h and 6.
    assert program.scratch_bytes == (37, 26, 2)
    assert program.first_need == {X: 0}
    assert program.last_need == {X: 2}


def test_an_unsaved_root_is_needed_by_the_replay_alone() -> None:
    program = program_of(chain_block(), X, H, T)
    assert program.transient_bytes == (2, 2, 2, 10)
    assert program.replay_ns == (1, 0, 0)
    assert program.scratch_bytes == (12, 6, 2)
    assert program.first_need == {T: 0, H: 1, X: 2}
    assert program.last_need == {T: 0, H: 1, X: 2}


def test_a_replay_holds_no_more_gradients_than_are_alive_before_its_event() -> None:
    # Event 1 replays h. Of its 50 only the 4 of event 0 are alive before: 20 + 4, then 20 + 50.
    assert program_of(chain_block(4, 50, 2), X, Y).scratch_bytes == (4, 70, 2)
    # 40 before, 3 in the event itself: 20 + 3.
    assert program_of(chain_block(40, 3, 2), X, Y).scratch_bytes == (40, 23, 2)
    # Before the first event it is the block's most: the smaller is its own.
    assert program_of(chain_block(9, 50, 2), X, H).scratch_bytes == (5 + 8 + 9, 50, 2)


@pytest.mark.parametrize(
    ("stored", "call_bytes"),
    [
        # By call 12, 32, 37 and 45: making y, x + h + y are stored, and t and 2 beside them.
        ((X, H, Y), 45),
        # 12, 32, 37 and 25: making t from h, both for forward alone.
        ((X,), 37),
        # 2, 22, 27 and 35: making y beside x, which is there to the end, t and h, which is stored.
        ((H,), 45),
    ],
)
def test_a_fused_block_has_one_moment_with_the_most_of_its_calls(
    stored: tuple[int, ...], call_bytes: int
) -> None:
    by_call = program_of(chain_block(), *stored)
    program = program_of(replace(chain_block(), is_fused=True), *stored)
    assert program.call_ns == (36,)
    assert program.made == (stored,)
    assert program.call_bytes == (call_bytes,)
    assert program.transient_bytes == (call_bytes - sum(by_call.num_bytes[i] for i in stored),)
    assert program.made_at == dict.fromkeys(stored, 0)
    assert program.last_held == (0, 0, 0, 0)
    # Backward is the same, call by call.
    for name in ("event_ns", "replay_ns", "scratch_bytes", "first_need", "last_need"):
        assert getattr(program, name) == getattr(by_call, name)


OUT, LSE, Z = 1, 2, 3


def attention_block() -> Block:
    return Block(
        name="b",
        class_name="Layer",
        activations=(
            made("x", 10, 0),
            made("out", 20, 6, "x", group="attention"),
            made("lse", 4, 6, "x", group="attention"),
            made("z", 8, 1, "out", is_saved=False),
        ),
        backward=(event(1, 30, "x"), event(2, 30, "lse"), event(3, 33, "out")),
    )


def test_a_replayed_call_makes_all_its_outputs_and_keeps_the_needed_ones() -> None:
    # out is stored, and made again beside it all the same: 24 + 30. Then lse alone.
    program = program_of(attention_block(), X, OUT)
    assert program.scratch_bytes == (30, 54, 33)
    assert program.replay_ns == (0, 6, 0)
    # Made for lse, out stays until event 2 has used it; the call runs once.
    program = program_of(attention_block(), X)
    assert program.scratch_bytes == (30, 54, 53)
    assert program.replay_ns == (0, 6, 0)
    assert program.last_need == {X: 1}


def test_outputs_of_one_call_are_made_and_needed_each_for_itself() -> None:
    program = program_of(attention_block(), X, OUT, LSE)
    assert program.made_at == {X: 0, OUT: 1, LSE: 1}
    assert program.first_need == {X: 0, LSE: 1, OUT: 2}
    # out is read by z, lse and z by nothing: until the end.
    assert program.last_held == (2, 2, 2, 2)
    assert program.transient_bytes == (0, 0, 8)


def test_what_several_events_use_is_needed_from_the_first_to_the_last() -> None:
    block = replace(
        chain_block(),
        backward=(event(1, 0, "h", "y"), event(1, 5, "x"), event(1, 0, "h"), event(1, 0, "y")),
    )
    program = program_of(block, X, H, Y)
    assert program.first_need == {H: 0, Y: 0, X: 1}
    assert program.last_need == {H: 2, Y: 3, X: 1}
    # Replayed, y is there through event 1 until event 3: made once.
    program = program_of(block, X, H)
    assert program.replay_ns == (3, 0, 0, 0)
    assert program.scratch_bytes == (13, 8 + 5, 8, 8)


def test_an_event_without_uses_has_its_gradients() -> None:
    block = replace(chain_block(), backward=(event(7, 4), event(8, 9, "y", "h", "x")))
    program = program_of(block, X, H)
    assert program.event_ns == (7, 11)
    # Before event 1 no more than event 0's 4 are alive: 13 + 4. The event: y + 9.
    assert program.scratch_bytes == (4, 17)
    assert program.first_need == {H: 1, X: 1}


@pytest.mark.parametrize("seed", range(0, 200, 50))
def test_a_programs_bytes_are_those_of_the_oracle(seed: int) -> None:
    machine = random_machine(random.Random(0))
    for number in range(seed, seed + 50):
        rng = random.Random(number)
        workload = replace(random_workload(rng, 1, rng.randint(1, 7)), outside=OUTSIDE)
        (block,) = workload.blocks
        stored = [a for a in block.activations if not a.is_replayable or rng.random() < 0.4]
        plan = plan_with(workload, {a.name: Decision.KEEP for a in stored})
        indices = [block.activations.index(a) for a in stored]
        program = program_of(block, *indices)
        forward, kept = [0], 0
        for call, transient_bytes in enumerate(program.transient_bytes):
            kept += sum(program.num_bytes[i] for i, at in program.made_at.items() if at == call)
            forward.append(kept + transient_bytes)
        backward = [kept + scratch_bytes for scratch_bytes in program.scratch_bytes]
        report = check_plan(plan, workload, machine)
        assert max(*forward, *backward) == report.peak_bytes, (number, report)
        assert sum(program.event_ns) == block.backward_ns + sum(program.replay_ns)
