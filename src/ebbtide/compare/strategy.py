"""What a strategy of `ebbtide compare` is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from ebbtide.compare.results import Status
from ebbtide.torch import Tide


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a strategy cannot run here at all."""

    status: Status
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A strategy in force on one model."""

    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Returns a new context to run one step's forward pass and loss in."""
    tide: Tide | None = None
    """The handle that counts the traffic of ebbtide's own plans."""
    note: str = ""
    """What a reader must know about how it runs here."""


class AbstractStrategy(ABC):
    """One way to train within less memory."""

    @abstractmethod
    def find_refusal(self, device: torch.device) -> Refusal | None:
        """Return why this strategy cannot run on `device`, or `None` if it can."""

    @abstractmethod
    def apply(
        self, model: PreTrainedModel, device: torch.device
    ) -> AbstractContextManager[Applied]:
        """Switch the strategy on for `model`; leaving the context switches it off.

        The model is on `device` and in training mode.
        """


def refuse_on_host(what: str) -> Refusal:
    """Return the refusal of what moves `what` to host memory, on a device that is the host."""
    return Refusal(
        status=Status.NOT_APPLICABLE,
        reason=f"it moves {what} to host memory, where a CPU run has them already",
    )


def find_missing_package(package: str, module: str | None = None) -> Refusal | None:
    """Return the refusal where a package is missing, or `None` where it can be used.

    Args:
        package: The package's name.
        module: Its module to import, where the package may be there and yet not import.
    """
    if find_spec(package) is None:
        reason = f"the package {package} is not installed"
        return Refusal(status=Status.NOT_INSTALLED, reason=reason)
    if module is not None:
        try:
            import_module(module)
        except (ImportError, AttributeError, RuntimeError, OSError) as error:
            reason = f"{module} cannot be imported here: {error}"
            return Refusal(status=Status.NOT_INSTALLED, reason=" ".join(reason.split()))
    return None
