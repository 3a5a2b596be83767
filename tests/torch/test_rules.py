"""The design rules, each on real models that run on the fake device under adversarial timing.

`tests.torch.mutations` takes the rules out of the source, one at a time: every time, some test
here or beside this file must fail.
"""

# B batch, T tokens, D model width, F feed-forward width

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.plan import Decision
from ebbtide.torch.devices.fake import Schedule
from ebbtide.torch.identity import Layout
from tests.torch.fakes import (
    FakeTide,
    MakePlan,
    offload_everything,
    planned,
    with_little_in_flight,
)
from tests.torch.models import (
    BATCH,
    NUM_TOKENS,
    WIDTH,
    BranchedStack,
    Gated,
    Stack,
    Views,
    Writing,
    features,
    llama,
)
from tests.torch.training import (
    NUM_STEPS,
    Step,
    Trace,
    differences,
    feature_step,
    language_step,
    run_step,
    seeded,
    sgd,
    train,
)

NUM_BLOCKS = 4
PLANS = ("offload-inputs", "offload", "balanced", "offload-last:2")
SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("late", 0),
    ("eager", 0),
    *(("random", seed) for seed in range(10)),
)
FLOAT_BYTES = 4
INPUT_BYTES = BATCH * NUM_TOKENS * WIDTH * FLOAT_BYTES
"""Bytes of one block's input."""
NO_ROOM = "no room left in the host tier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to train, and how."""

    build: Callable[[], nn.Module]
    step: Step


SUBJECTS = {
    "llama": Subject(build=lambda: llama(num_layers=NUM_BLOCKS), step=language_step),
    "views": Subject(build=lambda: Stack(Views, NUM_BLOCKS), step=feature_step),
}


@cache
def reference(name: str) -> Trace:
    """What a subject's training leaves when nothing is attached."""
    subject = SUBJECTS[name]
    return train(seeded(subject.build), subject.step)


def stack(make_block: Callable[[], nn.Module] = Gated) -> nn.Module:
    return seeded(lambda: Stack(make_block, NUM_BLOCKS))


def train_in_steps(tide: FakeTide, model: nn.Module, step: Step) -> Trace:
    """Train as `train` does; afterwards the ledger has counted the last step alone."""
    trace, optimizer = Trace(), sgd(model)
    for index in range(NUM_STEPS):
        if index == NUM_STEPS - 1:
            tide.ledger.reset()
        run_step(model, step, index, trace, optimizer)
    return trace


def assert_same_as_unattached(
    build: Callable[[], nn.Module], step: Step, make_plan: MakePlan, **options: Any
) -> None:
    """Train with and without ebbtide; every bit must agree and nothing may be left."""
    wanted = train(seeded(build), step)
    model = seeded(build)
    with FakeTide(model, make_plan, **options) as tide, tide.device.watch():
        assert differences(train(model, step), wanted) == []
        tide.assert_nothing_is_left()
        tide.assert_bounds_were_kept()
        assert tide.ledger.snapshot().host.moved_out_bytes > 0


# -- all rules at once -----------------------------------------------------------------------------


CASES = [
    (name, plan, schedule, seed)
    for name in SUBJECTS
    for plan in PLANS
    for schedule, seed in SCHEDULES
    # The large model takes most of the time: all seeds for one plan, two for each of the others.
    if name != "llama" or plan == "offload" or seed < 2
]


@pytest.mark.parametrize(("name", "plan", "schedule", "seed"), CASES)
def test_losses_and_gradients_are_bit_identical_under_every_schedule(
    name: str, plan: str, schedule: Schedule, seed: int
) -> None:
    """Design rules 1, 2 and 4: and each planned byte moves once each way."""
    model = seeded(SUBJECTS[name].build)
    with FakeTide(model, planned(plan), schedule=schedule, seed=seed) as tide:
        # Watching takes longer than the training: it is left to one schedule here.
        with tide.device.watch() if schedule == "late" else nullcontext():
            trace = train_in_steps(tide, model, SUBJECTS[name].step)
        assert differences(trace, reference(name)) == []
        tide.assert_nothing_is_left()
        tide.assert_bounds_were_kept()
        counts = tide.ledger.snapshot()
        assert counts.host.moved_out_bytes == tide.plan.host_bytes > 0
        assert counts.host.moved_in_bytes == tide.plan.host_bytes
        assert counts.host.peak_held_bytes == tide.plan.host_bytes
        assert counts.num_kept_not_understood == ()


# -- rule 1 ----------------------------------------------------------------------------------------


class Overwriting(nn.Module):
    """Writes to a product that no operator saved, but that two recipes start from."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        up_BTD = self.up(h_BTD)
        first_BTD = (up_BTD * 2.0).sin()
        second_BTD = (up_BTD + 1.0).cos()
        up_BTD.mul_(0.5)
        return h_BTD + first_BTD * second_BTD + up_BTD.tanh()


@pytest.mark.parametrize("schedule", ["late", "eager"])
def test_a_write_in_place_waits_for_the_copy_of_what_it_overwrites(schedule: Schedule) -> None:
    """Design rule 1: the evict is still under way when the block writes over its source."""
    model = stack(Overwriting)
    with FakeTide(model, planned("offload"), schedule=schedule) as tide:
        model(features()).sum().backward()
        model(features()).sum().backward()
        assert tide.plan.decision("blocks.0.up") is Decision.HOST
    assert_same_as_unattached(
        lambda: Stack(Overwriting, NUM_BLOCKS), feature_step, planned("offload"), schedule=schedule
    )


def test_writes_in_place_wherever_autograd_allows_them_change_nothing() -> None:
    """Design rule 1."""
    assert_same_as_unattached(
        lambda: Stack(Writing, NUM_BLOCKS), feature_step, offload_everything, schedule="late"
    )


def test_sources_are_held_until_their_copies_passed_and_no_longer() -> None:
    """Design rule 1: the turn lets all sources go, so that the logits' peak holds none."""
    model = stack()
    with FakeTide(model, offload_everything, schedule="late") as tide:
        for _ in range(2):
            model(features()).sum().backward()
        loss = model(features()).sum()
        assert tide.traffic.bytes_in_flight == (0, 0)
        assert tide.ledger.snapshot().held_device_bytes == 0
        assert tide.held_host_bytes == tide.plan.host_bytes
        loss.backward()
        del loss
        tide.assert_nothing_is_left()


# -- rule 2 ----------------------------------------------------------------------------------------


class SaveAll(torch.autograd.Function):
    """Saves tensors for backward, and notes there what comes back."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, h_BTD: Tensor, seen: list[Tensor], *saved: Tensor
    ) -> Tensor:
        ctx.seen = seen
        ctx.save_for_backward(*saved)
        return h_BTD.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.seen.extend(ctx.saved_tensors)
        return gradient, None, *(None for _ in ctx.saved_tensors)


class Layouts(nn.Module):
    """Saves its activations in every layout that a tensor can have."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.saved: list[Layout] = []
        self.values: list[Tensor] = []
        self.seen: list[Tensor] = []

    def forward(self, h_BTD: Tensor) -> Tensor:
        up_BTF = self.up(h_BTD).exp()
        narrow_BTD = self.up(h_BTD).sin()[..., 3 : WIDTH + 3]
        with torch.no_grad():
            pairs = torch.view_as_complex(up_BTF.sqrt().unflatten(-1, (-1, 2)))
            layouts = (
                up_BTF,
                up_BTF.permute(2, 0, 1),
                up_BTF[:, 3:, 1::2],
                up_BTF[0, 1].expand(4, -1),
                up_BTF.view(torch.int32),
                up_BTF.unfold(1, 4, 1),
                narrow_BTD,
                pairs,
                pairs.conj(),
                pairs.conj().imag,
            )
        self.saved = [Layout.of(t) for t in layouts]
        self.values = [t.clone() for t in layouts]
        self.seen = []
        result: Any = SaveAll.apply(h_BTD, self.seen, *layouts)
        return result


@pytest.mark.parametrize("schedule", ["late", "eager"])
def test_layout_comes_back_exactly(schedule: Schedule) -> None:
    """Design rule 2: shape, stride, offset, dtype, conjugate and negative bits, and aliasing."""
    model: Any = stack(Layouts)
    with FakeTide(model, offload_everything, schedule=schedule) as tide:
        for _ in range(NUM_STEPS):
            model(features().requires_grad_()).sum().backward()
        assert tide.ledger.snapshot().num_kept_not_understood == ()
        for block in model.blocks:
            seen = [Layout.of(t) for t in block.seen]
            assert len(seen) == 10
            assert {s.is_conj for s in seen} == {s.is_neg for s in seen} == {True, False}
            small = 6  # moves alone, without the rest of its storage: only its offset is another
            assert seen[:small] == block.saved[:small]
            assert seen[small + 1 :] == block.saved[small + 1 :]
            assert seen[small][1:] == block.saved[small][1:]
            for got, wanted in zip(block.seen, block.values, strict=True):
                assert torch.equal(got, wanted)


# -- rule 3 ----------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """Saves a parameter, a frozen one, a buffer and a constant from outside, all large."""

    def __init__(self, table_TD: Tensor) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.randn(NUM_TOKENS, WIDTH))
        self.frozen = nn.Parameter(torch.randn(NUM_TOKENS, WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.randn(NUM_TOKENS, WIDTH))
        self.table = [table_TD]

    def forward(self, h_BTD: Tensor) -> Tensor:
        scale_TD = self.get_buffer("scale")
        return h_BTD * self.trained * self.frozen * scale_TD * self.table[0]


def test_parameters_buffers_and_shared_tables_never_move() -> None:
    """Design rule 3: of all that the products save, only one activation of a block moves."""
    table_TD = torch.randn(NUM_TOKENS, WIDTH)
    assert table_TD.numel() * FLOAT_BYTES > 512
    model = seeded(lambda: Stack(lambda: Weighted(table_TD), NUM_BLOCKS))
    with FakeTide(model, offload_everything) as tide:
        train_in_steps(tide, model, feature_step)
        # The first product saves the block's input for `trained`; the other factors want no
        # gradient, so no activation is saved for them. The first block's input wants none
        # either: it comes from outside, as a table does.
        assert tide.plan.host_bytes == (NUM_BLOCKS - 1) * INPUT_BYTES
        counts = tide.ledger.snapshot()
        assert counts.host.moved_out_bytes == counts.host.moved_in_bytes == tide.plan.host_bytes
        assert counts.num_evictions == NUM_BLOCKS - 1


class Overlapping(nn.Module):
    """Saves the same storage four times, through views that overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        up_BTF = self.up(h_BTD)
        left_BTF, right_BTF = up_BTF[..., : WIDTH + 8], up_BTF[..., WIDTH - 8 :]
        mixed_BTF = 0.01 * (left_BTF.square() + right_BTF.square())
        return h_BTD + mixed_BTF[..., :WIDTH] + 0.01 * (up_BTF * up_BTF.mT.mT)[..., :WIDTH]


def test_a_storage_that_is_saved_often_moves_once() -> None:
    """Design rule 3."""
    assert_same_as_unattached(
        lambda: Stack(Overlapping, NUM_BLOCKS), feature_step, offload_everything
    )
    model = stack(Overlapping)
    with FakeTide(model, offload_everything) as tide:
        train_in_steps(tide, model, feature_step)
        moved = {n for n, d in tide.plan.decisions.items() if d is Decision.HOST}
        products = {f"blocks.{i}.up" for i in range(NUM_BLOCKS)}
        inputs = {f"blocks.{i}:input" for i in range(1, NUM_BLOCKS)}
        assert moved == products | inputs
        counts = tide.ledger.snapshot()
        assert counts.num_evictions == len(products) + len(inputs)
        assert counts.host.moved_out_bytes == (2 * len(products) + len(inputs)) * INPUT_BYTES


# -- rule 4 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("name", SUBJECTS)
def test_two_forwards_before_two_backwards_keep_their_graphs_apart(
    name: str, is_reversed: bool
) -> None:
    """Design rule 4: interleaved micro-batches need no counters."""

    def losses(model: nn.Module) -> list[Tensor]:
        if name == "llama":
            ids = torch.arange(BATCH * NUM_TOKENS).view(BATCH, NUM_TOKENS)
            return [model(input_ids=i, labels=i).loss for i in (ids, ids.flip(-1))]
        return [model(features()).square().mean() for _ in range(2)]

    def step(model: nn.Module, index: int) -> Tensor:
        del index
        first, second = losses(model)
        for loss in (second, first) if is_reversed else (first, second):
            loss.backward()
        return first + second

    build = SUBJECTS[name].build
    wanted = train(seeded(build), step)
    model = seeded(build)
    with FakeTide(model, planned("offload")) as tide, tide.device.watch():
        got = train_in_steps(tide, model, step)
        assert differences(got, wanted) == []
        tide.assert_nothing_is_left()
        tide.assert_bounds_were_kept()
        counts = tide.ledger.snapshot()
        assert counts.host.moved_out_bytes == 2 * tide.plan.host_bytes
        assert counts.host.peak_held_bytes == 2 * tide.plan.host_bytes


def test_a_retained_graph_runs_backward_again() -> None:
    """Design rule 4: nothing is used up by the first backward."""

    def step(model: nn.Module, index: int) -> Tensor:
        del index
        loss = model(features()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    wanted = train(stack(Views), step)
    model = stack(Views)
    with FakeTide(model, planned("offload")) as tide, tide.device.watch():
        assert differences(train_in_steps(tide, model, step), wanted) == []
        tide.assert_nothing_is_left()
        counts = tide.ledger.snapshot()
        assert counts.host.moved_out_bytes == tide.plan.host_bytes
        assert counts.host.moved_in_bytes == 2 * tide.plan.host_bytes


@pytest.mark.parametrize("schedule", ["late", "eager"])
@pytest.mark.parametrize("make_plan", [planned("offload"), offload_everything])
def test_a_graph_that_is_dropped_gives_everything_back(
    schedule: Schedule, make_plan: MakePlan
) -> None:
    """Design rule 4: without a backward, and without the garbage collector."""
    model = stack(Views)
    with FakeTide(model, make_plan, schedule=schedule) as tide:
        for _ in range(2):
            model(features()).sum().backward()
        for _ in range(3):
            output = model(features())
            assert tide.held_host_bytes == tide.plan.host_bytes
            del output
            tide.assert_nothing_is_left()


@pytest.mark.parametrize("schedule", ["late", "eager"])
def test_a_graph_that_is_dropped_half_way_through_backward_gives_everything_back(
    schedule: Schedule,
) -> None:
    """Design rules 1 and 4: fetches that nobody waits for any more are fenced."""
    model: Any = stack()
    with FakeTide(model, offload_everything, schedule=schedule) as tide:
        for _ in range(2):
            model(features()).sum().backward()
        output = model(features())
        last = list(model.blocks[-1].down.parameters())
        torch.autograd.grad(output.sum(), last, retain_graph=True)
        assert tide.traffic.bytes_in_flight[1] > 0, "the blocks before are on their way"
        del output
        tide.assert_nothing_is_left()


def test_a_branch_that_no_loss_uses_is_given_back_with_its_graph() -> None:
    """Design rule 4."""

    def step(model: nn.Module, index: int) -> Tensor:
        output, side = model(features())
        loss = output.square().mean() + (side if index == 1 else 0)
        loss.backward()
        return loss

    wanted = train(seeded(BranchedStack), step)
    model = seeded(BranchedStack)
    with FakeTide(model, offload_everything) as tide, tide.device.watch():
        assert differences(train_in_steps(tide, model, step), wanted) == []
        tide.assert_nothing_is_left()
        counts = tide.ledger.snapshot()
        assert counts.host.moved_out_bytes == tide.plan.host_bytes
        assert counts.host.moved_in_bytes == tide.plan.host_bytes, "all was fetched ahead"


class Fused(nn.Module):
    """A block that can be made to raise in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()
        self.is_blown = False

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = self.inner(h_BTD)
        if self.is_blown:
            raise ArithmeticError("the fuse is blown")
        return x_BTD * x_BTD.sigmoid()


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_a_good_step_follows_one_that_raised_in_mid_forward(schedule: Schedule) -> None:
    """Design rule 4: what the broken forward had evicted is gone."""

    def step(model: Any, index: int) -> Tensor:
        if index > 0:
            model.blocks[2].is_blown = True
            with pytest.raises(ArithmeticError, match="the fuse is blown"):
                model(features())
            model.blocks[2].is_blown = False
        return feature_step(model, index)

    wanted = train(stack(Fused), step)
    model = stack(Fused)
    with FakeTide(model, offload_everything, schedule=schedule) as tide, tide.device.watch():
        assert differences(train_in_steps(tide, model, step), wanted) == []
        tide.assert_nothing_is_left()
        host = tide.ledger.snapshot().host
        assert tide.plan.host_bytes < host.moved_out_bytes < 2 * tide.plan.host_bytes
        assert host.peak_held_bytes == tide.plan.host_bytes


# -- rule 5 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_context", [torch.no_grad, torch.inference_mode])
def test_a_pass_without_gradients_is_invisible(make_context: Callable[[], Any]) -> None:
    """Design rule 5: also between a forward and its backward."""
    model, plain = stack(), stack()
    with FakeTide(model, offload_everything) as tide:
        for _ in range(2):
            model(features()).sum().backward()
        loss = model(features()).sum()
        before = tide.ledger.snapshot()
        with make_context():
            inputs = features()
            assert torch.equal(model(inputs), plain(inputs))
        assert tide.ledger.snapshot() == before
        assert tide.held_host_bytes == tide.plan.host_bytes
        loss.backward()
        del loss
        tide.assert_nothing_is_left()


# -- rule 6 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[:4])
@pytest.mark.parametrize("name", SUBJECTS)
def test_forward_and_backward_may_run_on_different_streams(
    name: str, schedule: Schedule, seed: int
) -> None:
    """Design rules 1 and 6: and every step on two others than the step before."""
    subject = SUBJECTS[name]
    model = seeded(subject.build)
    with FakeTide(model, planned("offload"), schedule=schedule, seed=seed) as tide:
        device = tide.device

        def step(model: nn.Module, index: int) -> Tensor:
            first, second = f"forward {index}", f"backward {index}"
            device.wait(first, device.current_stream())
            with device.stream(first):
                if name == "llama":
                    ids = torch.randint(0, 64, (BATCH, NUM_TOKENS))
                    loss = model(input_ids=ids, labels=ids).loss
                else:
                    loss = model(features()).square().mean()
            device.wait(second, first)
            with device.stream(second):
                loss.backward()
            device.wait("main", second)
            return loss

        with device.watch():
            trace = train_in_steps(tide, model, step)
        assert differences(trace, reference(name)) == []
        tide.assert_nothing_is_left()
        assert tide.ledger.snapshot().host.moved_in_bytes == tide.plan.host_bytes


# -- rule 7 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_does_not_fit_in_the_host_tier_is_kept_or_recomputed(name: str) -> None:
    """Design rule 7: the tier has its size before the first planned step, and keeps it."""
    subject = SUBJECTS[name]
    num_host_bytes = 24 * 1024
    model = seeded(subject.build)
    with FakeTide(model, planned("offload"), num_host_bytes=num_host_bytes) as tide:
        with tide.device.watch():
            trace = train_in_steps(tide, model, subject.step)
        assert differences(trace, reference(name)) == []
        tide.assert_nothing_is_left()
        counts = tide.ledger.snapshot()
        assert tide.plan.host_bytes > num_host_bytes
        assert num_host_bytes // 2 < counts.host.peak_held_bytes <= num_host_bytes
        assert [reason for reason, _ in counts.num_kept_not_understood] == [NO_ROOM]
        host = tide.traffic.tiers.host
        assert host is not None
        assert host.arena.statistics().capacity_bytes == num_host_bytes


def test_the_host_tier_grows_between_steps_to_what_two_graphs_need() -> None:
    """Design rule 7: the step that finds no room does not grow it."""
    model = stack()
    with FakeTide(model, offload_everything, is_growing=True) as tide:

        def capacity_bytes() -> int:
            host = tide.traffic.tiers.host
            assert host is not None
            return host.arena.statistics().capacity_bytes

        for _ in range(2):
            model(features()).sum().backward()
        planned_bytes = tide.plan.host_bytes
        assert capacity_bytes() == planned_bytes
        for wanted_bytes in (planned_bytes, 2 * planned_bytes):
            tide.ledger.reset()
            losses = [model(features()).sum() for _ in range(2)]
            assert tide.held_host_bytes == capacity_bytes() == wanted_bytes
            (losses[0] + losses[1]).backward()
            losses.clear()
            tide.assert_nothing_is_left()
        assert tide.ledger.snapshot().num_kept_not_understood == ()


# -- rule 8 ----------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Drops out twice, between products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = nn.functional.dropout(self.first(h_BTD).tanh(), 0.5)
        noisy_BTD = x_BTD * torch.rand_like(x_BTD)
        return h_BTD + nn.functional.dropout(self.second(noisy_BTD).exp(), 0.3)


@pytest.mark.parametrize("plan", PLANS)
def test_random_operators_are_never_run_again(plan: str) -> None:
    """Design rule 8: gradients and the random state after each step are the same."""
    assert_same_as_unattached(lambda: Stack(Dropping, NUM_BLOCKS), feature_step, planned(plan))


# -- rule 10 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[:4])
@pytest.mark.parametrize("plan", PLANS)
def test_bytes_in_flight_stay_within_the_smallest_bound(
    plan: str, schedule: Schedule, seed: int
) -> None:
    """Design rule 10: one activation at a time, in each direction."""
    name = "views"
    model = seeded(SUBJECTS[name].build)
    with FakeTide(model, with_little_in_flight(plan), schedule=schedule, seed=seed) as tide:
        with tide.device.watch():
            trace = train_in_steps(tide, model, SUBJECTS[name].step)
        assert differences(trace, reference(name)) == []
        tide.assert_nothing_is_left()
        largest_bytes = tide.plan.max_out_bytes_in_flight
        assert tide.device.peak_out_bytes == tide.device.peak_in_bytes == largest_bytes
        counts = tide.ledger.snapshot()
        assert counts.host.moved_out_bytes == tide.plan.host_bytes
        # What was fetched ahead may have to give way, and come again.
        assert counts.host.moved_in_bytes >= tide.plan.host_bytes


# -- rule 11 ---------------------------------------------------------------------------------------


class Foreign(Tensor):
    """A subclass that ebbtide knows nothing of."""


class Subclassed(nn.Module):
    """Saves tensors of a foreign class between known ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD: Any = self.linear(h_BTD).sigmoid()
        foreign_BTD = x_BTD.as_subclass(Foreign).sin()
        return foreign_BTD.as_subclass(Tensor) * x_BTD  # pyright: ignore[reportReturnType]


def test_what_is_not_understood_is_kept_and_counted() -> None:
    """Design rule 11: an unknown class costs memory, never a gradient."""
    assert_same_as_unattached(
        lambda: Stack(Subclassed, NUM_BLOCKS), feature_step, offload_everything
    )
    model = stack(Subclassed)
    with FakeTide(model, offload_everything) as tide:
        train_in_steps(tide, model, feature_step)
        counts = tide.ledger.snapshot()
        assert counts.num_kept_not_understood == (("subclass Foreign", NUM_BLOCKS),)
        assert counts.host.moved_out_bytes == tide.plan.host_bytes > 0
