"""Say in which block a step first went another way.

Two rules. What differs in forward went wrong in the *first* block, in forward order, whose output
differs. Where forward is the same, something that backward was given is wrong, and all that comes
after in backward differs as well: so it is the *last* block, in forward order, of which a gradient
differs. A gradient of its input alone, with all its parameters right, is seen at the output of the
block before it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ebbtide.torch.fingerprint import fingerprint
from ebbtide.torch.forward import tensors_in
from ebbtide.torch.identity import Layout
from ebbtide.torch.internals import is_in_backward, is_plain
from ebbtide.torch.model_state import local


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a step first went another way."""

    block: str
    """Empty: outside of the blocks."""
    tensor: str


class Probe:
    """Checksums of what went from block to block in one step, forward and backward."""

    def __init__(self) -> None:
        self.outputs: dict[str, tuple[object, ...]] = {}
        """By block: of what it returned."""
        self.gradients: dict[str, tuple[object, ...]] = {}
        """By block: of the gradients of what it returned."""

    @contextmanager
    def on(self, blocks: Mapping[str, nn.Module]) -> Generator[Probe]:
        """Look at these blocks while this is entered; the checksums are there afterwards."""
        handles = [block.register_forward_hook(self._hook(path)) for path, block in blocks.items()]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
            for seen in (self.outputs, self.gradients):
                for path, prints in seen.items():
                    seen[path] = tuple(int(p) if isinstance(p, Tensor) else p for p in prints)

    def differs_from(self, plain: Sequence[Probe]) -> bool:
        """Return whether anything differs on which the steps without a plan agree."""
        return any(
            getattr(self, kind).get(path) != prints
            for kind in ("outputs", "gradients")
            for path, prints in _agreed(plain, kind).items()
        )

    def _hook(self, path: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if is_in_backward():
                return  # a checkpoint runs it again
            found = [t for t in tensors_in(output) if is_plain(local(t))]
            self.outputs[path] = tuple(_print(t) for t in found)
            for tensor in found:
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._note(path, gradient))

        return look

    def _note(self, path: str, gradient: Tensor) -> None:
        self.gradients[path] = (*self.gradients.get(path, ()), _print(gradient))


def locate(
    differences: Mapping[str, float],
    *,
    blocks: Sequence[str],
    arrived: Sequence[str],
    plain: Sequence[Probe],
    planned: Probe,
) -> Place:
    """Name the block and the tensor in which a step first went another way.

    Args:
        differences: What the step left that differs, by name.
        blocks: Their paths, in forward order.
        arrived: Parameters in the order in which backward makes their gradients.
        plain: Of two steps without a plan. Where they differ nothing is concluded.
        planned: Of a planned step that differs, or of one that does not show it.
    """
    outputs, gradients = _agreed(plain, "outputs"), _agreed(plain, "gradients")
    for path in blocks:
        if path in outputs and planned.outputs.get(path) not in (None, outputs[path]):
            return Place(block=path, tensor="output")
    if "loss" in differences:
        return Place(block="", tensor="loss")
    order = [*arrived, *(name for name in _parameters(differences) if name not in arrived)]
    for index in reversed(range(len(blocks))):
        own = [n for n in order if n.startswith(f"{blocks[index]}.")]
        wrong = next((n for n in own if f"gradient of {n}" in differences), None)
        if wrong is not None:
            return Place(block=blocks[index], tensor=f"gradient of {wrong}")
        before = blocks[index - 1] if index else None
        if before in gradients and planned.gradients.get(before) not in (None, gradients[before]):
            return Place(block=blocks[index], tensor="gradient of its input")
    wrong = next((n for n in order if f"gradient of {n}" in differences), None)
    if wrong is not None:
        return Place(block="", tensor=f"gradient of {wrong}")
    name = next(iter(differences))
    owner = next((p for p in blocks if name.startswith(f"buffer {p}.")), "")
    return Place(block=owner, tensor=name)


def _parameters(differences: Mapping[str, float]) -> list[str]:
    start = "gradient of "
    return [name.removeprefix(start) for name in differences if name.startswith(start)]


def _agreed(plain: Sequence[Probe], kind: str) -> dict[str, tuple[object, ...]]:
    """Return the checksums on which all agree."""
    first, *others = (getattr(probe, kind) for probe in plain)
    return {
        path: prints
        for path, prints in first.items()
        if all(other.get(path) == prints for other in others)
    }


def _print(tensor: Tensor) -> object:
    part = local(tensor)
    with torch.no_grad():
        return fingerprint(part) if part.numel() else Layout.of(part).shape
