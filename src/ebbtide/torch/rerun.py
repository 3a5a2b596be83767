"""Run one operator of a traced graph by itself, to learn what running it again takes.

In a compiled block nothing can be timed from outside but the block as a whole. What a plan decides
about is its products and attention, which generated code runs by the same kernels as torch does.
So each is run here a few times on random numbers of the sizes that were traced.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from ebbtide.torch.devices.base import AbstractMeter

log = logging.getLogger("ebbtide")

NUM_RUNS: Final = 3
"""After one that is not counted: it may choose a kernel."""


@dataclass(frozen=True, slots=True)
class _Spec:
    """A tensor's layout, with numbers in place of what was symbolic."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, generator: torch.Generator) -> Tensor:
        """Return a tensor of this layout, of normal random numbers or, of whole ones, zeros.

        Zeros too of numbers of 8 bits, of which torch draws none.
        """
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        num = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        row = torch.zeros(num, dtype=self.dtype, device=self.device)
        if (self.dtype.is_floating_point or self.dtype.is_complex) and self.dtype.itemsize > 1:
            row.normal_(generator=generator)
        return row.as_strided(self.shape, self.stride)


class _UnknownSizeError(Exception):
    """A size that depends on values, or an argument that is no tensor and no constant."""


class Rerun:
    """One call of a traced graph, ready to be run again on other numbers.

    Args:
        function: The operator.
        args: Its arguments, with `_Spec` in place of tensors.
        kwargs: The same.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._function = function
        self._args = args
        self._kwargs = kwargs

    @classmethod
    def of(cls, call: fx.Node) -> Rerun | None:
        """Return the call of a node; None where a size is not known before it runs."""
        assert callable(call.target), "bug in ebbtide: a node that calls nothing"
        try:
            args, kwargs = fx.map_arg((call.args, dict(call.kwargs)), _spec_of)
        except _UnknownSizeError:
            return None
        return cls(call.target, args, kwargs)

    def time_ns(self, meter: AbstractMeter) -> int | None:
        """Return how long the call takes: the median of a few. No random state is changed.

        None where it does not run on other numbers, or there is no memory for them.
        """
        try:
            return self._time_ns(meter)
        except RuntimeError as error:
            log.warning("%s cannot be timed by itself: %s", self._function, error)
            return None

    def _time_ns(self, meter: AbstractMeter) -> int:
        specs: list[_Spec] = []
        tree_map(lambda value: specs.append(value) if isinstance(value, _Spec) else None,
                 (self._args, self._kwargs))  # fmt: skip
        device = specs[0].device if specs else torch.device("cpu")
        devices = [device] if device.type == "cuda" else []
        generator = torch.Generator(device).manual_seed(0)
        with torch.random.fork_rng(devices), torch.no_grad():
            args, kwargs = tree_map(
                lambda value: value.make(generator) if isinstance(value, _Spec) else value,
                (self._args, self._kwargs),
            )
            self._function(*args, **kwargs)
            spans: list[tuple[Any, Any]] = []
            for number in range(NUM_RUNS):
                start = meter.mark(is_ahead=number == 0)
                self._function(*args, **kwargs)
                spans.append((start, meter.mark()))
        return statistics.median_low(meter.elapsed_ns(start, end) for start, end in spans)


def _spec_of(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return _Spec(
            tuple(map(_number, value.shape)),
            tuple(map(_number, value.stride())),
            value.dtype,
            value.device,
        )
    if isinstance(value, int | float | bool):
        return value
    return _number(value)


def _number(size: Any) -> int:
    """Return a size as a number; of a symbolic one, what it was as the graph was traced."""
    if isinstance(size, torch.SymInt):
        size = size.node.hint
    if not isinstance(size, int):
        raise _UnknownSizeError
    return size
