"""Measured workloads: what was measured of which moment, and that measuring changes no bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ebbtide.check import check_plan
from ebbtide.errors import RuntimeStateError
from ebbtide.machine import Machine
from ebbtide.memory.ledger import Ledger
from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import named_plan
from ebbtide.torch import attach, observe
from ebbtide.torch.blocks import find_blocks
from ebbtide.torch.devices.cpu import CpuMeter
from ebbtide.torch.devices.fake import FakeMeter
from ebbtide.torch.hooks import Hooks
from ebbtide.torch.identity import StorageRef, storage_key
from ebbtide.torch.ops import facts_of
from ebbtide.torch.runtime import Runtime
from ebbtide.workload import Block, OpKind, Outside, Workload
from tests.torch.cases import CASES, ODD_CASES
from tests.torch.models import Failing, Gated, Stack, features
from tests.torch.training import (
    Step,
    Trace,
    differences,
    feature_step,
    run_step,
    seeded,
    sgd,
    train,
)

NUM_BLOCKS = 4
TICK_NS = 10
MACHINE = Machine(
    name="any",
    device_bytes=2**40,
    host_bytes=2**40,
    out_bytes_per_s=10**9,
    in_bytes_per_s=10**9,
    both_bytes_per_s=10**9,
)


def stack(make_block: Callable[[], nn.Module] = Gated) -> nn.Module:
    return seeded(lambda: Stack(make_block, NUM_BLOCKS))


def observe_with(build: Callable[[], nn.Module], step: Step) -> tuple[Workload, Trace]:
    """Observe two steps as `train` runs them; returns what they left, too."""
    model = seeded(build)
    trace, optimizer = Trace(), sgd(model)
    numbers = iter(range(2))

    def one_step() -> None:
        run_step(model, step, next(numbers), trace, optimizer)

    return observe(model, one_step), trace


def local(block: Block, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.removeprefix(block.name) for name in names)


# -- structure -------------------------------------------------------------------------------------


MODELS = {
    name: {**CASES, **ODD_CASES}[name]
    for name in (
        "llama with grouped queries",
        "gpt2 with dropout",
        "two micro-batches",
        "a retained graph",
        "adapters on a frozen base",
        "autograd.grad",
        "second derivatives",
        "views of all kinds",
        "batch normalisation",
        "an unused branch",
        "an inner checkpoint",
        "an inner reentrant checkpoint",
        "float64 and complex",
        "autocast to bfloat16",
        "writes in place",
        "writes in place to the residual stream",
        "a sequential",
        "backward on another thread",
        "a part of backward",
        "looking at what is saved",
        "updates inside backward",
        "parameters of a class of their own",
    )
}


@pytest.mark.parametrize("name", MODELS)
def test_observing_changes_no_bit_and_times_every_block(name: str) -> None:
    case = MODELS[name]
    workload, trace = observe_with(case.build, case.step)
    assert differences(trace, train(seeded(case.build), case.step, num_steps=2)) == []
    assert workload.is_timed
    assert Workload.from_json(workload.to_json()) == workload
    assert all(block.forward_ns > 0 for block in workload.blocks)
    if name != "a part of backward":
        assert all(block.backward_ns > 0 for block in workload.blocks)


@pytest.mark.parametrize("name", ["llama with grouped queries", "gpt2 with dropout"])
def test_backward_asks_for_all_that_is_saved_and_nearly_in_reverse(name: str) -> None:
    workload, _ = observe_with(MODELS[name].build, MODELS[name].step)
    for block in workload.blocks:
        saved = [a.name for a in block.activations if a.is_saved]
        used = [use for event in block.backward for use in event.uses]
        assert set(used) == set(saved)
        places = [saved.index(name) for name in dict.fromkeys(used)]
        assert saved[0] in block.backward[-1].uses, "the input comes last"
        num_inverted = sum(a < b for i, a in enumerate(places) for b in places[i:])
        assert num_inverted < len(places), "of all pairs"
        assert all(event.uses for event in block.backward), "weights are no events of their own"


def test_equal_blocks_have_equal_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ebbtide"):
        workload, _ = observe_with(lambda: Stack(Gated, NUM_BLOCKS), feature_step)
    first, second, *others = workload.blocks
    for block in others:
        numbers = replace(second, name=block.name, activations=(), backward=())
        assert replace(block, activations=(), backward=()) == numbers
        assert [a.make_ns for a in block.activations] == [a.make_ns for a in second.activations]
        for event, alike in zip(block.backward, second.backward, strict=True):
            assert replace(event, uses=local(block, event.uses)) == replace(
                alike, uses=local(second, alike.uses)
            )
    # The first block's input wants no gradient: it is no activation there.
    assert len(first.activations) == len(second.activations) - 1
    found = [r.getMessage() for r in caplog.records if r.getMessage().startswith("measured")]
    assert found == ["measured 4 blocks of 2 classes: 1 like blocks.0, 3 like blocks.1"]


def test_a_block_of_two_kinds_is_not_taken_for_equal() -> None:
    class Mixed(Stack):
        def __init__(self) -> None:
            super().__init__(Gated, NUM_BLOCKS)
            block: Any = self.blocks[2]
            block.down = nn.Linear(64, 32, bias=False)

    workload, _ = observe_with(Mixed, feature_step)
    assert [len(b.activations) for b in workload.blocks] == [9, 10, 10, 10]
    assert workload.blocks[2].activations[8].op != workload.blocks[1].activations[8].op


# -- numbers ---------------------------------------------------------------------------------------


def measured(model: nn.Module, step: Step, meter: FakeMeter | CpuMeter) -> Runtime:
    """Train three steps, of which the second is measured; the plan runs in the third."""

    def make_plan(workload: Workload) -> tuple[Plan, None]:
        return named_plan("recompute", workload), None

    runtime = Runtime(model, find_blocks(model), make_plan, Ledger(), meter)
    hooks = Hooks(runtime)
    train(model, step, num_steps=3)
    hooks.close()
    runtime.close()
    return runtime


def test_times_are_those_between_the_marks() -> None:
    """The clock goes on by one tick with each mark, so that every span is known."""
    runtime = measured(stack(), feature_step, FakeMeter(tick_ns=TICK_NS))
    assert runtime.workload is not None
    block = runtime.workload.blocks[-1]
    made = {a.group: a.make_ns for a in block.activations if a.kind is not OpKind.INPUT}
    assert made == {
        f"blocks.3{op}": TICK_NS
        for op in (".norm:native_layer_norm", ".gate", ":silu", ".up", ":mul", ".down", ":add")
    }
    assert [a.make_ns for a in block.activations if a.kind is OpKind.INPUT] == [0]
    # Seven calls have a tick each, and there is one between any two, and at both ends.
    assert block.rest_ns == 8 * TICK_NS
    norm = ".norm:native_layer_norm"
    events = [(local(block, e.uses), e.compute_ns // TICK_NS) for e in block.backward]
    assert events == [
        ((":mul",), 2),  # and the weight, which is no event of its own
        ((".up", ":silu"), 2),
        ((f"{norm}.0",), 2),
        ((".gate",), 1),
        # What the norm asks for first is a parameter: it counts with what ran before.
        ((f"{norm}.0",), 3),
        ((":input", f"{norm}.1", f"{norm}.2"), 4),
    ]
    outside = runtime.workload.outside
    assert outside is not None
    assert (outside.turn_ns, outside.ends_ns) == (TICK_NS, TICK_NS)


def test_backward_after_the_first_block_is_outside() -> None:
    class Embedded(Stack):
        def __init__(self) -> None:
            super().__init__(Gated, NUM_BLOCKS)
            self.first = nn.Linear(32, 32)

        def forward(self, h_BTD: Tensor) -> Tensor:
            return super().forward(self.first(h_BTD))

    runtime = measured(seeded(Embedded), feature_step, FakeMeter(tick_ns=TICK_NS))
    assert runtime.workload is not None and runtime.workload.outside is not None
    assert runtime.workload.outside.ends_ns == 2 * TICK_NS
    assert runtime.workload.blocks[0].backward == tuple(
        replace(e, uses=tuple(u.replace("blocks.1", "blocks.0") for u in e.uses))
        for e in runtime.workload.blocks[1].backward
    )


def test_bytes_on_a_device_without_an_allocator_are_estimated() -> None:
    workload, _ = observe_with(lambda: Stack(Gated, NUM_BLOCKS), feature_step)
    model = stack()
    parameter_bytes = sum(p.numel() * 4 for p in model.parameters())
    output_bytes = 2 * 16 * 32 * 4
    assert workload.outside is not None
    assert workload.outside == Outside(
        resident_bytes=parameter_bytes,
        turn_bytes=3 * output_bytes,
        turn_ns=workload.outside.turn_ns,
        ends_bytes=0,
        ends_ns=workload.outside.ends_ns,
    )
    assert workload.gradient_bytes == parameter_bytes
    for block in workload.blocks:
        assert block.gradient_bytes == parameter_bytes // NUM_BLOCKS
        assert {e.held_bytes for e in block.backward} == {2 * 2 * output_bytes}
        assert block.workspace_bytes == 0


class Allocator(TorchDispatchMode):
    """Counts the bytes of all storages that operators made and that are alive."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageRef, int]] = {}
        self._peak_bytes = 0
        self.largest_bytes = 0
        """The most since it was last set; nobody else's reading of the peak ends it."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._add(tensor)

    def allocated_bytes(self) -> int:
        """Return the bytes that are alive now."""
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        return sum(num_bytes for _, num_bytes in self._alive.values())

    def take_peak_bytes(self) -> int:
        """Return the most since the last call."""
        now = self.allocated_bytes()
        peak, self._peak_bytes = max(now, self._peak_bytes), now
        return peak

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive.setdefault(storage_key(tensor), (StorageRef(storage), storage.nbytes()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not facts_of(func).is_view:
            self.allocated_bytes()  # so that a storage at the address of a dead one counts
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._add(leaf)
            total_bytes = sum(num_bytes for _, num_bytes in self._alive.values())
            self._peak_bytes = max(self._peak_bytes, total_bytes)
            self.largest_bytes = max(self.largest_bytes, total_bytes)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes of a step."""

    measured_bytes: int
    predicted_bytes: int


def peak_of_a_step(
    build: Callable[[], nn.Module], step: Step, plan_name: str, *, keeps_gradients: bool
) -> Peak:
    """Return the peak of the last of four steps, as measured and as `check_plan` adds it up."""

    def make_plan(workload: Workload) -> tuple[Plan, None]:
        return named_plan(plan_name, workload), None

    model = seeded(build)
    optimizer = torch.optim.AdamW(model.parameters())
    allocator = Allocator(model)
    meter = FakeMeter(
        allocated=allocator.allocated_bytes, take_peak=allocator.take_peak_bytes, tick_ns=1
    )
    runtime = Runtime(model, find_blocks(model), make_plan, Ledger(), meter)
    Hooks(runtime)
    peak_bytes = 0
    with allocator:
        for index in range(4):
            allocator.take_peak_bytes()
            step(model, index)
            optimizer.step()
            peak_bytes = allocator.take_peak_bytes()
            optimizer.zero_grad(set_to_none=not keeps_gradients)
    assert runtime.plan is not None and runtime.workload is not None
    report = check_plan(runtime.plan, runtime.workload, MACHINE)
    assert report.is_sound
    return Peak(measured_bytes=peak_bytes, predicted_bytes=report.peak_bytes)


@pytest.mark.parametrize("keeps_gradients", [True, False])
@pytest.mark.parametrize("plan_name", ["recompute", "keep"])
@pytest.mark.parametrize(
    "name",
    [
        "llama with grouped queries",
        "gpt2 with dropout",
        "views of all kinds",
        "query, key and value chunked",
        "a sequential",
    ],
)
def test_the_bytes_add_up_to_the_peak_of_a_step(
    name: str, plan_name: str, keeps_gradients: bool
) -> None:
    """From what was measured under frugal decisions, also for a plan that keeps everything."""
    case = CASES[name]
    peak = peak_of_a_step(case.build, case.step, plan_name, keeps_gradients=keeps_gradients)
    # What the block's own variables hold counts as workspace, and again where a plan keeps it.
    most = 1.0 if name.startswith("llama") and plan_name == "recompute" else 1.15
    assert peak.measured_bytes <= peak.predicted_bytes <= most * peak.measured_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapters on a frozen base", "autocast to bfloat16"])
def test_the_bytes_add_up_with_frozen_and_with_cast_weights(name: str) -> None:
    case = CASES[name]
    peak = peak_of_a_step(case.build, case.step, "recompute", keeps_gradients=True)
    assert peak.measured_bytes <= peak.predicted_bytes <= 1.15 * peak.measured_bytes


@pytest.mark.parametrize("plan_name", ["recompute", "keep"])
def test_gradients_that_come_one_by_one_make_no_peak_higher(plan_name: str) -> None:
    build, step = CASES["a sequential"].build, CASES["a sequential"].step
    before = peak_of_a_step(build, step, plan_name, keeps_gradients=True)
    none = peak_of_a_step(build, step, plan_name, keeps_gradients=False)
    assert none.measured_bytes < before.measured_bytes
    assert none.measured_bytes <= none.predicted_bytes < before.measured_bytes


def measured_once(model: nn.Module, step: Step) -> Workload:
    """Return the workload of the second step, with gradients set to None before each."""

    def call() -> None:
        model.zero_grad()
        step(model, 0)

    return observe(model, call)


def test_each_event_leaves_the_gradients_that_it_makes() -> None:
    model = stack()
    workload = measured_once(model, feature_step)
    block = workload.blocks[1]

    def size_of(name: str) -> int:
        module = model.get_submodule(f"blocks.1.{name}")
        return sum(p.numel() * 4 for p in module.parameters())

    # The gradient of a weight is made with the input that the weight was applied to.
    assert [(e.uses[0], e.gradient_bytes) for e in block.backward] == [
        ("blocks.1:mul", size_of("down")),
        ("blocks.1.up", 0),
        ("blocks.1.norm:native_layer_norm.0", size_of("up")),
        ("blocks.1.gate", 0),
        ("blocks.1.norm:native_layer_norm.0", size_of("gate")),
        ("blocks.1:input", size_of("norm")),
    ]
    assert workload.gradient_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert workload.outside is not None
    assert workload.outside.turn_gradient_bytes == workload.outside.ends_gradient_bytes == 0


def test_gradients_of_the_head_come_before_those_of_the_blocks_and_the_embeddings_after() -> None:
    class Ended(Stack):
        def __init__(self) -> None:
            super().__init__(Gated, NUM_BLOCKS)
            self.first = nn.Linear(32, 32, bias=False)
            self.head = nn.Linear(32, 8, bias=False)

        def forward(self, h_BTD: Tensor) -> Tensor:
            return self.head(super().forward(self.first(h_BTD)))

    workload = measured_once(seeded(Ended), feature_step)
    assert workload.outside is not None
    assert workload.outside.turn_gradient_bytes == 32 * 8 * 4
    assert workload.outside.ends_gradient_bytes == 32 * 32 * 4


def test_a_gradient_that_the_step_did_not_make_counts_in_all_of_backward() -> None:
    """An expert without a token may get one in another step."""

    class Idle(Stack):
        def __init__(self) -> None:
            super().__init__(Gated, NUM_BLOCKS)
            self.expert = nn.Linear(32, 64, bias=False)

    model = seeded(Idle)
    workload = measured_once(model, feature_step)
    assert workload.outside is not None
    assert workload.outside.turn_gradient_bytes == 32 * 64 * 4
    assert workload.gradient_bytes == sum(p.numel() * 4 for p in model.parameters())


def test_gradients_that_are_given_up_at_once_count_in_their_own_event_alone() -> None:
    """As where the optimizer takes its step in backward."""

    def give_up(parameter: Tensor) -> None:
        parameter.grad = None

    model = stack()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(give_up)
    workload = measured_once(model, feature_step)
    assert workload.gradient_bytes == 0
    assert workload.outside is not None
    assert workload.outside.resident_bytes == sum(p.numel() * 4 for p in model.parameters())


def test_a_hook_that_only_looks_on_hides_no_gradient_that_the_step_did_not_make() -> None:
    class Idle(Stack):
        def __init__(self) -> None:
            super().__init__(Gated, NUM_BLOCKS)
            self.expert = nn.Linear(32, 64, bias=False)

    model = seeded(Idle)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    workload = measured_once(model, feature_step)
    assert workload.outside is not None
    assert workload.outside.turn_gradient_bytes == 32 * 64 * 4
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]  # pyright: ignore
    assert all(len(table) == 1 for table in hooks), "ours are off again"


def test_a_turn_that_holds_much_makes_the_peak() -> None:
    """Whatever the blocks do."""

    def step(model: nn.Module, index: int) -> Tensor:
        output_BTD = model(features())
        loss = output_BTD.repeat(64, 1, 1).square().mean()
        loss.backward()
        return loss

    def build() -> nn.Module:
        return Stack(Gated, NUM_BLOCKS)

    peak = peak_of_a_step(build, step, "recompute", keeps_gradients=True)
    assert peak.measured_bytes == peak.predicted_bytes


# -- which step is measured ------------------------------------------------------------------------


def test_a_forward_that_fails_is_not_the_one_that_is_measured() -> None:
    model: Any = stack(Failing)
    meter = FakeMeter(tick_ns=TICK_NS)
    runtime = Runtime(model, find_blocks(model), _keep_all, Ledger(), meter)
    Hooks(runtime)
    feature_step(model, 0)
    model.blocks[2].error = ArithmeticError
    with pytest.raises(ArithmeticError):
        feature_step(model, 1)
    model.blocks[2].error = None
    runtime.finish_measuring()
    assert runtime.workload is None
    feature_step(model, 1)
    runtime.finish_measuring()
    assert [block.backward_ns > 0 for block in measured_blocks(runtime)] == [True] * NUM_BLOCKS


def test_a_forward_without_a_backward_is_not_the_one_that_is_measured() -> None:
    model = stack()
    runtime = Runtime(model, find_blocks(model), _keep_all, Ledger(), FakeMeter(tick_ns=TICK_NS))
    Hooks(runtime)
    feature_step(model, 0)
    for _ in range(2):
        model(features())
        with torch.no_grad():
            model(features())
        assert runtime.workload is None
    feature_step(model, 0)
    assert runtime.plan is None, "the next forward tells that the step is over"
    model(features())
    assert [block.backward_ns > 0 for block in measured_blocks(runtime)] == [True] * NUM_BLOCKS


def test_a_model_whose_own_forward_is_not_called_is_measured_all_the_same() -> None:
    class Headless(Stack):
        def loss(self) -> Tensor:
            h_BTD = features()
            for block in self.blocks:
                h_BTD = block(h_BTD)
            return h_BTD.square().mean()

    def step(model: Any, index: int) -> Tensor:
        loss = model.loss()
        loss.backward()
        return loss

    workload, _ = observe_with(lambda: Headless(Gated, NUM_BLOCKS), step)
    assert workload.is_timed


def measured_blocks(runtime: Runtime) -> tuple[Block, ...]:
    assert runtime.workload is not None and runtime.workload.is_timed
    return runtime.workload.blocks


def _keep_all(workload: Workload) -> tuple[Plan, None]:
    return named_plan("keep", workload), None


def test_of_several_micro_batches_the_first_of_the_second_step_is_measured() -> None:
    """There the optimizer's state is; the rest of the step runs under the frugal decisions."""
    calls: list[int] = []

    def step() -> None:
        for _ in range(3):
            feature_step(model, 0)
        calls.append(len(calls))

    model = stack()
    workload = observe(model, step)
    assert calls == [0, 1]
    assert workload.is_timed


def test_a_step_without_a_backward_is_refused() -> None:
    model = stack()

    def step() -> None:
        model(features())

    with pytest.raises(RuntimeStateError) as error:
        observe(model, step)
    assert str(error.value) == (
        "step() ran no forward and backward through all blocks of Stack, so there is nothing to "
        "measure. Let it run the model with gradients and call backward() on the loss."
    )
    with attach(model, "recompute") as tide:
        feature_step(model, 0)
        feature_step(model, 0)
        assert tide.plan is not None, "the model was left as it was"


def test_a_model_is_free_again_after_observing() -> None:
    model = stack()

    def step() -> None:
        feature_step(model, 0)

    first = observe(model, step)
    second = observe(model, step)
    assert first.fingerprint == second.fingerprint
    with attach(model, "recompute"), pytest.raises(RuntimeStateError, match="is attached already"):
        observe(model, step)


def test_what_was_measured_is_what_was_observed() -> None:
    """A plan made from one workload fits the other."""
    model = stack()

    def step() -> None:
        feature_step(model, 0)

    workload = observe(model, step)
    with attach(model, "recompute") as tide:
        feature_step(model, 0)
        feature_step(model, 0)
        assert tide.workload is not None
        assert tide.workload.fingerprint == workload.fingerprint
        named_plan("recompute", workload).check_fits(tide.workload)
        assert not tide.workload.is_timed
    decisions = named_plan("recompute", workload).decisions.values()
    assert set(decisions) == {Decision.KEEP, Decision.RECOMPUTE}
