"""Layouts over storages: exact both ways, for every kind of view."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ebbtide.torch.identity import (
    Layout,
    StorageRef,
    bytes_of,
    have_equal_bits,
    storage_key,
)

ALIGNMENT_BYTES = 512


def matrix() -> Tensor:
    """A 6 by 8 matrix of different numbers, with a NaN and both zeros."""
    base = torch.arange(48, dtype=torch.float32).view(6, 8)
    base[0, :3] = torch.tensor([float("nan"), 0.0, -0.0])
    return base


def pairs() -> Tensor:
    """A 6 by 4 complex matrix."""
    return torch.view_as_complex(matrix().view(6, 4, 2))


VIEWS: dict[str, Tensor] = {
    "whole": matrix(),
    "with an offset": matrix()[2:],
    "a row": matrix()[3],
    "a column": matrix()[:, 5],
    "steps": matrix()[1::2, 2::3],
    "transposed": matrix().T,
    "permuted": matrix().view(2, 3, 8).permute(2, 0, 1),
    "expanded": matrix()[4].expand(5, 8),
    "expanded in the middle": matrix()[1:5, None, ::2].expand(4, 3, 4),
    "a number": matrix()[2, 3],
    "expanded number": matrix()[2, 3].expand(7),
    "empty": matrix()[2:2],
    "empty with an offset": matrix()[3:, 4:4],
    "size one": matrix()[2:3, 1:2],
    "other type": matrix()[1:].view(torch.int32),
    "smaller type": matrix()[1:].view(torch.bfloat16),
    "bytes": matrix().view(torch.uint8)[:, 3:9],
    "bool": matrix()[1:] > 20,
    "complex": pairs()[1:],
    "conjugate": pairs()[:, 1:].conj(),
    "conjugate transposed": pairs()[2:].mH,
    "negative": pairs()[1:].conj().imag,
    "double complex": pairs()[1:].to(torch.complex128).conj(),
}
VIEW = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())


def assert_same(got: Tensor, wanted: Tensor) -> None:
    """Check value and layout, the offset left out, without the code under test."""
    assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert (got.is_conj(), got.is_neg()) == (wanted.is_conj(), wanted.is_neg())
    assert torch.equal(torch.isnan(got), torch.isnan(wanted))
    assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(wanted))


# -- layouts ---------------------------------------------------------------------------------------


def test_the_views_here_have_every_kind_of_layout() -> None:
    layouts = [Layout.of(view) for view in VIEWS.values()]
    assert {layout.is_conj for layout in layouts} == {True, False}
    assert {layout.is_neg for layout in layouts} == {True, False}
    assert {layout.offset > 0 for layout in layouts} == {True, False}
    assert any(0 in layout.stride for layout in layouts)
    assert len({layout.dtype for layout in layouts}) == 7


def test_a_layout_is_all_that_tells_views_apart() -> None:
    view = pairs()[2:, 1:].conj()
    assert Layout.of(view) == Layout(
        offset=9,
        shape=torch.Size((4, 3)),
        stride=(4, 1),
        dtype=torch.complex64,
        is_conj=True,
        is_neg=False,
    )
    assert Layout.of(view) == Layout.of(pairs()[2:, 1:].conj())
    assert hash(Layout.of(view)) == hash(Layout.of(pairs()[2:, 1:].conj()))
    assert Layout.of(pairs().conj().imag).is_neg


@VIEW
def test_over_gives_the_very_view_back(view: Tensor) -> None:
    """Design rule 2."""
    got = Layout.of(view).over(view)
    assert_same(got, view)
    assert got.storage_offset() == view.storage_offset()
    assert got.data_ptr() == view.data_ptr()
    assert storage_key(got) == storage_key(view)


@VIEW
def test_over_works_on_a_copy_of_the_bytes(view: Tensor) -> None:
    """Design rule 2: what an evicted storage comes back as."""
    got = Layout.of(view).over(bytes_of(view).clone())
    assert_same(got, view)
    assert Layout.of(got) == Layout.of(view)
    assert storage_key(got) != storage_key(view)


@VIEW
def test_compact_bytes_give_the_view_back(view: Tensor) -> None:
    """Design rule 2, for a view that moves without the rest of its storage."""
    layout = Layout.of(view)
    compact = layout.pack_compact(view)
    assert bytes_of(compact).numel() == layout.num_bytes
    assert compact.is_contiguous()
    got = layout.unpack_compact(bytes_of(compact).clone())
    assert_same(got, view)
    assert storage_key(got) not in (storage_key(view), storage_key(compact))


@VIEW
def test_compact_bytes_come_back_at_an_offset_of_the_same_alignment(view: Tensor) -> None:
    """Design rule 2: kernels choose by it in which order they sum."""
    layout = Layout.of(view)
    got = layout.unpack_compact(layout.pack_compact(view))
    item_bytes = view.element_size()
    assert got.storage_offset() * item_bytes < ALIGNMENT_BYTES
    distance_bytes = (layout.offset - got.storage_offset()) * item_bytes
    assert distance_bytes % ALIGNMENT_BYTES == 0


def test_a_far_offset_does_not_come_back_as_memory() -> None:
    view = torch.arange(1000, dtype=torch.float32)[900:910]
    got = Layout.of(view).unpack_compact(Layout.of(view).pack_compact(view))
    assert got.storage_offset() == 900 % (ALIGNMENT_BYTES // 4)
    assert got.untyped_storage().nbytes() == (900 % 128 + 10) * 4
    assert torch.equal(got, view)


@pytest.mark.parametrize(
    ("name", "num_bytes", "compact_shape"),
    [
        ("whole", 6 * 8 * 4, (6, 8)),
        ("steps", 3 * 2 * 4, (3, 2)),
        ("expanded", 8 * 4, (1, 8)),
        ("expanded in the middle", 4 * 4 * 4, (4, 1, 4)),
        ("expanded number", 4, (1,)),
        ("a number", 4, ()),
        ("empty", 0, (0, 8)),
        ("bytes", 6 * 6, (6, 6)),
        ("double complex", 5 * 4 * 16, (5, 4)),
    ],
)
def test_expanded_dimensions_count_and_move_once(
    name: str, num_bytes: int, compact_shape: tuple[int, ...]
) -> None:
    """Design rule 2: stride 0 is never materialised."""
    view = VIEWS[name]
    layout = Layout.of(view)
    assert layout.num_bytes == num_bytes
    assert layout.compact_shape == compact_shape
    compact = layout.pack_compact(view)
    assert compact.untyped_storage().nbytes() == num_bytes
    assert layout.unpack_compact(compact).stride() == view.stride()


def test_overlap_is_found_except_where_a_view_expands() -> None:
    base = torch.arange(24.0)
    assert not any(Layout.of(view).has_overlap for view in VIEWS.values())
    assert Layout.of(base.unfold(0, 4, 1)).has_overlap
    assert Layout.of(base.unfold(0, 4, 3)).has_overlap
    assert not Layout.of(base.unfold(0, 4, 4)).has_overlap
    assert Layout.of(base.as_strided((3, 3), (2, 2))).has_overlap
    assert Layout.of(base.as_strided((2, 3, 4), (5, 4, 1))).has_overlap
    assert not Layout.of(base.as_strided((2, 1, 4), (5, 4, 1))).has_overlap


# -- bits ------------------------------------------------------------------------------------------


@VIEW
def test_a_tensor_has_the_bits_of_its_copy(view: Tensor) -> None:
    assert have_equal_bits(view, Layout.of(view).over(bytes_of(view).clone()))


@VIEW
def test_every_flipped_bit_is_found(view: Tensor) -> None:
    layout = Layout.of(view)
    for place in range(bytes_of(layout.pack_compact(view)).numel()):
        compact = bytes_of(layout.pack_compact(view)).clone()
        compact[place] ^= 1 << (place % 8)
        if layout.dtype is torch.bool:
            compact[place] &= 1
        is_same = torch.equal(compact, bytes_of(layout.pack_compact(view)))
        assert have_equal_bits(view, layout.unpack_compact(compact)) == is_same


def test_zeros_of_both_signs_and_nans_of_other_payloads_differ() -> None:
    assert not have_equal_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32)
    assert have_equal_bits(quiet.view(torch.float32), quiet.clone().view(torch.float32))
    assert not have_equal_bits(quiet.view(torch.float32), (quiet + 1).view(torch.float32))


def test_equal_values_in_another_layout_differ() -> None:
    square = torch.ones(4, 4)
    assert have_equal_bits(square, torch.ones(5, 4)[1:])
    assert not have_equal_bits(square, square.T)
    assert not have_equal_bits(square, torch.ones(1, 4).expand(4, 4))
    assert not have_equal_bits(square, torch.ones(4, 4, dtype=torch.float64))
    assert not have_equal_bits(square, torch.ones(16))
    real = torch.ones(2, dtype=torch.complex64)
    assert not have_equal_bits(real, real.clone().conj())


# -- identity --------------------------------------------------------------------------------------


def test_bytes_of_a_view_are_those_of_its_whole_storage() -> None:
    base = matrix()
    row = bytes_of(base[2:, 3:])
    assert (row.dtype, row.shape) == (torch.uint8, (6 * 8 * 4,))
    assert row.data_ptr() == base.data_ptr()
    row.zero_()
    assert torch.equal(base, torch.zeros(6, 8))


def test_views_have_the_key_of_their_storage() -> None:
    base = matrix()
    others = (base[2:], base.T, base.detach(), base.view(torch.int32), bytes_of(base))
    assert {storage_key(view) for view in others} == {storage_key(base)}
    assert storage_key(base.clone()) != storage_key(base)


def test_identity_is_the_storage_and_not_the_address_of_its_bytes() -> None:
    """Design rule 3."""
    shared = bytearray(64)
    first = torch.frombuffer(shared, dtype=torch.uint8)
    second = torch.frombuffer(shared, dtype=torch.uint8)
    assert first.data_ptr() == second.data_ptr()
    assert storage_key(first) != storage_key(second)


def test_a_key_is_not_used_again_while_the_storage_is_weakly_held() -> None:
    """Design rule 3: though its bytes are free, and handed out again."""
    old = torch.zeros(64)
    key, ref = storage_key(old), StorageRef(old.untyped_storage())
    assert not ref.expired()
    del old
    assert ref.expired()
    news = [torch.zeros(64) for _ in range(200)]
    assert key not in {storage_key(new) for new in news}
