"""DTensors: the part of one that lies on this rank, and how it is put together again.

A DTensor has no bytes of its own. It counts the writes to it, and its local part counts none of
them: whoever holds the part must watch the DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from ebbtide.torch.identity import storage_key
from ebbtide.torch.internals import DTensor, alias_of, dtensor_of, local_part_of, spec_of
from ebbtide.torch.record import Handle, Outer


class SavedDTensor(NamedTuple):
    """What autograd holds in place of a DTensor that it saves."""

    handle: Handle
    """Of the local part."""
    spec: Any

    def over(self, local: Tensor) -> Tensor:
        """Return a DTensor like the one that was saved over its local part."""
        return dtensor_of(local, self.spec)

    @classmethod
    def of(cls, handle: Handle, tensor: Tensor) -> SavedDTensor:
        """Note how to put `tensor` together, whose local part `handle` stands for."""
        return cls(handle, spec_of(tensor))


def local_of(tensor: Tensor) -> Tensor | None:
    """Return this rank's part of a DTensor; None of any other tensor, and where it is none in
    memory yet, as while it is being gathered."""
    if type(tensor) is not DTensor:
        return None
    local = local_part_of(tensor)
    return local if type(local) is Tensor else None


def outer_of(tensor: Tensor) -> Outer:
    """Return what tells of later writes to a DTensor."""
    return Outer(alias_of(tensor), tensor._version)


def outers_in(tensors: Iterable[Tensor]) -> dict[int, Outer]:
    """Return, by the storages of their local parts, what tells of writes to DTensors."""
    return {
        storage_key(local): outer_of(tensor)
        for tensor in tensors
        if (local := local_of(tensor)) is not None
    }
