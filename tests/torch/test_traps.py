"""Each trap of a tape under saved-tensor hooks, as docs/design.md lists them, sprung once."""

# B batch, T tokens, D model width, H heads, K head width

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef as StorageRef
from torch.nn import functional

from ebbtide.plan import Decision
from ebbtide.torch import Tide
from ebbtide.workload import Activation
from tests.torch import models
from tests.torch.fakes import FakeTide, offload_everything
from tests.torch.models import NUM_BLOCKS, NUM_TOKENS, WIDTH, Gated, Stack, features
from tests.torch.training import (
    NUM_STEPS,
    PLANS,
    Step,
    assert_plan_was_run,
    attach_here,
    differences,
    feature_step,
    language_step,
    seeded,
    train,
    train_attached,
)

ROOT = Path(__file__).parents[2]
# Of the activations in these tests, one is never smaller.
ACTIVATION_BYTES = 4 * models.BATCH * NUM_TOKENS * WIDTH


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Let torch refuse every kernel whose bits vary."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Block(nn.Module):
    """A product, a function of the test's, and a product."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, h_BTD: Tensor) -> Tensor:
        return h_BTD + self.second(self.function(self.first(h_BTD)))


def stack_with(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Stack(lambda: Block(function))


def activations_of(tide: Tide) -> dict[str, Activation]:
    """Return what was observed, by name."""
    assert tide.workload is not None
    return {a.name: a for block in tide.workload.blocks for a in block.activations}


def assert_equal_to_plain(
    build: Callable[[], nn.Module], plan: str, folder: Path, step: Step = feature_step
) -> Tide:
    """Train with and without ebbtide, compare bit for bit, and return the closed handle."""
    model = seeded(build)
    with attach_here(model, plan, folder) as tide:
        trace = train_attached(tide, model, step)
    assert differences(trace, train(seeded(build), step)) == []
    return tide


# -- writes after storing ------------------------------------------------------------------------


def write_through_view(x: Tensor) -> Tensor:
    """Write to a root of a recipe through a view; torch allows it, since no op saved it."""
    total = x.cumsum(1)
    result = (total + 1.0).tanh()
    total[:, ::2].zero_()
    return result * total.mean()


@pytest.mark.parametrize("plan", PLANS)
def test_a_write_through_a_view_does_not_reach_what_a_recipe_starts_from(
    plan: str, tmp_path: Path
) -> None:
    tide = assert_equal_to_plain(stack_with(write_through_view), plan, tmp_path)
    found = activations_of(tide)
    assert not found["blocks.0:cumsum"].is_replayable
    assert found["blocks.0:tanh"].is_replayable and found["blocks.0:tanh"].is_saved


def write_part(x: Tensor) -> Tensor:
    """Save one part of a storage, and write to the other, which counts its versions apart."""
    first, second = x.cumsum(1).unsafe_chunk(2, -1)
    squared = first * first
    second.add_(1.0)
    return torch.cat((squared * second, second.sin()), -1)


def write_part_under_recipe(x: Tensor) -> Tensor:
    """As above, and a recipe starts from the part that is written."""
    first, second = x.cumsum(1).unsafe_chunk(2, -1)
    squared, other = first * first, (second + 1.0).sin()
    second.mul_(0.5)
    return torch.cat((squared * other, second.tanh()), -1)


def write_parts_in_turn(x: Tensor) -> Tensor:
    """Both parts have the same version each time that they are saved."""
    first, second = x.cumsum(1).unsafe_chunk(2, -1)
    first, second = first.sigmoid_(), second.tanh_()
    product = first * second
    third, fourth = product.clone().unsafe_split(product.shape[-1] // 2, -1)
    return torch.cat((third.sigmoid_() * third, fourth.sigmoid_() * product.sum(-1, True)), -1)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("function", [write_part, write_part_under_recipe, write_parts_in_turn])
def test_parts_of_a_storage_may_be_written_to_one_by_one(
    function: Callable[[Tensor], Tensor],
    plan: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """torch raises nothing: each part has a version counter of its own."""
    assert_equal_to_plain(lambda: Stack(lambda: PartBlock(function)), plan, tmp_path)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


class PartBlock(nn.Module):
    """A product, a function of the test's that may change the width, and a mean."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, h_BTD: Tensor) -> Tensor:
        return h_BTD + 0.1 * self.function(self.linear(h_BTD).tanh()).mean(-1, keepdim=True)


class Detached(nn.Module):
    """Uses a weight also through `.data`, whose version stays 0 when the optimizer writes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH))

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = (h_BTD @ self.weight).tanh()
        return h_BTD + x_BTD @ self.weight.data + x_BTD @ self.weight


@pytest.mark.parametrize("plan", PLANS)
def test_a_weight_and_its_data_count_their_versions_apart(plan: str, tmp_path: Path) -> None:
    tide = assert_equal_to_plain(lambda: Stack(Detached), plan, tmp_path)
    assert tide.statistics().num_kept_not_understood == ()


def write_unseen_to_saved(x: Tensor) -> Tensor:
    """Write behind torch's back to what was saved, so that backward gets the new value."""
    result = x.tanh()
    result.detach().numpy()[:, ::2] *= 0.5
    return result


def write_unseen_to_evicted(x: Tensor) -> Tensor:
    """As above, to what cannot be made again and so is stored."""
    result = x.cumsum(1).sigmoid().cumsum(1)
    product = result * result
    result.detach().numpy()[:, ::2] *= 0.5
    return product


def write_unseen_to_root(x: Tensor) -> Tensor:
    """Write behind torch's back to what only a recipe reads."""
    total = x.cumsum(1)
    result = (total + 1.0).tanh()
    total.detach().numpy()[:, ::2] = 0.0
    return result


def write_unseen_to_saved_root(x: Tensor) -> Tensor:
    """Write behind torch's back to what is saved, and what a recipe of another value reads."""
    result = x.tanh()
    other = (result + 1.0).sin()
    result.detach().numpy()[:, ::2] *= 0.5
    return result + other


UNSEEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "to a saved value": (write_unseen_to_saved, "tanh"),
    "to an evicted value": (write_unseen_to_evicted, "cumsum#2"),
    "to a root": (write_unseen_to_root, "tanh"),
    "to a saved root": (write_unseen_to_saved_root, "tanh"),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("where", UNSEEN)
def test_a_write_that_the_dispatcher_does_not_see_is_found_and_its_target_kept(
    where: str, plan: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    function, name = UNSEEN[where]
    with caplog.at_level(logging.WARNING, logger="ebbtide"):
        tide = assert_equal_to_plain(stack_with(function), plan, tmp_path)
    is_found = {r.message.split()[0] for r in caplog.records}
    # A value that stays on the device anyway is right without being found.
    stored = Decision.KEEP if tide.plan is None else tide.plan.decision(f"blocks.1:{name}")
    if where != "to an evicted value" or stored is Decision.DISK:
        assert f"blocks.1:{name}" in is_found
        assert all("did not come back bit for bit" in r.message for r in caplog.records)
        assert all("kept on the device" in r.message for r in caplog.records)


def test_an_unseen_write_is_found_however_late_its_copy_would_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A copy that ran after the write would hold what the check compares it with."""
    build = stack_with(write_unseen_to_evicted)
    model = seeded(build)
    with (
        caplog.at_level(logging.WARNING, logger="ebbtide"),
        FakeTide(model, offload_everything, schedule="late") as tide,
    ):
        trace = train(model, feature_step)
        tide.assert_nothing_is_left()
    assert differences(trace, train(seeded(build), feature_step)) == []
    found = {r.message.split()[0] for r in caplog.records if "bit for bit" in r.message}
    assert found >= {f"blocks.{i}:cumsum#2" for i in range(NUM_BLOCKS)}


# -- recipes use an allow-list -------------------------------------------------------------------


def uninitialised(x: Tensor) -> Tensor:
    return x.tanh() * torch.empty_like(x).fill_(2.0)


def random_mask(x: Tensor) -> Tensor:
    return x.tanh() * torch.rand_like(x)


def dropped_out(x: Tensor) -> Tensor:
    return functional.dropout(x.tanh(), 0.5)


def sampled(x: Tensor) -> Tensor:
    return x * torch.bernoulli(x.detach().sigmoid())


def summed_by_index(x: Tensor) -> Tensor:
    rows = torch.arange(NUM_TOKENS) // 2
    return torch.zeros_like(x).index_add(1, rows, x).square()


def sorted_and_chosen(x: Tensor) -> Tensor:
    values, _ = x.topk(WIDTH // 2, dim=-1)
    return torch.cat((values, values.sort(-1).values), -1).square()


def attended(x: Tensor) -> Tensor:
    x_BHTK = x.unflatten(-1, (models.NUM_HEADS, -1)).transpose(1, 2)
    y_BHTK = functional.scaled_dot_product_attention(x_BHTK, x_BHTK, x_BHTK, dropout_p=0.2)
    return y_BHTK.transpose(1, 2).flatten(2)


NEVER_AGAIN: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "memory that is not initialised": (uninitialised, {"fill_"}),
    "random numbers": (random_mask, {"rand_like"}),
    "dropout": (dropped_out, {"native_dropout", "bernoulli_"}),
    "samples": (sampled, {"bernoulli"}),
    "sums in any order": (summed_by_index, {"index_add"}),
    "choices between equals": (sorted_and_chosen, {"topk", "sort"}),
    "attention with dropout": (attended, {"native_dropout", "bernoulli_"}),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("what", NEVER_AGAIN)
def test_what_may_give_other_bits_is_never_run_again(what: str, plan: str, tmp_path: Path) -> None:
    function, operators = NEVER_AGAIN[what]
    tide = assert_equal_to_plain(stack_with(function), plan, tmp_path)
    of_these = [a for a in activations_of(tide).values() if a.op in operators]
    assert of_these
    assert not any(a.is_replayable for a in of_these)


@pytest.mark.parametrize("plan", PLANS)
def test_batch_normalisation_counts_each_batch_once(plan: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Stack(models.Normalised)

    model = seeded(build)
    with attach_here(model, plan, tmp_path) as tide:
        train(model, feature_step)
        found = [a for a in activations_of(tide).values() if a.op == "native_batch_norm"]
        assert found and not any(a.is_replayable for a in found)
    plain = seeded(build)
    train(plain, feature_step)
    for path in ("num_batches_tracked", "running_mean", "running_var"):
        name = f"blocks.1.norm.{path}"
        assert torch.equal(model.get_buffer(name), plain.get_buffer(name))
    assert int(model.get_buffer("blocks.1.norm.num_batches_tracked")) == NUM_STEPS


class Counts:
    """How often the custom operator below ran."""

    num_calls = 0


@torch.library.custom_op("ebbtide_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operator of somebody else's library."""
    Counts.num_calls += 1
    return 2.0 * x


def _save_result(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _double(ctx: Any, gradient: Tensor) -> Tensor:
    (output,) = ctx.saved_tensors
    return 2.0 * gradient + 0.0 * output


twice.register_autograd(_double, setup_context=_save_result)


@pytest.mark.parametrize("plan", PLANS)
def test_an_operator_of_another_library_is_stored(plan: str, tmp_path: Path) -> None:
    model = seeded(stack_with(twice))
    with attach_here(model, plan, tmp_path) as tide:
        Counts.num_calls = 0
        trace = train_attached(tide, model, feature_step)
        assert Counts.num_calls == NUM_STEPS * NUM_BLOCKS
        found = [a for a in activations_of(tide).values() if a.op == "twice"]
        assert len(found) == NUM_BLOCKS
        assert all(a.is_saved and not a.is_replayable for a in found)
    assert differences(trace, train(seeded(stack_with(twice)), feature_step)) == []


def test_checks_leave_the_random_state_alone(tmp_path: Path) -> None:
    """The first step is checked, with everything brought back inside the forward."""
    model = seeded(models.gpt2)
    with attach_here(model, "recompute", tmp_path):
        torch.manual_seed(1)
        language_step(model, 0)
        ours = torch.get_rng_state()
    plain = seeded(models.gpt2)
    torch.manual_seed(1)
    language_step(plain, 0)
    assert torch.equal(ours, torch.get_rng_state())


# -- torch.compile -------------------------------------------------------------------------------


class CountingBackend:
    """Compiles to eager code, and counts compilations and runs."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self.num_runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.num_compiled += 1

        def run(*arguments: Any) -> Any:
            self.num_runs += 1
            return graph.forward(*arguments)

        return run


# Dynamo looks at the attribute itself, in every block and without ebbtide, too.
ignore_grad_attribute = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@ignore_grad_attribute
@pytest.mark.parametrize("plan", PLANS)
def test_a_compiled_function_inside_a_block_still_runs_compiled(plan: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    backend = CountingBackend()
    compiled = torch.compile(lambda x: functional.silu(x) * x.sigmoid(), backend=backend)
    plain = train(seeded(stack_with(compiled)), feature_step)
    assert (backend.num_compiled, backend.num_runs) == (1, NUM_STEPS * NUM_BLOCKS)
    model = seeded(stack_with(compiled))
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, feature_step)
        assert_plan_was_run(tide)
    assert (backend.num_compiled, backend.num_runs) == (1, 2 * NUM_STEPS * NUM_BLOCKS)
    assert differences(trace, plain) == []


class WritesToSaved(torch.autograd.Function):
    """Its backward writes to what it saved: legal where nobody else saved that."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * 3.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        h.mul_(5.0)
        return gradients[0] * h


@pytest.mark.parametrize("plan", ["recompute", "offload-inputs", "offload"])
def test_a_backward_may_write_to_what_it_saved(plan: str, tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = 0.1 * self.first(x)
            wave = torch.exp(h)  # made again behind the one that writes
            scaled: Any = WritesToSaved.apply(h)
            return x + wave + scaled

    build = lambda: Stack(Twice)  # noqa: E731
    plain = train(seeded(build), feature_step)
    model = seeded(build)
    with attach_here(model, plan, tmp_path) as tide:
        assert differences(train_attached(tide, model, feature_step), plain) == []
        assert_plan_was_run(tide)


@ignore_grad_attribute
def test_no_code_of_ours_is_compiled_where_a_compiled_function_breaks(tmp_path: Path) -> None:
    """Between the two graphs the compiler looks at every Python function that runs."""

    def breaks(x: Tensor) -> Tensor:
        y = x.sin()
        if y.sum() > NUM_TOKENS * WIDTH:  # an operator that runs between the graphs
            return y
        return functional.silu(y) * y.cos()

    def count(attach: Callable[[nn.Module], contextlib.AbstractContextManager[Any]]) -> list[int]:
        torch.compiler.reset()
        counters = torch._dynamo.utils.counters  # pyright: ignore[reportPrivateUsage]
        counters.clear()
        backend = CountingBackend()
        model = seeded(stack_with(torch.compile(breaks, backend=backend)))
        with attach(model):
            train(model, feature_step)
        return [backend.num_compiled, backend.num_runs, *counters["frames"].values()]

    plain = count(lambda model: contextlib.nullcontext())
    assert plain[0] == 2
    assert count(lambda model: attach_here(model, "recompute", tmp_path)) == plain


@ignore_grad_attribute
def test_a_function_may_be_compiled_for_the_first_time_inside_a_block(tmp_path: Path) -> None:
    torch.compiler.reset()
    backend = CountingBackend()
    compiled = torch.compile(lambda x: x.sin() * x.cos(), backend=backend)
    model = seeded(stack_with(compiled))
    with attach_here(model, "offload", tmp_path) as tide:
        trace = train_attached(tide, model, feature_step)
    assert (backend.num_compiled, backend.num_runs) == (1, NUM_STEPS * NUM_BLOCKS)
    assert differences(trace, train(seeded(stack_with(compiled)), feature_step)) == []


# -- lifetimes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_a_graph_without_a_backward_dies_with_its_output(plan: str, tmp_path: Path) -> None:
    made: list[weakref.ref[Tensor]] = []

    def note(x: Tensor) -> Tensor:
        result = x.tanh()
        made.append(weakref.ref(result))
        return result

    model = seeded(stack_with(note))
    with attach_here(model, plan, tmp_path) as tide:
        gc.disable()
        try:
            for _ in range(4):
                output = model(features())
                known = weakref.ref(output)
                del output
                assert known() is None
                assert [ref() for ref in made] == [None] * len(made)
                assert tide.statistics().disk.held_bytes == 0
        finally:
            gc.enable()
    assert len(made) == 4 * NUM_BLOCKS


def test_a_graph_may_die_on_another_thread_in_the_middle_of_a_forward(tmp_path: Path) -> None:
    """A finalizer runs anywhere; it must not touch what the forward is using."""
    graphs: list[Tensor] = []

    def drop_graphs(x: Tensor) -> Tensor:
        thread = threading.Thread(target=graphs.clear)
        thread.start()
        thread.join()
        return x.tanh()

    model, plain = seeded(stack_with(drop_graphs)), seeded(stack_with(drop_graphs))

    def step(model: nn.Module, index: int) -> Tensor:
        dropped = model(features()).sum()
        graphs.append(dropped)
        del dropped
        return feature_step(model, index)

    with attach_here(model, "offload-last:2", tmp_path) as tide:
        trace = train_attached(tide, model, step)
        assert tide.statistics().disk.held_bytes == 0
        assert tide.statistics().held_device_bytes == 0
    assert differences(trace, train(plain, step)) == []


def test_a_reference_cycle_around_a_graph_is_collected_without_harm(tmp_path: Path) -> None:
    class Holder:
        """Holds a graph, and itself."""

        def __init__(self, loss: Tensor) -> None:
            self.loss = loss
            self.me = self

    model = seeded(lambda: Stack(Gated))
    with attach_here(model, "offload", tmp_path) as tide:
        for _ in range(3):
            feature_step(model, 0)
        gc.collect()
        gc.disable()
        try:
            Holder(model(features()).sum())
            assert tide.statistics().disk.held_bytes > 0
            gc.collect()
        finally:
            gc.enable()
        assert tide.statistics().disk.held_bytes == 0


# -- autocast and weights ------------------------------------------------------------------------


class Frozen(nn.Module):
    """Twelve frozen products of 256 x 256, each with a small trainable scale."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FrozenBlock() for _ in range(12))

    def forward(self, h_TD: Tensor) -> Tensor:
        for block in self.blocks:
            h_TD = block(h_TD)
        return h_TD


class FrozenBlock(nn.Module):
    """One of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(256))

    def forward(self, h_TD: Tensor) -> Tensor:
        return h_TD + self.linear(h_TD * self.scale).tanh()


def few_tokens_step(model: nn.Module, index: int) -> Tensor:
    loss = model(torch.randn(4, 256)).square().mean()
    loss.backward()
    return loss


def few_tokens_under_autocast_step(model: nn.Module, index: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(4, 256)).float().square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("step", [few_tokens_step, few_tokens_under_autocast_step])
def test_no_byte_of_a_weight_is_moved(step: Step, plan: str, tmp_path: Path) -> None:
    model = seeded(Frozen)
    with attach_here(model, plan, tmp_path, min_bytes=1) as tide:
        trace = train_attached(tide, model, step)
        assert_plan_was_run(tide)
        # A row of activations has 4 KiB, a weight 128 KiB in bfloat16.
        found = activations_of(tide).values()
        assert max(a.num_bytes for a in found if a.is_saved) == 4 * 4 * 256
        assert tide.statistics().moved_out_bytes <= 12 * 6 * 4 * 4 * 256
    assert differences(trace, train(seeded(Frozen), step)) == []


def two_passes_under_one_autocast_step(model: nn.Module, index: int) -> Tensor:
    """Let the second pass find the casts of all weights in autocast's cache."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(features(3, 25, WIDTH)).float().square().mean()
        loss = loss + model(features(3, 25, WIDTH)).float().square().mean()
    loss.backward()
    return loss


def backward_under_autocast_step(model: nn.Module, index: int) -> Tensor:
    """Run backward under autocast, too: a replay must not cast a second time."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(features(3, 25, WIDTH)).float().square().mean()
        loss.backward()
    return loss


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("step", [two_passes_under_one_autocast_step, backward_under_autocast_step])
def test_replays_run_without_autocast(step: Step, plan: str, tmp_path: Path) -> None:
    tide = assert_equal_to_plain(lambda: Stack(Gated), plan, tmp_path, step)
    assert tide.plan is not None
    # No activation of 75 tokens has the size of a weight, and no weight's cast is decided.
    assert 2 * 2 * WIDTH**2 not in {a.num_bytes for a in activations_of(tide).values()}


# -- what belongs to many blocks -----------------------------------------------------------------


class Tabled(nn.Module):
    """Multiplies by a table and masks by a mask that all blocks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor, *, table: Tensor, mask: Tensor) -> Tensor:
        x_BTD = self.linear(h_BTD)
        masked_BTD = (x_BTD * table).masked_fill(mask, 0.0)
        return h_BTD + masked_BTD.tanh() * table


class TabledStack(nn.Module):
    """Makes the table and the mask once, as models do with rotary tables."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tabled() for _ in range(NUM_BLOCKS))
        self.rate = nn.Parameter(torch.rand(WIDTH), requires_grad=is_trained)

    def forward(self, h_BTD: Tensor) -> Tensor:
        table_TD = (torch.arange(h_BTD.shape[1])[:, None] * self.rate).cos()
        mask_T1 = torch.rand(h_BTD.shape[1], 1) < 0.2
        for block in self.blocks:
            h_BTD = block(h_BTD, table=table_TD, mask=mask_T1)
        return h_BTD


@pytest.mark.parametrize("plan", PLANS)
def test_shared_masks_and_tables_are_never_moved(plan: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return TabledStack(is_trained=False)

    model = seeded(build)
    with attach_here(model, plan, tmp_path, min_bytes=1) as tide:
        trace = train_attached(tide, model, feature_step)
        assert_plan_was_run(tide)
        # The table has half the bytes of an activation, and the mask one byte a token.
        sizes = {a.num_bytes for a in activations_of(tide).values() if a.is_saved}
        assert sizes == {ACTIVATION_BYTES}
    assert differences(trace, train(seeded(build), feature_step)) == []


@pytest.mark.parametrize("plan", PLANS)
def test_a_table_that_is_trained_moves_at_most_once(plan: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return TabledStack(is_trained=True)

    model = seeded(build)
    with attach_here(model, plan, tmp_path, min_bytes=1) as tide:
        trace = train_attached(tide, model, feature_step)
        assert tide.plan is not None
        found, table_bytes = activations_of(tide), 4 * NUM_TOKENS * WIDTH
        tables = [n for n, a in found.items() if a.num_bytes == table_bytes and ":input" in n]
        num_moved = sum(tide.plan.decision(n) is Decision.DISK for n in tables)
        saved_bytes = max(num_moved - 1, 0) * table_bytes
        assert tide.statistics().moved_out_bytes == tide.plan.disk_bytes - saved_bytes
    assert differences(trace, train(seeded(build), feature_step)) == []


# -- what is not understood ----------------------------------------------------------------------


class Marked(torch.Tensor):
    """A subclass that carries a plain tensor and computes with it."""

    plain: Tensor

    @staticmethod
    def __new__(cls: type[Marked], plain: Tensor) -> Marked:
        made: Any = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage]
            cls, plain.size(), dtype=plain.dtype, strides=plain.stride()
        )
        made.plain = plain
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = [a.plain if isinstance(a, cls) else a for a in args]
        result = func(*plain, **(kwargs or {}))
        return cls(result) if func is torch.ops.aten.detach.default else result


class SavesOther(torch.autograd.Function):
    """Saves a tensor that is not the block's, beside its input."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, other: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, other)
        return x.square()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        x, other = ctx.saved_tensors
        assert type(other) is SavesOther.kind and other.layout is SavesOther.layout
        assert other.device.type == SavesOther.device
        return 2.0 * x * gradient, None

    kind: type = Tensor
    layout = torch.strided
    device = "cpu"


OTHERS: dict[str, Callable[[], Tensor]] = {
    "on another device": lambda: torch.empty(WIDTH, WIDTH, device="meta"),
    "sparse": lambda: torch.eye(WIDTH).to_sparse(),
    "of a subclass": lambda: Marked(torch.eye(WIDTH)),
    "empty": lambda: torch.empty(0, WIDTH),
    "of no dimension": lambda: torch.tensor(1.0),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", OTHERS)
def test_a_saved_tensor_that_is_different_is_left_alone(
    kind: str, plan: str, tmp_path: Path
) -> None:
    def function(x: Tensor) -> Tensor:
        other = OTHERS[kind]()
        SavesOther.kind, SavesOther.layout = type(other), other.layout
        SavesOther.device = other.device.type
        result: Any = SavesOther.apply(x, other)
        return result

    model = seeded(stack_with(function))
    with attach_here(model, plan, tmp_path) as tide:
        trace = train_attached(tide, model, feature_step)
        if kind == "of a subclass":
            # A block of which the plan keeps all is not looked at.
            num_blocks = NUM_BLOCKS - plan.startswith("offload") + (plan == "offload-inputs")
            counts = tide.statistics().num_kept_not_understood
            assert counts == (("subclass Marked", num_blocks),)
            assert f"kept on the device: {num_blocks} (subclass Marked)" in tide.report()
        else:
            assert_plan_was_run(tide)
    assert differences(trace, train(seeded(stack_with(function)), feature_step)) == []


# -- function transforms -------------------------------------------------------------------------


def mapped(x: Tensor) -> Tensor:
    result: Any = torch.func.vmap(lambda v: v.sin() * v)(x)
    return result


def pushed_forward(x: Tensor) -> Tensor:
    result: Any = torch.func.jvp(lambda v: v.sin() * v, (x,), (torch.ones_like(x),))
    return result[1]


def differentiated(x: Tensor) -> Tensor:
    gradient: Any = torch.func.grad(lambda v: (v.sin() * v).sum())(x)
    return gradient


@pytest.mark.parametrize("plan", PLANS)
def test_vmap_may_be_used_inside_a_block(plan: str, tmp_path: Path) -> None:
    assert_equal_to_plain(stack_with(mapped), plan, tmp_path)


# torch loads its own decompositions with a function that it has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.parametrize("plan", PLANS)
def test_forward_mode_derivatives_inside_a_block(plan: str, tmp_path: Path) -> None:
    assert_equal_to_plain(stack_with(pushed_forward), plan, tmp_path)


def test_function_transforms_say_what_to_do_and_work_from_the_next_step_on(tmp_path: Path) -> None:
    model = seeded(stack_with(differentiated))
    with attach_here(model, "offload", tmp_path) as tide:
        with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
            feature_step(model, 0)
        assert caught.value.__notes__ == [
            "ebbtide: blocks.0 uses torch.func, which torch cannot run under saved-tensor hooks. "
            "ebbtide leaves blocks of class Block alone from now on: run the step again, or name "
            "the other blocks: attach(model, blocks=[...])."
        ]
        model.zero_grad()
        trace = train_attached(tide, model, feature_step)
    assert differences(trace, train(seeded(stack_with(differentiated)), feature_step)) == []


# -- sharded models ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded() -> dict[tuple[str, str], dict[str, Any]]:
    """Run `sharded.py` and return what it printed, by model and plan."""
    paths = [str(ROOT / "src"), str(ROOT)]
    process = subprocess.run(
        [sys.executable, "-m", "tests.torch.sharded"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    results = [json.loads(line) for line in process.stdout.splitlines()]
    return {(r["model"], r["plan"]): r for r in results}


@pytest.mark.parametrize("plan", PLANS)
def test_fully_sharded_blocks_have_the_gradients_of_the_sharded_model(
    plan: str, sharded: dict[tuple[str, str], dict[str, Any]]
) -> None:
    result = sharded["fully sharded", plan]
    assert result["different"] == []
    assert result["moved_out_bytes"] == result["moved_in_bytes"] == result["planned_bytes"]
    assert (result["planned_bytes"] > 0) == (plan != "recompute")
    assert (result["num_recomputed_ops"] > 0) == (plan != "offload-last:2")
    assert result["not_understood"] == []


@pytest.mark.parametrize("plan", PLANS)
def test_fully_sharded_parts_of_a_block(
    plan: str, sharded: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """What a recipe needs is freed inside the block: it is found, and kept."""
    result = sharded["sharded inside", plan]
    assert result.get("error") is None
    assert result["different"] == []


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["tensor parallel", "distributed"])
def test_local_parts_of_dtensors_are_moved_and_made_again(
    name: str, plan: str, sharded: dict[tuple[str, str], dict[str, Any]]
) -> None:
    result = sharded[name, plan]
    assert result["different"] == []
    assert (result["planned_bytes"] > 0) == (plan != "recompute")
    assert result["moved_out_bytes"] == result["planned_bytes"]
    assert (result["num_recomputed_ops"] > 0) == (plan != "offload-last:2")
    assert result["not_understood"] == []


class Product(torch.autograd.Function):
    """A product that saves its weight itself, as DeepSpeed's does."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTD, weight)
        return x_BTD.matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD, weight = ctx.saved_tensors
        (grad_BTD,) = grads
        by_weight = grad_BTD.flatten(0, 1).t().matmul(x_BTD.flatten(0, 1))
        return grad_BTD.matmul(weight), by_weight


class Gathering(nn.Module):
    """A product whose weight is on the device while the module runs, forward and backward, alone.

    Each time it is gathered into other memory, as ZeRO-3 of DeepSpeed does it.
    """

    gathered: list[StorageRef]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(WIDTH, WIDTH).weight.detach())
        self.shard = self.weight.data
        vars(self.weight).update(ds_status="NOT_AVAILABLE", ds_persist=False)
        self.gathered = []
        self.release()
        self.register_forward_pre_hook(lambda *_: self.gather())
        self.register_forward_hook(lambda *_: self.release())
        self.register_full_backward_pre_hook(lambda *_: self.gather())
        self.weight.register_post_accumulate_grad_hook(self.update)

    def gather(self) -> None:
        self.weight.data = self.shard.clone()
        self.gathered.append(StorageRef(self.weight.untyped_storage()))

    def release(self) -> None:
        self.weight.data = torch.empty(0)

    def update(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.shard -= 0.02 * weight.grad
        self.sum = weight.grad.clone()
        weight.grad = None
        self.release()

    def forward(self, x_BTD: Tensor) -> Tensor:
        result: Any = Product.apply(x_BTD, self.weight)
        return result


class GatheringBlock(nn.Module):
    """Two gathered products with functions of elements around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gathering(), Gathering()

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = functional.silu(self.first(torch.tanh(h_BTD)))
        return h_BTD + torch.tanh(self.second(x_BTD * x_BTD)).sin()


def train_gathering(model: nn.Module, tide: Tide | None) -> tuple[list[Tensor], list[int]]:
    """Return the gradients of all steps, and how many gathered weights each forward left."""
    parts = [module for module in model.modules() if isinstance(module, Gathering)]
    gradients, left = list[Tensor](), list[int]()
    for index in range(NUM_STEPS):
        if tide is not None and index == NUM_STEPS - 1:
            tide.reset_statistics()
        torch.manual_seed(index)
        loss = model(features().requires_grad_()).square().mean()
        left.append(sum(not ref.expired() for part in parts for ref in part.gathered))
        for part in parts:
            part.gathered.clear()
        loss.backward()
        gradients += [part.sum for part in parts]
    return gradients, left


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_that_are_gathered_for_their_module_are_not_held(
    plan: str, tmp_path: Path
) -> None:
    """What is made of them is moved or kept; the rest of the block is made again."""
    wanted, _ = train_gathering(seeded(lambda: Stack(GatheringBlock)), None)
    model = seeded(lambda: Stack(GatheringBlock))
    with attach_here(model, plan, tmp_path) as tide:
        found, left = train_gathering(model, tide)
        assert all(map(torch.equal, found, wanted))
        assert len(found) == NUM_STEPS * NUM_BLOCKS * 2
        assert left == [0] * NUM_STEPS
        assert_plan_was_run(tide)
        assert tide.workload is not None
        products = [
            a for b in tide.workload.blocks for a in b.activations if a.op in ("mm", "matmul")
        ]
        assert len(products) == NUM_BLOCKS * 2
        assert not any(product.is_replayable for product in products)
