"""Hooks come off without a trace, and are inert in copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.memory.ledger import Ledger
from ebbtide.plan import Plan
from ebbtide.torch.hooks import Hooks
from ebbtide.torch.runtime import Runtime
from ebbtide.torch.traffic import Traffic
from ebbtide.workload import Workload
from tests.torch.models import Gated, Stack, features


def no_plan(workload: Workload) -> tuple[Plan, Traffic | None]:
    raise AssertionError("no plan was expected in the first step")


def observing(model: nn.Module) -> tuple[Runtime, Hooks]:
    """Install a runtime that only observes."""
    blocks = dict(model.get_submodule("blocks").named_children())
    runtime = Runtime(model, {f"blocks.{n}": b for n, b in blocks.items()}, no_plan, Ledger())
    return runtime, Hooks(runtime)


def hook_counts(model: nn.Module) -> dict[str, int]:
    """Return how many entries all tables of forward hooks of each module have together."""
    return {
        path: sum(len(v) for k, v in vars(m).items() if "_hooks" in k and isinstance(v, dict))
        for path, m in model.named_modules()
    }


def observed_names(runtime: Runtime) -> list[list[str]]:
    return [
        [a.name for a in state.observed.activations]
        for state in runtime.blocks
        if state.observed is not None
    ]


def test_hooks_come_off_without_a_trace() -> None:
    model = Stack(Gated)
    before = hook_counts(model)
    _, hooks = observing(model)
    assert hook_counts(model) != before
    hooks.close()
    assert hook_counts(model) == before == dict.fromkeys(before, 0)


def test_only_blocks_and_what_is_in_them_get_hooks() -> None:
    model = nn.Sequential(Stack(Gated, 2), nn.Linear(2, 2))
    runtime = Runtime(model, {"0.blocks.1": model.get_submodule("0.blocks.1")}, no_plan, Ledger())
    Hooks(runtime)
    assert {path for path, n in hook_counts(model).items() if n} == {
        "0.blocks.1",
        "0.blocks.1.norm",
        "0.blocks.1.gate",
        "0.blocks.1.up",
        "0.blocks.1.down",
    }


def test_activations_are_named_by_the_module_that_makes_them() -> None:
    model = Stack(Gated, 1)
    runtime, _ = observing(model)
    model(features().requires_grad_()).sum()
    assert observed_names(runtime) == [
        [
            "blocks.0:input",
            "blocks.0.norm:native_layer_norm.0",
            "blocks.0.norm:native_layer_norm.1",
            "blocks.0.norm:native_layer_norm.2",
            "blocks.0.gate",
            "blocks.0:silu",
            "blocks.0.up",
            "blocks.0:mul",
            "blocks.0.down",
            "blocks.0:add",
        ]
    ]


def test_a_module_that_two_blocks_share_is_named_by_the_block_that_runs() -> None:
    model = Stack(Gated, 2)
    first: Any = model.blocks[0]
    second: Any = model.blocks[1]
    second.up = first.up
    runtime, _ = observing(model)
    model(features().requires_grad_()).sum()
    names = observed_names(runtime)
    assert "blocks.0.up" in names[0] and "blocks.1.up" in names[1]
    assert set(names[0]).isdisjoint(names[1])


class Stumbling(nn.Module):
    """Catches the failure of a part of itself, as some models do to fall back."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = Broken()
        self.whole = nn.Linear(32, 32)

    def forward(self, h_BTD: Tensor) -> Tensor:
        try:
            return self.broken(h_BTD)
        except ArithmeticError:
            return self.whole(h_BTD).tanh()


class Broken(nn.Module):
    """Always fails."""

    def forward(self, h_BTD: Tensor) -> Tensor:
        raise ArithmeticError("always")


def test_a_module_that_fails_is_left_as_well_as_entered() -> None:
    model = Stack(Stumbling, 1)
    runtime, _ = observing(model)
    model(features().requires_grad_()).sum()
    assert observed_names(runtime) == [["blocks.0:input", "blocks.0.whole", "blocks.0:tanh"]]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_carries_hooks_that_do_nothing(duplicate: Any) -> None:
    model = Stack(Gated)
    runtime, hooks = observing(model)
    again = duplicate(model)
    assert hook_counts(again) == hook_counts(model)
    inputs = features()
    assert torch.equal(again(inputs), model(inputs).detach())
    hooks.close()
    runtime.close()
    again(inputs).sum().backward()
    assert observed_names(runtime) and hook_counts(model) != hook_counts(again)


def test_a_copy_observes_nothing() -> None:
    model = Stack(Gated)
    runtime, _ = observing(model)
    copy.deepcopy(model)(features()).sum().backward()
    pickle.loads(pickle.dumps(model))(features()).sum().backward()
    assert observed_names(runtime) == []
    model(features()).sum().backward()
    assert len(observed_names(runtime)) == 3


def test_a_copy_of_a_copy_is_inert_too() -> None:
    model = Stack(Gated)
    runtime, _ = observing(model)
    again = copy.deepcopy(copy.deepcopy(model))
    again(features()).sum().backward()
    assert observed_names(runtime) == []
