from concurrent.futures import ThreadPoolExecutor

import pytest

from ebbtide.memory.arena import Arena, Region
from ebbtide.memory.bounce import Bounce, BounceStatistics, Row, bounce_bytes

UNIT = 512


def places(num: int, num_bytes: int = UNIT) -> list[Region]:
    arena = Arena(num * num_bytes)
    found = [arena.take(num_bytes) for _ in range(num)]
    return [region for region in found if region is not None]


def filled(bounce: Bounce, place: Region) -> Row:
    """Take a row, fill it, and leave it to whoever finds it."""
    row = bounce.take(place)
    assert row is not None
    bounce.fill(row)
    bounce.leave(row, is_wanted=True)
    return row


def test_the_oldest_rows_make_room_and_the_newest_are_found() -> None:
    bounce = Bounce(3 * UNIT)
    all_places = places(5)
    rows = [filled(bounce, place) for place in all_places]
    assert [bounce.find(place) for place in all_places] == [None, None, *rows[2:]]
    assert bounce.statistics() == BounceStatistics(
        num_served=3, served_bytes=3 * UNIT, num_dropped=2
    )


def test_a_row_that_somebody_uses_makes_no_room() -> None:
    bounce = Bounce(2 * UNIT)
    first, second, third, fourth = places(4)
    filled(bounce, first)
    used = bounce.find(first)
    assert used is not None
    filled(bounce, second)
    taken = bounce.take(third)
    assert taken is not None
    assert (bounce.find(second), bounce.find(first)) == (None, used)
    assert bounce.take(fourth, is_waiting=False) is None
    bounce.leave(used, is_wanted=True)
    assert bounce.take(fourth, is_waiting=False) is None  # found twice, left once
    bounce.leave(used, is_wanted=True)
    last = bounce.take(fourth, is_waiting=False)
    assert last is not None and last.region.offset_bytes == used.region.offset_bytes


def test_what_is_not_wanted_is_found_no_more_and_freed_by_its_last_user() -> None:
    bounce = Bounce(UNIT)
    first, second = places(2)
    row = bounce.take(first)
    assert row is not None
    assert bounce.find(first) is None  # its bytes are not there
    bounce.fill(row)
    assert bounce.find(first) is row
    bounce.leave(row, is_wanted=False)
    assert bounce.find(first) is None
    assert bounce.take(second, is_waiting=False) is None
    bounce.leave(row, is_wanted=True)
    assert bounce.take(second, is_waiting=False) is not None


def test_a_later_owner_of_the_same_room_is_not_taken_for_the_earlier_one() -> None:
    """An equal place is another: by its identity, since it lies where the first one did."""
    bounce = Bounce(2 * UNIT)
    arena = Arena(UNIT)
    first = arena.take(UNIT)
    assert first is not None
    filled(bounce, first)
    arena.give_back(first)
    second = arena.take(UNIT)
    assert second is not None and second == first
    assert bounce.find(second) is None
    assert bounce.find(first) is not None


def test_a_place_that_is_filled_again_has_its_newer_row() -> None:
    bounce = Bounce(2 * UNIT)
    (place,) = places(1)
    filled(bounce, place)
    newer = filled(bounce, place)
    assert bounce.find(place) is newer
    assert bounce.take(places(1)[0], is_waiting=False) is not None  # the older one's room


def test_whoever_waits_for_room_gets_it_when_a_user_leaves() -> None:
    bounce = Bounce(UNIT)
    first, second = places(2)
    row = bounce.take(first)
    assert row is not None
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(bounce.take, second)
        bounce.leave(row, is_wanted=False)
        taken = later.result(timeout=60)
    assert taken is not None and taken.place is second


MIB = 2**20


@pytest.mark.parametrize(
    ("disk_mib", "in_flight_mib", "room_mib", "taken_mib"),
    [
        (1792, 512, None, 1024),  # the wish
        (700, 512, None, 700),  # no more than a step writes
        (1792, 2048, None, 2048),  # what is in flight has room
        (100, 512, None, 200),  # once each way
        (1792, 512, 800, 800),  # what the cap leaves
        (1792, 512, 0, 512),
    ],
)
def test_bounce_memory_is_what_is_in_flight_or_as_much_as_serves(
    disk_mib: int, in_flight_mib: int, room_mib: int | None, taken_mib: int
) -> None:
    taken_bytes = bounce_bytes(
        disk_bytes=disk_mib * MIB,
        in_flight_bytes=in_flight_mib * MIB,
        room_bytes=None if room_mib is None else room_mib * MIB,
    )
    assert taken_bytes == taken_mib * MIB
