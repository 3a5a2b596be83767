"""All that a training step starts from, so that it can be run again from there.

Parameters, buffers, what the batch holds, gradients, which modules train, and the random states of
torch on the CPU and on GPUs, of Python and of numpy. Unchecked: generators of the user's own,
and state that a module keeps in plain attributes; steps then differ although nothing is wrong.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil
import torch
from torch import Tensor, nn

from ebbtide.errors import ModelError
from ebbtide.torch.fingerprint import fingerprint
from ebbtide.torch.internals import DTensor, has_gradient_hook

MAX_PARAMETER_SHARE: Final = 0.25
"""Of the host memory that is available: copies of parameters take no more. Above that they are
only watched, since a step that writes to its parameters is rare."""


@dataclass(slots=True, kw_only=True)
class _Value:
    """One tensor and what it held."""

    name: str
    tensor: Tensor
    print: int
    version: int
    """Of the tensor when it last had that checksum."""
    saved: Tensor | None
    """A copy in host memory; None for a parameter that is only watched."""


@dataclass(slots=True, kw_only=True)
class _Gradient:
    """A leaf and the gradient that it had."""

    leaf: Tensor
    gradient: Tensor | None
    saved: Tensor | None


class ModelState:
    """The state of a model and of the random generators, as it was when this was made.

    Args:
        batch: The tensors of the batch.

    Raises:
        ModelError: A parameter has a hook that runs when its gradient is there: an optimizer in
            backward would update it, and cannot be undone.
    """

    def __init__(self, model: nn.Module, batch: Sequence[Tensor]) -> None:
        for name, parameter in model.named_parameters():
            if has_gradient_hook(parameter):
                raise ModelError(
                    f"{name} has a hook that runs when its gradient is there, as an optimizer in "
                    "backward has; verify must not step it. Remove these hooks, verify, and put "
                    "them on again."
                )
        num_bytes = sum(bytes_in(p) for p in model.parameters())
        has_room = num_bytes <= psutil.virtual_memory().available * MAX_PARAMETER_SHARE
        self._values = [
            *(_value(name, p, is_saved=has_room) for name, p in model.named_parameters()),
            *(_value(name, b) for name, b in model.named_buffers()),
            *(_value(f"tensor {i} of the batch", t) for i, t in enumerate(batch)),
        ]
        leaves = [*model.parameters(), *(t for t in batch if t.is_leaf and t.requires_grad)]
        self._gradients = [_gradient(leaf) for leaf in leaves]
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._random = random_states()

    def start(self) -> None:
        """Go back to that state, with gradients of zero where there were some, else with none.

        Zero, so that a difference is not rounded away by what was there.

        Raises:
            ModelError: The last step wrote to a parameter of which there is no copy.
        """
        self._put_back(is_last=False)
        for known in self._gradients:
            known.leaf.grad = known.gradient
            if known.gradient is not None:
                with torch.no_grad():
                    local(known.gradient).zero_()

    def restore(self) -> None:
        """Go back to that state, gradients too.

        Raises:
            ModelError: As `start`; all else is as it was then.
        """
        for known in self._gradients:
            known.leaf.grad = known.gradient
            if known.gradient is not None and known.saved is not None:
                with torch.no_grad():
                    local(known.gradient).copy_(known.saved)
        self._put_back(is_last=True)

    def _put_back(self, *, is_last: bool) -> None:
        for module, is_training in self._modes:
            module.training = is_training
        for module, name, buffer in self._buffers:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
        set_random_states(self._random)
        lost = ""
        for value in self._values:
            # Between two steps it is enough that torch saw no write, but not for buffers: batch
            # normalisation writes its running statistics unannounced.
            is_counted = isinstance(value.tensor, nn.Parameter)
            if is_counted and not is_last and value.tensor._version == value.version:
                continue
            # Only where it changed: a write would stop graphs that saved it.
            if _print(value.tensor) == value.print:
                value.version = value.tensor._version
                continue
            if value.saved is None:
                lost = lost or value.name
                continue
            with torch.no_grad():
                local(value.tensor).copy_(value.saved)
            value.version = value.tensor._version
        if lost:
            raise ModelError(
                f"forward and backward write to the parameter {lost}, and the parameters take too "
                "much of the host's memory for a copy, so it has another value now. Load it from "
                "your checkpoint; verify needs a step that leaves its parameters alone."
            )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; any other one is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_in(tensor: Tensor) -> int:
    """Return the bytes of this rank's elements."""
    part = local(tensor)
    return part.numel() * part.element_size()


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy of this rank's elements, in host memory and with no order of its own."""
    part = local(tensor).detach()
    dense = part.coalesce().to_dense() if part.is_sparse else part
    return torch.empty(dense.shape, dtype=dense.dtype, device="cpu").copy_(dense)


def random_states() -> dict[str, Any]:
    """Return the states of all generators that a model draws from by default."""
    numpy: Any = sys.modules.get("numpy")
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if has_gpu else [],
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Set what `random_states` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    random.setstate(states["python"])
    if states["numpy"] is not None:
        sys.modules["numpy"].random.set_state(states["numpy"])


def _value(name: str, tensor: Tensor, *, is_saved: bool = True) -> _Value:
    return _Value(
        name=name,
        tensor=tensor,
        print=_print(tensor),
        version=tensor._version,
        saved=copy_to_host(tensor) if is_saved else None,
    )


def _print(tensor: Tensor) -> int:
    part = local(tensor).detach()
    return int(fingerprint(part.coalesce().to_dense() if part.is_sparse else part))


def _gradient(leaf: Tensor) -> _Gradient:
    gradient = leaf.grad
    saved = None if gradient is None else copy_to_host(gradient)
    return _Gradient(leaf=leaf, gradient=gradient, saved=saved)
