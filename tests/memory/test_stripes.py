import itertools

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.memory.stripes import STRIPE_BYTES, Part, Stripes

UNIT = 4096
ENDLESS = [1 << 60] * 2


def grown(stripes: Stripes, num_bytes: int, caps: list[int]) -> Stripes:
    found = stripes.grow(num_bytes, caps)
    assert found is not None
    return found


def test_one_file_holds_everything_in_one_part_cut_into_requests() -> None:
    stripes = grown(Stripes([1.0]), 3 * STRIPE_BYTES, [1 << 60])
    assert stripes.sizes == (3 * STRIPE_BYTES,)
    assert list(stripes.split(UNIT, 2 * STRIPE_BYTES)) == [
        Part(start_bytes=UNIT, num_bytes=STRIPE_BYTES, file=0, offset_bytes=UNIT),
        Part(
            start_bytes=UNIT + STRIPE_BYTES,
            num_bytes=STRIPE_BYTES,
            file=0,
            offset_bytes=UNIT + STRIPE_BYTES,
        ),
    ]


def test_a_file_that_is_twice_as_fast_gets_twice_as_much() -> None:
    stripes = grown(Stripes([2.0, 1.0]), 9 * STRIPE_BYTES, ENDLESS)
    assert stripes.sizes == (6 * STRIPE_BYTES, 3 * STRIPE_BYTES)


def test_a_file_that_is_full_is_left_out() -> None:
    stripes = grown(Stripes([1.0, 1.0]), 5 * STRIPE_BYTES, [STRIPE_BYTES, 1 << 60])
    assert stripes.sizes == (STRIPE_BYTES, 4 * STRIPE_BYTES)


def test_what_does_not_fit_is_told_and_changes_nothing() -> None:
    stripes = grown(Stripes([1.0, 1.0]), UNIT, [UNIT, UNIT])
    assert stripes.grow(3 * UNIT, [UNIT, UNIT]) is None
    assert stripes.sizes == (UNIT, 0)


@given(
    rates=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 3 * STRIPE_BYTES // UNIT), min_size=1, max_size=5),
    first=st.integers(0, 1 << 20),
    length=st.integers(0, 1 << 20),
)
def test_every_byte_has_one_place_that_growing_does_not_move(
    rates: list[float], sizes: list[int], first: int, length: int
) -> None:
    caps = [1 << 60] * len(rates)
    stripes, before = Stripes(rates), list[Part]()
    for size in sizes:
        stripes = grown(stripes, stripes.num_bytes + size * UNIT, caps)
        whole = list(stripes.split(0, stripes.num_bytes))
        # What lay somewhere lies there still.
        assert places(before) <= places(whole)
        before = whole
    # Parts follow each other, and no two share a byte of a file.
    assert sum(part.num_bytes for part in before) == stripes.num_bytes == sum(stripes.sizes)
    ends = sorted((p.file, p.offset_bytes, p.offset_bytes + p.num_bytes) for p in before)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(ends))
    first %= stripes.num_bytes
    length = min(length, stripes.num_bytes - first)
    parts = list(stripes.split(first, length))
    assert sum(part.num_bytes for part in parts) == length
    assert all(0 < part.num_bytes <= STRIPE_BYTES for part in parts)
    assert [p.start_bytes for p in parts] == starts(first, parts)


def places(parts: list[Part]) -> set[tuple[int, int, int]]:
    """Where each unit of the tier lies."""
    return {
        (part.start_bytes + at, part.file, part.offset_bytes + at)
        for part in parts
        for at in range(0, part.num_bytes, UNIT)
    }


def starts(first: int, parts: list[Part]) -> list[int]:
    found: list[int] = []
    for part in parts:
        found.append(first)
        first += part.num_bytes
    return found
