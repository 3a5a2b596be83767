"""A forward that follows what the last ones did, and one that does not: the same bits both times.

Each block here changes something between two steps that a script takes over from earlier ones.
"""

# T tokens, D model width

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ebbtide.torch import Tide
from ebbtide.torch.script import MAX_MISSES, is_same_number
from tests.torch.models import WIDTH, features
from tests.torch.training import (
    Step,
    Trace,
    attach_here,
    differences,
    run_step,
    seeded,
    sgd,
    train,
)

pytestmark = pytest.mark.own_scripts

STEPS = 12
CHANGES_AT = 6
"""Step of the change: scripts were learned by then, and followed in one step."""


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Let torch refuse every kernel whose bits vary."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Changing(nn.Module):
    """A block whose middle depends on the number of the step."""

    def __init__(self, function: Callable[[Changing, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH))
        self.table: Tensor
        self.step = 0

    def forward(self, x_td: Tensor) -> Tensor:
        return x_td + self.last(self.function(self, self.first(x_td)))


class Stack(nn.Module):
    """Blocks of a kind, and the number of the step handed on to them."""

    def __init__(self, function: Callable[[Changing, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Changing(function) for _ in range(3))

    def forward(self, x_td: Tensor) -> Tensor:
        for block in self.blocks:
            x_td = block(x_td)
        return x_td


def step_of(model: nn.Module, index: int) -> Tensor:
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        block.step = index
    loss = model(features()).square().mean()
    loss.backward()
    return loss


def has_changed(block: Changing) -> bool:
    return block.step >= CHANGES_AT


def scalar(block: Changing, y_td: Tensor) -> Tensor:
    """Add a number that nothing saves, and multiply by one."""
    number = 0.5 if has_changed(block) else 0.25
    return functional.silu(y_td + number) * (2.0 * number)


def sign_of_zero(block: Changing, y_td: Tensor) -> Tensor:
    """Copy the sign of a zero: a number that equals another one."""
    zero = -0.0 if has_changed(block) else 0.0
    return functional.silu(torch.copysign(y_td.abs() + 0.1, torch.full((), zero)))


def keyword(block: Changing, y_td: Tensor) -> Tensor:
    """Change a keyword argument: which approximation."""
    kind = "tanh" if has_changed(block) else "none"
    return functional.gelu(y_td * 1.5, approximate=kind).sin()


def other_parameters(block: Changing, y_td: Tensor) -> Tensor:
    """Go through another layer of the same shape."""
    layer = block.other if has_changed(block) else block.second
    return functional.silu(layer(functional.silu(y_td)))


def same_parameters_twice(block: Changing, y_td: Tensor) -> Tensor:
    """Go through one layer twice, where it was through two."""
    layer = block.second if has_changed(block) else block.other
    return functional.silu(layer(functional.silu(block.second(y_td))))


def other_operand(block: Changing, y_td: Tensor) -> Tensor:
    """Multiply by another tensor of the same layout."""
    a, b = y_td.sin(), y_td.cos()
    return functional.silu((a if has_changed(block) else b) * y_td) * b


def other_layout(block: Changing, y_td: Tensor) -> Tensor:
    """Multiply by the same storage, with another stride."""
    z = y_td.sin()[..., :WIDTH]
    w = z.transpose(-1, -2) if has_changed(block) else z.transpose(-1, -2).contiguous()
    return functional.silu(y_td * w.transpose(-1, -2).cos())


def other_order(block: Changing, y_td: Tensor) -> Tensor:
    """Swap two calls that do not depend on one another."""
    if has_changed(block):
        b, a = y_td.cos(), y_td.sin()
    else:
        a, b = y_td.sin(), y_td.cos()
    return functional.silu(a * b + y_td)


def more_calls(block: Changing, y_td: Tensor) -> Tensor:
    """Do more at the end than before."""
    y_td = functional.silu(y_td).tanh()
    return functional.gelu(y_td).sin() if has_changed(block) else y_td


def fewer_calls(block: Changing, y_td: Tensor) -> Tensor:
    """Do less at the end than before."""
    y_td = functional.silu(y_td).tanh()
    return y_td if has_changed(block) else functional.gelu(y_td).sin()


def every_other(block: Changing, y_td: Tensor) -> Tensor:
    """Take turns."""
    y_td = functional.silu(y_td)
    return y_td.sin().tanh() if block.step % 2 else y_td.tanh().sin()


def writes_in_place(block: Changing, y_td: Tensor) -> Tensor:
    """Write to what a recipe starts from, after it was read by a call that saves nothing of it."""
    z_td = y_td.detach().clone()
    w_td = functional.silu(y_td + z_td)
    if has_changed(block):
        z_td.mul_(2.0)
    return w_td * (z_td + 1.0).sin()


def writes_to_table(block: Changing, y_td: Tensor) -> Tensor:
    """Write to a buffer that was read by calls that do not save it."""
    w_td = functional.silu(y_td + block.table)
    if has_changed(block):
        with torch.no_grad():
            block.table.mul_(1.01)
    return w_td.sin()


def freezes(block: Changing, y_td: Tensor) -> Tensor:
    """Stop the gradient on one way: less is saved, by the same calls."""
    z_td = y_td.detach() if has_changed(block) else y_td
    return functional.silu(z_td.sin()) * functional.silu(y_td)


def other_dtype(block: Changing, y_td: Tensor) -> Tensor:
    """Go on in another precision."""
    dtype = torch.bfloat16 if has_changed(block) else torch.float64
    return functional.silu(y_td.to(dtype)).sin().to(torch.float32)


def drops_out(block: Changing, y_td: Tensor) -> Tensor:
    """Draw random numbers, with another probability later; on a CPU that writes in place."""
    return functional.silu(functional.dropout(y_td, 0.3 if has_changed(block) else 0.1)).sin()


def other_slice(block: Changing, y_td: Tensor) -> Tensor:
    """Take another part of a list of equal parts."""
    parts = functional.silu(y_td).chunk(2, dim=-1)
    first, second = reversed(parts) if has_changed(block) else parts
    return torch.cat([first.sin() * second, second.cos()], dim=-1).sin()


def other_unsaved_slice(block: Changing, y_td: Tensor) -> Tensor:
    """Read another part of a storage, by calls that do not save what they read."""
    first, second = functional.silu(y_td).chunk(2, dim=-1)
    if has_changed(block):
        first, second = second, first
    return torch.cat([first + 1.0, second - 1.0], dim=-1).sin()


def other_list(block: Changing, y_td: Tensor) -> Tensor:
    """Join the same tensors in another order."""
    a, b = y_td.sin().chunk(2, dim=-1), y_td.cos().chunk(2, dim=-1)
    parts = [b[0], a[0]] if has_changed(block) else [a[0], b[0]]
    return functional.silu(torch.cat(parts, dim=-1)) * y_td


def constant_made_inside(block: Changing, y_td: Tensor) -> Tensor:
    """Multiply by a tensor that is made anew each time from another number."""
    table = torch.arange(WIDTH, dtype=torch.float32) * (0.1 if has_changed(block) else 0.2)
    return functional.silu(y_td * table.cos()).sin()


CHANGES = [
    scalar, sign_of_zero, keyword, other_parameters, same_parameters_twice, other_operand,
    other_layout, other_order, more_calls, fewer_calls, every_other, writes_in_place,
    writes_to_table, freezes, other_dtype, drops_out, other_slice, other_unsaved_slice,
    other_list,
    constant_made_inside,
]  # fmt: skip


def train_attached(function: Any, plan: str, folder: Path, step: Step = step_of) -> Trace:
    model = seeded(lambda: Stack(function))
    trace, optimizer = Trace(), sgd(model)
    with attach_here(model, plan, folder) as tide:
        for index in range(STEPS):
            run_step(model, step, index, trace, optimizer)
            if index == CHANGES_AT - 1 and function not in (every_other, drops_out):
                assert num_scripts(tide) == (2 if plan == "offload" else 3)  # the last is kept
            assert tide.statistics().disk.held_bytes == 0
        assert tide.statistics().num_recomputed_ops > 0
    return trace


def num_scripts(tide: Tide) -> int:
    assert tide.runtime is not None
    return sum(state.scripts.num_proven for state in tide.runtime.blocks)


@pytest.mark.parametrize("plan", ["recompute", "offload", "balanced"])
@pytest.mark.parametrize("function", CHANGES, ids=lambda f: f.__name__)
def test_what_changes_is_recorded_anew(function: Any, plan: str, tmp_path: Path) -> None:
    wanted = train(seeded(lambda: Stack(function)), step_of, num_steps=STEPS)
    assert differences(train_attached(function, plan, tmp_path), wanted) == []


def test_a_script_is_followed_and_leaves_less_to_hold(tmp_path: Path) -> None:
    """What backward does not need is not even noted: fewer nodes, the same recipes."""
    function = more_calls
    model = seeded(lambda: Stack(function))
    trace, optimizer = Trace(), sgd(model)
    followed: list[int] = []
    with attach_here(model, "recompute", tmp_path) as tide:
        assert tide.runtime is not None
        for index in range(CHANGES_AT):
            before = tide.statistics().num_recomputed_ops
            run_step(model, step_of, index, trace, optimizer)
            followed.append(tide.runtime.num_followed)
            if index >= 3:
                assert tide.statistics().num_recomputed_ops - before == 3 * 3
    # Observed, checked, recorded twice; then all three blocks follow.
    assert followed == [0, 0, 0, 0, 3, 6]


def test_a_block_that_always_changes_has_no_script_any_more(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(lambda block, y: y.sin().mul(1.0 + block.step // 3).tanh()))
    with attach_here(model, "recompute", tmp_path) as tide:
        for index in range(8 * MAX_MISSES):
            step_of(model, index)
        assert num_scripts(tide) == 0
        assert tide.runtime is not None
        assert [s.scripts.num_misses for s in tide.runtime.blocks] == [MAX_MISSES] * 3


def test_random_programs_have_the_same_bits(tmp_path: Path) -> None:
    """Blocks that draw their program anew now and then, out of calls of one layout."""
    calls: list[Callable[[Tensor, float], Tensor]] = [
        lambda t, n: t.sin(), lambda t, n: t + n, lambda t, n: t * n, lambda t, n: t.tanh(),
        lambda t, n: functional.silu(t), lambda t, n: (t * t.detach()).cos(),
        lambda t, n: torch.where(t > n, t, -t), lambda t, n: t.softmax(-1),
    ]  # fmt: skip

    for seed in range(5):

        def function(block: Changing, y_td: Tensor, seed: int = seed) -> Tensor:
            # Stays for a few steps, and changes a part of itself.
            for place in range(7):
                chance = random.Random(f"{seed} {place} {(block.step + 6 * (place % 2)) // 12}")
                y_td = chance.choice(calls)(y_td, chance.choice([0.5, 0.25]))
                if place == 3:
                    y_td = block.second(y_td)
            return y_td

        for plan in ("recompute", "balanced"):
            wanted = train(seeded(lambda: Stack(function)), step_of, num_steps=26)
            model = seeded(lambda: Stack(function))
            trace, optimizer = Trace(), sgd(model)
            folder = tmp_path / f"{seed}-{plan}"
            folder.mkdir()
            with attach_here(model, plan, folder) as tide:
                for index in range(26):
                    run_step(model, step_of, index, trace, optimizer)
                assert tide.runtime is not None and tide.runtime.num_followed > 0
            assert differences(trace, wanted) == []


def num_scopes(model: nn.Module) -> int:
    """Count the entries in the tables of hooks of the modules inside the blocks."""
    blocks = set(model.get_submodule("blocks").children())
    inner = [m for block in blocks for m in block.modules() if m not in blocks]
    tables = [t for m in inner for name, t in vars(m).items() if "_hooks" in name]
    return sum(len(table) for table in tables if isinstance(table, dict))


def kept_names(tide: Tide) -> list[list[str]]:
    assert tide.runtime is not None
    return [[name for _, _, name in state.names] for state in tide.runtime.blocks]


def test_inner_modules_have_hooks_only_until_the_calls_have_names(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(more_calls))
    with attach_here(model, "recompute", tmp_path) as tide:
        num_hooks = [num_scopes(model)]
        for index in range(CHANGES_AT + 4):
            step_of(model, index)
            num_hooks.append(num_scopes(model))
        names = kept_names(tide)
    every = 3 * 4 * 3  # one before each module, one after, which is always called
    # Off once the second forward was like the first; on again after the step with other calls,
    # until two in a row are alike.
    assert num_hooks == [every] * 2 + [0] * (CHANGES_AT - 1) + [every] * 2 + [0] * 2
    assert num_scopes(model) == 0
    fresh = seeded(lambda: Stack(more_calls))
    for block in fresh.get_submodule("blocks").children():
        assert isinstance(block, Changing)
        block.step = CHANGES_AT
    with attach_here(fresh, "recompute", tmp_path) as tide:
        step_of(fresh, CHANGES_AT)
        assert kept_names(tide) == names


def test_hooks_stay_where_somebody_elses_may_swap_parameters(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(more_calls))
    block = model.get_submodule("blocks.1")
    assert isinstance(block, Changing)
    block.last.register_forward_pre_hook(lambda module, args: None)
    with attach_here(model, "recompute", tmp_path):
        for index in range(4):
            step_of(model, index)
        assert num_scopes(model) == 4 * 3 + 1


def test_hooks_stay_in_a_block_whose_calls_often_have_other_names(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(lambda block, y: y.sin() if block.step // 3 % 2 else y.cos()))
    with attach_here(model, "recompute", tmp_path):
        num_hooks: list[bool] = []
        for index in range(15):
            step_of(model, index)
            num_hooks.append(num_scopes(model) > 0)
    assert num_hooks == [
        True, False, False, True, True, False, True, *[True] * 8
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("left", "right", "is_same"),
    [
        (1, 1, True), (1, 1.0, False), (1, True, False), (0.0, -0.0, False), (0.5, 0.5, True),
        (None, None, True), (torch.float32, torch.float32, True), ("a", "b", False),
        (float("nan"), float("nan") * 1.0, False), ([1], [1], True), (None, 0, False),
        (1 + 0j, complex(1, -0.0), False), (2j, 2j, True),
    ],
)  # fmt: skip
def test_numbers_are_the_same_by_type_value_and_sign(left: Any, right: Any, is_same: bool) -> None:
    assert is_same_number(left, right) is is_same
