"""A checksum of a tensor's bits, computed where the tensor is.

Each word of 8 bytes is mixed with a key of its position (the steps are those of the finaliser of
MurmurHash3, Appleby, 2011), and the mixed words are added up. So bits that change, words that
change places and words that are missing change the sum. Known weakness: it is no match for an
adversary; two different tensors agree by chance once in 2^64.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from ebbtide.torch.internals import pause_autocast, pause_dispatch

WORD_BYTES: Final = 8

CHUNK_WORDS: Final = 2**19
"""Mixed at a time: the words in between take four times 4 MiB, whatever the tensor's size."""

_KEY: Final = 0x1E3779B97F4A7C15
_FIRST: Final = 0x7F51AFD7ED558CCD
_SECOND: Final = 0x44CEB9FE1A85EC53
_CHUNK: Final = 0x1000193
"""All odd, so that multiplying by them loses no bit."""
_LOW_BITS: Final = 2**31 - 1
"""torch shifts the sign in from the left; what is wanted is zeros."""


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the checksum of a strided tensor: one int64 on its device.

    Shape, stride and dtype are no part of it; expanded dimensions count once. Nothing waits for
    the device: the kernels are queued on the current stream. Deterministic. A tensor whose
    elements lie apart in memory is copied first.
    """
    with torch.no_grad(), pause_autocast(), pause_dispatch():
        words = _words_of(_flat(tensor.detach()))
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for chunk in words.split(CHUNK_WORDS):
            total = total * _CHUNK + _mixed(chunk).sum()
        return total * _CHUNK + tensor.numel()


def _flat(tensor: Tensor) -> Tensor:
    """Return the distinct elements in the order in which they lie in memory, as one row."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.permute(order).contiguous().view(-1)


def _words_of(row: Tensor) -> Tensor:
    """Return a row of elements as words, filled up with zeros."""
    if row.data_ptr() % WORD_BYTES or row.numel() * row.element_size() % WORD_BYTES:
        num_bytes = row.numel() * row.element_size()
        padded = row.new_zeros(-(-num_bytes // WORD_BYTES) * WORD_BYTES, dtype=torch.uint8)
        padded[:num_bytes] = row.view(torch.uint8)
        row = padded
    return row.view(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    """Mix each word with its position's key; no two words of a position become the same."""
    mixed = words + _keys(words.device)[: words.numel()]
    mixed ^= (mixed >> 33) & _LOW_BITS
    mixed *= _FIRST
    mixed ^= (mixed >> 33) & _LOW_BITS
    mixed *= _SECOND
    mixed ^= (mixed >> 33) & _LOW_BITS
    return mixed


@cache
def _keys(device: torch.device) -> Tensor:
    """Return a key for each position in a chunk; 4 MiB a device, kept."""
    return torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64, device=device) * _KEY
