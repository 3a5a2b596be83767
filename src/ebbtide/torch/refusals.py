"""Models that cannot be attached, and why: checked before a hook is installed."""

from __future__ import annotations

import torch
from torch import nn

from ebbtide.errors import ModelError
from ebbtide.torch.internals import is_compiled, uses_cuda_graphs


def refuse_compiled(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Refuse a model of which more than its blocks is compiled.

    Raises:
        ModelError: A block lies inside a compiled region.
    """
    for path, module in model.named_modules():
        if is_compiled(module) and any(_lies_in(block, path) for block in blocks):
            raise ModelError(
                f"{path or 'the model'} is compiled as a whole: inside a compiled region ebbtide "
                "cannot see where its blocks start and end. Compile the blocks instead: attach to "
                "the uncompiled model with attach(model, compile=True), or call .compile() on each "
                "block before you attach."
            )


def _lies_in(path: str, outer: str) -> bool:
    return outer == "" or path.startswith(f"{outer}.")


def refuse_cuda_graphs(blocks: dict[str, nn.Module]) -> None:
    """Refuse blocks whose memory belongs to CUDA graphs.

    Raises:
        ModelError: A block is compiled to run as CUDA graphs.
    """
    for path, block in blocks.items():
        if is_compiled(block) and uses_cuda_graphs(block):
            raise ModelError(
                f"{path} is compiled to run as CUDA graphs (mode='reduce-overhead'): what it saves "
                "stays in the graph's own memory, and moving it would free nothing. Compile it "
                "without: mode='default' or 'max-autotune-no-cudagraphs'."
            )


def refuse_checkpointing(model: nn.Module) -> None:
    """Refuse a model that recomputes by itself.

    Raises:
        ModelError: A module has `gradient_checkpointing` on.
    """
    for path, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ModelError(
                f"{path or type(module).__name__} checkpoints itself (gradient_checkpointing is "
                "on): its blocks would be recomputed twice. Turn it off: "
                "model.gradient_checkpointing_disable()."
            )


def device_of(blocks: dict[str, nn.Module]) -> torch.device:
    """Return the one device that the blocks are on.

    Raises:
        ModelError: They are on several, or on none that computes.
    """
    devices = {p.device for b in blocks.values() for p in b.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(str(d) for d in devices))
        raise ModelError(
            f"the blocks are on several devices ({names}); one plan is for one device. "
            "Name the blocks of one device: attach(model, blocks=[...])."
        )
    device = next(iter(devices), torch.device("cpu"))
    if device.type == "meta":
        raise ModelError("the model is on the meta device. Materialise it, then attach.")
    return device
