"""What one forward leaves for its backward: replays, uses, pieces and lifetimes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide.plan import Decision
from ebbtide.torch.devices.base import Place
from ebbtide.torch.identity import Layout, have_equal_bits, storage_key
from ebbtide.torch.parameters import Parameters
from ebbtide.torch.record import Handle, Node, Record
from ebbtide.torch.tape import Tape, restore_alias
from ebbtide.torch.traffic import MUTATED
from tests.torch.fakes import ROW, Bench

NUM = ROW // 4
"""Floats of one row."""

KEEP, HOST, RECOMPUTE = Decision.KEEP, Decision.HOST, Decision.RECOMPUTE


class FixedPolicy:
    """Decides by the operator's name, and `otherwise` for all others."""

    def __init__(self, bench: Bench, otherwise: Decision, by_op: Mapping[str, Decision]) -> None:
        self._bench = bench
        self._otherwise = otherwise
        self._by_op = by_op
        self.unknown: list[str] = []

    def decide(
        self, name: str, *, is_replayable: bool, num_bytes: int
    ) -> tuple[Decision, Place | None]:
        """Return the decision; without room or a recipe the storage is kept."""
        op = name.partition(":")[2].partition("#")[0].partition(".")[0]
        decision = self._by_op.get(op, self._otherwise)
        if decision is RECOMPUTE and not is_replayable:
            return KEEP, None
        if decision is not HOST:
            return decision, None
        place = self._bench.tiers.take(HOST, num_bytes)
        return (KEEP, None) if place is None else (HOST, place)

    def is_kept_by_plan(self, name: str) -> bool:
        """What a check changes is tested with whole models."""
        return False

    def reach(self, group: str) -> None:
        """Moments of a plan are tested with whole models."""

    def keep_unknown(self, reason: str) -> None:
        """Note why a tensor was left alone."""
        self.unknown.append(reason)


@dataclass(slots=True, kw_only=True)
class Recorded:
    """One forward of a function, recorded as that of a block is."""

    record: Record
    handles: list[Handle]
    """In the order in which autograd saved them."""
    real: list[Tensor]
    """What autograd saved, beside the handles."""
    output: Tensor
    bench: Bench
    roots: list[tuple[Node, Tensor]]
    """While it is checked: what recipes start from and is evicted, and the real one."""

    def node(self, op: str) -> Node:
        """Return the storage that an operator made."""
        (found,) = [n for n in self.record.nodes if n is not None and n.name == f"block:{op}"]
        return found

    def num_replayed(self, handle: Handle) -> int:
        """Restore a saved tensor and return how many calls that took."""
        before = self.record.num_replayed_calls
        self.record.restore(handle)
        return self.record.num_replayed_calls - before


def record_forward(
    function: Callable[[Tensor], Tensor],
    *,
    otherwise: Decision = RECOMPUTE,
    bench: Bench | None = None,
    is_checked: bool = False,
    start: Tensor | None = None,
    **by_op: Decision,
) -> Recorded:
    """Record `function` on `start`, or on one row of floats that wants a gradient."""
    bench = bench or Bench()
    if start is None:
        start = torch.linspace(0.1, 1.0, NUM).requires_grad_()
    record = Record("block", bench.traffic, is_checked=is_checked)
    tape = Tape(
        record,
        FixedPolicy(bench, otherwise, by_op),
        device=start.device,
        parameters=Parameters(),
        inputs=frozenset({storage_key(start)}),
        scope=lambda: ("block", False),
        names=[],
        stream=0,
        copies_inputs=False,
        is_checked=is_checked,
    )
    handles: list[Handle] = []
    real: list[Tensor] = []

    def pack(tensor: Tensor) -> Any:
        packed = tape.pack(tensor)
        if isinstance(packed, Handle):
            handles.append(packed)
            real.append(tensor.detach())
        return packed

    def unpack(packed: Any) -> Tensor:
        with torch.no_grad():
            return record.restore(packed) if isinstance(packed, Handle) else restore_alias(packed)

    with tape, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = function(start)
    record.seal()
    return Recorded(
        record=record,
        handles=handles,
        real=real,
        output=output,
        bench=bench,
        roots=tape.nodes.roots,
    )


def chain(x: Tensor) -> Tensor:
    """Saves the input of `sin`, the output of `exp`, and the inputs of `cos` and `square`."""
    return x.sin().exp().cos().square()


# -- replays ---------------------------------------------------------------------------------------


def test_a_replay_runs_only_the_calls_that_lead_to_what_is_wanted() -> None:
    made = record_forward(chain)
    of_sin, of_exp, for_cos, for_square = made.handles
    assert [made.record.holder_of(h).name for h in made.handles] == [
        "block:input",
        "block:exp",
        "block:exp",
        "block:cos",
    ]
    assert made.num_replayed(of_sin) == 0
    assert made.num_replayed(for_square) == 3
    assert made.num_replayed(for_cos) == 0, "exp is still there from the replay before"
    assert made.num_replayed(of_exp) == 0
    for handle, real in zip(made.handles, made.real, strict=True):
        assert have_equal_bits(made.record.restore(handle), real)


def test_a_replayed_storage_goes_with_its_last_use() -> None:
    made = record_forward(chain)
    _, of_exp, for_cos, for_square = made.handles
    exp = made.node("exp")
    assert exp.num_uses == 3, "two saves, and the replay of cos"
    made.record.restore(for_square)
    assert exp.num_left == 2
    assert made.node("cos").memo is None, "cos was used for the only time"
    made.record.restore(for_cos)
    assert exp.memo is not None
    made.record.restore(of_exp)
    assert exp.memo is None
    assert exp.num_left == 3, "ready for another backward"
    assert made.num_replayed(of_exp) == 2


def test_what_is_stored_starts_a_replay() -> None:
    made = record_forward(chain, exp=KEEP)
    assert made.num_replayed(made.handles[3]) == 1
    assert [c.func.name() for c in made.record.calls if c is not None] == ["aten::cos"]
    assert {n.name for n in made.record.nodes if n is not None} == {
        "block:input",
        "block:exp",
        "block:cos",
    }, "the output of sin is needed by nobody, the output of the block neither"


def test_a_root_that_nobody_saved_is_stored_at_its_first_use() -> None:
    made = record_forward(lambda x: (x + 1.0).exp().cos(), otherwise=RECOMPUTE, add=HOST)
    assert made.node("add").slot is not None
    counts = made.bench.ledger.snapshot()
    assert counts.host.moved_out_bytes == ROW
    of_exp = made.handles[0]
    assert made.num_replayed(of_exp) == 1
    assert have_equal_bits(made.record.restore(of_exp), made.real[0])


@pytest.mark.parametrize("is_written", [True, False])
def test_a_root_that_code_wrote_to_unseen_is_kept_as_it_is_now(is_written: bool) -> None:
    """Its copy was made before, but in later forwards may be made after."""

    def function(x: Tensor) -> Tensor:
        root = x + 1.0
        made = root.exp()
        if is_written:
            root.detach().numpy()[:] = 3.0
        return made.cos()

    made = record_forward(function, otherwise=RECOMPUTE, is_checked=True, add=HOST)
    node = made.node("add")
    ((of_root, real),) = made.roots
    assert of_root is node and node.slot is not None
    wrong = made.record.check_roots(made.roots)
    assert made.roots == []
    if not is_written:
        assert wrong == [] and node.slot is not None
        return
    assert wrong == [node] and node.decision is KEEP and node.slot is None
    assert node.kept is real and set(real.tolist()) == {3.0}


def test_a_root_may_be_written_to_once_it_was_taken() -> None:
    """Design rule 1: the write waits for the copy, which is as late here as it can be."""

    def function(x: Tensor) -> Tensor:
        made = x.sin()
        first, second = (made * 2.0).sin(), (made + 1.0).cos()
        made.mul_(0.5)
        return first * second * made.cos()

    for decision in (HOST, KEEP):
        made = record_forward(function, otherwise=RECOMPUTE, sin=decision)
        for handle, real in zip(made.handles, made.real, strict=True):
            assert have_equal_bits(made.record.restore(handle), real)
        assert made.record.num_replayed_calls > 0


@pytest.mark.parametrize("num_rows", [2, 2048])
def test_a_table_that_is_written_to_before_backward_gives_its_old_value_or_an_error(
    num_rows: int,
) -> None:
    """Of a small one there is a copy; torch itself would allow the write to both."""
    table = torch.ones(num_rows, NUM)
    made = record_forward(lambda x: (x + table.mean(0)).sin())
    table.add_(1.0)
    if num_rows == 2:
        assert made.num_replayed(made.handles[0]) == 2
        assert have_equal_bits(made.record.restore(made.handles[0]), made.real[0])
    else:
        with pytest.raises(RuntimeError, match="shared was written to after autograd saved it"):
            made.record.restore(made.handles[0])


def test_a_call_with_two_outputs_is_replayed_once_for_both() -> None:
    def function(x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x.view(8, -1), dim=1)
        return (variance.exp() * mean.exp()).sum()

    made = record_forward(function)
    held = [made.record.holder_of(h).name for h in made.handles]
    assert held.count("block:exp") == 2 and held.count("block:exp#2") == 2
    assert "block:var_mean.0" not in held
    for handle in made.handles:
        made.record.restore(handle)
    assert made.record.num_replayed_calls == 3, "var_mean once, exp twice"


def test_every_order_of_restoring_gives_the_same_bits() -> None:
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]):
        made = record_forward(chain, sin=HOST)
        for _ in range(2):
            for index in order:
                assert have_equal_bits(made.record.restore(made.handles[index]), made.real[index])


def test_the_gradient_is_that_of_plain_autograd() -> None:
    start = torch.linspace(0.1, 1.0, NUM).requires_grad_()
    (wanted,) = torch.autograd.grad(chain(start).sum(), start)
    for decision in (KEEP, HOST, RECOMPUTE):
        made = record_forward(chain, otherwise=decision)
        made.output.sum().backward()
        edge: Any = made.output.grad_fn
        while edge.next_functions:
            edge = edge.next_functions[0][0]
        assert torch.equal(edge.variable.grad, wanted)


# -- device copies ---------------------------------------------------------------------------------


def held_device_bytes(made: Recorded) -> int:
    return made.bench.ledger.snapshot().held_device_bytes


def test_a_fetched_storage_goes_with_its_last_use() -> None:
    made = record_forward(chain, otherwise=HOST)
    made.bench.traffic.settle_all()
    _, of_exp, for_cos, _ = made.handles
    assert held_device_bytes(made) == 0
    made.record.restore(for_cos)
    assert made.node("exp").num_left == 1
    held_before = held_device_bytes(made)
    made.record.restore(of_exp)
    assert held_before - held_device_bytes(made) == ROW


def test_device_copies_are_dropped_and_made_again() -> None:
    made = record_forward(chain, exp=HOST)
    made.bench.traffic.settle_all()
    of_exp, for_square = made.handles[1], made.handles[3]
    made.record.restore(of_exp)
    assert held_device_bytes(made) == ROW
    made.record.drop_device_copies()
    assert held_device_bytes(made) == 0
    assert made.node("exp").num_left == made.node("exp").num_uses == 3
    assert all(n.memo is None for n in made.record.nodes if n is not None)
    assert have_equal_bits(made.record.restore(for_square), made.real[3])
    assert made.bench.ledger.snapshot().num_fetches == 2


def test_room_of_what_nobody_needs_is_given_back_at_the_end_of_the_block() -> None:
    made = record_forward(chain, otherwise=HOST)
    counts = made.bench.ledger.snapshot()
    assert counts.num_evictions == 3, "the input, exp and cos"
    assert counts.host.held_bytes == 3 * ROW
    assert made.bench.tiers.held_bytes(HOST) == 3 * ROW, "not sin, nor the block's output"


def test_without_room_what_was_to_be_evicted_is_kept() -> None:
    made = record_forward(chain, otherwise=HOST, bench=Bench(num_host_rows=2))
    counts = made.bench.ledger.snapshot()
    assert counts.num_evictions == 1, "the input; sin took the other row, and needed none"
    assert made.node("exp").kept is not None
    for handle, real in zip(made.handles, made.real, strict=True):
        assert have_equal_bits(made.record.restore(handle), real)


# -- pieces ----------------------------------------------------------------------------------------


def slices(*bounds: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """Return a function that saves these parts of one storage of a row, and nothing else."""

    def function(x: Tensor) -> Tensor:
        made = x.sin()
        return torch.stack([made[a:b].square().sum() for a, b in bounds]).sum()

    return function


def moved_bytes(made: Recorded) -> tuple[int, int]:
    counts = made.bench.ledger.snapshot()
    return counts.num_evictions, counts.host.moved_out_bytes


@pytest.mark.parametrize(
    ("bounds", "num_evictions", "num_floats"),
    [
        ([(3, 11)], 1, 8),
        ([(3, 11), (3, 11)], 1, 8),
        ([(3, 11), (64, 65), (100, 128)], 3, 8 + 1 + 28),
        ([(0, 40), (10, 30)], 2, 40 + 20),
        ([(0, 40), (20, 60)], 1, NUM),
        ([(0, 64)], 1, NUM),
        ([(0, 20), (0, NUM), (30, 50)], 1, NUM),
        ([(5, 5), (7, 9)], 1, 2),
    ],
)
def test_small_slices_move_alone_and_large_ones_with_their_storage(
    bounds: list[tuple[int, int]], num_evictions: int, num_floats: int
) -> None:
    """Design rule 3: a storage moves once, or less than once, never more often."""
    made = record_forward(slices(*bounds), otherwise=KEEP, sin=HOST)
    assert moved_bytes(made) == (num_evictions, 4 * num_floats)
    made.bench.traffic.settle_all()
    assert made.bench.tiers.held_bytes(HOST) == 4 * num_floats
    for _ in range(2):
        assert all(map(have_equal_bits, map(made.record.restore, made.handles), made.real))
    made.handles.clear()
    del made.record, made.output
    made.bench.assert_nothing_is_left()


def test_a_storage_that_replays_start_from_moves_whole_though_only_slices_are_saved() -> None:
    made = record_forward(slices((3, 11)), otherwise=RECOMPUTE, sin=HOST)
    assert made.node("sin").is_root
    assert moved_bytes(made) == (1, ROW)
    for handle, real in zip(made.handles, made.real, strict=True):
        assert have_equal_bits(made.record.restore(handle), real)


def test_a_slice_is_used_up_like_any_other_storage() -> None:
    made = record_forward(slices((3, 11), (3, 11)), otherwise=KEEP, sin=HOST)
    made.bench.traffic.settle_all()
    first, second = (h for h in made.handles if h.layout.offset == 3)
    assert made.record.holder_of(first) is made.record.holder_of(second)
    made.record.restore(first)
    assert held_device_bytes(made) == 32
    made.record.restore(second)
    assert held_device_bytes(made) == 0


def test_a_tier_too_full_for_every_slice_takes_the_whole_storage_once() -> None:
    bench = Bench(num_host_rows=1)
    made = record_forward(slices((0, 8), (50, 58)), otherwise=KEEP, bench=bench, sin=HOST)
    assert moved_bytes(made) == (1, ROW), "two slices would take a unit of the arena each"
    assert bench.tiers.held_bytes(HOST) == ROW
    for handle, real in zip(made.handles, made.real, strict=True):
        assert have_equal_bits(made.record.restore(handle), real)


def test_a_storage_that_was_written_to_after_a_slice_was_saved_raises() -> None:
    def function(x: Tensor) -> Tensor:
        made = x.sin()
        part = made[3:11].square().sum()
        made.mul_(2.0)
        return part + made.sum()

    for decision in (HOST, KEEP):
        made = record_forward(function, otherwise=KEEP, sin=decision)
        wanted = MUTATED.format(name="block:sin", saved=0, now=1)
        with pytest.raises(RuntimeError) as error:
            made.output.backward()
        assert str(error.value) == wanted
        assert moved_bytes(made) == (0, 0)
        assert made.bench.tiers.held_bytes(HOST) == 0


def saved_parts(written: int) -> Callable[[Tensor], Tensor]:
    """Save three parts of a storage that count their versions apart, and write to one of them."""

    def function(x: Tensor) -> Tensor:
        parts = x.sin().unsafe_split(NUM // 8, 0)[:3]
        total = torch.stack([part * part for part in parts]).sum()
        with torch.no_grad():
            parts[written].add_(1.0)
        return total

    return function


@pytest.mark.parametrize("written", range(3))
def test_of_parts_that_are_saved_only_the_one_that_was_written_to_raises(written: int) -> None:
    """As in torch; the storage is not evicted, whichever it was."""
    for decision in (HOST, KEEP):
        made = record_forward(saved_parts(written), otherwise=KEEP, sin=decision)
        # The first is the input of `sin`; each part is saved twice, for both sides of a product.
        for number, handle in enumerate(made.handles):
            if (number - 1) // 2 == written:
                with pytest.raises(RuntimeError) as error:
                    made.record.restore(handle)
                assert str(error.value) == MUTATED.format(name="block:sin", saved=0, now=1)
            else:
                assert have_equal_bits(made.record.restore(handle), made.real[number])
        assert moved_bytes(made) == (0, 0)
        assert made.bench.tiers.held_bytes(HOST) == 0


def test_parts_of_the_same_version_are_not_taken_for_one_another() -> None:
    """The slot of the first part has other bytes of the second one than are saved later."""

    def function(x: Tensor) -> Tensor:
        first, second = x.sin().unsafe_chunk(2, 0)
        return first.exp_().sum() + second.exp_().sum()

    made = record_forward(function, otherwise=HOST)
    made.bench.traffic.settle_all()
    assert [h.version for h in made.handles] == [0, 1, 1]
    for handle, real in zip(made.handles, made.real, strict=True):
        assert have_equal_bits(made.record.restore(handle), real)


def test_what_is_written_to_without_a_new_version_is_evicted_anew() -> None:
    def function(x: Tensor) -> Tensor:
        made = x.sin()
        first = made * made
        made.data.add_(1.0)  # the version of `made` stays
        return first + made * made

    made = record_forward(function, otherwise=HOST)
    made.bench.traffic.settle_all()
    names = [made.record.holder_of(h).name for h in made.handles]
    assert names == ["block:input", *["block:sin"] * 2, *["block:add"] * 2]
    assert {h.version for h in made.handles} == {0}
    for handle, real in zip(made.handles[3:], made.real[3:], strict=True):
        assert have_equal_bits(made.record.restore(handle), real)


def test_a_part_is_not_taken_for_what_another_block_saved_of_its_storage() -> None:
    """Between the blocks the other part is written to, which no version of this one tells."""
    bench = Bench()
    first, second = torch.linspace(0.1, 1.0, NUM).unsafe_chunk(2, 0)
    first.requires_grad_()
    made: list[Recorded] = []
    for version in range(2):
        made.append(
            record_forward(lambda x: x * x + x * second, otherwise=HOST, bench=bench, start=first)
        )
        assert [h.version for h in made[-1].handles] == [0, 0, version]
        bench.traffic.settle_all()
        value = second.clone()
        second.add_(1.0)
        assert have_equal_bits(made[-1].record.restore(made[-1].handles[2]), value)


def test_a_kept_storage_that_was_written_to_raises_what_torch_says() -> None:
    made = record_forward(chain, otherwise=KEEP)
    made.real[3].add_(1.0)
    made.record.restore(made.handles[1])
    with pytest.raises(RuntimeError, match="block:cos was written to after autograd saved it"):
        made.record.restore(made.handles[3])


# -- checks ----------------------------------------------------------------------------------------


def check(made: Recorded) -> list[str]:
    """Check as the runtime does, keep what is wrong instead, and return its names."""
    real = list(zip(made.handles, made.real, strict=True))
    wrong = made.record.check(real)
    assert real == [], "what was compared is let go"
    return [node.name for node in wrong]


@pytest.mark.parametrize("function", [chain, slices((3, 11), (100, 120))])
@pytest.mark.parametrize("decision", [KEEP, HOST, RECOMPUTE])
def test_a_check_finds_nothing_when_all_comes_back(
    function: Callable[[Tensor], Tensor], decision: Decision
) -> None:
    made = record_forward(function, otherwise=decision)
    assert check(made) == []
    assert held_device_bytes(made) == 0
    assert made.bench.device.violations == []


def test_a_check_brings_what_was_evicted_the_whole_way() -> None:
    made = record_forward(chain, otherwise=HOST)
    assert check(made) == []
    counts = made.bench.ledger.snapshot()
    assert counts.host.moved_in_bytes >= counts.host.moved_out_bytes == 3 * ROW
    assert counts.num_resurrections == 0


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (chain, ["block:input", "block:exp", "block:cos"]),
        (slices((3, 11), (100, 120)), ["block:sin[0]", "block:sin[1]"]),
    ],
)
def test_what_comes_back_different_is_found_and_kept_instead(
    function: Callable[[Tensor], Tensor], names: list[str]
) -> None:
    """Design rule 11: here the host tier loses its bytes."""
    otherwise = HOST if function is chain else KEEP
    made = record_forward(function, otherwise=otherwise, sin=HOST)
    made.bench.traffic.settle_all()
    made.bench.device.host.fill_(1)
    assert check(made) == names
    for _ in range(2):
        for handle, real in zip(made.handles, made.real, strict=True):
            assert have_equal_bits(made.record.restore(handle), real)
            assert made.record.restore(handle).stride() == real.stride()
    made.bench.traffic.bury()
    assert made.bench.tiers.held_bytes(HOST) == 0


def test_a_check_keeps_what_was_written_to_so_that_backward_raises() -> None:
    made = record_forward(chain, otherwise=HOST)
    made.bench.traffic.settle_all()
    made.real[3].add_(1.0)
    assert made.real[3]._version == 1
    assert check(made) == ["block:cos"]
    with pytest.raises(RuntimeError, match=r"block:cos was written to .* \(version 0, now 1\)"):
        made.record.restore(made.handles[3])


# -- lifetimes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("decision", [KEEP, HOST, RECOMPUTE])
def test_a_record_dies_with_the_graph_and_without_the_garbage_collector(
    decision: Decision,
) -> None:
    """Design rule 4."""
    made = record_forward(chain, otherwise=decision)
    bench, record = made.bench, weakref.ref(made.record)
    gc.disable()
    try:
        made.handles.clear()
        del made.record
        assert record() is not None, "the graph holds it"
        del made.output
        assert record() is None
    finally:
        gc.enable()
    bench.assert_nothing_is_left()


def test_a_record_lives_as_long_as_one_handle() -> None:
    """Design rule 4: no count of uses ends it."""
    made = record_forward(chain, otherwise=HOST)
    handle, real = made.handles[1], made.real[1]
    made.bench.traffic.settle_all()
    made.handles.clear()
    del made.record, made.output
    for _ in range(3):
        assert have_equal_bits(handle.record.restore(handle), real)
    assert Layout.of(handle.record.restore(handle)) == Layout.of(real)
