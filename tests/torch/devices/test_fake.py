"""The fake device is only worth what it notices: each test breaks one rule on purpose."""

import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ebbtide.memory.arena import Region
from ebbtide.plan import Decision
from ebbtide.torch.devices.base import Place
from ebbtide.torch.devices.fake import POISON, FakeDevice, Schedule

SCHEDULES: tuple[Schedule, ...] = ("late", "eager", "random")
MAIN = "main"
SIDE = "side"

SOURCE_LET_GO = "memory was let go while an evict may read it"
TARGET_LET_GO = "memory was let go while a fetch may write to it"


def place(first: int = 0, num_bytes: int = 8) -> Place:
    region = Region(offset_bytes=first, num_bytes=num_bytes, taken_bytes=num_bytes)
    return Place(tier=Decision.HOST, region=region)


def row(value: int, num_bytes: int = 8) -> Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def values(tensor: Tensor) -> set[int]:
    return set(tensor.tolist())


# -- when copies run -------------------------------------------------------------------------------


def test_host_space_and_new_memory_are_poison() -> None:
    device = FakeDevice(16)
    assert values(device.host) == {POISON}
    assert values(device.allocate(8)) == {POISON}
    assert device.allocate(8).shape == (8,)


def test_a_late_copy_runs_when_the_current_stream_waits_for_it() -> None:
    device = FakeDevice(16, schedule="late")
    source = row(1)
    out = device.copy(source, place(), stream=MAIN, after=())
    assert values(device.host[:8]) == {POISON}
    device.wait(MAIN, out)
    assert values(device.host[:8]) == {1}
    assert values(device.host[8:]) == {POISON}


def test_a_late_copy_reads_what_its_source_holds_then() -> None:
    device = FakeDevice(16, schedule="late")
    source = row(1)
    out = device.copy(source, place(), stream=MAIN, after=())
    source.fill_(2)
    device.wait(MAIN, out)
    assert values(device.host[:8]) == {2}


def test_an_eager_copy_runs_at_once() -> None:
    device = FakeDevice(16, schedule="eager")
    source = row(1)
    out = device.copy(source, place(), stream=MAIN, after=())
    assert values(device.host[:8]) == {1}
    back = device.allocate(8)
    device.copy(place(), back, stream=MAIN, after=(out,))
    assert values(back) == {1}


def test_what_another_stream_waits_for_runs_when_that_stream_is_current() -> None:
    device = FakeDevice(16, schedule="late")
    source = row(1)
    out = device.copy(source, place(), stream=MAIN, after=())
    device.wait(SIDE, out)
    assert values(device.host[:8]) == {POISON}
    with device.stream(SIDE):
        assert device.current_stream() == SIDE
        assert values(device.host[:8]) == {1}
    assert device.current_stream() == MAIN


def test_a_wait_for_a_stream_is_a_wait_for_all_that_it_waited_for() -> None:
    device = FakeDevice(16, schedule="late")
    source = row(1)
    out = device.copy(source, place(), stream=MAIN, after=())
    device.wait(SIDE, out)
    device.wait(MAIN, SIDE)
    assert values(device.host[:8]) == {1}


def random_order(seed: int) -> list[int]:
    """The order in which eight independent copies run, as it shows in the host space."""
    device = FakeDevice(64, schedule="random", seed=seed)
    sources = [row(i, 1) for i in range(8)]
    done: list[int] = []
    for index, source in enumerate(sources):
        device.copy(source, place(8 * index, 1), stream=MAIN, after=())
        done += [i for i in range(8) if i not in done and device.host[8 * i] == i]
    while len(done) < 8:
        device.allocate(1)
        done += [i for i in range(8) if i not in done and device.host[8 * i] == i]
    return done


def test_random_copies_run_in_an_order_that_the_seed_decides() -> None:
    orders = [random_order(seed) for seed in range(10)]
    assert orders == [random_order(seed) for seed in range(10)]
    assert len({tuple(order) for order in orders}) == 10
    assert any(a > b for order in orders for a, b in pairwise(order))


@pytest.mark.parametrize("seed", range(10))
def test_a_random_copy_never_overtakes_what_it_is_ordered_after(seed: int) -> None:
    device = FakeDevice(16, schedule="random", seed=seed)
    source, back = row(1), device.allocate(8)
    out = device.copy(source, place(), stream=MAIN, after=())
    device.copy(place(), back, stream=MAIN, after=(out,))
    for _ in range(40):
        device.allocate(1)
        assert values(back) in ({POISON}, {1})
        assert values(back) == {POISON} or values(device.host[:8]) == {1}
    assert values(back) == {1}
    assert device.violations == []


def test_finish_runs_everything_and_orders_every_stream_behind_it() -> None:
    device = FakeDevice(16, schedule="late")
    source, back = row(1), device.allocate(8)
    out = device.copy(source, place(), stream=MAIN, after=())
    device.copy(place(), back, stream=MAIN, after=(out,))
    device.finish()
    assert values(back) == {1}
    del source
    with device.stream(SIDE):
        device.copy(row(2), place(), stream=SIDE, after=())
        del back
    device.finish()
    assert values(device.host[:8]) == {POISON}, "the last source was let go unfenced"
    assert device.violations == [SOURCE_LET_GO]


# -- what is let go too early ----------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_source_that_is_let_go_before_its_fence_is_noticed(schedule: Schedule) -> None:
    device = FakeDevice(16, schedule=schedule)
    source = row(1)
    device.copy(source, place(), stream=MAIN, after=())
    del source
    assert device.violations == [SOURCE_LET_GO]


def test_a_source_that_is_let_go_before_its_fence_arrives_as_poison() -> None:
    device = FakeDevice(16, schedule="late")
    source = row(1)
    device.host.fill_(0)
    out = device.copy(source, place(), stream=MAIN, after=())
    del source
    device.wait(MAIN, out)
    assert values(device.host[:8]) == {POISON}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fence_on_another_stream_than_the_owner_is_none(schedule: Schedule) -> None:
    device = FakeDevice(16, schedule=schedule)
    source = row(1)
    out = device.copy(source, place(), stream=MAIN, after=())
    device.wait(SIDE, out)
    del source
    assert device.violations == [SOURCE_LET_GO]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_source_may_go_behind_a_fence_on_its_owner(schedule: Schedule) -> None:
    device = FakeDevice(16, schedule=schedule)
    with device.stream(SIDE):
        source = row(1)
        out = device.copy(source, place(), stream=SIDE, after=())
    device.wait(SIDE, out)
    del source
    device.finish()
    assert values(device.host[:8]) == {1}
    assert device.violations == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fetch_into_memory_that_was_let_go_is_noticed(schedule: Schedule) -> None:
    device = FakeDevice(16, schedule=schedule)
    back = device.allocate(8)
    device.copy(place(), back, stream=MAIN, after=())
    del back
    assert device.violations == [TARGET_LET_GO]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fetch_may_be_dropped_behind_a_fence_on_its_owner(schedule: Schedule) -> None:
    device = FakeDevice(16, schedule=schedule)
    with device.stream(SIDE):
        back = device.allocate(8)
        fetched = device.copy(place(), back, stream=SIDE, after=())
    device.wait(SIDE, fetched)
    del back
    assert device.violations == []


def test_memory_that_another_stream_reads_may_only_go_behind_a_fence() -> None:
    device = FakeDevice(16)
    for is_fenced in (False, True):
        back = device.allocate(8)
        with device.stream(SIDE):
            device.wait(SIDE, MAIN)
            device.touch(back, is_written=False)
        if is_fenced:
            device.wait(MAIN, SIDE)
        assert device.violations == []
        del back
        wanted = [] if is_fenced else ["memory was let go while stream 'side' may use it"]
        assert device.violations == wanted
        device.violations.clear()


# -- the wrong stream ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_evict_behind_the_wrong_stream_is_noticed_and_leaves_poison(schedule: Schedule) -> None:
    device = FakeDevice(16, schedule=schedule)
    with device.stream(SIDE):
        source = row(1)
        out = device.copy(source, place(), stream=MAIN, after=())
        device.wait(SIDE, out)
    assert device.violations == ["an evict read memory while stream 'side' may use it"]
    assert values(device.host[:8]) == {POISON}


def test_an_evict_behind_a_stream_that_waited_before_the_source_was_made_is_noticed() -> None:
    device = FakeDevice(16)
    with device.stream(SIDE):
        device.wait(MAIN, SIDE)
        source = row(1)
        device.copy(source, place(), stream=MAIN, after=())
    assert device.violations == ["an evict read memory while stream 'side' may use it"]


def test_a_fetch_behind_the_wrong_stream_is_noticed() -> None:
    device = FakeDevice(16)
    with device.stream(SIDE):
        back = device.allocate(8)
        device.copy(place(), back, stream=MAIN, after=())
    assert device.violations == ["a fetch wrote to memory while stream 'side' may use it"]


def test_a_copy_behind_a_stream_that_waited_for_the_right_one_is_fine() -> None:
    device = FakeDevice(16)
    with device.stream(SIDE):
        back = device.allocate(8)
        device.wait(MAIN, SIDE)
        device.copy(place(), back, stream=MAIN, after=())
    assert device.violations == []


# -- host space ------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fetch_that_does_not_wait_for_its_evict_is_noticed(schedule: Schedule) -> None:
    device = FakeDevice(16, schedule=schedule)
    source, back = row(1), device.allocate(8)
    device.copy(source, place(), stream=MAIN, after=())
    device.copy(place(), back, stream=MAIN, after=())
    assert device.violations == ["a fetch read a place that an evict may write to"]


def test_a_fetch_that_does_not_wait_for_its_evict_brings_poison() -> None:
    device = FakeDevice(16, schedule="late")
    source, back = row(1), device.allocate(8)
    device.copy(source, place(), stream=MAIN, after=())
    device.wait(MAIN, device.copy(place(), back, stream=MAIN, after=()))
    assert values(back) == {POISON}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_place_overwritten_before_its_last_fetch_passed_is_noticed(schedule: Schedule) -> None:
    device = FakeDevice(16, schedule=schedule)
    first, second, back = row(1), row(2), device.allocate(8)
    out = device.copy(first, place(), stream=MAIN, after=())
    device.copy(place(), back, stream=MAIN, after=(out,))
    device.copy(second, place(), stream=MAIN, after=(out,))
    assert device.violations == ["an evict wrote to a place that a fetch may read"]


def test_a_place_overwritten_before_its_last_fetch_passed_brings_other_bytes() -> None:
    device = FakeDevice(16, schedule="late")
    first, second, back = row(1), row(2), device.allocate(8)
    out = device.copy(first, place(), stream=MAIN, after=())
    fetched = device.copy(place(), back, stream=MAIN, after=(out,))
    device.wait(MAIN, device.copy(second, place(), stream=MAIN, after=(out,)))
    device.wait(MAIN, fetched)
    assert values(back) == {2}


def test_two_evicts_to_one_place_in_no_order_are_noticed() -> None:
    device = FakeDevice(16)
    first, second = row(1), row(2)
    device.copy(first, place(0), stream=MAIN, after=())
    device.copy(second, place(7), stream=MAIN, after=())
    assert device.violations == ["an evict wrote to a place that another evict may write to"]


def test_neighbouring_places_and_two_fetches_of_one_place_need_no_order() -> None:
    device = FakeDevice(16)
    first, second = row(1), row(2)
    out = device.copy(first, place(0), stream=MAIN, after=())
    device.copy(second, place(8), stream=MAIN, after=())
    backs = [device.allocate(8) for _ in range(2)]
    for back in backs:
        device.wait(MAIN, device.copy(place(0), back, stream=MAIN, after=(out,)))
    assert device.violations == []
    assert [values(back) for back in backs] == [{1}, {1}]


def test_order_reaches_through_the_copies_in_between() -> None:
    device = FakeDevice(16)
    first, second, back = row(1), row(2), device.allocate(8)
    out = device.copy(first, place(), stream=MAIN, after=())
    fetched = device.copy(place(), back, stream=MAIN, after=(out,))
    again = device.copy(second, place(), stream=MAIN, after=(fetched,))
    device.wait(MAIN, again)
    assert device.violations == []
    assert values(back) == {1}
    assert values(device.host[:8]) == {2}


# -- compute ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_read_of_a_fetched_row_before_the_wait_is_noticed(schedule: Schedule) -> None:
    device = FakeDevice(16, schedule=schedule)
    back = device.allocate(8)
    fetched = device.copy(place(), back, stream=MAIN, after=())
    with device.watch():
        back.view(torch.int64).add(1)
        assert device.violations == ["compute read memory while a fetch may write to it"]
        device.violations.clear()
        device.wait(MAIN, fetched)
        back.view(torch.int64).add(1)
    assert device.violations == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_write_to_a_source_before_its_evict_passed_is_noticed(schedule: Schedule) -> None:
    device = FakeDevice(16, schedule=schedule)
    source = row(1)
    out = device.copy(source, place(), stream=MAIN, after=())
    with device.watch():
        source.add(1)
        assert device.violations == []
        source[2:].add_(1)
        torch.add(source, 1, out=source)
        assert device.violations == ["compute wrote to memory while an evict may read it"] * 2
        device.violations.clear()
        device.wait(MAIN, out)
        source.add_(1)
    assert device.violations == []


def test_what_no_copy_touches_is_not_watched() -> None:
    device = FakeDevice(16)
    with device.watch():
        torch.ones(3).add_(1).to_sparse().coalesce()
    device.touch(torch.ones(3), is_written=True)
    assert device.violations == []


def test_compute_on_another_stream_must_wait_for_the_stream_that_fetched() -> None:
    device = FakeDevice(16)
    back = device.allocate(8)
    device.wait(MAIN, device.copy(place(), back, stream=MAIN, after=()))
    with device.stream(SIDE), device.watch():
        back.add(1)
        assert device.violations == [
            "compute read memory while stream 'main' may use it",
            "compute read memory while a fetch may write to it",
        ]
        device.violations.clear()
        device.wait(SIDE, MAIN)
        back.add(1)
    device.wait(MAIN, SIDE)
    assert device.violations == []


# -- what it measures and refuses ------------------------------------------------------------------


def test_bytes_in_flight_count_until_the_source_goes_and_the_fetch_is_waited_for() -> None:
    device = FakeDevice(32, schedule="eager")
    first, second, third = row(1), row(2, 16), row(3, 4)
    out = device.copy(first, place(0), stream=MAIN, after=())
    device.wait(MAIN, device.copy(second, place(8, 16), stream=MAIN, after=()))
    assert device.peak_out_bytes == 24
    del second
    device.copy(third, place(24, 4), stream=MAIN, after=())
    assert device.peak_out_bytes == 24
    back, other = device.allocate(8), device.allocate(8)
    fetched = device.copy(place(0), back, stream=MAIN, after=(out,))
    assert device.peak_in_bytes == 8
    device.wait(MAIN, fetched)
    device.copy(place(0), other, stream=MAIN, after=(out,))
    assert device.peak_in_bytes == 8
    third = device.allocate(8)
    device.copy(place(0), third, stream=MAIN, after=(out,))
    assert device.peak_in_bytes == 16


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (row(1), row(2), "one end must be a place"),
        (place(), place(), "one end must be a place"),
        (row(1), place(0, 9), "sizes differ"),
        (row(1).view(torch.int16), place(), "sizes differ"),
        (row(1), place(9), "the place lies beyond the host tier"),
        (
            row(1),
            Place(tier=Decision.DISK, region=place().region),
            "the fake device has no disk tier",
        ),
    ],
)
def test_a_copy_that_makes_no_sense_is_refused(
    source: Tensor | Place, target: Tensor | Place, message: str
) -> None:
    device = FakeDevice(16)
    with pytest.raises(AssertionError, match=re.escape(message)):
        device.copy(source, target, stream=MAIN, after=())
