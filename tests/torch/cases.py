"""Models and ways to train them, by name; each runs on any device, with and without ebbtide."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.torch import models
from tests.torch.models import WIDTH, Gated, Stack, features, tokens
from tests.torch.training import Step, feature_step, language_step, sgd


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and a way to train it."""

    build: Callable[[], nn.Module]
    step: Step = feature_step
    num_forwards: int = 1
    """How often a step runs each block's forward."""
    num_backwards: int = 1
    """How often a step runs each block's backward."""


def autocast_step(dtype: torch.dtype) -> Step:
    """Run the forward under autocast to `dtype`."""

    def step(model: nn.Module, index: int) -> Tensor:
        ids = tokens()
        with torch.autocast(torch.get_default_device().type, dtype=dtype):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    return step


def scaled_step(model: nn.Module, index: int) -> Tensor:
    """Scale the loss, as float16 needs it, and unscale the gradients."""
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0)
    ids = tokens()
    with torch.autocast(torch.get_default_device().type, dtype=torch.float16):
        loss = model(input_ids=ids, labels=ids).loss
    scaler.scale(loss).backward()
    scaler.unscale_(sgd(model))
    return loss


def accumulating_step(model: nn.Module, index: int) -> Tensor:
    """Add up the gradients of two micro-batches."""
    first, second = language_step(model, index), language_step(model, index)
    return first + second


def retaining_step(model: nn.Module, index: int) -> Tensor:
    """Run backward twice through one graph."""
    ids = tokens()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def functional_step(model: nn.Module, index: int) -> Tensor:
    """Use `torch.autograd.grad`, which accumulates nothing."""
    loss = model(features()).square().mean()
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    return loss


def penalised_step(model: nn.Module, index: int) -> Tensor:
    """Add the square of the gradient to the loss: a second derivative through the blocks."""
    inputs = features().requires_grad_()
    loss = model(inputs).square().mean()
    (gradient,) = torch.autograd.grad(loss, (inputs,), create_graph=True)
    loss = loss + 100.0 * gradient.square().sum()
    loss.backward()
    return loss


def unused_branch_step(model: nn.Module, index: int) -> Tensor:
    """Leave the side branches out of the loss, but alive during backward."""
    outputs, side = model(features())
    loss = outputs.square().mean()
    loss.backward()
    assert side.requires_grad
    return loss


def used_branch_step(model: nn.Module, index: int) -> Tensor:
    """Put the side branches into the loss."""
    outputs, side = model(features())
    loss = outputs.square().mean() + 0.01 * side
    loss.backward()
    return loss


def half_llama() -> nn.Module:
    """Return a Llama whose weights are in bfloat16."""
    return models.llama().to(torch.bfloat16)


def encoder() -> nn.Module:
    """Return an encoder of torch's own, with dropout."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def stack_of(make_block: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    """Return what builds a stack of such blocks."""
    return lambda: Stack(lambda: make_block(**options))


CASES = {
    "llama with grouped queries": Case(build=models.llama, step=language_step),
    "llama with eager attention": Case(
        build=lambda: models.llama(attention="eager"), step=language_step
    ),
    "llama in bfloat16": Case(build=half_llama, step=language_step),
    "gpt2 with dropout": Case(build=models.gpt2, step=language_step),
    "gpt2 with dropout and eager attention": Case(
        build=lambda: models.gpt2(attention="eager"), step=language_step
    ),
    "autocast to bfloat16": Case(build=models.llama, step=autocast_step(torch.bfloat16)),
    "autocast to float16 with scaled gradients": Case(build=models.llama, step=scaled_step),
    "two micro-batches": Case(
        build=models.llama, step=accumulating_step, num_forwards=2, num_backwards=2
    ),
    "adapters on a frozen base": Case(build=models.lora_llama, step=language_step),
    "a retained graph": Case(build=models.llama, step=retaining_step, num_backwards=2),
    "autograd.grad": Case(build=stack_of(Gated), step=functional_step),
    "second derivatives": Case(build=stack_of(Gated), step=penalised_step, num_backwards=2),
    "query, key and value narrowed": Case(build=stack_of(models.FusedAttention, with_chunk=False)),
    "query, key and value chunked": Case(build=stack_of(models.FusedAttention, with_chunk=True)),
    "views of all kinds": Case(build=stack_of(models.Views)),
    "batch normalisation": Case(build=stack_of(models.Normalised)),
    "an unused branch": Case(build=models.BranchedStack, step=unused_branch_step),
    "a used branch": Case(build=models.BranchedStack, step=used_branch_step),
    "an inner checkpoint": Case(build=stack_of(models.Checkpointed, use_reentrant=False)),
    "an inner reentrant checkpoint": Case(build=stack_of(models.Checkpointed, use_reentrant=True)),
    "a custom function": Case(build=stack_of(models.Custom)),
    "float64 and complex": Case(build=stack_of(models.Numbers)),
    "shared parameters": Case(build=models.SharedStack),
    "a sequential": Case(build=lambda: nn.Sequential(Gated(), Gated(), Gated())),
    "writes in place": Case(build=stack_of(models.Writing)),
    "writes in place to the residual stream": Case(build=models.ResidualStack),
    "a transformer encoder": Case(build=encoder),
}


def channels_last_stack() -> nn.Module:
    """Return convolutions whose weights are laid out as their images are."""
    model: Any = Stack(models.Convolution)
    return model.to(memory_format=torch.channels_last)


def image_step(*, memory_format: torch.memory_format) -> Step:
    """Train on images, laid out in memory one way or another."""

    def step(model: nn.Module, index: int) -> Tensor:
        images = features(2, 8, 12, 12).to(memory_format=memory_format)
        loss = model(images).square().mean()
        loss.backward()
        return loss

    return step


def updating_step(model: nn.Module, index: int) -> Tensor:
    """Update each parameter inside backward, as soon as its gradient is there."""

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.05)

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    loss = feature_step(model, index)
    for handle in handles:
        handle.remove()
    return loss


def freezing_step(model: nn.Module, index: int) -> Tensor:
    """Train fewer parameters in the first two steps: the plan is made without the others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(index > 1 or not ("up" in name or "norm" in name))
    return feature_step(model, index)


def mode_changing_step(model: nn.Module, index: int) -> Tensor:
    """Turn dropout off in every second step: other operators run."""
    model.train(index % 2 == 0)
    return language_step(model, index)


def threaded_step(model: nn.Module, index: int) -> Tensor:
    """Run backward on another thread."""
    loss = model(features()).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return loss


def partial_step(model: nn.Module, index: int) -> Tensor:
    """Ask for the gradients of the last parameters only, and drop the rest of the graph."""
    loss = model(features()).square().mean()
    loss.backward(inputs=list(model.parameters())[-4:])
    return loss


def looking_step(model: nn.Module, index: int) -> Tensor:
    """Look at all that autograd saved, as tools that draw graphs do, and then run backward."""
    loss = model(features()).square().mean()
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved"):
                getattr(node, name)
        waiting += [following for following, _ in node.next_functions]
    loss.backward()
    return loss


def expanded_step(model: nn.Module, index: int) -> Tensor:
    """Give the blocks an input whose rows are one and the same."""
    rows = features(1, models.NUM_TOKENS, WIDTH).requires_grad_()
    loss = model(rows.expand(2, -1, -1)).square().mean()
    loss.backward()
    return loss


def empty_step(model: nn.Module, index: int) -> Tensor:
    """Train on no token at all in every second step."""
    num_tokens = 0 if index % 2 else models.NUM_TOKENS
    loss = model(features(2, num_tokens, WIDTH).requires_grad_()).sum()
    loss.backward()
    return loss


def hooked_step(model: nn.Module, index: int) -> Tensor:
    """Watch the gradients of every module."""
    handles = [m.register_full_backward_hook(lambda *_: None) for m in model.modules()]
    handles += [m.register_full_backward_pre_hook(lambda *_: None) for m in model.modules()]
    loss = model(features().requires_grad_()).square().mean()
    loss.backward()
    for handle in handles:
        handle.remove()
    return loss


def nested_hooks_step(model: nn.Module, index: int) -> Tensor:
    """Move what is saved outside of the blocks with torch's own hooks."""
    with torch.autograd.graph.save_on_cpu():
        loss = model(features()).square().mean()
    loss.backward()
    return loss


ODD_CASES = {
    "computed weights": Case(build=stack_of(models.Spectral)),
    "writes to its input": Case(build=stack_of(models.InPlace)),
    "overlapping windows and complex parts": Case(build=stack_of(models.Windows)),
    "convolutions": Case(
        build=stack_of(models.Convolution),
        step=image_step(memory_format=torch.contiguous_format),
    ),
    "convolutions with channels last": Case(
        build=channels_last_stack,
        step=image_step(memory_format=torch.channels_last),
    ),
    "attention that returns its weights": Case(build=stack_of(models.Weighed)),
    "parameters of a class of their own": Case(build=stack_of(models.Subclassed)),
    "updates inside backward": Case(build=stack_of(Gated), step=updating_step),
    "parameters that are trained later": Case(build=stack_of(Gated), step=freezing_step),
    "training and evaluation mode in turn": Case(build=models.gpt2, step=mode_changing_step),
    "backward on another thread": Case(build=stack_of(Gated), step=threaded_step),
    "a part of backward": Case(build=stack_of(Gated), step=partial_step),
    "looking at what is saved": Case(build=stack_of(Gated), step=looking_step),
    "an expanded input": Case(build=stack_of(Gated), step=expanded_step),
    "steps without tokens": Case(build=stack_of(Gated), step=empty_step),
    "backward hooks": Case(build=stack_of(Gated), step=hooked_step),
    "hooks around ours": Case(build=stack_of(Gated), step=nested_hooks_step),
}
"""What is rarer; bytes that are moved may differ from the plan's, as operators or shapes do."""
