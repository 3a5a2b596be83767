"""Places in the tiers, and the copies that must have passed before one is used again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ebbtide.errors import PinnedMemoryError
from ebbtide.memory.arena import Region
from ebbtide.memory.disk import DiskStore
from ebbtide.plan import Decision
from ebbtide.torch.devices.base import Place
from ebbtide.torch.tiers import HostRegion, Tiers, take_what_there_is
from tests.disk_folders import in_folder

UNIT = 512
DISK_UNIT = 4096


def host_tiers(num_units: int = 8) -> Tiers:
    buffer = torch.zeros(num_units * UNIT, dtype=torch.uint8)
    return Tiers(host=HostRegion(buffer, unpin=lambda: None), disk=None)


def take(tiers: Tiers, num_units: int, tier: Decision = Decision.HOST) -> Place:
    place = tiers.take(tier, num_units * UNIT)
    assert place is not None
    return place


def span(first_unit: int, end_unit: int) -> Place:
    """A place over some units, whoever may hold them."""
    num_bytes = (end_unit - first_unit) * UNIT
    region = Region(offset_bytes=first_unit * UNIT, num_bytes=num_bytes, taken_bytes=num_bytes)
    return Place(tier=Decision.HOST, region=region)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(in_folder(tmp_path, 8 * DISK_UNIT), num_threads=1) as store:
        store.reserve(8 * DISK_UNIT)
        yield store


def test_a_place_names_its_tier_and_its_bytes() -> None:
    tiers = host_tiers()
    place = tiers.take(Decision.HOST, 700)
    assert place == Place(
        tier=Decision.HOST, region=Region(offset_bytes=0, num_bytes=700, taken_bytes=1024)
    )
    assert tiers.held_bytes(Decision.HOST) == 700
    assert place is not None
    tiers.give_back(place, None)
    assert tiers.held_bytes(Decision.HOST) == 0


def test_a_full_tier_gives_none_and_never_grows_by_itself() -> None:
    """Design rule 7: never a new pinned region in mid-step."""
    tiers = host_tiers(2)
    take(tiers, 1)
    assert tiers.take(Decision.HOST, 2 * UNIT) is None
    take(tiers, 1)
    assert tiers.take(Decision.HOST, 1) is None
    assert tiers.held_bytes(Decision.HOST) == 2 * UNIT
    assert tiers.host is not None
    assert tiers.host.arena.statistics().capacity_bytes == 2 * UNIT


def test_an_absent_tier_gives_none_and_holds_nothing() -> None:
    tiers = Tiers(host=None, disk=None)
    for tier in (Decision.HOST, Decision.DISK):
        assert tiers.take(tier, UNIT) is None
        assert tiers.held_bytes(tier) == 0
        assert not tiers.is_open(tier)


def test_host_and_disk_are_apart(store: DiskStore) -> None:
    buffer = torch.zeros(8 * UNIT, dtype=torch.uint8)
    tiers = Tiers(host=HostRegion(buffer, unpin=lambda: None), disk=store)
    host, disk = take(tiers, 1), take(tiers, 2, Decision.DISK)
    assert host.region.offset_bytes == disk.region.offset_bytes == 0
    assert tiers.held_bytes(Decision.HOST) == UNIT
    assert tiers.held_bytes(Decision.DISK) == store.statistics().held_bytes == 2 * UNIT
    tiers.give_back(disk, "read from disk")
    assert tiers.held_bytes(Decision.HOST) == UNIT
    assert tiers.held_bytes(Decision.DISK) == 0
    assert tiers.events_before_reuse(host) == ()
    assert tiers.events_before_reuse(take(tiers, 2, Decision.DISK)) == ("read from disk",)


# -- events before reuse ---------------------------------------------------------------------------


def test_a_fresh_place_waits_for_nothing() -> None:
    tiers = host_tiers()
    assert tiers.events_before_reuse(take(tiers, 8)) == ()


def test_the_next_owner_waits_for_the_last_copy_and_the_one_after_does_not() -> None:
    """Design rule 1: the next owner's own copies come behind the last one's."""
    tiers = host_tiers()
    place = take(tiers, 2)
    tiers.give_back(place, "first")
    again = take(tiers, 2)
    assert again.region.offset_bytes == place.region.offset_bytes
    assert tiers.events_before_reuse(again) == ("first",)
    assert tiers.events_before_reuse(again) == ()
    tiers.give_back(again, "second")
    assert tiers.events_before_reuse(take(tiers, 2)) == ("second",)


def test_a_place_that_was_only_reserved_keeps_the_events_of_the_owner_before() -> None:
    tiers = host_tiers()
    tiers.give_back(take(tiers, 2), "first")
    tiers.give_back(take(tiers, 2), None)
    assert tiers.events_before_reuse(take(tiers, 2)) == ("first",)


def test_an_event_is_split_among_the_owners_of_its_parts() -> None:
    tiers = host_tiers()
    tiers.give_back(take(tiers, 6), "whole")
    assert tiers.events_before_reuse(span(2, 4)) == ("whole",)
    assert tiers.events_before_reuse(span(2, 4)) == ()
    assert tiers.events_before_reuse(span(6, 8)) == ()
    assert tiers.events_before_reuse(span(0, 1)) == ("whole",)
    assert tiers.events_before_reuse(span(0, 1)) == ()
    assert tiers.events_before_reuse(span(1, 2)) == ("whole",)
    assert tiers.events_before_reuse(span(3, 5)) == ("whole",)
    assert tiers.events_before_reuse(span(0, 5)) == ()
    assert tiers.events_before_reuse(span(0, 8)) == ("whole",), "unit 5 is left"
    assert tiers.events_before_reuse(span(0, 8)) == ()


def test_a_place_over_several_old_ones_waits_for_the_events_of_all() -> None:
    tiers = host_tiers()
    old = [take(tiers, 2) for _ in range(4)]
    for number, place in enumerate(old):
        tiers.give_back(place, number)
    assert set(tiers.events_before_reuse(span(1, 5))) == {0, 1, 2}
    assert set(tiers.events_before_reuse(span(0, 8))) == {0, 2, 3}
    assert tiers.events_before_reuse(span(0, 8)) == ()


def test_places_that_only_touch_share_no_event() -> None:
    tiers = host_tiers()
    left, middle, right = (take(tiers, 2) for _ in range(3))
    tiers.give_back(left, "left")
    tiers.give_back(right, "right")
    assert tiers.events_before_reuse(middle) == ()
    assert set(tiers.events_before_reuse(span(0, 8))) == {"left", "right"}


def test_the_rounding_of_a_place_belongs_to_it() -> None:
    tiers = host_tiers()
    place = tiers.take(Decision.HOST, UNIT + 1)
    assert place is not None
    tiers.give_back(place, "odd")
    assert tiers.events_before_reuse(span(1, 2)) == ("odd",)


# -- growth between steps --------------------------------------------------------------------------


class System:
    """Hands out host regions and notes it, up to a limit."""

    def __init__(self, max_units: int = 100, room_bytes: int | None = None) -> None:
        self.max_units = max_units
        self.room_bytes = room_bytes
        self.calls: list[str] = []

    def make(self, num_bytes: int) -> HostRegion:
        num_units = num_bytes // UNIT
        if num_units > self.max_units:
            self.calls.append(f"refuse {num_units}")
            raise PinnedMemoryError("there is no more", self.room_bytes)
        self.calls.append(f"pin {num_units}")
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        return HostRegion(buffer, unpin=lambda: self.calls.append(f"unpin {num_units}"))


def capacity_units(tiers: Tiers) -> int:
    return 0 if tiers.host is None else tiers.host.arena.statistics().capacity_bytes // UNIT


def test_the_host_tier_is_reserved_up_to_its_cap() -> None:
    system = System()
    tiers = Tiers(host=None, disk=None, make_host=system.make, host_cap_bytes=3 * UNIT)
    tiers.reserve_host(2 * UNIT)
    tiers.reserve_host(8 * UNIT)
    assert capacity_units(tiers) == 3
    assert system.calls == ["pin 2", "unpin 2", "pin 3"]


def test_the_host_tier_grows_by_what_was_refused() -> None:
    """Design rule 7: between steps, and with the old region given back first."""
    system = System()
    tiers = Tiers(host=None, disk=None, make_host=system.make)
    tiers.reserve_host(2 * UNIT)
    place = take(tiers, 2)
    assert tiers.take(Decision.HOST, UNIT) is None
    assert tiers.take(Decision.HOST, 2 * UNIT) is None
    tiers.give_back(place, "an event of the old region")
    assert capacity_units(tiers) == 2
    tiers.grow_to_demand()
    tiers.grow_to_demand()
    assert system.calls == ["pin 2", "unpin 2", "pin 5"]
    assert tiers.events_before_reuse(take(tiers, 5)) == ()


def test_the_host_tier_never_grows_beyond_its_cap() -> None:
    system = System()
    tiers = Tiers(host=None, disk=None, make_host=system.make, host_cap_bytes=3 * UNIT)
    tiers.reserve_host(2 * UNIT)
    for _ in range(2):
        assert tiers.take(Decision.HOST, 4 * UNIT) is None
        tiers.grow_to_demand()
    assert capacity_units(tiers) == 3
    assert system.calls == ["pin 2", "unpin 2", "pin 3"]


def test_a_host_tier_that_cannot_grow_stays_as_large_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Design rule 7: a refusal in mid-run costs memory, not the run."""
    system = System(max_units=2)
    tiers = Tiers(host=None, disk=None, make_host=system.make)
    tiers.reserve_host(2 * UNIT)
    for _ in range(2):
        assert tiers.take(Decision.HOST, 4 * UNIT) is None
        tiers.grow_to_demand()
    assert capacity_units(tiers) == 2
    assert system.calls == ["pin 2", "unpin 2", "refuse 6", "pin 2"]
    assert [r.message for r in caplog.records] == [
        "the host tier stays at 1.0 KiB: there is no more"
    ]


def test_a_region_that_is_refused_too_in_the_size_that_it_had_is_smaller_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    system = System()
    tiers = Tiers(host=None, disk=None, make_host=system.make)
    assert tiers.reserve_host(4 * UNIT) is None
    assert tiers.take(Decision.HOST, 6 * UNIT) is None
    system.max_units = 2  # another program has taken the rest in the meantime
    tiers.grow_to_demand()
    assert system.calls[-4:] == ["refuse 10", "refuse 4", "refuse 3", "pin 2"]
    assert [r.message for r in caplog.records] == [
        "the host tier stays at 1.0 KiB: there is no more"
    ]
    assert tiers.take(Decision.HOST, 6 * UNIT) is None
    tiers.grow_to_demand()
    assert system.calls[-1] == "pin 2"


# -- refusals --------------------------------------------------------------------------------------


def test_where_the_system_says_what_is_left_that_much_is_taken() -> None:
    system = System(max_units=7, room_bytes=7 * UNIT + 100)
    taken = take_what_there_is(system.make, 40 * UNIT)
    assert taken.region is not None and str(taken.refusal) == "there is no more"
    assert system.calls == ["refuse 40", "pin 7"]


def test_where_it_does_not_the_size_goes_down_by_quarters_and_thirds() -> None:
    system = System(max_units=13)
    taken = take_what_there_is(system.make, 64 * UNIT)
    assert taken.region is not None and taken.region.buffer.numel() == 12 * UNIT
    assert system.calls == [
        *("refuse 64", "refuse 48", "refuse 32", "refuse 24", "refuse 16"),
        "pin 12",
    ]


def test_a_region_that_was_there_is_not_lost_to_a_larger_one_that_is_refused() -> None:
    system = System(max_units=10)
    tiers = Tiers(host=None, disk=None, make_host=system.make)
    assert tiers.reserve_host(10 * UNIT) is None
    assert tiers.reserve_host(12 * UNIT) is not None
    assert system.calls == ["pin 10", "unpin 10", "refuse 12", "pin 10"]
    assert (tiers.host_bytes, tiers.host_cap_bytes) == (10 * UNIT, 10 * UNIT)


def test_what_was_left_may_be_gone_by_now() -> None:
    system = System(max_units=12, room_bytes=16 * UNIT)
    taken = take_what_there_is(system.make, 64 * UNIT)
    assert taken.region is not None
    assert system.calls == ["refuse 64", "refuse 16", "pin 12"]


def test_a_64th_or_less_than_is_of_use_is_not_tried() -> None:
    system = System(max_units=0)
    taken = take_what_there_is(system.make, 96 * UNIT)
    assert taken.region is None and str(taken.refusal) == "there is no more"
    assert system.calls[-2:] == ["refuse 3", "refuse 2"]  # 1.5 units would be one, and too little
    system.calls.clear()
    assert take_what_there_is(system.make, 96 * UNIT, least_bytes=40 * UNIT).region is None
    assert system.calls == ["refuse 96", "refuse 72", "refuse 48"]
    system.calls.clear()
    system.room_bytes = 0
    assert take_what_there_is(system.make, 96 * UNIT).region is None
    assert system.calls == ["refuse 96"]


def test_what_the_system_gives_is_the_cap_from_then_on() -> None:
    """Design rule 7: it is not asked again and again."""
    system = System(max_units=6)
    tiers = Tiers(host=None, disk=None, make_host=system.make)
    refusal = tiers.reserve_host(8 * UNIT)
    assert str(refusal) == "there is no more"
    assert (tiers.host_bytes, tiers.host_cap_bytes) == (6 * UNIT, 6 * UNIT)
    assert tiers.take(Decision.HOST, 7 * UNIT) is None
    tiers.grow_to_demand()
    assert system.calls == ["refuse 8", "pin 6"]
    system.max_units = 0
    assert str(tiers.reserve_host(2 * UNIT)) == "there is no more"
    assert (tiers.host, tiers.host_bytes, tiers.host_cap_bytes) == (None, 0, 0)


def test_bounce_memory_is_taken_down_to_what_one_copy_needs() -> None:
    system = System(max_units=5)
    tiers = Tiers(host=None, disk=None, make_host=system.make)
    assert tiers.reserve_bounce(8 * UNIT, least_bytes=4 * UNIT) is None
    assert tiers.bounce is not None and tiers.bounce.buffer.numel() == 4 * UNIT
    refusal = tiers.reserve_bounce(20 * UNIT, least_bytes=10 * UNIT)
    assert str(refusal) == "there is no more"
    assert tiers.bounce is None


def test_the_disk_tier_grows_up_to_its_cap(tmp_path: Path) -> None:
    with DiskStore(in_folder(tmp_path, 3 * DISK_UNIT), num_threads=1) as store:
        store.reserve(DISK_UNIT)
        tiers = Tiers(host=None, disk=store)
        assert tiers.take(Decision.DISK, 4 * DISK_UNIT) is None
        tiers.grow_to_demand()
        assert store.statistics().reserved_bytes == 3 * DISK_UNIT


# -- the end ---------------------------------------------------------------------------------------


def test_a_region_that_nobody_closed_is_unpinned_when_it_dies() -> None:
    system = System()
    region = system.make(UNIT)
    tiers = Tiers(host=region, disk=None)
    del region
    assert system.calls == ["pin 1"]
    del tiers
    assert system.calls == ["pin 1", "unpin 1"]


def test_close_unpins_the_host_once_and_leaves_the_disk_open(store: DiskStore) -> None:
    unpinned: list[str] = []
    buffer = torch.zeros(8 * UNIT, dtype=torch.uint8)
    tiers = Tiers(host=HostRegion(buffer, unpin=lambda: unpinned.append("host")), disk=store)
    host, disk = take(tiers, 1), take(tiers, 1, Decision.DISK)
    tiers.close()
    tiers.close()
    assert unpinned == ["host"]
    assert (tiers.is_open(Decision.HOST), tiers.is_open(Decision.DISK)) == (False, True)
    tiers.give_back(host, "too late")
    assert tiers.held_bytes(Decision.HOST) == 0
    assert store.statistics().held_bytes == UNIT
    tiers.give_back(disk, None)
    assert store.statistics().held_bytes == 0
