"""Which storages backward may make again, and from what: the right bits, or none."""

# T tokens, D model width

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.torch.models import WIDTH, features
from tests.torch.training import attach_here, differences, seeded, train, train_attached

NUM_STEPS = 9
LATE = 6
"""Step from which some programs are others: scripts are followed by then."""

Body = Callable[["Gated", Tensor], Tensor]
Update = Callable[[Tensor], None]


class Gated(nn.Module):
    """A block that uses what its gate makes in two ways, one without a gradient to the gate."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.step = 0

    def forward(self, x_td: Tensor) -> Tensor:
        return self.body(self, x_td)


class Stack(nn.Module):
    """Two such blocks; a hook updates each parameter as soon as its gradient is there."""

    def __init__(self, body: Body, update: Update | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(body) for _ in range(2))
        if update is not None:
            self.update_early(update)

    def update_early(self, update: Update) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(update)

    def forward(self, x_td: Tensor) -> Tensor:
        for block in self.blocks:
            x_td = block(x_td)
        return x_td


def unseen(parameter: Tensor) -> None:
    """Update as fused optimizers do: no version moves."""
    assert parameter.grad is not None
    parameter.data.add_(parameter.grad, alpha=-0.05)


def seen(parameter: Tensor) -> None:
    """Update as torch's optimizers do."""
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.05)


def without_gradients(block: Gated, x_td: Tensor) -> Tensor:
    with torch.no_grad():
        gate_td = block.gate(x_td).sigmoid().exp()
    return block.last(x_td.tanh() * gate_td) + 0.1 * block.gate(x_td)


def detached(block: Gated, x_td: Tensor) -> Tensor:
    y_td = block.gate(x_td)
    gate_td = (1.5 * y_td).sigmoid().detach().exp()
    return block.last(x_td.tanh() * gate_td) + 0.1 * y_td


def detached_later(block: Gated, x_td: Tensor) -> Tensor:
    y_td = block.gate(x_td)
    gate_td = (1.5 * y_td).sigmoid().exp()
    if block.step >= LATE:
        gate_td = gate_td.detach()
    return block.last(x_td.tanh() * gate_td) + 0.1 * y_td


def compared(block: Gated, x_td: Tensor) -> Tensor:
    is_open_td = block.gate(x_td) > 0.05
    return block.last(torch.where(is_open_td, x_td.tanh(), x_td.sin())) + 0.1 * block.gate(x_td)


def detached_weight(block: Gated, x_td: Tensor) -> Tensor:
    """The gate's weight without its gradient, and nothing that autograd saves of it."""
    gate_td = functional.linear(x_td.detach(), block.gate.weight.detach()).sigmoid()
    return block.last(x_td.tanh() * gate_td) + 0.1 * block.gate(x_td)


def detached_weight_later(block: Gated, x_td: Tensor) -> Tensor:
    weight = block.gate.weight.detach() if block.step >= LATE else block.gate.weight
    with torch.no_grad():
        gate_td = functional.linear(x_td, weight).sigmoid()
    return block.last(x_td.tanh() * gate_td) + 0.1 * block.gate(x_td)


def without_gradients_later(block: Gated, x_td: Tensor) -> Tensor:
    """The same call as before, and from some step on no gradient goes that way."""
    with torch.set_grad_enabled(block.step < LATE):
        gate_td = functional.linear(x_td.detach(), block.gate.weight).sigmoid()
    return block.last(x_td.tanh() * gate_td) + 0.1 * block.gate(x_td)


def weight_data(block: Gated, x_td: Tensor) -> Tensor:
    gate_td = functional.linear(x_td.detach(), block.gate.weight.data).sigmoid()
    return block.last(x_td.tanh() * gate_td) + 0.1 * block.gate(x_td)


def step_of(model: nn.Module, index: int) -> Tensor:
    for block in model.get_submodule("blocks").children():
        assert isinstance(block, Gated)
        block.step = index
    loss = model(features()).square().mean()
    loss.backward()
    return loss


BODIES = [
    without_gradients, detached, detached_later, compared, detached_weight, detached_weight_later,
    without_gradients_later, weight_data,
]  # fmt: skip


@pytest.mark.parametrize("plan", ["recompute", "balanced"])
@pytest.mark.parametrize("update", [unseen, seen], ids=lambda f: f.__name__)
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_a_parameter_that_backward_updates_is_not_read_behind_that(
    body: Body, update: Update, plan: str, tmp_path: Path
) -> None:
    """Where no gradient goes to it, backward may come late to what is made from it."""
    wanted = train(seeded(lambda: Stack(body, update)), step_of, num_steps=NUM_STEPS)
    model = seeded(lambda: Stack(body, update))
    with attach_here(model, plan, tmp_path) as tide:
        got = train_attached(tide, model, step_of, num_steps=NUM_STEPS)
        assert tide.statistics().num_recomputed_ops > 0  # the rest of it still is
        assert tide.runtime is not None
        assert (tide.runtime.num_followed > 0) == (body not in (detached_weight, weight_data))
    assert differences(got, wanted) == []


def test_a_hook_that_comes_after_scripts_were_learned_is_seen(tmp_path: Path) -> None:
    def step(model: nn.Module, index: int) -> Tensor:
        if index == LATE:
            assert isinstance(model, Stack)
            model.update_early(unseen)
        return step_of(model, index)

    wanted = train(seeded(lambda: Stack(without_gradients, None)), step, num_steps=NUM_STEPS)
    model = seeded(lambda: Stack(without_gradients, None))
    with attach_here(model, "recompute", tmp_path) as tide:
        got = train_attached(tide, model, step, num_steps=NUM_STEPS)
        assert tide.runtime is not None and tide.runtime.num_followed > 0
    assert differences(got, wanted) == []


def test_a_graph_holds_no_parameter_that_it_does_not_need(tmp_path: Path) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_parameter("spare", nn.Parameter(torch.zeros(WIDTH)))

        def forward(self, x_td: Tensor) -> Tensor:
            return self.linear(x_td).tanh()

    blocks = [Spare(), Spare()]
    model = nn.Sequential(*blocks)
    with attach_here(model, "recompute", tmp_path):
        first = model(features())
        spares = [weakref.ref(block.get_parameter("spare")) for block in blocks]
        for block in blocks:
            block.register_parameter("spare", None)
        second = model(features())  # what the runtime itself knew is looked up anew
        assert [spare() for spare in spares] == [None, None]
        (first + second).sum().backward()


def test_without_such_hooks_what_is_detached_is_made_again(tmp_path: Path) -> None:
    """It costs nobody else memory."""
    counts: list[int] = []
    for update in (None, seen):
        model = seeded(lambda update=update: Stack(detached, update))
        with attach_here(model, "recompute", tmp_path) as tide:
            train_attached(tide, model, step_of)
            counts.append(tide.statistics().num_recomputed_ops)
    assert counts[0] > counts[1] > 0
