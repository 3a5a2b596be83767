import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.memory.arena import Arena, ArenaStatistics, Region


def taken(arena: Arena, num_bytes: int) -> Region:
    region = arena.take(num_bytes)
    assert region is not None
    return region


def test_regions_follow_each_other_at_aligned_offsets() -> None:
    arena = Arena(4096)
    regions = [taken(arena, 1), taken(arena, 512), taken(arena, 513)]
    assert regions == [
        Region(offset_bytes=0, num_bytes=1, taken_bytes=512),
        Region(offset_bytes=512, num_bytes=512, taken_bytes=512),
        Region(offset_bytes=1024, num_bytes=513, taken_bytes=1024),
    ]


def test_statistics_tell_what_was_asked_for_and_what_it_took() -> None:
    arena = Arena(2048)
    first = taken(arena, 700)
    taken(arena, 300)
    assert arena.take(1024) is None
    arena.give_back(first)
    taken(arena, 1)
    assert arena.statistics() == ArenaStatistics(
        capacity_bytes=2048,
        held_bytes=301,
        taken_bytes=1024,
        peak_taken_bytes=1536,
        num_regions=2,
        num_refused=1,
    )


def test_the_smallest_free_range_that_fits_is_used() -> None:
    arena = Arena(8192)
    large = taken(arena, 2048)
    taken(arena, 512)
    small = taken(arena, 1024)
    taken(arena, 512)
    arena.give_back(large)
    arena.give_back(small)
    assert taken(arena, 1024).offset_bytes == small.offset_bytes
    assert taken(arena, 1024).offset_bytes == large.offset_bytes


def test_neighbours_that_come_back_in_any_order_become_one_range() -> None:
    for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]):
        arena = Arena(3 * 512)
        regions = [taken(arena, 512) for _ in range(3)]
        for index in order:
            arena.give_back(regions[index])
        assert taken(arena, 3 * 512).offset_bytes == 0


def test_a_capacity_between_two_alignments_is_used_to_the_last_byte() -> None:
    arena = Arena(1000)
    region = taken(arena, 1000)
    assert region.taken_bytes == 1000
    arena.give_back(region)
    taken(arena, 1)
    assert taken(arena, 488) == Region(offset_bytes=512, num_bytes=488, taken_bytes=488)
    assert arena.take(1) is None


def test_rounding_wastes_less_than_two_percent_of_what_plans_move() -> None:
    arena = Arena(1 << 40)
    for num_bytes in (65_536, 65_537, 100_001, 1_048_577, (1 << 30) + 1):
        region = taken(arena, num_bytes)
        assert num_bytes <= region.taken_bytes <= 1.02 * num_bytes


def test_giving_back_twice_is_a_bug() -> None:
    arena = Arena(1024)
    region = taken(arena, 10)
    arena.give_back(region)
    with pytest.raises(AssertionError, match=r"given back twice .* this is a bug in ebbtide"):
        arena.give_back(region)


def test_giving_back_a_stale_region_is_a_bug_even_if_its_place_is_taken_again() -> None:
    arena = Arena(1024)
    stale = taken(arena, 10)
    arena.give_back(stale)
    fresh = taken(arena, 10)
    assert fresh == stale
    with pytest.raises(AssertionError, match="bug in ebbtide"):
        arena.give_back(stale)
    arena.give_back(fresh)


def test_giving_back_to_another_arena_is_a_bug() -> None:
    other = Arena(1024)
    taken(other, 10)
    with pytest.raises(AssertionError, match="comes from another arena"):
        other.give_back(taken(Arena(1024), 10))


def test_an_arena_grows_at_its_end() -> None:
    arena = Arena(0)
    assert arena.take(1) is None
    arena.grow(1024)
    first = taken(arena, 512)
    arena.grow(2048)
    assert taken(arena, 1536).offset_bytes == 512
    assert first.offset_bytes == 0
    arena.grow(2048)
    assert arena.statistics().capacity_bytes == 2048


def test_an_arena_does_not_shrink() -> None:
    with pytest.raises(ValueError, match="capacity_bytes is 512, below the present 1024"):
        Arena(1024).grow(512)


def test_an_arena_with_an_unaligned_end_does_not_grow() -> None:
    with pytest.raises(ValueError, match="1000 bytes is not a multiple of the alignment of 512"):
        Arena(1000).grow(2000)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_an_empty_region_cannot_be_taken(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"num_bytes is {num_bytes}; a region has at least 1 byte"):
        Arena(1024).take(num_bytes)


def test_impossible_arenas_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity_bytes is -1"):
        Arena(-1)
    with pytest.raises(ValueError, match="alignment_bytes is 0"):
        Arena(1024, alignment_bytes=0)


@given(
    capacity_bytes=st.integers(0, 20_000),
    alignment_bytes=st.sampled_from([1, 64, 512, 700]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 5_000)), max_size=60),
)
def test_live_regions_never_overlap_and_all_space_comes_back(
    capacity_bytes: int, alignment_bytes: int, steps: list[tuple[bool, int]]
) -> None:
    arena = Arena(capacity_bytes, alignment_bytes=alignment_bytes)
    live: list[Region] = []
    for is_take, number in steps:
        if is_take:
            region = arena.take(number)
            if region is not None:
                live.append(region)
        elif live:
            arena.give_back(live.pop(number % len(live)))
        ordered = sorted(live, key=lambda region: region.offset_bytes)
        ends = [region.offset_bytes + region.taken_bytes for region in ordered]
        starts = [region.offset_bytes for region in ordered]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        assert all(end <= capacity_bytes for end in ends)
        assert all(start % alignment_bytes == 0 for start in starts)
        assert all(region.num_bytes <= region.taken_bytes for region in live)
        statistics = arena.statistics()
        assert statistics.num_regions == len(live)
        assert statistics.held_bytes == sum(region.num_bytes for region in live)
        assert statistics.taken_bytes == sum(region.taken_bytes for region in live)
        assert statistics.peak_taken_bytes >= statistics.taken_bytes
    for region in live:
        arena.give_back(region)
    if capacity_bytes:
        assert taken(arena, capacity_bytes).offset_bytes == 0


@given(num_bytes=st.integers(1, 10_000), held=st.lists(st.integers(1, 3_000), max_size=8))
def test_a_request_is_refused_only_if_no_gap_is_large_enough(
    num_bytes: int, held: list[int]
) -> None:
    arena = Arena(8192)
    regions = [region for size in held if (region := arena.take(size)) is not None]
    for region in regions[::2]:
        arena.give_back(region)
    left = sorted(regions[1::2], key=lambda region: region.offset_bytes)
    starts = [region.offset_bytes for region in left] + [8192]
    ends = [0] + [region.offset_bytes + region.taken_bytes for region in left]
    largest_gap = max(start - end for start, end in zip(starts, ends, strict=True))
    assert (arena.take(num_bytes) is not None) == (num_bytes <= largest_gap)
