"""Compute the loss without the logits of all tokens at once, with a library's kernel.

A vocabulary's logits take more memory than any block where the context is long, and no strategy
moves them. What is used is Liger's fused linear cross-entropy on a GPU with Triton, else torch's
own `linear_cross_entropy` with chunks, which torch 2.11 does not have.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from typing import Any, assert_never, final

import torch
from transformers import PreTrainedModel

# Shapes: B batch, T tokens, D model width.

IGNORED = -100
"""The label of a token that has no next one; the value that transformers uses."""
CHECKED_TOKENS = 16


class LossKind(StrEnum):
    """How the loss is computed; the same for every row of a run."""

    PLAIN = "plain"
    """The model's own: logits of all tokens, then cross-entropy."""
    LIGER = "liger"
    """Liger's fused linear cross-entropy."""
    TORCH = "torch"
    """torch's `linear_cross_entropy` in chunks."""


def find_chunked_loss(device: torch.device) -> LossKind:
    """Return the chunked loss that works on `device`.

    Raises:
        ValueError: There is none; the message has the command that installs one.
    """
    has_liger = find_spec("liger_kernel") is not None and find_spec("triton") is not None
    if device.type == "cuda" and has_liger:
        return LossKind.LIGER
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return LossKind.TORCH
    command = "pip install liger-kernel" if device.type == "cuda" else "pip install torch==2.13.0"
    raise ValueError(
        f"--chunked-loss: torch {torch.__version__} has no chunked loss of its own, and Liger's "
        f"needs a GPU with triton and liger_kernel; `{command}` brings one"
    )


def describe_loss(kind: LossKind) -> str:
    """Return what a reader should call the loss."""
    match kind:
        case LossKind.PLAIN:
            return "the model's own, on the logits of all tokens"
        case LossKind.LIGER:
            return "in chunks, Liger's fused linear cross-entropy"
        case LossKind.TORCH:
            return "in chunks, torch's linear_cross_entropy"
        case _:
            assert_never(kind)


@final
class PassingHead(torch.nn.Module):
    """Stands in for the output head: has its weights, and returns its input."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias
        self.in_features, self.out_features = head.in_features, head.out_features

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return hidden_BTD


@contextmanager
def chunked_loss(model: PreTrainedModel, kind: LossKind) -> Generator[None]:
    """Let `model(input_ids=..., labels=...).loss` be the chunked one inside the context.

    The model's forward still runs whole, and parameters keep their names. `logits` of its output
    are hidden states meanwhile.

    Raises:
        ValueError: The model does more between its last hidden states and its loss than one
            linear head, so that the chunked loss would be another one.
    """
    if kind is LossKind.PLAIN:
        yield
        return
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise _refuse(model, f"its head is no nn.Linear but {type(head).__name__}")
    passing = PassingHead(head)
    compute = _choose_function(kind)

    def compute_loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        # Named as transformers names it: with the head passed by, these are hidden states.
        targets_BT = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return compute(logits.flatten(0, 1), passing.weight, targets_BT.flatten(), passing.bias)

    probe = torch.arange(CHECKED_TOKENS, device=head.weight.device).remainder(head.out_features)
    with torch.no_grad():
        expected = model(input_ids=probe[None]).logits
    original = model.loss_function
    model.set_output_embeddings(passing)
    model.loss_function = compute_loss
    try:
        with torch.no_grad():
            found = head(model(input_ids=probe[None]).logits)
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-3):
            raise _refuse(model, "its logits are not what its head returns")
        yield
    finally:
        model.set_output_embeddings(head)
        model.loss_function = original


def _refuse(model: PreTrainedModel, reason: str) -> ValueError:
    return ValueError(
        f"--chunked-loss: {type(model).__name__} does not fit, since {reason}; leave it out"
    )


def _choose_function(kind: LossKind) -> Any:
    """Return a function of hidden states, weight, targets and bias."""
    if kind is LossKind.LIGER:
        module: Any = import_module("liger_kernel.transformers.fused_linear_cross_entropy")
        fused = module.LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
        return lambda hidden, weight, targets, bias: fused(weight, hidden, targets, bias)
    functional: Any = torch.nn.functional
    options: Any = torch.nn.LinearCrossEntropyOptions()

    def compute(hidden: Any, weight: Any, targets: Any, bias: Any) -> Any:
        return functional.linear_cross_entropy(
            hidden,
            weight,
            targets,
            linear_bias=bias,
            ignore_index=IGNORED,
            options=options,
        )

    return compute
