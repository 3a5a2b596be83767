"""Strategies of packages that few machines have: torchtune and DeepSpeed."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, final

import torch
from transformers import PreTrainedModel

from ebbtide.compare.forwards import Forward, wrapped_forwards
from ebbtide.compare.strategy import (
    AbstractStrategy,
    Applied,
    Refusal,
    find_missing_package,
    refuse_on_host,
)
from ebbtide.torch.blocks import find_blocks

TORCHTUNE = "torchtune.training"
DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"


@final
class TorchtuneOffload(AbstractStrategy):
    """Copy every activation to host memory on a second stream: torchtune's `OffloadActivations`."""

    def find_refusal(self, device: torch.device) -> Refusal | None:
        if device.type != "cuda":
            return refuse_on_host("activations")
        return find_missing_package("torchtune", TORCHTUNE)

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        training: Any = import_module(TORCHTUNE)
        offload, skip = training.OffloadActivations(), training.NoOpManager()
        head: Any = model.get_output_embeddings()
        # torchtune leaves the output head out, which it finds under its own name for it.
        handles = [
            head.register_forward_pre_hook(lambda *args: skip.__enter__() and None),
            head.register_forward_hook(lambda *args: skip.__exit__(), always_call=True),
        ]
        try:
            yield Applied(forward=lambda: offload)
        finally:
            for handle in handles:
                handle.remove()


@final
class DeepspeedOffload(AbstractStrategy):
    """Checkpoint each block with its input in host memory: DeepSpeed's `cpu_checkpointing`."""

    def find_refusal(self, device: torch.device) -> Refusal | None:
        if device.type != "cuda":
            return refuse_on_host("block inputs")
        return find_missing_package("deepspeed", DEEPSPEED)

    @contextmanager
    def apply(self, model: PreTrainedModel, device: torch.device) -> Generator[Applied]:
        deepspeed: Any = import_module("deepspeed")
        checkpointing: Any = import_module(DEEPSPEED)
        started = not torch.distributed.is_initialized()
        if started:
            # It asks which rank it is, though nothing here is distributed.
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
            )
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        checkpointing.configure(None, checkpoint_in_cpu=True)
        wrap = functools.partial(_checkpoint, checkpointing.checkpoint)
        try:
            with wrapped_forwards(find_blocks(model).values(), wrap):
                yield Applied()
        finally:
            if started:
                torch.distributed.destroy_process_group()


def _checkpoint(checkpoint: Forward, forward: Forward) -> Forward:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Keyword arguments hold what all blocks share (masks, rotary tables); as arguments of
        # its own they would be emptied when the first block's are moved.
        return checkpoint(functools.partial(forward, **kwargs), *args)

    return run
