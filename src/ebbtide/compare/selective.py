"""Selective checkpointing, with the policies that torchtitan has for it.

Written with torch's public interface, `create_selective_checkpoint_contexts`: torchtitan itself
wraps blocks in modules that rename their parameters, takes only models with `layers`, and since
0.3 has no option for every second block. Its policy also stores the result of `topk`; transformers'
routers write into that, which a stored result may not see, so here it is computed again, from equal
inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from ebbtide.compare.forwards import Forward, wrapped_forwards
from ebbtide.compare.strategy import AbstractStrategy, Applied, Refusal
from ebbtide.torch.blocks import find_blocks

_ATEN = torch.ops.aten
# Operators whose results cost much time to compute again for their bytes.
DEAR_OPERATORS = (
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_mm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
)
# Of these, every second one is recomputed.
HALVED_OPERATORS = (_ATEN.mm.default, _ATEN.linear.default)


@final
class SelectiveOperators(AbstractStrategy):
    """Checkpoint each block, but store attention and every other matrix product."""

    def find_refusal(self, device: torch.device) -> Refusal | None:
        return None

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        with wrapped_forwards(find_blocks(model).values(), _checkpoint_selectively):
            yield Applied()


@final
class SelectiveBlocks(AbstractStrategy):
    """Checkpoint every n-th block whole, and keep the others."""

    def __init__(self, every: int) -> None:
        """Take n: of 2, the second, the fourth and so on are checkpointed."""
        self._every = every

    def find_refusal(self, device: torch.device) -> Refusal | None:
        return None

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        blocks = list(find_blocks(model).values())[self._every - 1 :: self._every]
        with wrapped_forwards(blocks, _checkpoint_whole):
            yield Applied()


def _checkpoint_whole(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _checkpoint_selectively(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_make_contexts, **kwargs)

    return run


def _make_contexts() -> Any:
    # One policy a call of a block: its counts start anew.
    return create_selective_checkpoint_contexts(_Policy())


@final
class _Policy:
    """Decides about one operator after another, in forward and again in recomputation."""

    def __init__(self) -> None:
        self._num_products = {True: 0, False: 0}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in HALVED_OPERATORS:
            self._num_products[context.is_recompute] += 1
            if self._num_products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE
        if operator in DEAR_OPERATORS:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE
