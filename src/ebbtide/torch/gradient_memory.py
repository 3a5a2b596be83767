"""What the gradients of a model's parameters take: in the step that is measured, and ever since.

A gradient that is there before a step is held all through it. One that the step makes is held from
its event on. One that the step could have made and did not (an expert without a token) may come in
another step; one that a hook gave up at once (the optimizer's step in backward) takes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ebbtide.torch.internals import DTensor, has_gradient_hook


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What rests on the device that did not before the measured step."""

    num_bytes: int
    """Beside the gradients that the measured step made."""
    has_gradients: bool
    """Those are there before a step, too."""

    def __bool__(self) -> bool:
        return self.num_bytes > 0 or self.has_gradients


class GradientMemory:
    """Follows the gradients of one model.

    Args:
        parameters: The model's, in its order. They are let go with `finish`.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.start_bytes = 0
        """What was there before the measured step."""
        self.missing_bytes = 0
        """What it could have made and did not."""
        self.grown_bytes = 0
        """What it left beyond that, with what is missing."""
        self.made_bytes = 0
        """All that plans take to be made in a step; 0 once it counts as there before."""
        self._parameters = list(parameters)
        self._resting: set[int] = set()
        """Parameters, by number, whose gradients count as there before a step."""
        self._trainable: set[int] = set()
        """Those whose gradients count at all."""
        self._got_one: set[int] = set()
        """Those with hooks that got a gradient in the measured step, whatever became of it."""
        self._watches: list[RemovableHandle] = []

    def now_bytes(self) -> int:
        """Return what is there now."""
        return gradient_bytes(self._parameters)

    def start(self) -> None:
        """Note that the measured step starts."""
        self.close()
        self.start_bytes = self.now_bytes()
        self.missing_bytes = self.grown_bytes = 0
        self._resting = {i for i, p in enumerate(self._parameters) if p.grad is not None}
        self._got_one.clear()
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and has_gradient_hook(parameter):
                note = partial(_note_number, self._got_one, index)
                self._watches.append(parameter.register_post_accumulate_grad_hook(note))

    def end(self) -> None:
        """Note that its backward is over."""
        self.close()
        self.missing_bytes = sum(
            element_bytes(p)
            for i, p in enumerate(self._parameters)
            if p.requires_grad and p.grad is None and i not in self._got_one
        )
        self.grown_bytes = self.now_bytes() - self.start_bytes + self.missing_bytes

    def close(self) -> None:
        """Take the hooks off the parameters again."""
        for handle in self._watches:
            handle.remove()
        self._watches.clear()

    def finish(self, made_bytes: int) -> None:
        """Note what plans take to be made in a step from now on."""
        self.made_bytes = made_bytes
        self._trainable = {i for i, p in enumerate(self._parameters) if p.requires_grad}
        self._parameters = []

    def take_growth(self, parameters: Iterable[Tensor]) -> tuple[int, Growth]:
        """Return what is there as a forward starts, and what of it no plan knows yet, once.

        Gradients are there before a further micro-batch, and where they are zeroed in place. Less
        than a 256th is nothing.
        """
        found = list(parameters)
        there = {i: element_bytes(p.grad) for i, p in enumerate(found) if p.grad is not None}
        there_bytes, grown_bytes = sum(there.values()), 0
        new = {i for i, p in enumerate(found) if p.requires_grad} - self._trainable
        if new:  # they were frozen; from now on their gradients count as there
            self._trainable |= new
            self._resting |= new
            grown_bytes += sum(element_bytes(found[i]) for i in new)
        more_bytes = sum(size for i, size in there.items() if i not in self._resting)
        has_gradients = more_bytes * 256 > max(self.made_bytes, there_bytes)
        if has_gradients:
            # What the measured step made rests now, and what it did not make as well.
            grown_bytes += max(0, more_bytes - self.made_bytes)
            self._resting |= there.keys()
            self.made_bytes = 0
        return there_bytes, Growth(num_bytes=grown_bytes, has_gradients=has_gradients)


def gradient_bytes(parameters: Iterable[Tensor]) -> int:
    """Return what the gradients of these parameters take now."""
    # Elements, not storages: gradients may be views into one bucket.
    return sum(element_bytes(p.grad) for p in parameters if p.grad is not None)


def element_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sharded one, of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _note_number(numbers: set[int], number: int, _: Tensor) -> None:
    numbers.add(number)
