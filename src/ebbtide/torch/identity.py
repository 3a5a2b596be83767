"""Which bytes a tensor stands on, and how it is laid out over them.

A tensor that autograd saves is a layout over a storage. Identity is the live storage, held
weakly (design rule 3): while a `StorageRef` exists, the address cannot be handed to another
storage, so equal keys mean the same storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef as StorageRef

from ebbtide.memory.arena import ALIGNMENT_BYTES
from ebbtide.torch.internals import conj_view, neg_view, storage_address

__all__ = [
    "Layout", "StorageRef", "bytes_of", "clone_storage", "have_equal_bits", "storage_key",
]  # fmt: skip


def storage_key(tensor: Tensor) -> int:
    """Return the key of the tensor's storage, unique among those alive or weakly held."""
    return storage_address(tensor.untyped_storage())


class Layout(NamedTuple):
    """How a tensor lies over its storage; all that must come back exactly (design rule 2)."""

    offset: int
    """First element, counted in elements from the start of the storage."""
    shape: torch.Size
    stride: tuple[int, ...]
    """Elements between neighbours along each dimension; 0 for an expanded one."""
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """Return the layout of a strided tensor."""
        return Layout(
            int(tensor.storage_offset()),
            tensor.size(),
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a strided tensor has this layout; sooner told than by making its own."""
        offset, shape, stride, dtype, is_conj, is_neg = self
        return (
            tensor.dtype is dtype
            and tensor.shape == shape
            and tensor.stride() == stride
            and tensor.storage_offset() == offset
            and tensor.is_neg() is is_neg
            and (not dtype.is_complex or tensor.is_conj() is is_conj)
        )

    def over(self, owner: Tensor) -> Tensor:
        """Return a tensor of this layout over the storage of `owner`, or `owner` itself.

        Nothing is copied.
        """
        offset, shape, stride, dtype, is_conj, is_neg = self
        if dtype is owner.dtype and not (owner.is_neg() or (dtype.is_complex and owner.is_conj())):
            is_same = (
                shape == owner.shape
                and stride == owner.stride()
                and offset == owner.storage_offset()
            )
            view = owner if is_same else owner.as_strided(shape, stride, offset)
            return self._with_bits(view) if is_conj or is_neg else view
        view = torch.empty(0, dtype=self.dtype, device=owner.device)
        view.set_(owner.untyped_storage(), self.offset, self.shape, self.stride)
        return self._with_bits(view)

    def _with_bits(self, view: Tensor) -> Tensor:
        if self.is_conj:
            view = conj_view(view)
        if self.is_neg:
            view = neg_view(view)
        return view

    @property
    def compact_shape(self) -> tuple[int, ...]:
        """The shape with expanded dimensions taken once."""
        return tuple(1 if s == 0 else n for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of the distinct elements; an expanded dimension counts once."""
        shape = self.compact_shape if 0 in self.stride else self.shape
        return prod(shape) * self.dtype.itemsize

    @property
    def has_overlap(self) -> bool:
        """Whether two indices may stand on one element, other than by expansion."""
        reach = 0
        dims = sorted(
            (s, n) for n, s in zip(self.shape, self.stride, strict=True) if s != 0 and n > 1
        )
        for stride, size in dims:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
        return False

    def pack_compact(self, owner: Tensor) -> Tensor:
        """Return a dense copy of the distinct elements, on the device of `owner`."""
        view = torch.empty(0, dtype=self.dtype, device=owner.device)
        view.set_(owner.untyped_storage(), self.offset, self.compact_shape, self.stride)
        return view.clone(memory_format=torch.contiguous_format)

    def unpack_compact(self, compact: Tensor) -> Tensor:
        """Return a tensor with this shape and stride, made from `pack_compact`'s bytes.

        It stands on a storage of its own. The offset is another one, with the same alignment:
        kernels choose by it in which order they sum.
        """
        dense = torch.empty(0, dtype=self.dtype, device=compact.device)
        dense.set_(
            compact.untyped_storage(), 0, self.compact_shape, _dense_stride(self.compact_shape)
        )
        offset = self.offset % (ALIGNMENT_BYTES // self.dtype.itemsize)
        num_spanned = 0
        if dense.numel():
            num_spanned = 1 + sum(
                s * (n - 1) for n, s in zip(self.compact_shape, self.stride, strict=True)
            )
        row = torch.empty(offset + num_spanned, dtype=self.dtype, device=compact.device)
        view = row.as_strided(self.compact_shape, self.stride, offset)
        view.copy_(dense)
        return self._with_bits(view.expand(self.shape))


def _dense_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, strides = 1, list[int]()
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of `tensor` as one row of bytes; nothing is copied."""
    storage = tensor.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))


def clone_storage(tensor: Tensor) -> Tensor:
    """Return a tensor laid out alike over a copy of the whole storage."""
    storage = tensor.untyped_storage().clone()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


_NUM_COMPARED = 2**20
"""Elements that are compared at a time."""

_SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def have_equal_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors agree in every bit, NaNs included, and in all of their layout
    but the offset.

    Waits for the device.
    """
    if Layout.of(left)[1:] != Layout.of(right)[1:]:
        return False
    if left.is_conj() or left.is_neg():
        left, right = left.resolve_conj().resolve_neg(), right.resolve_conj().resolve_neg()
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    integer = _SAME_SIZE_INTEGER[left.element_size()]
    left, right = left.view(integer), right.view(integer)
    if left.is_contiguous():
        # On a GPU a comparison takes a byte an element, which for whole activations is much.
        pairs = zip(
            left.flatten().split(_NUM_COMPARED), right.flatten().split(_NUM_COMPARED), strict=True
        )
        return all(torch.equal(a, b) for a, b in pairs)
    return torch.equal(left, right)
