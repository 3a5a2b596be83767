"""The strategies that `ebbtide compare` sets side by side, and how each is switched on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Literal, final

import torch
import transformers
from transformers import PreTrainedModel

from ebbtide.compare.compiled import CompileBudget, CompiledBlocks
from ebbtide.compare.names import (
    BUDGET_STRATEGY,
    COMPILE_BUDGET_PREFIX,
    EBBTIDE_PREFIX,
    SAC_PREFIX,
    is_ours,
    runs_compiled,
)
from ebbtide.compare.packaged import DeepspeedOffload, TorchtuneOffload
from ebbtide.compare.results import Status
from ebbtide.compare.selective import SelectiveBlocks, SelectiveOperators
from ebbtide.compare.strategy import (
    AbstractStrategy,
    Applied,
    Refusal,
    find_missing_package,
    refuse_on_host,
)
from ebbtide.torch import attach

# These plans move nothing, so a CPU run gives them no disk.
Disk = str | Sequence[str] | None
"""What `ebbtide.torch.attach` takes as `disk`."""

PLANS_WITHOUT_TRAFFIC = frozenset({"keep", "recompute"})


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
            return refuse_on_host("block inputs")
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
            return refuse_on_host("activations")
        return find_missing_package("trl")

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        # The object is made for re-entry: its streams and buffers are kept across steps.
        offload = get_act_offloading_ctx_manager(model)
        yield Applied(forward=lambda: offload)


@final
class EbbtidePlan(AbstractStrategy):
    """One of ebbtide's named plans."""

    def __init__(
        self, plan: str, *, host: str | None, disk: Disk, is_compiled: bool = False
    ) -> None:
        """Take the plan's name and the `host` and `disk` that `ebbtide.torch.attach` takes.

        `is_compiled`: ebbtide compiles the blocks, with what the plan recomputes.
        """
        self._plan = plan
        self._host = host
        self._disk = disk
        self._is_compiled = is_compiled

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
            compile=self._is_compiled,
        ) as tide:
            yield Applied(tide=tide)


@final
class EbbtideBudget(AbstractStrategy):
    """The fastest plan that ebbtide finds within a budget of device memory."""

    def __init__(
        self, budget: str, *, host: str | None, disk: Disk, is_compiled: bool = False
    ) -> None:
        """Take the `budget`, `host` and `disk` that `ebbtide.torch.attach` takes.

        `is_compiled`: ebbtide compiles the blocks, with what the plan recomputes.
        """
        self._budget = budget
        self._host = host
        self._disk = disk
        self._is_compiled = is_compiled

    def find_refusal(self, device: torch.device) -> Refusal | None:
        return None

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        with attach(
            model,
            budget=self._budget,
            host=self._host,
            disk=self._disk,
            compile=self._is_compiled,
        ) as tide:
            yield Applied(tide=tide)


def make_strategy(
    name: str,
    *,
    host: str | None,
    disk: Disk,
    budget: str | None = None,
    is_compiled: bool = False,
) -> AbstractStrategy:
    """Return the strategy called `name`, as `names.parse_strategies` returned it.

    Args:
        name: A canonical name.
        host: Most host memory that ebbtide's plans may take, or `None` for its default.
        disk: `PATH:CAP` for ebbtide's plans, or several of them, or `None` for no disk.
        budget: Most device memory; only the strategy `ebbtide` takes it, and it needs one.
        is_compiled: Compile each block, under every strategy that supports it.

    Raises:
        ValueError: The strategy `ebbtide` was given no budget.
    """
    if is_ours(name):
        return _make_ours(name, host=host, disk=disk, budget=budget, is_compiled=is_compiled)
    peer = _make_peer(name)
    # Those with a budget of torch's own compile by themselves.
    if runs_compiled(name, is_compiled=is_compiled) and not isinstance(peer, CompileBudget):
        return CompiledBlocks(peer)
    return peer


def _make_ours(
    name: str, *, host: str | None, disk: Disk, budget: str | None, is_compiled: bool
) -> AbstractStrategy:
    if name != BUDGET_STRATEGY:
        plan = name.removeprefix(EBBTIDE_PREFIX)
        return EbbtidePlan(plan, host=host, disk=disk, is_compiled=is_compiled)
    if budget is None:
        raise ValueError(f"the strategy {name} needs a budget, such as 40GiB")
    return EbbtideBudget(budget, host=host, disk=disk, is_compiled=is_compiled)


def _make_peer(name: str) -> AbstractStrategy:
    if name.startswith(COMPILE_BUDGET_PREFIX):
        return CompileBudget(float(name.removeprefix(COMPILE_BUDGET_PREFIX)))
    if name.startswith(SAC_PREFIX):
        mode = name.removeprefix(SAC_PREFIX)
        return SelectiveOperators() if mode == "op" else SelectiveBlocks(int(mode))
    peers: dict[str, Callable[[], AbstractStrategy]] = {
        "keep": Keep,
        "checkpoint": Checkpoint,
        "checkpoint-offload": CheckpointOffload,
        "save-on-cpu": SaveOnCpu,
        "trl": TrlOffload,
        "torchtune": TorchtuneOffload,
        "deepspeed": DeepspeedOffload,
        "compile-keep": Keep,
    }
    return peers[name]()


def _find_checkpointing_switch(
    model: PreTrainedModel | type[PreTrainedModel], action: Literal["enable", "disable"]
) -> Callable[..., None]:
    """Return the method of this transformers: 5.17 says gradient, later ones activation."""
    old_name = f"gradient_checkpointing_{action}"
    return getattr(model, f"activation_checkpointing_{action}", None) or getattr(model, old_name)


def _takes_offload(switch: Callable[..., None]) -> bool:
    return "offload" in inspect.signature(switch).parameters
