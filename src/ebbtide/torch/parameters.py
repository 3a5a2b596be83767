"""The storages of a model's parameters and buffers: they are referenced, and never moved.

They are looked up anew in every forward: FSDP swaps them around each block, and frees them after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ebbtide.torch.identity import storage_key
from ebbtide.torch.internals import tensor_tables


class Parameters:
    """Parameters and buffers by storage; what is in it holds its storage alive.

    Args:
        known: Those of the model as it was when its forward started.
    """

    __slots__ = ("_added", "_known")

    def __init__(self, known: Mapping[int, Tensor] | None = None) -> None:
        self._known = {} if known is None else known
        self._added: dict[int, Tensor] = {}

    def get(self, key: int) -> Tensor | None:
        """Return the parameter or buffer over a storage."""
        found = self._known.get(key)
        return self._added.get(key) if found is None else found

    def add(self, *modules: nn.Module) -> list[int]:
        """Add what these modules hold themselves; returns the storages that were not known."""
        new: list[int] = []
        for tensor in _tensors_of(modules):
            key = storage_key(tensor)
            if key not in self._known and key not in self._added:
                self._added[key] = tensor
                new.append(key)
        return new


def storages_of(model: nn.Module) -> dict[int, Tensor]:
    """Return the plain parameters and buffers of a model, by storage."""
    return {storage_key(tensor): tensor for tensor in _tensors_of(model.modules())}


def _tensors_of(modules: Iterable[nn.Module]) -> Iterable[Tensor]:
    for module in modules:
        for table in tensor_tables(module):
            for tensor in table.values():
                if tensor is not None and _is_plain(tensor):
                    yield tensor


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
