"""A checksum that changes with every bit, with every place, and with nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ebbtide.torch.fingerprint import CHUNK_WORDS, WORD_BYTES, fingerprint

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)


def of(tensor: Tensor) -> int:
    return int(fingerprint(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (64, 65)])
def test_a_copy_has_the_same_checksum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 9).to(dtype)
    assert of(tensor) == of(tensor.clone())


@pytest.mark.parametrize("bit", range(64))
def test_each_bit_counts(bit: int) -> None:
    words = torch.arange(100, dtype=torch.int64)
    before = of(words)
    words[41] ^= 1 << bit if bit < 63 else -(1 << 63)
    assert of(words) != before


def test_elements_that_change_places_count() -> None:
    for num_bytes in (32, WORD_BYTES * CHUNK_WORDS * 2):
        row = torch.zeros(num_bytes // 4)
        row[1], row[-3] = 1.0, 2.0
        before = of(row)
        row[1], row[-3] = 2.0, 1.0
        assert of(row) != before


def test_two_values_in_one_word_that_change_places_count() -> None:
    assert of(torch.tensor([1.0, 2.0])) != of(torch.tensor([2.0, 1.0]))


def test_a_zero_more_counts() -> None:
    assert of(torch.zeros(8)) != of(torch.zeros(10)) != of(torch.zeros(0))


def test_an_order_that_is_lost_counts() -> None:
    torch.manual_seed(0)
    permuted = torch.randn(8, 16).t()
    in_order = permuted.contiguous().view(-1).as_strided(permuted.shape, permuted.stride())
    assert of(permuted) != of(in_order)
    assert of(permuted) == of(permuted.clone(memory_format=torch.preserve_format))


def test_the_sign_of_zero_and_the_bits_of_nan_count() -> None:
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert of(nan[:1]) != of(nan[1:])


def test_what_is_expanded_is_read_once_and_a_slice_is_read_alone() -> None:
    row = torch.randn(4, 1)
    wide = row.expand(4, 1000)
    assert of(wide) == of(wide.clone()[:, :1].expand(4, 1000))
    base = torch.randn(6, 6)
    before = of(base[1:3, ::2])
    base[0, 0] += 1
    assert of(base[1:3, ::2]) == before
    base[1, 2] += 1
    assert of(base[1:3, ::2]) != before


def test_it_changes_nothing_and_saves_nothing_for_backward() -> None:
    tensor = torch.randn(5, requires_grad=True)
    value = fingerprint(tensor * 2)
    assert not value.requires_grad and value.dtype is torch.int64 and value.shape == ()
