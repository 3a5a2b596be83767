"""Compiled blocks with a budget: what is measured of them, and the bits that their steps give."""

# B batch, T tokens, D model width

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from ebbtide.block import Activation, Block, OpKind
from ebbtide.check import check_plan
from ebbtide.errors import ModelError
from ebbtide.machine import Machine
from ebbtide.memory.ledger import Ledger
from ebbtide.plan import Decision, Plan
from ebbtide.torch import attach
from ebbtide.torch.blocks import find_blocks
from ebbtide.torch.compiled import Stashed, StashingSet
from ebbtide.torch.devices.fake import FakeMeter
from ebbtide.torch.forward import Policy
from ebbtide.torch.fused import FusedRun, fused_block
from ebbtide.torch.internals import compiled_call_of
from ebbtide.torch.parameters import Parameters
from ebbtide.torch.record import Record
from ebbtide.torch.rerun import Rerun
from ebbtide.torch.stopwatch import Stopwatch
from ebbtide.workload import BackwardEvent
from tests.torch.models import WIDTH, Gated, Stack
from tests.torch.models import gpt2 as build_gpt2
from tests.torch.training import (
    Step,
    Trace,
    differences,
    feature_step,
    language_step,
    seeded,
    train,
    train_attached,
)

pytestmark = [
    # Dynamo itself looks at `.grad` of the inputs of a graph.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated"),
]

NUM_BLOCKS = 6
BATCH, NUM_TOKENS = 16, 64
NUM_STREAM_BYTES = BATCH * NUM_TOKENS * WIDTH * 4
NUM_STEPS = 7
"""Observed, compiled to be measured, measured, checked, and three that run freely."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def build() -> nn.Module:
    return Stack(Gated, NUM_BLOCKS)


def wide_step(model: nn.Module, index: int) -> Tensor:
    """With activations that are larger than gradients and parameters together."""
    torch.manual_seed(index)
    h_BTD = torch.randn(BATCH, NUM_TOKENS, WIDTH, requires_grad=True)
    loss = model(h_BTD).square().mean()
    loss.backward()
    return loss


def kept_compiled(
    make: Callable[[], nn.Module], step: Step, *, backend: str = "aot_eager"
) -> Trace:
    model = seeded(make)
    for block in find_blocks(model).values():
        block.compile(backend=backend)
    trace = train(model, step, num_steps=NUM_STEPS)
    torch.compiler.reset()
    counters.clear()
    return trace


def assert_compiled_freely(num_graphs: int) -> None:
    assert counters["graph_break"] == {}
    assert counters["recompiles"] == {}
    assert counters["stats"]["unique_graphs"] == num_graphs


# -- whole steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decide", "num_variants", "moves"),
    [
        ({"*": "DISK"}, 2, True),
        ({"*.gate": "RECOMPUTE", "*.up": "DISK"}, 3, True),
        ({"*.gate": "RECOMPUTE", "*.up": "RECOMPUTE"}, 2, False),
        ({"blocks.0.*": "RECOMPUTE", "blocks.[1-5].*": "KEEP"}, 2, False),
    ],
)
def test_a_budget_runs_what_its_plan_says_with_the_bits_of_compiled_blocks(
    decide: dict[str, str], num_variants: int, moves: bool, tmp_path: Path
) -> None:
    wanted = kept_compiled(build, wide_step)
    model = seeded(build)
    with attach(
        model,
        budget="1GiB",
        disk=f"{tmp_path}:200MiB",
        min_bytes=1,
        decide=decide,
        compile="aot_eager",
    ) as tide:
        trace = train_attached(tide, model, wide_step, num_steps=NUM_STEPS)
        plan = tide.plan
        assert plan is not None
        counts = tide.statistics()
        assert counts.moved_out_bytes == counts.moved_in_bytes == plan.disk_bytes
        assert bool(plan.disk_bytes) == moves
        assert counts.num_kept_not_understood == ()
    assert differences(trace, wanted) == []
    assert_compiled_freely(num_variants)


@pytest.mark.slow
def test_a_budget_gives_the_same_gradients_with_generated_code(tmp_path: Path) -> None:
    """In float32; in lower precision what is fused decides where it is rounded."""
    wanted = kept_compiled(build, wide_step, backend="inductor")
    model = seeded(build)
    with attach(
        model,
        budget="1GiB",
        disk=f"{tmp_path}:200MiB",
        min_bytes=1,
        decide={"*.gate": "RECOMPUTE", "*.up": "DISK"},
        compile=True,
    ) as tide:
        trace = train_attached(tide, model, wide_step, num_steps=NUM_STEPS)
        assert tide.plan is not None
        assert tide.statistics().moved_in_bytes == tide.plan.disk_bytes > 0
    assert differences(trace, wanted) == []
    assert_compiled_freely(3)


@pytest.mark.parametrize("num_streams", [14, 18, 28])
def test_a_tight_budget_moves_keeps_and_makes_again(
    num_streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mark takes the same time, and the disk as long for a stream as a block's backward."""

    def probe(*_: Any, **__: Any) -> Machine:
        return Machine(
            name="a test",
            device_bytes=2**40,
            host_bytes=0,
            out_bytes_per_s=0,
            in_bytes_per_s=0,
            both_bytes_per_s=0,
            disk_bytes=2**30,
            disk_write_bytes_per_s=NUM_STREAM_BYTES * 1000,
            disk_read_bytes_per_s=NUM_STREAM_BYTES * 1000,
        )

    def meter_of(device: torch.device) -> FakeMeter:
        del device
        return FakeMeter(tick_ns=1_000_000)

    monkeypatch.setattr(import_module("ebbtide.torch.budgets"), "probe_machine", probe)
    monkeypatch.setattr(import_module("ebbtide.torch.attach"), "meter_of", meter_of)
    wanted = kept_compiled(build, wide_step)
    model = seeded(build)
    budget = num_streams * NUM_STREAM_BYTES + 2 * sum(p.numel() * 4 for p in model.parameters())
    with attach(
        model, budget=budget, disk=f"{tmp_path}:200MiB", min_bytes=1, compile="aot_eager"
    ) as tide:
        trace = train_attached(tide, model, wide_step, num_steps=NUM_STEPS)
        plan, workload, counts = tide.plan, tide.workload, tide.statistics()
    assert plan is not None and workload is not None
    report = check_plan(plan, workload, probe())
    assert report.faults == ()
    assert report.peak_bytes == plan.peak_bytes <= budget
    kinds = set(plan.decisions.values())
    assert {Decision.KEEP, Decision.DISK} <= kinds
    assert (Decision.RECOMPUTE in kinds) == (num_streams < 28)
    assert counts.moved_out_bytes == counts.moved_in_bytes == plan.disk_bytes
    in_flight = max(plan.max_out_bytes_in_flight, plan.max_in_bytes_in_flight)
    assert counts.peak_held_device_bytes <= in_flight
    assert differences(trace, wanted) == []
    assert counters["graph_break"] == counters["recompiles"] == {}
    made_again = {
        frozenset(a.name[len(b.name) :] for a in b.activations if a.name in again(plan))
        for b in workload.blocks
    }
    # Each kind of backward is compiled once; what is measured, and the frugal one, are two more.
    all_again = frozenset({".gate", ".up"})
    assert counters["stats"]["unique_graphs"] == len(made_again | {frozenset(), all_again})


def again(plan: Plan) -> list[str]:
    return [name for name, d in plan.decisions.items() if d is Decision.RECOMPUTE]


def test_dropout_and_random_numbers_are_those_of_compiled_blocks(tmp_path: Path) -> None:
    """Timing single operators draws random numbers of its own."""
    wanted = kept_compiled(build_gpt2, language_step)
    model = seeded(build_gpt2)
    with attach(
        model, budget="1GiB", disk=f"{tmp_path}:200MiB", min_bytes=1, decide={"*c_fc": "RECOMPUTE"},
        compile="aot_eager",
    ) as tide:  # fmt: skip
        trace = train_attached(tide, model, language_step, num_steps=NUM_STEPS)
        assert tide.plan is not None and again(tide.plan)
    assert differences(trace, wanted) == []


def test_where_everything_fits_no_block_is_watched(tmp_path: Path) -> None:
    wanted = kept_compiled(build, wide_step)
    model = seeded(build)
    with attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", compile="aot_eager") as tide:
        trace = train_attached(tide, model, wide_step, num_steps=NUM_STEPS)
        assert tide.plan is not None and set(tide.plan.decisions.values()) == {Decision.KEEP}
        calls = [compiled_call_of(block) for block in find_blocks(model).values()]
        # The first one sees when a batch needs another plan.
        assert [type(call).__name__ for call in calls] == ["CompiledCall"] + ["BlockCall"] * 5
    assert all(compiled_call_of(block) is None for block in find_blocks(model).values())
    assert differences(trace, wanted) == []
    assert_compiled_freely(2)


@pytest.mark.parametrize("num_frozen", [1, 2])
def test_frozen_first_blocks_have_no_graph_and_cost_nothing(
    num_frozen: int, tmp_path: Path
) -> None:
    def build_frozen() -> nn.Module:
        model = build()
        blocks = [*model.get_submodule("blocks").children()]
        for block in blocks[:num_frozen]:
            block.requires_grad_(False)
        return model

    def step(model: nn.Module, index: int) -> Tensor:
        torch.manual_seed(index)
        loss = model(torch.randn(BATCH, NUM_TOKENS, WIDTH)).square().mean()
        loss.backward()
        return loss

    wanted = kept_compiled(build_frozen, step)
    model = seeded(build_frozen)
    with attach(
        model, budget="1GiB", disk=f"{tmp_path}:200MiB", min_bytes=1, decide={"*": "DISK"},
        compile="aot_eager",
    ) as tide:  # fmt: skip
        trace = train_attached(tide, model, step, num_steps=NUM_STEPS)
        assert tide.plan is not None and tide.workload is not None
        num_saved = [len(block.activations) for block in tide.workload.blocks]
        assert tide.statistics().moved_in_bytes == tide.plan.disk_bytes > 0
    assert num_saved[:num_frozen] == [0] * num_frozen and all(num_saved[num_frozen:])
    assert differences(trace, wanted) == []


# -- what is measured ------------------------------------------------------------------------------


def test_one_block_of_each_kind_saves_all_it_could_while_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[tuple[str, int]] = []
    pack = StashingSet.pack

    def note(self: StashingSet, tensor: Tensor) -> Any:
        held = pack(self, tensor)
        if isinstance(held, Stashed):
            packed.append((self.record.block, held.layout.num_bytes))
        return held

    monkeypatch.setattr(StashingSet, "pack", note)

    class Mixed(Stack):
        def __init__(self) -> None:
            super().__init__(Gated, NUM_BLOCKS)
            for block in [*self.blocks][::2]:
                assert isinstance(block, Gated)
                block.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)  # another kind

    model = seeded(Mixed)
    with attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", compile="aot_eager") as tide:
        train(model, wide_step, num_steps=4)
        assert tide.workload is not None
        kinds = {b.activations[1].make_ns for b in tide.workload.blocks}
        assert len(kinds) <= 2
    # In two steps: once to compile them, and once to measure them. Gate and up of each.
    wide_bytes = 2 * NUM_STREAM_BYTES
    one_step = [("blocks.4", wide_bytes)] * 2 + [("blocks.5", wide_bytes)] * 2
    assert packed == one_step * 2


def test_what_waits_in_host_memory_is_freed_after_the_step_that_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free it takes the CPU's time, which would be measured as the block's."""
    waiting: list[weakref.ref[Any]] = []
    num_waiting: list[int] = []
    pack, end_backward = StashingSet.pack, Stopwatch.end_backward

    def note(self: StashingSet, tensor: Tensor) -> Any:
        held = pack(self, tensor)
        if isinstance(held, Stashed):
            waiting.append(weakref.ref(held.stash))
        return held

    def count(self: Stopwatch) -> None:
        if self.is_running:
            num_waiting.append(len({id(stash()) for stash in waiting if stash() is not None}))
        end_backward(self)

    monkeypatch.setattr(StashingSet, "pack", note)
    monkeypatch.setattr(Stopwatch, "end_backward", count)
    model = seeded(build)
    with attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", compile="aot_eager"):
        train(model, wide_step, num_steps=4)
    # Gate and up of the last block.
    assert num_waiting == [2]
    assert not any(stash() for stash in waiting)


@pytest.mark.parametrize("rows", [(2, 2, 16, 16), (16, 16, 4, 4)])
def test_sizes_are_those_of_the_step_that_is_measured(
    rows: tuple[int, ...], tmp_path: Path
) -> None:
    """Also where the batch was another one before, and the code is compiled for any batch."""
    model = seeded(build)
    with attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", compile="aot_eager") as tide:
        for num in rows:
            h_BTD = torch.randn(num, NUM_TOKENS, WIDTH, requires_grad=True)
            model(h_BTD).square().mean().backward()
            model.zero_grad()
        assert tide.workload is not None
        # The third step is measured.
        stream_bytes = rows[2] * NUM_TOKENS * WIDTH * 4
        for block in tide.workload.blocks:
            sizes = [a.num_bytes for a in block.activations]
            assert sizes == [stream_bytes, 2 * stream_bytes, 2 * stream_bytes]


def test_every_price_of_a_compiled_block_is_measured(tmp_path: Path) -> None:
    model = seeded(build)
    with attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", compile="aot_eager") as tide:
        train(model, wide_step, num_steps=4)
        assert tide.workload is not None
        block = tide.workload.blocks[2]
    names = ["blocks.2:input", "blocks.2.gate", "blocks.2.up"]
    assert [a.name for a in block.activations] == names
    assert [a.num_bytes for a in block.activations] == [
        NUM_STREAM_BYTES,
        2 * NUM_STREAM_BYTES,
        2 * NUM_STREAM_BYTES,
    ]
    assert all(a.make_ns > 0 for a in block.activations if a.kind is OpKind.MATMUL)
    (event,) = block.backward
    assert event.uses == tuple(names)
    assert event.compute_ns > 0
    assert event.gradient_bytes == sum(p.numel() * 4 for p in Gated().parameters())


def test_what_cannot_be_timed_by_itself_is_as_dear_as_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Rerun, meter: object) -> int:
        del self, meter
        raise torch.OutOfMemoryError("no memory for a trial")

    monkeypatch.setattr(Rerun, "_time_ns", refuse)
    wanted = kept_compiled(build, wide_step)
    model = seeded(build)
    with attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", compile="aot_eager") as tide:
        trace = train(model, wide_step, num_steps=NUM_STEPS)
        assert tide.workload is not None
        block = tide.workload.blocks[1]
    prices = {a.make_ns for a in block.activations if a.is_replayable}
    assert len(prices) == 1 and 0 not in prices
    assert differences(trace, wanted) == []


class Narrow(nn.Module):
    """Multiplies by a product of numbers of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_ND = h_BTD.detach().flatten(0, 1).to(torch.float8_e4m3fn)
        weight_DD = self.linear.weight.detach().to(torch.float8_e4m3fn)
        one = torch.ones((), device=h_BTD.device)
        product: Any = torch._scaled_mm  # pyright: ignore[reportPrivateUsage]
        y_ND = product(x_ND, weight_DD.t(), one, one, out_dtype=torch.float32)
        return h_BTD + self.linear(h_BTD) * y_ND.view_as(h_BTD)


def test_products_of_8_bits_are_measured_too(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(Narrow))
    with attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", compile="aot_eager") as tide:
        train(model, wide_step, num_steps=4)
        assert tide.plan is not None and tide.workload is not None
        (product,) = (a for a in tide.workload.blocks[1].activations if a.op == "_scaled_mm")
        assert product.make_ns > 0


def stashing() -> StashingSet:
    ledger = Ledger()
    return StashingSet(
        Record("block", None),
        Policy(None, None, ledger, set()),
        device=torch.device("cpu"),
        parameters=Parameters(),
        inputs=frozenset(),
        given=frozenset(),
        is_checked=False,
    )


def restored(packed: Any) -> Tensor:
    assert isinstance(packed, Stashed)
    return packed.stash.restore(packed.layout)


def test_what_waits_in_host_memory_is_never_taken_for_another_storage() -> None:
    """Design rule 3: an address may be another storage's by then."""
    taken = stashing()
    packed: list[Any] = []
    for number in range(200):
        tensor = torch.full((16,), float(number))
        packed.append(taken.pack(tensor))
        del tensor
    assert [restored(each)[0].item() for each in packed] == [*range(200)]


def test_a_storage_that_is_saved_again_after_a_write_waits_twice() -> None:
    taken, tensor = stashing(), torch.zeros(4, 4)
    before = taken.pack(tensor)
    tensor += 1
    after, view = taken.pack(tensor), taken.pack(tensor.t()[1:])
    assert torch.equal(restored(before), torch.zeros(4, 4))
    assert torch.equal(restored(after), torch.ones(4, 4))
    assert restored(view).stride() == (1, 4)
    # A graph that is retained asks again.
    assert torch.equal(restored(before), torch.zeros(4, 4))
    assert taken.saved_bytes == {"": 64}


class Broken(Gated):
    """A block in two graphs."""

    def forward(self, h_BTD: Tensor) -> Tensor:
        h_BTD = super().forward(h_BTD)
        torch._dynamo.graph_break()  # pyright: ignore[reportPrivateUsage]
        return super().forward(h_BTD)


def test_a_block_in_two_graphs_is_refused_and_trains_on(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(Broken))
    attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", compile="aot_eager")
    feature_step(model, 0)
    with pytest.raises(ModelError, match=r"blocks\.0 compiles into 2 graphs, and a budget needs"):
        feature_step(model, 1)
    assert all(compiled_call_of(block) is None for block in find_blocks(model).values())
    model.zero_grad()
    plain = seeded(lambda: Stack(Broken))
    for either in (model, plain):
        torch.manual_seed(2)
        feature_step(either, 2)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert torch.equal(own.grad, other.grad)


# -- from numbers to a block -----------------------------------------------------------------------


def made(name: str, num_bytes: int, *inputs: str, group: str = "") -> Activation:
    return Activation(
        name=name,
        op="aten.mm",
        kind=OpKind.MATMUL if inputs else OpKind.INPUT,
        num_bytes=num_bytes,
        inputs=inputs,
        is_saved=True,
        is_replayable=bool(inputs),
        group=group or name,
    )


BLOCK = Block(
    name="b",
    class_name="Layer",
    activations=(
        made("x", 10),
        made("y", 30, "x"),
        made("out", 20, "y", group="call"),
        made("lse", 5, "y", group="call"),
    ),
)
FULL = FusedRun(
    is_full=True,
    forward_ns=999,
    backward_ns=200,
    held_bytes=75,
    workspace_bytes=3,
    gradient_bytes=8,
)
LEAST = replace(
    FULL, is_full=False, forward_ns=100, backward_ns=260, held_bytes=60, workspace_bytes=7
)
CALL_NS = {"y": 20, "call": 30}


def test_what_a_full_backward_takes_less_is_what_making_again_costs() -> None:
    block = fused_block(BLOCK, (LEAST, LEAST, FULL), CALL_NS)
    # 60 ns for what takes 50 alone.
    assert [a.make_ns for a in block.activations] == [0, 24, 36, 36]
    assert block.rest_ns == 100 - 60
    assert block.backward == (
        BackwardEvent(
            uses=("x", "y", "out", "lse"), compute_ns=200, held_bytes=75 - 55, gradient_bytes=8
        ),
    )
    assert (block.workspace_bytes, block.is_fused) == (7, True)


def test_chance_does_not_make_it_free_or_dear() -> None:
    slow = replace(LEAST, backward_ns=100_000)
    assert [a.make_ns for a in fused_block(BLOCK, (slow, FULL), CALL_NS).activations] == [
        *(0, 40, 60, 60)
    ]
    fast = replace(LEAST, backward_ns=10)
    assert [a.make_ns for a in fused_block(BLOCK, (fast, FULL), CALL_NS).activations] == [
        *(0, 10, 15, 15)
    ]


def test_without_a_full_run_the_calls_are_taken_at_their_own_times() -> None:
    block = fused_block(BLOCK, (LEAST,), CALL_NS)
    assert [a.make_ns for a in block.activations] == [0, 20, 30, 30]
    assert block.backward[0].compute_ns == 260 - 50
    assert block.backward[0].held_bytes == 60 - 55


def test_without_a_least_run_what_is_measured_is_the_full_one() -> None:
    block = fused_block(BLOCK, (FULL,), CALL_NS)
    assert [a.make_ns for a in block.activations] == [0, 20, 30, 30]
    assert (block.backward[0].compute_ns, block.rest_ns) == (200, 999 - 50)


def test_a_call_that_cannot_be_timed_is_as_dear_as_the_forward() -> None:
    block = fused_block(BLOCK, (FULL, replace(LEAST, backward_ns=330)), {"y": 20})
    assert [a.make_ns for a in block.activations] == [
        0,
        *(int(n * 130 / 120) for n in (20, 100, 100)),
    ]


def test_memory_is_never_less_than_nothing() -> None:
    low = replace(FULL, held_bytes=1, workspace_bytes=-40)
    block = fused_block(BLOCK, (low,), CALL_NS)
    assert (block.backward[0].held_bytes, block.workspace_bytes) == (0, 0)
