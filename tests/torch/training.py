"""Train a few steps of a small model, and compare two trainings bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ebbtide.plan import Decision
from ebbtide.torch import Tide, attach
from ebbtide.torch.script import Script, Scripts
from tests.torch.models import features, tokens

PLANS = ("recompute", "offload-inputs", "offload", "balanced", "offload-last:2")
EVICTING = PLANS[1:]
NUM_STEPS = 4
"""The first step observes, the second is checked, the third runs the plan and nothing else, and
the fourth follows what the third did, under `learn_at_once`."""

Step = Callable[[nn.Module, int], Tensor]
"""Runs forward and backward of step number `int`, and returns the loss."""


@contextlib.contextmanager
def learn_at_once() -> Generator[None]:
    """Take one recorded forward for a script; what follows it is compared with it all the same."""

    def learn(scripts: Scripts, key: object, script: Script) -> None:
        scripts.add(key, script)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scripts, "learn", learn)
        yield


def feature_step(model: nn.Module, index: int) -> Tensor:
    """Train a model of features towards small outputs."""
    del index
    loss = model(features(device=device_of(model))).square().mean()
    loss.backward()
    return loss


def language_step(model: nn.Module, index: int) -> Tensor:
    """Train a language model on random tokens."""
    del index
    ids = tokens(device=device_of(model))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


@dataclass(slots=True, kw_only=True)
class Trace:
    """All that a training leaves behind."""

    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Losses, gradients and buffers of each step, and the random state after it."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Note a value, as it is now; of a sharded tensor, this rank's part."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self.tensors[name] = local.detach().clone()


def device_of(model: nn.Module) -> str:
    """Return the device of a model's first parameter."""
    return str(next(model.parameters()).device)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all these tests."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)


def run_step(
    model: nn.Module, step: Step, index: int, trace: Trace, optimizer: torch.optim.Optimizer
) -> None:
    """Run one step with its own seed, note all it leaves, and update the parameters."""
    torch.manual_seed(1000 + index)
    loss = step(model, index)
    trace.add(f"{index}: loss", loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            trace.add(f"{index}: gradient of {name}", parameter.grad)
    for name, buffer in model.named_buffers():
        trace.add(f"{index}: buffer {name}", buffer)
    trace.add(f"{index}: random state", torch.get_rng_state())
    if torch.cuda.is_available():
        trace.add(f"{index}: random state of CUDA", torch.cuda.get_rng_state())
    optimizer.step()
    optimizer.zero_grad()


def train(model: nn.Module, step: Step, *, num_steps: int = NUM_STEPS, first: int = 0) -> Trace:
    """Train for some steps and return what they left."""
    trace, optimizer = Trace(), sgd(model)
    for index in range(first, first + num_steps):
        run_step(model, step, index, trace, optimizer)
    return trace


def train_attached(
    tide: Tide, model: nn.Module, step: Step, *, num_steps: int = NUM_STEPS
) -> Trace:
    """Train as `train` does; afterwards the statistics are those of the last step alone."""
    trace, optimizer = Trace(), sgd(model)
    for index in range(num_steps):
        if index == num_steps - 1:
            tide.reset_statistics()
        run_step(model, step, index, trace, optimizer)
    return trace


def differences(got: Trace, wanted: Trace) -> list[str]:
    """Name what differs; empty when two trainings are equal.

    All must be finite: infinities and NaNs would hide what differs.
    """
    for name, tensor in wanted.tensors.items():
        assert tensor.isfinite().all(), f"{name} is not finite"
    names = {**got.tensors, **wanted.tensors}
    return [n for n in names if not _is_equal(got.tensors.get(n), wanted.tensors.get(n))]


def _is_equal(left: Tensor | None, right: Tensor | None) -> bool:
    return left is not None and right is not None and torch.equal(left, right)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model with always the same weights."""
    torch.manual_seed(7)
    return build()


def assert_plan_was_run(
    tide: Tide, *, num_forwards: int = 1, num_backwards: int = 1, tier: Decision = Decision.DISK
) -> None:
    """Check that since the last reset every decision of the plan was carried out."""
    plan, counts = tide.plan, tide.statistics()
    assert plan is not None
    planned_bytes = plan.host_bytes + plan.disk_bytes
    assert counts.moved_out_bytes == num_forwards * planned_bytes
    assert counts.moved_in_bytes == num_backwards * planned_bytes
    assert (planned_bytes > 0) == (plan.name != "recompute")
    if Decision.RECOMPUTE in plan.decisions.values():
        assert counts.num_recomputed_ops > 0
    else:
        assert planned_bytes > 0
    assert counts.num_kept_not_understood == ()


def attach_here(model: Any, plan: Any, folder: Any, **options: Any) -> Tide:
    """Attach with a disk tier in `folder`, moving even small activations."""
    options.setdefault("disk", f"{folder}:200MiB")
    options.setdefault("min_bytes", 1024)
    return attach(model, plan, **options)
