"""Strategies on compiled blocks: `torch.compile` on each block, alone or around another strategy.

Blocks and not the model: what ebbtide plans are blocks, and strategies that wrap blocks need
them whole.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch._functorch.config
from transformers import PreTrainedModel

from ebbtide.compare.strategy import AbstractStrategy, Applied, Refusal
from ebbtide.torch.blocks import find_blocks


@contextmanager
def compiled_blocks(model: torch.nn.Module, *, backend: str = "inductor") -> Generator[None]:
    """Compile each block of `model` inside the context; its first step then compiles.

    The one place where blocks of peers are compiled. What `apply` of a strategy put around a
    block's forward is compiled with it.

    Args:
        model: The model, with its strategy already in force.
        backend: `torch.compile`'s backend.
    """
    blocks = list(find_blocks(model).values())
    for block in blocks:
        block.compile(backend=backend)
    try:
        yield
    finally:
        for block in blocks:
            _forget_compiled(block)
        torch.compiler.reset()


@final
class CompiledBlocks(AbstractStrategy):
    """Another strategy, on a model whose blocks are compiled."""

    def __init__(self, inner: AbstractStrategy) -> None:
        """Take the strategy that is in force before the blocks are compiled."""
        self._inner = inner

    def find_refusal(self, device: torch.device) -> Refusal | None:
        return self._inner.find_refusal(device)

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        with self._inner.apply(model, device) as applied, compiled_blocks(model):
            yield applied


@final
class CompileBudget(AbstractStrategy):
    """Compile each block and let torch's partitioner recompute within a share of its memory."""

    def __init__(self, budget_fraction: float) -> None:
        """Take `activation_memory_budget`: 0 recomputes all, 1 what costs no time."""
        self._budget_fraction = budget_fraction

    def find_refusal(self, device: torch.device) -> Refusal | None:
        return None

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        config: Any = torch._functorch.config  # pyright: ignore[reportPrivateUsage]
        # In force until the end: a block is compiled at its first call, not here.
        patch = config.patch(activation_memory_budget=self._budget_fraction)
        with patch, compiled_blocks(model):
            yield Applied()


def _forget_compiled(block: torch.nn.Module) -> None:
    # torch has no way to undo `Module.compile`.
    block._compiled_call_impl = None  # pyright: ignore[reportPrivateUsage]
