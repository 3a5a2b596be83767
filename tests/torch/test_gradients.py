"""Under every plan, losses and gradients have the bits that they have without ebbtide."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from ebbtide.plan import Decision, Plan
from ebbtide.torch import Tide, attach
from tests.torch import models
from tests.torch.cases import CASES, ODD_CASES, stack_of
from tests.torch.models import NUM_TOKENS, WIDTH, Gated, Stack, features, tokens
from tests.torch.training import (
    NUM_STEPS,
    PLANS,
    Step,
    Trace,
    assert_plan_was_run,
    attach_here,
    differences,
    feature_step,
    language_step,
    run_step,
    seeded,
    sgd,
    train,
    train_attached,
)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Let torch refuse every kernel whose bits vary."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@cache
def train_plain(name: str) -> Trace:
    case = CASES[name]
    return train(seeded(case.build), case.step)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_same_bits(name: str, plan: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = seeded(case.build)
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, case.step)
        assert_plan_was_run(tide, num_forwards=case.num_forwards, num_backwards=case.num_backwards)
        assert held_bytes(tide) == 0
    assert differences(trace, train_plain(name)) == []


@pytest.mark.parametrize("plan", PLANS)
def test_what_two_blocks_save_moves_once(plan: str, tmp_path: Path) -> None:
    """Blocks that return tuples and dicts, of which the next block saves a tensor again."""
    model = seeded(models.StructuredStack)
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, feature_step)
        assert tide.plan is not None
        evicted = {name for name, d in tide.plan.decisions.items() if d is Decision.DISK}
        # Saved where the first block makes it, and as an input of the second.
        is_twice = {"blocks.0:tanh", "blocks.1:input", "blocks.1:input#2"} <= evicted
        assert is_twice == (plan in ("offload", "balanced"))
        side_bytes = 4 * models.BATCH * NUM_TOKENS * WIDTH
        counts = tide.statistics()
        assert counts.moved_out_bytes == tide.plan.disk_bytes - is_twice * side_bytes
        # Each of the two fetches it: it is not held on the device between their backwards.
        assert counts.moved_in_bytes == tide.plan.disk_bytes
        assert held_bytes(tide) == 0
    assert differences(trace, train(seeded(models.StructuredStack), feature_step)) == []


@pytest.mark.parametrize("plan", ["recompute", "offload", "balanced"])
@pytest.mark.parametrize("name", ODD_CASES)
def test_odd_programs_have_the_same_bits(name: str, plan: str, tmp_path: Path) -> None:
    case = ODD_CASES[name]
    model = seeded(case.build)
    with attach_here(model, plan, tmp_path) as tide:
        trace, optimizer = Trace(), sgd(model)
        for index in range(5):
            run_step(model, case.step, index, trace, optimizer)
            assert held_bytes(tide) == 0
        counts = tide.statistics()
        assert (counts.moved_out_bytes > 0) == (plan != "recompute")
        assert counts.num_recomputed_ops > 0
    assert differences(trace, train(seeded(case.build), case.step, num_steps=5)) == []


def interleaved_step(model: nn.Module, index: int) -> Tensor:
    """Run a pass without gradients, in training mode, between forward and backward."""
    loss = model(features()).square().mean()
    with torch.no_grad():
        model(features())
    loss.backward()
    return loss


def moving_step(model: nn.Module, index: int) -> Tensor:
    """Write to all small buffers and tables between forward and backward."""
    loss = model(features()).square().mean()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, models.Remembering):
                module.table.add_(0.1)
                if module.seen.nbytes <= 65536:
                    module.seen.mul_(0.9)
    loss.backward()
    return loss


WRITES: dict[str, Callable[[], nn.Module]] = {
    "computed weights": stack_of(models.Spectral),
    "a small buffer before it is read": stack_of(models.Remembering, num_rows=4, is_late=False),
    "a small buffer after it was read": stack_of(models.Remembering, num_rows=4, is_late=True),
    "a large buffer before it is read": stack_of(models.Remembering, num_rows=2048, is_late=False),
    "a large buffer after it was read": stack_of(models.Remembering, num_rows=2048, is_late=True),
}


@pytest.mark.parametrize("plan", ["recompute", "offload", "balanced"])
@pytest.mark.parametrize(
    "when",
    ["first in first out", "last in first out", "without gradients", "outside"],
)
@pytest.mark.parametrize("what", WRITES)
def test_buffers_may_be_written_to_before_backward(
    what: str, when: str, plan: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch allows it where no operator saved the buffer itself."""
    steps = {"without gradients": interleaved_step, "outside": moving_step}
    is_first_in_first_out = when == "first in first out"
    step = steps.get(when, crossing_step(is_first_in_first_out=is_first_in_first_out))
    model = seeded(WRITES[what])
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, step)
        assert (tide.statistics().num_recomputed_ops > 0) or plan != "recompute"
        assert held_bytes(tide) == 0
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert differences(trace, train(seeded(WRITES[what]), step)) == []


@pytest.mark.parametrize("plan", ["recompute", "offload", "balanced"])
@pytest.mark.parametrize("is_small", [True, False])
def test_a_write_to_a_buffer_that_was_saved_is_an_error_as_in_torch(
    is_small: bool, plan: str, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        num_rows = 4 if is_small else 2048
        return Stack(lambda: models.Remembering(num_rows, is_late=False, is_saved=True))

    step, message = crossing_step(is_first_in_first_out=True), "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        train(seeded(build), step)
    model = seeded(build)
    with attach_here(model, plan, tmp_path) as tide:
        train_attached(tide, model, feature_step)
        with pytest.raises(RuntimeError, match=message):
            step(model, 0)
        tide.reset_statistics()


@pytest.mark.parametrize("plan", ["recompute", "offload", "balanced"])
def test_recurrent_blocks(plan: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the CPU their gates are parts of one storage, each with a version of its own."""
    model = seeded(stack_of(models.Recurrent))
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, feature_step)
        counts = tide.statistics()
        assert (counts.moved_out_bytes > 0) == (plan != "recompute")
        assert held_bytes(tide) == 0
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert differences(trace, train(seeded(stack_of(models.Recurrent)), feature_step)) == []


def held_bytes(tide: Tide) -> int:
    """Return what is held now, in the tiers and on the device for copies."""
    counts = tide.statistics()
    return counts.host.held_bytes + counts.disk.held_bytes + counts.held_device_bytes


def crossing_step(*, is_first_in_first_out: bool) -> Step:
    """Run two forwards before their backwards."""

    def step(model: nn.Module, index: int) -> Tensor:
        losses = [model(features()).square().mean() for _ in range(2)]
        for loss in losses if is_first_in_first_out else reversed(losses):
            loss.backward()
        return losses[0] + losses[1]

    return step


@pytest.mark.parametrize("is_first_in_first_out", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_two_forwards_may_run_before_their_backwards(
    plan: str, is_first_in_first_out: bool, tmp_path: Path
) -> None:
    step = crossing_step(is_first_in_first_out=is_first_in_first_out)
    model = seeded(stack_of(Gated))
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, step)
        assert tide.plan is not None
        planned_bytes, counts = tide.plan.disk_bytes, tide.statistics()
        # The tier has room for one forward: what more there is stays or is recomputed.
        assert planned_bytes <= counts.moved_out_bytes <= 2 * planned_bytes
        assert counts.moved_in_bytes == counts.moved_out_bytes
        assert held_bytes(tide) == 0
    assert differences(trace, train(seeded(stack_of(Gated)), step)) == []


@pytest.mark.parametrize("plan", PLANS)
def test_a_block_may_run_twice_in_one_forward(plan: str, tmp_path: Path) -> None:
    model = seeded(models.Repeating)
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, feature_step)
        assert tide.plan is not None
        assert tide.statistics().moved_out_bytes >= tide.plan.disk_bytes
        assert held_bytes(tide) == 0
    assert differences(trace, train(seeded(models.Repeating), feature_step)) == []


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_blocks_may_run_their_forward_during_backward(
    plan: str, use_reentrant: bool, tmp_path: Path
) -> None:
    """As checkpoints around blocks do: backward may ask for what has hardly been evicted."""

    def build() -> nn.Module:
        return models.CheckpointedStack(use_reentrant=use_reentrant)

    model = seeded(build)
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, feature_step)
        assert tide.plan is not None
        assert differences(trace, train(seeded(build), feature_step)) == []
        counts = tide.statistics()
        assert counts.moved_out_bytes == tide.plan.disk_bytes
        assert counts.moved_in_bytes <= tide.plan.disk_bytes
        assert counts.num_fetches + counts.num_resurrections >= counts.num_evictions
        assert held_bytes(tide) == 0


def changing_step(model: nn.Module, index: int) -> Tensor:
    """Use another number of tokens in each step: shorter and longer than the first."""
    num_tokens = (NUM_TOKENS, NUM_TOKENS, NUM_TOKENS // 2 + 1, 2 * NUM_TOKENS, NUM_TOKENS)[index]
    ids = tokens(2, num_tokens)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("plan", PLANS)
def test_shapes_may_change_from_step_to_step(plan: str, tmp_path: Path) -> None:
    model = seeded(models.llama)
    with attach_here(model, plan, tmp_path) as tide:
        trace, optimizer = Trace(), sgd(model)
        for index in range(5):
            tide.reset_statistics()
            run_step(model, changing_step, index, trace, optimizer)
            assert held_bytes(tide) == 0
        assert_plan_was_run(tide)
    assert differences(trace, train(seeded(models.llama), changing_step, num_steps=5)) == []


def fail_in_the_middle(model: nn.Module, error: type[BaseException]) -> None:
    middle: Any = model.get_submodule("blocks.1")
    middle.error = error
    with pytest.raises(error, match="told to fail"):
        model(features())
    middle.error = None


def failing_step(model: nn.Module, index: int) -> Tensor:
    """Fail in the middle block first, in every step; then train as usual."""
    fail_in_the_middle(model, ArithmeticError)
    return feature_step(model, index)


@pytest.mark.parametrize("plan", PLANS)
def test_a_forward_that_fails_leaves_nothing_behind(plan: str, tmp_path: Path) -> None:
    model = seeded(stack_of(models.Failing))
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, failing_step)
        assert tide.plan is not None
        assert tide.statistics().moved_in_bytes == tide.plan.disk_bytes
        assert held_bytes(tide) == 0
    assert differences(trace, train(seeded(stack_of(models.Failing)), failing_step)) == []


def interrupted_step(model: nn.Module, index: int) -> Tensor:
    """Interrupt a forward as a keyboard does: torch calls no hook then. Evaluate, and train."""
    fail_in_the_middle(model, KeyboardInterrupt)
    with torch.no_grad():
        model(features())
    return feature_step(model, index)


@pytest.mark.parametrize("plan", PLANS)
def test_a_forward_that_is_interrupted_leaves_nothing_behind(plan: str, tmp_path: Path) -> None:
    model = seeded(stack_of(models.Failing))
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, interrupted_step)
        assert tide.plan is not None
        assert tide.statistics().moved_in_bytes == tide.plan.disk_bytes
        assert held_bytes(tide) == 0
    assert differences(trace, train(seeded(stack_of(models.Failing)), interrupted_step)) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("plan", ["recompute", "offload"])
def test_another_model_may_train_after_an_interrupt(
    plan: str, error: type[BaseException], tmp_path: Path
) -> None:
    model, other = seeded(stack_of(models.Failing)), seeded(stack_of(Gated))
    with attach_here(model, plan, tmp_path) as tide:
        ours = train(model, feature_step)
        fail_in_the_middle(model, error)
        tide.reset_statistics()
        trace = train(other, feature_step)
        counts = tide.statistics()
        assert counts.moved_out_bytes == counts.num_recomputed_ops == held_bytes(tide) == 0
        again = train(model, feature_step, first=NUM_STEPS)
    plain = seeded(stack_of(models.Failing))
    assert differences(trace, train(seeded(stack_of(Gated)), feature_step)) == []
    assert differences(ours, train(plain, feature_step)) == []
    assert differences(again, train(plain, feature_step, first=NUM_STEPS)) == []


def test_another_attached_model_may_train_after_an_interrupt(tmp_path: Path) -> None:
    model, other = seeded(stack_of(models.Failing)), seeded(stack_of(Gated))
    (tmp_path / "other").mkdir()
    with attach(model, "recompute"), attach_here(other, "offload", tmp_path / "other") as tide:
        train(model, feature_step)
        fail_in_the_middle(model, KeyboardInterrupt)
        trace = train_attached(tide, other, feature_step)
        assert_plan_was_run(tide)
    assert differences(trace, train(seeded(stack_of(Gated)), feature_step)) == []


def test_close_after_an_interrupt_ends_the_recording(tmp_path: Path) -> None:
    model, plain = seeded(stack_of(models.Failing)), seeded(stack_of(Gated))
    tide = attach_here(model, "recompute", tmp_path)
    train_attached(tide, model, feature_step)
    fail_in_the_middle(model, KeyboardInterrupt)
    tide.close()
    tide.reset_statistics()
    assert (
        differences(train(plain, feature_step), train(seeded(stack_of(Gated)), feature_step)) == []
    )
    assert tide.statistics().num_recomputed_ops == 0


def test_a_first_forward_that_fails_is_not_observed(tmp_path: Path) -> None:
    plans: list[Plan] = []
    for step in (failing_step, feature_step):
        model = seeded(stack_of(models.Failing))
        with attach_here(model, "offload", tmp_path) as tide:
            train_attached(tide, model, step)
            assert tide.plan is not None
            plans.append(tide.plan)
    assert plans[0] == plans[1]


def failing_backward_step(model: nn.Module, index: int) -> Tensor:
    """Fail in the middle of backward, with fetches under way; then train as usual."""

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("told to fail")

    def let_fail(_module: nn.Module, _inputs: Any, output: Any) -> None:
        output.register_hook(fail)

    handle = model.get_submodule("blocks.1").register_forward_hook(let_fail)
    loss = model(features()).square().mean()
    handle.remove()
    with pytest.raises(ArithmeticError, match="told to fail"):
        loss.backward()
    model.zero_grad()
    return feature_step(model, index)


@pytest.mark.parametrize("plan", PLANS)
def test_a_backward_that_fails_leaves_nothing_behind(plan: str, tmp_path: Path) -> None:
    model = seeded(stack_of(Gated))
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, failing_backward_step)
        assert held_bytes(tide) == 0
    assert differences(trace, train(seeded(stack_of(Gated)), failing_backward_step)) == []


def num_tensors() -> int:
    """Count the tensors that the garbage collector knows."""
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("plan", ["recompute", "offload-last:2"])
def test_two_hundred_graphs_without_a_backward_leak_nothing(plan: str, tmp_path: Path) -> None:
    model, inputs = seeded(lambda: Stack(Gated, 2)), features(32, NUM_TOKENS, WIDTH)
    process, rss_bytes, counts = psutil.Process(), list[int](), set[int]()
    with attach_here(model, plan, tmp_path) as tide:
        for _ in range(3):
            model(inputs).square().mean().backward()
        gc.collect()
        gc.disable()  # no cycle may be needed to be found
        try:
            for index in range(200):
                loss = model(inputs).square().mean()
                assert loss.requires_grad
                del loss
                assert held_bytes(tide) == 0
                if index in (20, 199):
                    counts.add(num_tensors())
                    rss_bytes.append(process.memory_info().rss)
        finally:
            gc.enable()
        assert len(counts) == 1
        # One graph keeps more than 1 MiB, so a leak would show as 200 MiB.
        assert rss_bytes[1] - rss_bytes[0] < 8 * 2**20
        assert tide.plan is not None
        assert tide.statistics().moved_out_bytes >= 200 * tide.plan.disk_bytes


@pytest.mark.parametrize("plan", PLANS)
def test_a_copy_of_an_attached_model_trains_on_its_own(plan: str, tmp_path: Path) -> None:
    model, plain = seeded(models.llama), seeded(models.llama)
    with attach_here(model, plan, tmp_path) as tide:
        trace, optimizer = Trace(), sgd(model)
        for index in range(2):
            run_step(model, language_step, index, trace, optimizer)
        assert differences(trace, train(plain, language_step, num_steps=2)) == []
        duplicate, plain_duplicate = copy.deepcopy(model), copy.deepcopy(plain)
        tide.reset_statistics()
        theirs = train(duplicate, language_step, first=10)
        assert tide.statistics().moved_out_bytes == 0
        assert tide.statistics().num_recomputed_ops == 0
        assert differences(theirs, train(plain_duplicate, language_step, first=10)) == []
        ours = train(model, language_step, num_steps=1, first=2)
        assert_plan_was_run(tide)
        assert differences(ours, train(plain, language_step, num_steps=1, first=2)) == []


@pytest.mark.parametrize("plan", PLANS)
def test_a_pickled_model_is_not_attached(plan: str, tmp_path: Path) -> None:
    model, plain = seeded(stack_of(Gated)), seeded(stack_of(Gated))
    with attach_here(model, plan, tmp_path) as tide:
        ours, wanted = train(model, feature_step), train(plain, feature_step)
        assert differences(ours, wanted) == []
        again = pickle.loads(pickle.dumps(model))
        tide.reset_statistics()
        got, wanted = train(again, feature_step), train(copy.deepcopy(plain), feature_step)
        assert differences(got, wanted) == []
        assert tide.statistics().moved_out_bytes == tide.statistics().num_recomputed_ops == 0
        train_attached(tide, model, feature_step)
        assert_plan_was_run(tide)
    with attach_here(again, plan, tmp_path) as tide:
        train_attached(tide, again, feature_step)
        assert_plan_was_run(tide)


OVERWRITING: dict[str, Callable[[bool], nn.Module]] = {
    "inside a block": lambda is_legal: Stack(lambda: models.Overwriting(is_legal=is_legal)),
    "to a block's output": lambda is_legal: models.OverwritingStack(
        is_legal=is_legal, writes_input=False
    ),
    "to a block's input": lambda is_legal: models.OverwritingStack(
        is_legal=is_legal, writes_input=True
    ),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("where", OVERWRITING)
def test_a_write_after_saving_is_an_error_or_does_no_harm(
    where: str, plan: str, tmp_path: Path
) -> None:
    build = OVERWRITING[where]
    message = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        train(seeded(lambda: build(False)), feature_step)
    model, legal = seeded(lambda: build(False)), seeded(lambda: build(True))
    with attach_here(model, plan, tmp_path) as tide:
        for index in range(4):
            torch.manual_seed(index)
            feature_step(legal, index)
            torch.manual_seed(index)
            try:
                feature_step(model, index)
            except RuntimeError as error:
                assert message in str(error)
            else:
                for ours, theirs in zip(model.parameters(), legal.parameters(), strict=True):
                    assert ours.grad is not None and theirs.grad is not None
                    assert torch.equal(ours.grad, theirs.grad)
            model.zero_grad()
            legal.zero_grad()
            assert held_bytes(tide) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_is_invisible(plan: str, mode: Any, tmp_path: Path) -> None:
    model, plain = seeded(models.gpt2), seeded(models.gpt2)
    ids = tokens()

    def evaluate(model: nn.Module) -> Tensor:
        model.eval()
        with mode():
            logits = model(input_ids=ids).logits
        model.train()
        return logits.clone()

    with attach_here(model, plan, tmp_path) as tide:
        trace, wanted = Trace(), Trace()
        optimizer, plain_optimizer = sgd(model), sgd(plain)
        for index in range(4):
            before = tide.statistics()
            assert torch.equal(evaluate(model), evaluate(plain))
            assert tide.statistics() == before
            tide.reset_statistics()
            run_step(model, language_step, index, trace, optimizer)
            run_step(plain, language_step, index, wanted, plain_optimizer)
        assert_plan_was_run(tide)
    assert differences(trace, wanted) == []


@pytest.mark.parametrize("plan", PLANS)
def test_outputs_that_no_loss_uses_do_not_pile_up(plan: str, tmp_path: Path) -> None:
    """The unused output of a step is alive until the next forward is over."""
    model, plain = seeded(models.BranchedStack), seeded(models.BranchedStack)
    held, outputs = list[int](), None
    with attach_here(model, plan, tmp_path) as tide:
        for index in range(20):
            for each in (plain, model):
                torch.manual_seed(index)
                outputs = each(features())
                outputs[0].square().mean().backward()
            held.append(held_bytes(tide))
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                if ours.grad is not None or theirs.grad is not None:
                    assert ours.grad is not None and theirs.grad is not None
                    assert torch.equal(ours.grad, theirs.grad)
            model.zero_grad()
            plain.zero_grad()
        del outputs
        assert len(set(held[4:])) == 1
        assert held_bytes(tide) == 0
