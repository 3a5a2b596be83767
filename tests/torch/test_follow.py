"""What a forward that follows its script takes over, and what makes it leave.

`test_script.py` changes what blocks do; here it is what single calls are given.
"""

# T tokens, D model width

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.torch.models import WIDTH, features
from tests.torch.training import attach_here, differences, seeded, train, train_attached

NUM_STEPS = 9
CHANGES_AT = 6

Body = Callable[["Given", Tensor], Tensor]


class Given(nn.Module):
    """A block that gives a call in its middle something else from some step on."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.table = torch.linspace(0.5, 1.5, WIDTH)
        self.step = 0

    @property
    def has_changed(self) -> bool:
        return self.step >= CHANGES_AT

    def forward(self, x_td: Tensor) -> Tensor:
        return x_td + self.last(self.body(self, self.first(x_td)))


def number_for_a_tensor(block: Given, y_td: Tensor) -> Tensor:
    return functional.silu(y_td * (1.25 if block.has_changed else block.table)).sin()


def tensor_for_a_number(block: Given, y_td: Tensor) -> Tensor:
    return functional.silu(y_td * (block.table if block.has_changed else 1.25)).sin()


def fewer_arguments(block: Given, y_td: Tensor) -> Tensor:
    limits = (-0.2,) if block.has_changed else (-0.2, 0.2)
    return functional.silu(torch.clamp(y_td, *limits)).sin()


def no_keyword(block: Given, y_td: Tensor) -> Tensor:
    other_td = y_td.cos()
    if block.has_changed:
        return functional.silu(y_td + other_td).sin()
    return functional.silu(torch.add(y_td, other_td, alpha=2)).sin()


def other_keyword(block: Given, y_td: Tensor) -> Tensor:
    return functional.silu(torch.add(y_td, y_td.cos(), alpha=block.step)).sin()


def parameter_for_a_table(block: Given, y_td: Tensor) -> Tensor:
    return functional.silu(y_td + (block.scale if block.has_changed else block.table)).sin()


def table_for_a_parameter(block: Given, y_td: Tensor) -> Tensor:
    return functional.silu(y_td + (block.table if block.has_changed else block.scale)).sin()


def table_of_another_storage(block: Given, y_td: Tensor) -> Tensor:
    """As large and laid out alike, but the first part of a longer one."""
    table = torch.linspace(0.5, 3.5, 3 * WIDTH)[:WIDTH] if block.has_changed else block.table
    return functional.silu(y_td + table).sin()


def table_anew(block: Given, y_td: Tensor) -> Tensor:
    """Made inside, and times another number each time."""
    return functional.silu(y_td + torch.full((WIDTH,), 1.0).mul(block.table) * block.step).sin()


def longer_list(block: Given, y_td: Tensor) -> Tensor:
    parts = list(y_td.sin().chunk(4, dim=-1))
    if block.has_changed:
        parts = [parts[0], torch.cat(parts[1:], dim=-1)]
    return functional.silu(torch.cat(parts, dim=-1)).sin()


def the_blocks_input(block: Given, y_td: Tensor) -> Tensor:
    other_td = y_td.detach() if block.has_changed else torch.ones_like(y_td)
    return functional.silu(y_td + other_td).sin()


def temperature(block: Given, y_td: Tensor) -> Tensor:
    """Falls until it stays."""
    return (y_td / max(0.5, 2.0 - 0.25 * block.step)).softmax(-1) * y_td


def window(block: Given, y_td: Tensor) -> Tensor:
    start = 2 + block.step % 3
    part_td = y_td[..., start : start + 4].exp()
    return functional.silu(y_td) + functional.pad(part_td, (start, WIDTH - 4 - start)).sin()


def dropped_part(block: Given, y_td: Tensor) -> Tensor:
    """Drops a part of the block by chance, as stochastic depth does."""
    is_dropped = random.Random(7 * block.step).random() < 0.4
    return y_td if is_dropped else functional.silu(y_td).sin()


def other_causality(block: Given, y_td: Tensor) -> Tensor:
    q = y_td.reshape(1, 1, -1, WIDTH)
    made = functional.scaled_dot_product_attention(
        q, q, q, is_causal=block.has_changed, scale=0.1 * (1 + block.step // 7)
    )
    return made.reshape(y_td.shape).sin()


BODIES = [
    number_for_a_tensor, tensor_for_a_number, fewer_arguments, no_keyword, other_keyword,
    parameter_for_a_table, table_for_a_parameter, table_of_another_storage, table_anew,
    longer_list, the_blocks_input, temperature, window, dropped_part, other_causality,
]  # fmt: skip


NEVER_TWICE = (other_keyword, table_anew, temperature, window)
"""What these do is never what the last step did, or not for long enough."""


def build(body: Body) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(Given(body), Given(body))


def step_of(model: nn.Module, index: int) -> Tensor:
    for block in model.children():
        assert isinstance(block, Given)
        block.step = index
    loss = model(features()).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("plan", ["recompute", "balanced"])
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_a_call_that_is_given_something_else_is_recorded(
    body: Body, plan: str, tmp_path: Path
) -> None:
    wanted = train(seeded(build(body)), step_of, num_steps=NUM_STEPS)
    model = seeded(build(body))
    with attach_here(model, plan, tmp_path) as tide:
        got = train_attached(tide, model, step_of, num_steps=NUM_STEPS)
        assert tide.runtime is not None
        assert tide.runtime.num_followed > 0 or body in NEVER_TWICE
    assert differences(got, wanted) == []


def test_what_is_made_anew_each_time_is_no_reason_to_leave(tmp_path: Path) -> None:
    """Values of tensors are no part of a script."""
    model = seeded(build(lambda block, y_td: functional.silu(y_td + block.table * 2.0).sin()))
    with attach_here(model, "recompute", tmp_path) as tide:
        assert tide.runtime is not None
        for index in range(NUM_STEPS):
            before = tide.runtime.num_followed
            for block in model.children():
                assert isinstance(block, Given)
                block.table = torch.linspace(0.5, 1.5 + index, WIDTH)
            step_of(model, index)
            if index >= 3:
                assert tide.runtime.num_followed == before + 2
