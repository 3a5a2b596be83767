"""Write one run's gradients to disk, and compare another run's with them bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

# Above this many parameters one step's gradients are several GB on disk: only the first and
# the last step are compared.
LARGE_MODEL_PARAMETERS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far one step's gradients are from the reference's."""

    is_equal: bool
    """Every gradient has the reference's shape, type and bits."""
    largest_difference: float
    """Largest absolute difference; NaN if a value is not finite or a gradient is missing."""
    worst: str
    """The parameter that differs most; empty if none does."""


def choose_compared_steps(num_steps: int, num_parameters: int) -> tuple[int, ...]:
    """Return which of the steps 1..num_steps have their gradients compared."""
    if num_parameters > LARGE_MODEL_PARAMETERS:
        return tuple(sorted({1, num_steps}))
    return tuple(range(1, num_steps + 1))


def write_gradients(model: torch.nn.Module, folder: Path, step: int) -> None:
    """Write every gradient of `step` under `folder`.

    Copies through host memory only. Tied parameters are written once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: grad.cpu().contiguous() for name, grad in _list_gradients(model)},
        _name_file(folder, step),
    )


def compare_gradients(model: torch.nn.Module, folder: Path, step: int) -> Agreement:
    """Compare every gradient of `step` with those that `write_gradients` wrote.

    Gradients are brought to host memory one at a time, so that comparing adds nothing to
    the device's peak.
    """
    differences: dict[str, float] = {}
    with safe_open(_name_file(folder, step), framework="pt", device="cpu") as reference:
        missing = set(reference.keys())
        for name, grad in _list_gradients(model):
            if name not in missing:
                differences[name] = math.nan
                continue
            missing.remove(name)
            expected = reference.get_tensor(name)
            found = grad.cpu()
            if found.dtype != expected.dtype or found.shape != expected.shape:
                differences[name] = math.nan
            elif not torch.equal(found, expected):
                differences[name] = (found.double() - expected.double()).abs().max().item()
        differences |= dict.fromkeys(missing, math.nan)
    # NaN compares false with everything, so it is ranked first by hand.
    worst = max(differences, key=lambda name: _rank(differences[name]), default="")
    return Agreement(
        is_equal=not differences,
        largest_difference=differences.get(worst, 0.0),
        worst=worst,
    )


def _rank(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def _list_gradients(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad.detach()


def _name_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:03d}.safetensors"
