"""Every kind of program that a public fault was about: the same bits as without ebbtide.

`docs/cases.md` says which test stands for which case.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ebbtide.errors import RuntimeStateError
from ebbtide.torch.devices.fake import Schedule
from ebbtide.torch.traffic import Slot
from tests.torch.cases import Case
from tests.torch.fakes import FakeTide, MakePlan, offload_everything, planned
from tests.torch.kinds import KINDS, Squares
from tests.torch.models import WIDTH, Gated, Stack, features, llama, tokens
from tests.torch.training import (
    NUM_STEPS,
    Trace,
    attach_here,
    differences,
    feature_step,
    seeded,
    train,
)

NUM_HOST_BYTES = 64 << 20
UNSEEN = "did not come back bit for bit"
SLOW = pytest.mark.slow
ON_FAKE: dict[str, tuple[MakePlan, Schedule]] = {
    "recompute": (planned("recompute"), "late"),
    "offload": (planned("offload"), "late"),
    "everything": (offload_everything, "random"),
}


@cache
def wanted(name: str) -> Trace:
    """What a training leaves when nothing is attached."""
    case = KINDS[name]
    return train(seeded(case.build), case.step)


def assert_kept_only_what_it_should(name: str, reasons: list[str]) -> None:
    """Check that blocks were understood, but for what is there to be not understood."""
    allowed = {
        "an unseen write to what recipes start from": {UNSEEN},
        "an unseen write that is read": {UNSEEN},
        # The tier has the size of the first batch until the next one starts.
        "lengths from 64 to 8192": {"no room left in the disk tier"},
    }.get(name, set[str]())
    assert {reason for reason in reasons if not reason.startswith("subclass")} <= allowed


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("plan", ["recompute", pytest.param("offload", marks=SLOW), "everything"])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_have_the_same_bits_on_the_fake_device(name: str, plan: str) -> None:
    case: Case = KINDS[name]
    make_plan, schedule = ON_FAKE[plan]
    model = seeded(case.build)
    with FakeTide(model, make_plan, schedule=schedule, num_host_bytes=NUM_HOST_BYTES) as tide:
        assert differences(train(model, case.step), wanted(name)) == []
        counts = tide.ledger.snapshot()
        assert_kept_only_what_it_should(name, [r for r, _ in counts.num_kept_not_understood])
        if tide.runtime.traffic is not None:
            tide.assert_nothing_is_left()
            assert counts.host.moved_out_bytes >= tide.plan.host_bytes
        else:
            assert name == "a block that raises and is forgiven"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("plan", ["balanced"])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_have_the_same_bits_on_the_cpu(name: str, plan: str, tmp_path: Path) -> None:
    case: Case = KINDS[name]
    model = seeded(case.build)
    with attach_here(model, plan, tmp_path) as tide:
        assert differences(train(model, case.step), wanted(name)) == []
        counts = tide.statistics()
        assert_kept_only_what_it_should(name, [r for r, _ in counts.num_kept_not_understood])
        assert counts.moved_in_bytes > 0 or name == "a block that raises and is forgiven"


# -- what happens around the steps -----------------------------------------------------------------


def test_twenty_equal_blocks_move_the_same_bytes_each() -> None:
    """Addresses are used again and again; identity is not the address."""
    model = seeded(lambda: Stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), 20))
    with FakeTide(model, offload_everything, num_host_bytes=NUM_HOST_BYTES) as tide:
        for _ in range(2):
            feature_step(model, 0)
        moved: Counter[str] = Counter()
        evict = tide.traffic.evict

        def counting(name: str, source: Tensor, *rest: Any, **options: Any) -> Slot:
            moved[name.partition(":")[0].split(".")[1]] += source.numel()
            return evict(name, source, *rest, **options)

        vars(tide.traffic)["evict"] = counting
        feature_step(model, 0)
        # The input of the first needs no gradient, and is the caller's.
        assert moved.pop("0") == moved["1"] - features().numel() * features().element_size()
        assert len(moved) == 19 and len(set(moved.values())) == 1
        tide.assert_nothing_is_left()


def test_two_attached_models_train_through_each_other() -> None:
    """One model's output is the other's input, and both are in one backward."""

    def step(models: tuple[nn.Module, nn.Module]) -> list[Tensor]:
        torch.manual_seed(5)
        first, second = (models[0](features()) for _ in range(2))
        (models[1](first).square().mean() + models[0](second).mean()).backward()
        gradients = [p.grad.clone() for m in models for p in m.parameters() if p.grad is not None]
        for model in models:
            model.zero_grad()
        return gradients

    def build() -> tuple[nn.Module, nn.Module]:
        return seeded(lambda: Stack(Gated)), seeded(lambda: Stack(Squares))

    plain, attached = build(), build()
    with (
        FakeTide(attached[0], planned("offload"), num_host_bytes=NUM_HOST_BYTES) as one,
        FakeTide(attached[1], planned("balanced"), num_host_bytes=NUM_HOST_BYTES) as two,
    ):
        for _ in range(NUM_STEPS):
            wanted_gradients, found = step(plain), step(attached)
            assert len(found) == len(wanted_gradients) > 0
            assert all(map(torch.equal, found, wanted_gradients))
        for tide in (one, two):
            tide.assert_nothing_is_left()
            assert tide.ledger.snapshot().host.moved_in_bytes > 0


@pytest.mark.slow
def test_text_may_be_generated_between_forward_and_backward() -> None:
    def step(model: nn.Module, index: int) -> Tensor:
        del index
        ids, found = tokens(), cast(Any, model)
        loss = found(input_ids=ids, labels=ids).loss
        with torch.no_grad():
            new = found.generate(ids[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
        loss.backward()
        return loss + 0.0 * new.sum()

    wanted_trace = train(seeded(llama), step)
    model = seeded(llama)
    with FakeTide(model, planned("offload"), num_host_bytes=NUM_HOST_BYTES) as tide:
        assert differences(train(model, step), wanted_trace) == []
        tide.assert_nothing_is_left()


def test_a_state_dict_may_be_taken_and_loaded_in_mid_step() -> None:
    plain, model = (seeded(lambda: Stack(Gated)) for _ in range(2))
    with FakeTide(model, planned("offload")) as tide:
        for index in range(NUM_STEPS):
            gradients: list[list[Tensor]] = []
            for each in (plain, model):
                torch.manual_seed(index)
                each.zero_grad()
                loss = each(features()).square().mean()
                taken = copy.deepcopy(each.state_dict())
                loss.backward()
                del loss
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter.add_(1.0)
                each.load_state_dict(taken)
                gradients.append([p.grad for p in each.parameters() if p.grad is not None])
            assert all(map(torch.equal, *gradients)) and len(gradients[0]) == len(gradients[1])
        mine, theirs = model.state_dict(), plain.state_dict()
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        tide.assert_nothing_is_left()


class Closing(Gated):
    """Calls what it is told to in the middle of its forward."""

    call: Callable[[], None] | None = None

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = self.norm(h_BTD).tanh()
        if self.call is not None:
            self.call()
        return super().forward(x_BTD.exp() * h_BTD)


@pytest.mark.parametrize("plan", ["recompute", "offload"])
def test_close_inside_a_block_leaves_a_step_that_runs_or_says_so(plan: str, tmp_path: Path) -> None:
    plain, model = (seeded(lambda: Stack(Closing)) for _ in range(2))
    tide = attach_here(model, plan, tmp_path)
    for each in (plain, model):
        for index in range(3):
            torch.manual_seed(index)
            feature_step(each, index)
            each.zero_grad()
    cast(Any, model).blocks[1].call = tide.close
    torch.manual_seed(9)
    feature_step(plain, 0)
    torch.manual_seed(9)
    try:
        feature_step(model, 0)
    except RuntimeStateError as error:
        # By who asks first: the runtime, or a copy that a slow disk had not begun.
        assert plan == "offload" and re.search(r"given back by close\(\)|is closed", str(error))
    else:
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)


class Rows(Dataset[Tensor]):
    """Features by their number, drawn in the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(index))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_data_loader_may_fork_workers_while_copies_run(tmp_path: Path) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        found: list[Tensor] = []
        for _ in range(2):
            # New workers in each epoch: the second forks with threads and files of the tier.
            loader = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="fork")
            for batch in loader:
                model.zero_grad()
                model(batch).square().mean().backward()
                found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    wanted_gradients = gradients(seeded(lambda: Stack(Gated)))
    model = seeded(lambda: Stack(Gated))
    with attach_here(model, "offload", tmp_path) as tide:
        found = gradients(model)
        assert tide.statistics().moved_in_bytes > 0
    assert len(found) == len(wanted_gradients) > 0
    assert all(map(torch.equal, found, wanted_gradients))
