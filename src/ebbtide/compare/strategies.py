"""The strategies that `ebbtide compare` sets side by side, and how each is switched on."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, final

import torch
import transformers
from transformers import PreTrainedModel

from ebbtide.compare.names import BUDGET_STRATEGY, EBBTIDE_PREFIX
from ebbtide.compare.results import Status
from ebbtide.torch import Tide, attach

# These plans move nothing, so a CPU run gives them no disk.
PLANS_WITHOUT_TRAFFIC = frozenset({"keep", "recompute"})


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


@final
class Keep(AbstractStrategy):
    """Keep every activation on the device: what training does by itself."""

    def find_refusal(self, device: torch.device) -> Refusal | None:
        return None

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        yield Applied()


@final
class Checkpoint(AbstractStrategy):
    """Recompute each block from its input, as transformers does it."""

    def find_refusal(self, device: torch.device) -> Refusal | None:
        return None

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        _find_checkpointing_switch(model, "enable")()
        try:
            yield Applied()
        finally:
            _find_checkpointing_switch(model, "disable")()


@final
class CheckpointOffload(AbstractStrategy):
    """As `Checkpoint`, with the block inputs in pinned host memory."""

    def find_refusal(self, device: torch.device) -> Refusal | None:
        if device.type != "cuda":
            return _refuse_on_host("block inputs")
        if not _takes_offload(_find_checkpointing_switch(PreTrainedModel, "enable")):
            return Refusal(
                status=Status.NOT_INSTALLED,
                reason=f"transformers {transformers.__version__} cannot offload checkpoints; "
                "5.17 and later can",
            )
        return None

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        _find_checkpointing_switch(model, "enable")(offload=True)
        try:
            yield Applied()
        finally:
            _find_checkpointing_switch(model, "disable")()


@final
class SaveOnCpu(AbstractStrategy):
    """Copy every saved tensor, parameters too, to host memory: torch's `save_on_cpu`."""

    def find_refusal(self, device: torch.device) -> Refusal | None:
        return None

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        is_cuda = device.type == "cuda"
        yield Applied(
            forward=lambda: torch.autograd.graph.save_on_cpu(pin_memory=is_cuda),
            note="" if is_cuda else "saved tensors are on the CPU already, so nothing moves",
        )


@final
class TrlOffload(AbstractStrategy):
    """Copy every activation to host memory on a second stream: TRL's `OffloadActivations`."""

    def find_refusal(self, device: torch.device) -> Refusal | None:
        if device.type != "cuda":
            return _refuse_on_host("activations")
        if find_spec("trl") is None:
            return Refusal(status=Status.NOT_INSTALLED, reason="the package trl is not installed")
        return None

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        # The object is made for re-entry: its streams and buffers are kept across steps.
        offload = get_act_offloading_ctx_manager(model)
        yield Applied(forward=lambda: offload)


@final
class EbbtidePlan(AbstractStrategy):
    """One of ebbtide's named plans."""

    def __init__(self, plan: str, *, host: str | None, disk: str | None) -> None:
        """Take the plan's name and the `host` and `disk` that `ebbtide.torch.attach` takes."""
        self._plan = plan
        self._host = host
        self._disk = disk

    def find_refusal(self, device: torch.device) -> Refusal | None:
        return None

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        is_moving = self._plan not in PLANS_WITHOUT_TRAFFIC
        with attach(
            model,
            plan=self._plan,
            host=self._host if is_moving else None,
            disk=self._disk if is_moving else None,
        ) as tide:
            yield Applied(tide=tide)


@final
class EbbtideBudget(AbstractStrategy):
    """The fastest plan that ebbtide finds within a budget of device memory."""

    def __init__(self, budget: str, *, host: str | None, disk: str | None) -> None:
        """Take the `budget`, `host` and `disk` that `ebbtide.torch.attach` takes."""
        self._budget = budget
        self._host = host
        self._disk = disk

    def find_refusal(self, device: torch.device) -> Refusal | None:
        return None

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        with attach(model, budget=self._budget, host=self._host, disk=self._disk) as tide:
            yield Applied(tide=tide)


def make_strategy(
    name: str, *, host: str | None, disk: str | None, budget: str | None = None
) -> AbstractStrategy:
    """Return the strategy called `name`, as `names.parse_strategies` returned it.

    Args:
        name: A canonical name.
        host: Most host memory that ebbtide's plans may take, or `None` for its default.
        disk: `PATH:CAP` for ebbtide's plans, or `None` for no disk.
        budget: Most device memory; only the strategy `ebbtide` takes it, and it needs one.

    Raises:
        ValueError: The strategy `ebbtide` was given no budget.
    """
    if name == BUDGET_STRATEGY:
        if budget is None:
            raise ValueError(f"the strategy {name} needs a budget, such as 40GiB")
        return EbbtideBudget(budget, host=host, disk=disk)
    peers: dict[str, Callable[[], AbstractStrategy]] = {
        "keep": Keep,
        "checkpoint": Checkpoint,
        "checkpoint-offload": CheckpointOffload,
        "save-on-cpu": SaveOnCpu,
        "trl": TrlOffload,
    }
    if name.startswith(EBBTIDE_PREFIX):
        return EbbtidePlan(name.removeprefix(EBBTIDE_PREFIX), host=host, disk=disk)
    return peers[name]()


def _refuse_on_host(what: str) -> Refusal:
    return Refusal(
        status=Status.NOT_APPLICABLE,
        reason=f"it moves {what} to host memory, where a CPU run has them already",
    )


def _find_checkpointing_switch(
    model: PreTrainedModel | type[PreTrainedModel], action: Literal["enable", "disable"]
) -> Callable[..., None]:
    """Return the method of this transformers: 5.17 says gradient, later ones activation."""
    old_name = f"gradient_checkpointing_{action}"
    return getattr(model, f"activation_checkpointing_{action}", None) or getattr(model, old_name)


def _takes_offload(switch: Callable[..., None]) -> bool:
    return "offload" in inspect.signature(switch).parameters
