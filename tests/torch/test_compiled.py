"""Blocks that the user compiled: the same bits, the same compilations, and the bytes that moved."""

# B batch, T tokens, D model width

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.nn import functional

from ebbtide.errors import ModelError, PlanError
from ebbtide.torch import attach
from ebbtide.torch.blocks import find_blocks
from ebbtide.torch.devices.fake import Schedule
from ebbtide.torch.internals import compiled_call_of
from tests.torch.fakes import FakeTide, offload_everything, planned
from tests.torch.models import BATCH, NUM_BLOCKS, NUM_TOKENS, WIDTH, Gated, Stack, features
from tests.torch.training import Trace as Left
from tests.torch.training import (
    attach_here,
    differences,
    feature_step,
    run_step,
    seeded,
    sgd,
    train,
    train_attached,
)

# dynamo itself looks at `.grad` of the inputs of a graph.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated"),
]

SCHEDULES: tuple[Schedule, ...] = ("late", "eager", "random")

NUM_STREAM_BYTES = BATCH * NUM_TOKENS * WIDTH * 4
NUM_STATISTIC_BYTES = BATCH * NUM_TOKENS * 4
NUM_SAVED_BYTES = 2 * NUM_STATISTIC_BYTES + NUM_STREAM_BYTES + 3 * 2 * NUM_STREAM_BYTES
"""Of a `Gated` block beside its input: the norm's mean, deviation and result, gate, up, product."""
NUM_PLANNED_BYTES = NUM_BLOCKS * NUM_SAVED_BYTES + (NUM_BLOCKS - 1) * NUM_STREAM_BYTES
"""The first block's input is the user's, who asks no gradient of it: it stays."""

Compile = Callable[..., nn.Module]


def compile_in_place(model: nn.Module, **options: Any) -> nn.Module:
    """Compile each block with `module.compile`."""
    for block in find_blocks(model).values():
        block.compile(**options)
    return model


def wrap_blocks(model: nn.Module, **options: Any) -> nn.Module:
    """Put `torch.compile(block)` in place of each block."""
    assert isinstance(model, Stack)
    for index, block in enumerate(model.blocks):
        wrapped: Any = torch.compile(block, **options)
        model.blocks[index] = wrapped
    return model


WAYS = (compile_in_place, wrap_blocks)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what other tests compiled, so that counters count from nothing."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled_stack(way: Compile = compile_in_place, *, backend: str = "aot_eager") -> nn.Module:
    return way(seeded(lambda: Stack(Gated)), backend=backend)


def compilations() -> dict[str, dict[str, int]]:
    """Return how often the compiler ran and broke off, since this was asked last."""
    names = ("frames", "stats", "graph_break", "recompiles", "aot_autograd")
    found = {name: {k: v for k, v in counters[name].items() if "cache" not in k} for name in names}
    counters.clear()
    torch.compiler.reset()
    return found


@pytest.mark.parametrize("plan", ["offload", "offload-last:2", "offload-last:3"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_and_compilations_are_those_without_ebbtide(
    way: Compile, plan: str, tmp_path: Path
) -> None:
    wanted = train(compiled_stack(way), feature_step)
    alone = compilations()
    assert alone["stats"]["unique_graphs"] == 2  # the first block's input needs no gradient
    assert alone["graph_break"] == {}
    model = compiled_stack(way)
    with attach_here(model, plan, tmp_path, min_bytes=1) as tide:
        trace = train_attached(tide, model, feature_step)
        counts = tide.statistics()
        num_blocks = 3 if plan == "offload-last:3" else 2
        num_inputs = 2 if plan.startswith("offload-last") else 1
        moved_bytes = num_blocks * NUM_SAVED_BYTES + num_inputs * NUM_STREAM_BYTES
        assert tide.plan is not None and tide.plan.disk_bytes == moved_bytes
        assert counts.moved_out_bytes == counts.moved_in_bytes == moved_bytes
        assert counts.num_kept_not_understood == ()
        assert counts.num_recomputed_ops == 0
    assert differences(trace, wanted) == []
    assert compilations() == alone


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_same_with_generated_code(way: Compile, tmp_path: Path) -> None:
    wanted = train(compiled_stack(way, backend="inductor"), feature_step)
    alone = compilations()
    model = compiled_stack(way, backend="inductor")
    with attach_here(model, "offload-last:2", tmp_path, min_bytes=1) as tide:
        trace = train_attached(tide, model, feature_step)
        assert tide.plan is not None and tide.plan.disk_bytes > 2 * NUM_STREAM_BYTES
        assert tide.statistics().moved_out_bytes == tide.plan.disk_bytes
    assert differences(trace, wanted) == []
    assert compilations() == alone


@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved_is_named_and_described(way: Compile, tmp_path: Path) -> None:
    model = compiled_stack(way)
    with attach_here(model, "offload", tmp_path) as tide:
        train(model, feature_step)
        assert tide.workload is not None
        block = tide.workload.blocks[1]
        assert block.name == "blocks.1"
        assert block.class_name == "Gated"
        assert {a.name: a.num_bytes for a in block.activations} == {
            "blocks.1:input": NUM_STREAM_BYTES,
            "blocks.1:saved.1": NUM_STATISTIC_BYTES,
            "blocks.1:saved.2": NUM_STATISTIC_BYTES,
            "blocks.1:saved.3": NUM_STREAM_BYTES,
            "blocks.1:saved.4": 2 * NUM_STREAM_BYTES,
            "blocks.1:saved.5": 2 * NUM_STREAM_BYTES,
            "blocks.1:saved.6": 2 * NUM_STREAM_BYTES,
        }
        assert not any(a.is_replayable for a in block.activations)
        assert tide.workload.num_bytes_saved == NUM_PLANNED_BYTES


def test_without_a_plan_what_is_saved_is_evicted(tmp_path: Path) -> None:
    model = compiled_stack()
    with attach(model, disk=f"{tmp_path}:200MiB") as tide:
        train(model, feature_step)
        assert tide.plan is not None and tide.plan.name == "offload"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_copies_may_end_at_any_time(way: Compile, schedule: Schedule) -> None:
    wanted = train(compiled_stack(way), feature_step)
    model = compiled_stack(way)
    with FakeTide(model, planned("offload-last:3"), schedule=schedule, seed=1) as tide:
        assert differences(train(model, feature_step), wanted) == []
        counts = tide.ledger.snapshot()
        assert counts.moved_out_bytes >= 2 * tide.plan.host_bytes > 0
        tide.assert_nothing_is_left()
        tide.assert_bounds_were_kept()


@pytest.mark.parametrize("way", WAYS)
def test_a_dropped_graph_leaves_nothing(way: Compile) -> None:
    model = compiled_stack(way)
    with FakeTide(model, offload_everything) as tide:
        train(model, feature_step)
        h_BTD: Tensor | None = model(features())
        assert tide.held_host_bytes >= NUM_BLOCKS * NUM_STREAM_BYTES
        del h_BTD
        tide.assert_nothing_is_left()


def two_forwards_first(model: nn.Module, index: int) -> Tensor:
    del index
    losses = [model(features()).square().mean() for _ in range(2)]
    for loss in losses:
        loss.backward()
    return losses[0] + losses[1]


def retained(model: nn.Module, index: int) -> Tensor:
    del index
    loss = model(features()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def with_evaluation(model: nn.Module, index: int) -> Tensor:
    loss = feature_step(model, index)
    with torch.no_grad():
        return loss + model(features()).sum()


def unused_branch(model: nn.Module, index: int) -> Tensor:
    h_BTD = features()
    for block in find_blocks(model).values():
        if index > 1:
            block(h_BTD)
        h_BTD = block(h_BTD)
    loss = h_BTD.square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    "step", [two_forwards_first, retained, with_evaluation, unused_branch], ids=lambda s: s.__name__
)
@pytest.mark.parametrize("way", WAYS)
def test_odd_steps_have_the_same_gradients(
    way: Compile, step: Callable[[nn.Module, int], Tensor]
) -> None:
    with functorch_config.patch(donated_buffer=False):  # or torch refuses to retain
        wanted = train(compiled_stack(way), step)
        alone = compilations()
        model = compiled_stack(way)
        with FakeTide(model, offload_everything) as tide:
            assert differences(train(model, step), wanted) == []
            assert tide.ledger.snapshot().moved_in_bytes > 0
            tide.assert_nothing_is_left()
        assert compilations() == alone


def test_a_retained_graph_fetches_again() -> None:
    with functorch_config.patch(donated_buffer=False):
        model = compiled_stack()
        with FakeTide(model, offload_everything) as tide:
            train(model, feature_step)
            loss = model(features()).square().mean()
            before = tide.ledger.snapshot().moved_in_bytes
            loss.backward(retain_graph=True)
            once = tide.ledger.snapshot().moved_in_bytes - before
            loss.backward()
            twice = tide.ledger.snapshot().moved_in_bytes - before
            assert (once, twice) == (tide.plan.host_bytes, 2 * tide.plan.host_bytes)


def test_torch_still_refuses_to_retain_what_its_backward_overwrites() -> None:
    model = compiled_stack()
    with FakeTide(model, offload_everything):
        train(model, feature_step)
        loss = model(features()).square().mean()
        with pytest.raises(RuntimeError, match="donated buffers"):
            loss.backward(retain_graph=True)


class Failing(Gated):
    """Fails after its forward when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.error: type[BaseException] | None = None
        self.fail: Any = torch.compiler.disable(self.raise_error)

    def forward(self, h_BTD: Tensor) -> Tensor:
        h_BTD = super().forward(h_BTD)
        self.fail()
        return h_BTD

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error("stop")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_fails_leaves_nothing(way: Compile, error: type[BaseException]) -> None:
    wanted = train(way(seeded(lambda: Stack(Failing)), backend="aot_eager"), feature_step)
    blocks: list[Any] = []

    def step(model: nn.Module, index: int) -> Tensor:
        if index == 2:
            state = torch.get_rng_state()
            blocks[1].error = error
            with contextlib.suppress(error):
                model(features())
            blocks[1].error = None
            torch.set_rng_state(state)
        return feature_step(model, index)

    model = seeded(lambda: Stack(Failing))
    blocks += find_blocks(model).values()
    way(model, backend="aot_eager")
    with FakeTide(model, offload_everything) as tide:
        assert differences(train(model, step), wanted) == []
        assert sys.exception() is None
        tide.assert_nothing_is_left()


@pytest.mark.parametrize("way", WAYS)
def test_a_write_to_what_was_saved_raises_as_torch_does(way: Compile) -> None:
    model = compiled_stack(way)

    first, second = list(find_blocks(model).values())[:2]

    def write_after() -> None:
        h_BTD = features().requires_grad_()
        middle_BTD = first(h_BTD * 2)
        loss = second(middle_BTD).square().mean()
        with torch.no_grad():
            middle_BTD.mul_(2)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        write_after()
    for plan in ("offload-last:2", "offload-last:1"):  # evicted, and kept
        with FakeTide(model, planned(plan)):
            train(model, feature_step)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                write_after()


def test_a_write_after_the_bytes_have_left_does_no_harm() -> None:
    model = compiled_stack()
    last = list(find_blocks(model).values())[-1]

    def gradient(*, is_written: bool) -> Tensor:
        h_BTD = features().requires_grad_()
        middle_BTD = h_BTD * 2
        loss = last(middle_BTD).square().mean()  # the copies are fenced as the last block ends
        if is_written:
            with torch.no_grad():
                middle_BTD.mul_(2)
        loss.backward()
        assert h_BTD.grad is not None
        return h_BTD.grad

    with FakeTide(model, offload_everything):
        train(model, feature_step)
        state = torch.get_rng_state()
        wanted = gradient(is_written=False)
        torch.set_rng_state(state)
        assert torch.equal(gradient(is_written=True), wanted)


def calls_of(model: nn.Module) -> list[Any]:
    return [compiled_call_of(block) for block in find_blocks(model).values()]


def hooks_of(model: nn.Module) -> list[int]:
    return [
        len(hooks)
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks")
        for hooks in (vars(module)[name],)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_close_puts_back_what_was_there(way: Compile, tmp_path: Path) -> None:
    model = compiled_stack(way)
    calls, hooks = calls_of(model), hooks_of(model)
    tide = attach_here(model, "offload", tmp_path)
    assert (calls_of(model), hooks_of(model)) != (calls, hooks)
    train(model, feature_step)
    tide.close()
    assert all(now is before for now, before in zip(calls_of(model), calls, strict=True))
    assert hooks_of(model) == hooks
    wanted = train(compiled_stack(way), feature_step, num_steps=8)
    assert differences(train(model, feature_step, first=4), _from(wanted, 4)) == []


def _from(trace: Left, first: int) -> Left:
    tensors = {n: t for n, t in trace.tensors.items() if int(n.partition(":")[0]) >= first}
    return Left(tensors=tensors)


def test_what_the_user_compiles_anew_in_between_stays(tmp_path: Path) -> None:
    model = compiled_stack()
    with attach_here(model, "offload", tmp_path):
        block = find_blocks(model)["blocks.1"]
        block.compile(backend="eager")
        theirs = compiled_call_of(block)
    assert compiled_call_of(block) is theirs


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_that_keeps_all_installs_nothing(way: Compile) -> None:
    model = compiled_stack(way)
    calls, hooks = calls_of(model), hooks_of(model)
    with attach(model, "keep"):
        assert all(now is before for now, before in zip(calls_of(model), calls, strict=True))
        assert hooks_of(model) == hooks


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_not_attached(copied: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    model = compiled_stack()
    with attach_here(model, "offload", tmp_path) as tide:
        train(model, feature_step)
        other = copied(model)
        assert calls_of(other) == [None] * NUM_BLOCKS  # torch itself drops the compiled call
        tide.reset_statistics()
        trace = train(other, feature_step)
        assert tide.statistics().moved_out_bytes == 0
    plain = seeded(lambda: Stack(Gated))
    plain.load_state_dict(model.state_dict())
    assert differences(trace, train(plain, feature_step)) == []


def test_a_copy_of_wrapped_blocks_is_not_attached(tmp_path: Path) -> None:
    model = compiled_stack(wrap_blocks)
    with attach_here(model, "offload", tmp_path) as tide:
        train(model, feature_step)
        other = copy.deepcopy(model)
        tide.reset_statistics()
        trace = train(other, feature_step)
        assert tide.statistics().moved_out_bytes == 0
    plain = compiled_stack(wrap_blocks)
    plain.load_state_dict(model.state_dict())
    assert differences(trace, train(plain, feature_step)) == []


class Masked(nn.Module):
    """A block that is given a mask and keeps a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale: Tensor
        self.register_buffer("scale", torch.rand(4 * NUM_TOKENS, WIDTH)[:NUM_TOKENS])

    def forward(self, h_BTD: Tensor, mask_BTD: Tensor) -> Tensor:
        return h_BTD + functional.gelu(self.linear(h_BTD) * mask_BTD) * self.scale


class MaskedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(NUM_BLOCKS))

    def forward(self, h_BTD: Tensor) -> Tensor:
        mask_BTD = (h_BTD > 0).float()
        for block in self.blocks:
            h_BTD = block(h_BTD, mask_BTD)
        return h_BTD


def test_parameters_buffers_and_masks_never_move() -> None:
    wanted = train(compile_in_place(seeded(MaskedStack), backend="aot_eager"), feature_step)
    model = compile_in_place(seeded(MaskedStack), backend="aot_eager")
    with FakeTide(model, offload_everything) as tide:
        assert differences(train(model, feature_step), wanted) == []
        assert tide.runtime.workload is not None
        block = tide.runtime.workload.blocks[1]
        # The input and the product: weight, buffer and mask are saved too, and are not there.
        assert [(a.name, a.num_bytes) for a in block.activations] == [
            ("blocks.1:input", NUM_STREAM_BYTES),
            ("blocks.1:saved.1", NUM_STREAM_BYTES),
        ]


def test_blocks_of_both_kinds_run_side_by_side() -> None:
    def build() -> nn.Module:
        model: Any = seeded(lambda: Stack(Gated))
        model.blocks[1].compile(backend="aot_eager")
        return model

    wanted = train(build(), feature_step)
    model = build()
    with FakeTide(model, planned("offload")) as tide:
        assert differences(train(model, feature_step), wanted) == []
        assert tide.runtime.workload is not None
        names = [a.name for b in tide.runtime.workload.blocks for a in b.activations]
        assert "blocks.1:saved.1" in names
        assert "blocks.0.gate" in names


def test_the_users_hooks_on_a_compiled_block_run_as_before(tmp_path: Path) -> None:
    def build(calls: list[int]) -> nn.Module:
        model = compiled_stack()
        for block in find_blocks(model).values():
            block.register_forward_hook(lambda *_: calls.append(1))
        return model

    alone: list[int] = []
    wanted = train(build(alone), feature_step)
    frames = compilations()
    calls: list[int] = []
    model = build(calls)
    with attach_here(model, "offload", tmp_path, min_bytes=1):
        assert differences(train(model, feature_step), wanted) == []
    assert calls == alone != []
    assert compilations() == frames


@pytest.mark.parametrize("plan", ["recompute", "offload-inputs", "balanced"])
def test_a_plan_that_recomputes_is_refused(plan: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        attach_here(compiled_stack(), plan, tmp_path)
    assert str(error.value) == (
        f"plan {plan!r} recomputes, but blocks.0 is compiled already: what it saves and what it "
        "recomputes was decided then. Use 'offload' or 'offload-last:K', which move what it saves."
    )


def whole_model() -> nn.Module:
    compiled: Any = torch.compile(Stack(Gated), backend="eager")
    return compiled


def whole_model_in_place() -> nn.Module:
    model = Stack(Gated)
    model.compile(backend="eager")
    return model


def whole_part() -> nn.Module:
    inner: Any = torch.compile(Stack(Gated), backend="eager")
    return nn.Sequential(inner)


@pytest.mark.parametrize(
    ("build", "what"),
    [(whole_model, "the model"), (whole_model_in_place, "the model"), (whole_part, "0")],
)
def test_what_is_compiled_as_a_whole_is_refused(build: Callable[[], nn.Module], what: str) -> None:
    with pytest.raises(ModelError) as error:
        attach(build(), "recompute")
    assert str(error.value) == (
        f"{what} is compiled as a whole: inside a compiled region ebbtide cannot see where its "
        "blocks start and end. Compile the blocks instead: attach to the uncompiled model with "
        "attach(model, compile=True), or call .compile() on each block before you attach."
    )


def wrap_model(model: nn.Module, **options: Any) -> nn.Module:
    wrapped: Any = torch.compile(model, **options)
    return wrapped


def wrap_model_in_one_graph(model: nn.Module, **options: Any) -> nn.Module:
    return wrap_model(model, fullgraph=True, **options)


def compile_model_in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


@pytest.mark.parametrize("plan", ["offload", "recompute"])
@pytest.mark.parametrize(
    "way", [*WAYS, wrap_model, wrap_model_in_one_graph, compile_model_in_place]
)
def test_what_is_compiled_after_attach_runs_as_without_and_says_so(
    way: Compile, plan: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler takes hooks for a part of the model: it must not get the runtime with them."""

    def gradients(model: nn.Module) -> list[Tensor]:
        for seed in range(3):
            torch.manual_seed(seed)
            model(features()).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = gradients(way(seeded(lambda: Stack(Gated)), backend="aot_eager"))
    compilations()
    model = seeded(lambda: Stack(Gated))
    with attach_here(model, plan, tmp_path) as tide:
        attached = gradients(way(model, backend="aot_eager"))
        assert tide.statistics().moved_out_bytes == 0
    assert len(plain) == len(attached) > 0
    assert all(map(torch.equal, plain, attached))
    assert compilations()["graph_break"] == {}
    told = [r.getMessage() for r in caplog.records if "compiled after attach" in r.getMessage()]
    assert told == [
        "blocks were compiled after attach: they run as they would without ebbtide, and the plan "
        "moves and recomputes nothing of them. Let ebbtide compile them, with attach(model, ..., "
        "compile=True), or compile each block before you attach."
    ]


def test_a_copy_of_an_attached_model_is_compiled_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(lambda: Stack(Gated))
    with attach_here(model, "offload", tmp_path):
        copied = copy.deepcopy(model)
    wrap_model_in_one_graph(copied, backend="aot_eager")(features()).sum().backward()
    assert [p.grad is not None for p in copied.parameters()] == [True] * len(
        list(copied.parameters())
    )
    assert "compiled after attach" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_cuda_graphs_are_refused(way: Compile, tmp_path: Path) -> None:
    model = way(seeded(lambda: Stack(Gated)), mode="reduce-overhead")
    with pytest.raises(ModelError) as error:
        attach_here(model, "offload", tmp_path)
    assert str(error.value) == (
        "blocks.0 is compiled to run as CUDA graphs (mode='reduce-overhead'): what it saves stays "
        "in the graph's own memory, and moving it would free nothing. Compile it without: "
        "mode='default' or 'max-autotune-no-cudagraphs'."
    )


def test_a_batch_of_another_shape_compiles_no_more_often_than_without(tmp_path: Path) -> None:
    def run(model: nn.Module) -> Left:
        trace, optimizer = Left(), sgd(model)
        for index, length in enumerate([16, 16, 24, 24, 40, 16]):

            def step(model: nn.Module, index: int, length: int = length) -> Tensor:
                loss = model(features(BATCH, length, WIDTH)).square().mean()
                loss.backward()
                return loss

            run_step(model, step, index, trace, optimizer)
        return trace

    wanted = run(compiled_stack())
    alone = compilations()
    model = compiled_stack()
    with attach_here(model, "offload-last:3", tmp_path, min_bytes=1) as tide:
        assert differences(run(model), wanted) == []
        assert tide.statistics().moved_out_bytes > 3 * NUM_SAVED_BYTES
    assert compilations() == alone


def test_hooks_of_blocks_and_of_what_is_in_them_run_whenever_they_came() -> None:
    """Dynamo guards on no hook: code that was compiled without one would serve all blocks."""

    def hook(factor: float) -> Callable[..., Tensor]:
        return lambda module, args, output: output * factor

    models = [seeded(lambda: Stack(Gated)) for _ in range(2)]
    for model in models:
        model.get_submodule("blocks.2").register_forward_hook(hook(1.5))
    with attach(models[0], "recompute", compile="aot_eager"):
        for index in range(6):
            losses: list[Tensor] = []
            for model in models:
                if index == 3:
                    model.get_submodule("blocks.0.up").register_forward_hook(hook(1.25))
                torch.manual_seed(index)
                losses.append(feature_step(model, index))
            assert torch.equal(*losses)
            pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
            for left, right in pairs:
                assert left.grad is not None and right.grad is not None
                assert torch.equal(left.grad, right.grad)


class Stumbling(nn.Module):
    """A block that raises in one step: dynamo leaves its frames to Python then, and looks on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.has_stumbled = False

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = self.first(x_BTD).sin()
        if self.has_stumbled:
            raise ValueError("a bad batch")
        return x_BTD + h_BTD


def test_what_python_runs_in_a_compiled_block_is_packed_outside_of_the_compiler() -> None:
    model = seeded(lambda: Stack(Stumbling))
    seen: list[str] = []
    with attach(model, "recompute", compile="aot_eager"):
        for index in range(6):
            for block in model.get_submodule("blocks").children():
                assert isinstance(block, Stumbling)
                block.has_stumbled = index == 3
            try:
                feature_step(model, index)
                seen.append("")
            except ValueError as error:
                seen.append(str(error))
    assert seen == ["", "", "", "a bad batch", "", ""]
