"""What a tape holds while a block runs, and what it lets go of afterwards."""

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
)

from ebbtide.torch import attach
from ebbtide.torch.identity import StorageRef
from ebbtide.torch.internals import has_ended


class Casting(nn.Module):
    """Begins with a cast, so that autograd saves nothing of the block's input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.float32)

    def forward(self, h_BD: Tensor) -> Tensor:
        return torch.tanh(self.linear(h_BD.float())).to(torch.bfloat16) + h_BD


def test_an_observed_forward_holds_each_block_input_once() -> None:
    """The original dies with the model's last use of it; only the copy for recipes is left."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Casting() for _ in range(4)])
    inputs: list[StorageRef] = []

    def note(module: nn.Module, args: Any) -> None:
        inputs.append(StorageRef(args[0].untyped_storage()))

    for block in model:
        block.register_forward_pre_hook(note)
    with attach(model, "recompute"):
        out = model(torch.randn(2, 16, dtype=torch.bfloat16, requires_grad=True).clone())
        alive = [not ref.expired() for ref in inputs]
        # The last block's input is watched until backward starts; see `Runtime._note_writes`.
        assert alive == [False, False, False, True]
        out.float().sum().backward()
        assert inputs[-1].expired()


def test_a_root_that_no_recipe_needs_is_let_go_at_the_end_of_its_block() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, h_BD: Tensor) -> Tensor:
            # The random values are a root of the sum, but nothing saves the sum.
            noise_BD = torch.rand_like(h_BD)
            refs.append(StorageRef(noise_BD.untyped_storage()))
            return self.linear(h_BD) + (noise_BD + 1.0)

    refs: list[StorageRef] = []
    torch.manual_seed(0)
    model = nn.Sequential(Dropping(), Dropping())
    with attach(model, "recompute"):
        out = model(torch.randn(2, 16))
        assert [ref.expired() for ref in refs] == [True, True]
        out.sum().backward()


class Interrupted(nn.Module):
    """Is interrupted in the middle of its forward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.is_interrupted = False

    def forward(self, h_BD: Tensor) -> Tensor:
        x_BD = torch.tanh(self.linear(h_BD))
        if self.is_interrupted:
            raise KeyboardInterrupt
        return h_BD + x_BD


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_step_that_was_interrupted_leaves_no_mode_behind(is_closed: bool) -> None:
    """torch calls no hook after a `KeyboardInterrupt`."""
    torch.manual_seed(0)
    blocks = [Interrupted() for _ in range(3)]
    model = nn.Sequential(*blocks)
    inputs = torch.randn(2, 16)
    model(inputs).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    tide = attach(model, "recompute")
    model(inputs).sum().backward()
    blocks[1].is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        model(inputs)
    blocks[1].is_interrupted = False
    if is_closed:
        tide.close()
    model.zero_grad()
    model(inputs).sum().backward()
    assert _get_current_dispatch_mode_stack() == []
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    tide.close()


@pytest.fixture
def interrupted() -> Iterator[nn.Sequential]:
    """An attached model, after an interrupt in the middle of its forward."""
    torch.manual_seed(0)
    blocks = [Interrupted() for _ in range(3)]
    model = nn.Sequential(*blocks)
    with attach(model, "recompute"):
        model(torch.ones(2, 16)).sum().backward()
        blocks[1].is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 16))
        blocks[1].is_interrupted = False
        assert len(_get_current_dispatch_mode_stack()) == 1
        yield model
    assert _get_current_dispatch_mode_stack() == []


def gradient_of_other() -> Tensor:
    """Train something that is not attached."""
    weight = torch.linspace(0.0, 1.0, 16).requires_grad_()
    (weight * weight).tanh().sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_an_interrupted_tape_goes_when_autograd_saves_something(interrupted: nn.Module) -> None:
    got = gradient_of_other()
    assert _get_current_dispatch_mode_stack() == []
    with torch.autograd.graph.disable_saved_tensors_hooks("no hook is left, so this is allowed"):
        assert torch.equal(got, gradient_of_other())


def test_an_interrupted_tape_goes_in_a_pass_without_gradients(interrupted: nn.Module) -> None:
    with torch.no_grad():
        interrupted(torch.ones(2, 16))
    assert _get_current_dispatch_mode_stack() == []


class Counting(TorchDispatchMode):
    """Counts the calls that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("on_top", [Counting, torch.autograd.graph.save_on_cpu])
def test_what_was_entered_since_the_interrupt_stays_on_top(
    on_top: type[AbstractContextManager[Any]], interrupted: nn.Module
) -> None:
    """torch leaves what was entered last, whoever asks: the tape must wait for its turn."""
    wanted = torch.linspace(0.0, 1.0, 16)
    wanted = 2 * wanted * (1 - (wanted * wanted).tanh() ** 2)
    context = on_top()
    with context:
        assert torch.allclose(gradient_of_other(), wanted)
        interrupted(torch.ones(2, 16)).sum().backward()  # its blocks put tapes on, and off again
        if isinstance(context, Counting):
            assert _get_current_dispatch_mode_stack()[-1] is context
            before = context.num_calls
            gradient_of_other()
            assert context.num_calls > before
    assert torch.allclose(gradient_of_other(), wanted)
    assert _get_current_dispatch_mode_stack() == []


def test_a_frame_has_ended_when_it_runs_on_no_thread() -> None:
    frames: list[FrameType] = []
    is_known, may_end = threading.Event(), threading.Event()

    def run() -> None:
        frames.append(sys._getframe())  # pyright: ignore[reportPrivateUsage]
        is_known.set()
        may_end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    is_known.wait()
    assert not has_ended(frames[0])
    assert not has_ended(sys._getframe())  # pyright: ignore[reportPrivateUsage]
    may_end.set()
    thread.join()
    assert has_ended(frames[0])
