"""Models and ways to train them, by name; each runs on any device, with and without ebbtide."""

from __future__ import annotations

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
