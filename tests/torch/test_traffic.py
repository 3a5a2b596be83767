"""Evictions and fetches on the fake device: values, bytes, and what may go when."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from torch import Tensor

from ebbtide.errors import RuntimeStateError
from ebbtide.plan import Decision
from ebbtide.torch import traffic
from ebbtide.torch.devices.fake import Schedule
from ebbtide.torch.traffic import CLOSED, MUTATED, Slot
from tests.torch.fakes import HOST_ROWS, ROW, Bench

SCHEDULES: tuple[Schedule, ...] = ("late", "eager", "random")


def values(tensor: Tensor) -> set[int]:
    return set(tensor.tolist())


def test_freed_memory_goes_back_before_the_turn_once_enough_was_let_go() -> None:
    held_bytes: list[int] = []
    bench = Bench(
        num_host_rows=16,
        max_out_bytes=16 * ROW,
        trim=lambda: held_bytes.append(bench.ledger.snapshot().held_device_bytes),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "MIN_TRIM_BYTES", 4 * ROW)
        slots = [bench.evict(value) for value in range(3)]
        bench.traffic.start_turn()
        assert held_bytes == []  # three rows are not enough
        slots += [bench.evict(value) for value in range(2)]
        assert bench.ledger.snapshot().held_device_bytes == 2 * ROW
        bench.traffic.start_turn()
        assert held_bytes == [0]  # nothing is leaving any more
        bench.traffic.start_turn()
        slots.append(bench.evict(7))
        bench.traffic.start_turn()
        assert held_bytes == [0]  # it counts from the last time
    slots.clear()
    bench.assert_nothing_is_left()


# -- the three lives of a slot ---------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_row_comes_back_with_its_bytes(schedule: Schedule) -> None:
    bench = Bench(schedule=schedule)
    slot = bench.evict(7)
    assert slot.num_bytes == ROW
    bench.traffic.settle(slot)
    back = bench.traffic.bytes_of(slot)
    assert back.shape == (ROW,)
    assert values(back) == {7}
    counts = bench.ledger.snapshot()
    assert (counts.host.moved_out_bytes, counts.host.moved_in_bytes) == (ROW, ROW)
    assert (counts.num_evictions, counts.num_fetches, counts.num_resurrections) == (1, 1, 0)
    del slot, back
    bench.assert_nothing_is_left()


def test_a_fetch_that_is_refused_leaves_no_memory_that_a_later_use_could_take_for_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    slot = bench.evict(7)
    bench.traffic.settle(slot)

    def refuse(*_: object, **__: object) -> object:
        raise OSError("a copy is refused")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="refused"):
        patch.setattr(bench.device, "copy", refuse)
        bench.traffic.bytes_of(slot)
    assert bench.ledger.snapshot().held_device_bytes == 0
    assert values(bench.traffic.bytes_of(slot)) == {7}
    del slot
    bench.assert_nothing_is_left()


def test_a_row_that_is_still_leaving_serves_without_a_fetch() -> None:
    bench = Bench()
    row = torch.full((ROW,), 7, dtype=torch.uint8)
    slot = bench.evict_row(row)
    assert bench.traffic.bytes_of(slot).data_ptr() == row.data_ptr()
    counts = bench.ledger.snapshot()
    assert (counts.host.moved_in_bytes, counts.num_resurrections) == (0, 1)
    assert counts.held_device_bytes == ROW


def test_device_bytes_are_those_of_sources_and_fetched_copies() -> None:
    bench = Bench()
    slot = bench.evict(7)
    held = [bench.ledger.snapshot().held_device_bytes]
    bench.traffic.settle(slot)
    held.append(bench.ledger.snapshot().held_device_bytes)
    bench.traffic.bytes_of(slot)
    held.append(bench.ledger.snapshot().held_device_bytes)
    bench.traffic.release(slot)
    held.append(bench.ledger.snapshot().held_device_bytes)
    assert held == [ROW, 0, ROW, 0]
    assert bench.ledger.snapshot().peak_held_device_bytes == ROW


def test_a_source_is_held_until_it_settles_and_not_longer() -> None:
    bench = Bench()
    row = torch.full((ROW,), 7, dtype=torch.uint8)
    storage = weakref.ref(row)
    slot = bench.evict_row(row)
    del row
    bench.traffic.settle(slot)
    assert storage() is None
    assert slot.watched is None
    assert bench.device.violations == []
    assert values(bench.traffic.bytes_of(slot)) == {7}


def test_a_released_row_is_fetched_again() -> None:
    bench = Bench()
    slot = bench.evict(7)
    for _ in range(3):
        bench.traffic.release(slot)
        assert values(bench.traffic.bytes_of(slot)) == {7}
    counts = bench.ledger.snapshot()
    assert (counts.num_fetches, counts.host.moved_in_bytes) == (3, 3 * ROW)
    assert counts.host.held_bytes == ROW
    del slot
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_slot_that_dies_gives_everything_back_in_each_life(schedule: Schedule) -> None:
    bench = Bench(schedule=schedule, max_in_bytes=ROW)
    leaving = bench.evict(1)
    del leaving
    away = bench.evict(2)
    bench.traffic.settle(away)
    del away
    ahead, back = bench.evict(3), bench.evict(4)
    bench.traffic.settle_all()
    bench.traffic.bytes_of(back)
    assert bench.traffic.bytes_in_flight == (0, ROW), "the third row was fetched ahead"
    del ahead, back
    bench.assert_nothing_is_left()


def test_a_dead_slot_holds_its_bytes_until_the_next_call() -> None:
    bench = Bench()
    slot = bench.evict(7)
    del slot
    assert bench.tiers.held_bytes(Decision.HOST) == ROW
    assert bench.device.violations == []
    bench.traffic.bury()
    assert bench.tiers.held_bytes(Decision.HOST) == 0
    assert bench.device.violations == []


# -- storages that several blocks evict ------------------------------------------------------------


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_storage_that_is_evicted_twice_moves_once(is_settled: bool) -> None:
    """Design rule 3: the second eviction gets the slot of the first, in whatever life it is."""
    bench = Bench()
    row = torch.full((ROW,), 7, dtype=torch.uint8)
    first = bench.evict_row(row)
    if is_settled:
        bench.traffic.settle(first)
    second = bench.evict_row(row)
    assert second is first
    counts = bench.ledger.snapshot()
    assert (counts.num_evictions, counts.host.moved_out_bytes) == (1, ROW)
    assert bench.tiers.held_bytes(Decision.HOST) == ROW, "the second place was given back"
    del first, row
    assert values(bench.traffic.bytes_of(second)) == {7}
    del second
    bench.assert_nothing_is_left()


def test_a_storage_that_was_written_to_since_moves_again() -> None:
    """Design rule 3: identity is the storage at one version."""
    bench = Bench()
    row = torch.full((ROW,), 7, dtype=torch.uint8)
    old = bench.evict_row(row)
    bench.traffic.settle(old)
    row.add_(1)
    new = bench.evict_row(row)
    assert bench.ledger.snapshot().host.moved_out_bytes == 2 * ROW
    bench.traffic.settle_all()
    assert (values(bench.traffic.bytes_of(old)), values(bench.traffic.bytes_of(new))) == ({7}, {8})


def test_a_storage_whose_slot_is_gone_moves_again() -> None:
    bench = Bench()
    row = torch.full((ROW,), 7, dtype=torch.uint8)
    for _ in range(3):
        assert values(bench.traffic.bytes_of(bench.evict_row(row))) == {7}
    assert bench.ledger.snapshot().num_evictions == 3
    bench.assert_nothing_is_left()


# -- writes to what was saved ----------------------------------------------------------------------


def test_a_row_that_was_written_to_while_leaving_raises_what_torch_says() -> None:
    bench = Bench()
    row = torch.full((ROW,), 7, dtype=torch.uint8)
    slot = bench.evict_row(row)
    row.add_(1)
    with pytest.raises(RuntimeError) as error:
        bench.traffic.bytes_of(slot)
    assert str(error.value) == MUTATED.format(name="row 0", saved=0, now=1)
    bench.traffic.release(slot)
    with pytest.raises(RuntimeError, match="row 0 was written to after autograd saved it"):
        bench.traffic.bytes_of(slot)


@pytest.mark.parametrize("stream", ["main", "side"])
def test_a_settled_row_may_be_written_to_on_any_stream(stream: str) -> None:
    """Design rule 1: whoever settles, to write, waits for the copy on its own stream too."""
    bench = Bench(schedule="late")
    row = torch.full((ROW,), 7, dtype=torch.uint8)
    slot = bench.evict_row(row)
    with bench.device.stream(stream), bench.device.watch():
        bench.device.wait(stream, "main")
        bench.traffic.settle(slot)
        row.add_(1)
    with bench.device.stream("main"):
        bench.device.wait("main", stream)
        assert values(bench.traffic.bytes_of(slot)) == {7}
    assert values(row) == {8}
    assert bench.device.violations == []


# -- bytes in flight -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_bytes_out_never_exceed_the_bound(max_rows: int) -> None:
    """Design rule 10."""
    bench = Bench(max_out_bytes=max_rows * ROW)
    slots = [bench.evict(i) for i in range(6)]
    assert bench.device.peak_out_bytes == max_rows * ROW
    assert bench.traffic.bytes_in_flight == (max_rows * ROW, 0)
    assert bench.ledger.snapshot().peak_held_device_bytes == max_rows * ROW
    assert [values(bench.traffic.bytes_of(s)) for s in slots] == [{i} for i in range(6)]


def test_a_row_larger_than_the_bound_leaves_alone() -> None:
    bench = Bench(max_out_bytes=2 * ROW)
    small, large, last = bench.evict(1), bench.evict(2, 3 * ROW), bench.evict(3)
    assert bench.device.peak_out_bytes == 3 * ROW
    assert bench.traffic.bytes_in_flight == (ROW, 0)
    assert [values(bench.traffic.bytes_of(s)) for s in (small, large, last)] == [{1}, {2}, {3}]


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_bytes_in_never_exceed_the_bound(max_rows: int) -> None:
    """Design rule 10."""
    bench = Bench(max_in_bytes=max_rows * ROW)
    slots = [bench.evict(i) for i in range(8)]
    bench.traffic.settle_all()
    for i in reversed(range(8)):
        assert values(bench.traffic.bytes_of(slots[i])) == {i}
        assert bench.traffic.bytes_in_flight == (0, min(max_rows, i) * ROW)
        bench.traffic.release(slots[i])
    assert bench.device.peak_in_bytes == max_rows * ROW
    assert bench.ledger.snapshot().num_fetches == 8


def test_what_was_fetched_ahead_gives_way_to_what_is_needed_now() -> None:
    """Design rule 10: the farthest row goes first, and comes back when it is asked for."""
    bench = Bench(max_in_bytes=2 * ROW)
    slots = [bench.evict(i) for i in range(6)]
    bench.traffic.settle_all()
    bench.traffic.fetch_ahead(6)
    assert bench.traffic.bytes_in_flight == (0, 2 * ROW), "rows 5 and 4 are on their way"
    assert values(bench.traffic.bytes_of(slots[1])) == {1}
    assert bench.device.peak_in_bytes == 2 * ROW
    fetches = bench.ledger.snapshot().num_fetches
    assert values(bench.traffic.bytes_of(slots[5])) == {5}
    assert bench.ledger.snapshot().num_fetches == fetches + 1, "row 5 stayed, row 4 came again"
    assert values(bench.traffic.bytes_of(slots[4])) == {4}
    assert bench.device.peak_in_bytes == 2 * ROW
    assert bench.device.violations == []


def test_the_bound_holds_when_a_backward_stopped_half_way() -> None:
    """Design rule 10: what an unfinished backward fetched ahead still counts and gives way."""
    bench = Bench(max_in_bytes=2 * ROW)
    old = [bench.evict(i) for i in range(3)]
    bench.traffic.settle_all()
    bench.traffic.bytes_of(old[2])
    assert bench.traffic.bytes_in_flight == (0, 2 * ROW)
    new = [bench.evict(10 + i) for i in range(3)]
    bench.traffic.settle_all()
    for i in (2, 1, 0):
        assert values(bench.traffic.bytes_of(new[i])) == {10 + i}
        bench.traffic.release(new[i])
    assert bench.device.peak_in_bytes == 2 * ROW
    assert [values(bench.traffic.bytes_of(slot)) for slot in old] == [{0}, {1}, {2}]
    assert bench.device.peak_in_bytes == 2 * ROW


# -- fetching ahead --------------------------------------------------------------------------------


def test_slots_are_fetched_ahead_latest_first() -> None:
    bench = Bench(max_in_bytes=2 * ROW)
    slots = [bench.evict(i) for i in range(4)]
    bench.traffic.settle_all()
    bench.traffic.fetch_ahead(bench.traffic.next_index)
    assert bench.ledger.snapshot().num_fetches == 2
    for i in (3, 2, 1, 0):
        assert values(bench.traffic.bytes_of(slots[i])) == {i}
        bench.traffic.release(slots[i])
    assert bench.ledger.snapshot().num_fetches == 4, "each was fetched once, ahead of its use"


def test_what_is_leaving_or_was_used_is_not_fetched_ahead() -> None:
    bench = Bench()
    used, away, leaving = bench.evict(0), bench.evict(1), bench.evict(2)
    bench.traffic.settle(used)
    bench.traffic.settle(away)
    bench.traffic.bytes_of(used)
    bench.traffic.release(used)
    bench.traffic.fetch_ahead(bench.traffic.next_index)
    assert bench.ledger.snapshot().num_fetches == 2
    assert bench.traffic.bytes_in_flight == (ROW, ROW)
    assert values(bench.traffic.bytes_of(leaving)) == {2}
    assert values(bench.traffic.bytes_of(away)) == {1}


def test_what_was_leaving_is_fetched_ahead_once_it_has_left() -> None:
    bench = Bench()
    slots = [bench.evict(number) for number in range(3)]
    bench.traffic.settle(slots[0])
    bench.traffic.settle(slots[2])
    bench.traffic.bytes_of(slots[2])
    assert bench.ledger.snapshot().num_fetches == 2  # the one that is leaving was passed over
    bench.traffic.settle(slots[1])
    bench.traffic.bytes_of(slots[2])
    assert bench.ledger.snapshot().num_fetches == 3
    assert values(bench.traffic.bytes_of(slots[1])) == {1}


def test_later_graphs_are_fetched_ahead_after_earlier_ones_are_gone() -> None:
    bench = Bench()
    for first in (0, 10, 20):
        slots = [bench.evict(first + i) for i in range(3)]
        bench.traffic.settle_all()
        fetches = bench.ledger.snapshot().num_fetches
        bench.traffic.fetch_ahead(bench.traffic.next_index)
        assert bench.ledger.snapshot().num_fetches == fetches + 3
        assert [values(bench.traffic.bytes_of(s)) for s in slots] == [
            {first},
            {first + 1},
            {first + 2},
        ]
        del slots
        bench.traffic.fetch_ahead(bench.traffic.next_index)
    bench.assert_nothing_is_left()


def test_what_gave_way_is_fetched_ahead_again() -> None:
    bench = Bench(max_in_bytes=2 * ROW)
    slots = [bench.evict(i) for i in range(6)]
    bench.traffic.settle_all()
    bench.traffic.fetch_ahead(6)  # rows 5 and 4
    assert values(bench.traffic.bytes_of(slots[5])) == {5}
    bench.traffic.release(slots[5])
    assert bench.traffic.bytes_in_flight == (0, 2 * ROW), "rows 4 and 3"
    assert values(bench.traffic.bytes_of(slots[0])) == {0}, "out of order: row 3 gives way"
    assert bench.traffic.bytes_in_flight == (0, ROW)
    fetches = bench.ledger.snapshot().num_fetches
    assert values(bench.traffic.bytes_of(slots[4])) == {4}
    assert bench.ledger.snapshot().num_fetches == fetches + 2, "rows 3 and 2 are on their way"
    assert values(bench.traffic.bytes_of(slots[3])) == {3}
    assert bench.ledger.snapshot().num_fetches == fetches + 3, "row 3 was there, row 1 is fetched"


def test_a_backward_looks_at_each_slot_a_few_times_however_many_there_are() -> None:
    """Some hundred small activations must not take a scan of them all at each use."""
    bench = Bench(max_in_bytes=3 * ROW, num_host_rows=200)
    slots = [bench.evict(i % 251) for i in range(200)]
    bench.traffic.settle_all()
    looked = count_looks(bench)
    bench.traffic.fetch_ahead(200)
    for i in reversed(range(200)):
        assert values(bench.traffic.bytes_of(slots[i])) == {i % 251}
        bench.traffic.release(slots[i])
    assert bench.ledger.snapshot().num_fetches == 200
    assert len(looked) <= 2 * 200 + 1


def test_uses_that_go_back_up_a_little_look_at_nothing_again() -> None:
    """Within a block backward does not ask in the order of eviction: query, then key."""
    bench = Bench(max_in_bytes=200 * ROW, num_host_rows=200)
    slots = [bench.evict(i % 251) for i in range(200)]
    bench.traffic.settle_all()
    looked = count_looks(bench)
    bench.traffic.fetch_ahead(200)
    for last in reversed(range(3, 200, 4)):
        for i in (last - 2, last, last - 3, last - 1):
            assert values(bench.traffic.bytes_of(slots[i])) == {i % 251}
            bench.traffic.release(slots[i])
    assert bench.ledger.snapshot().num_fetches == 200
    assert sorted(looked) == list(range(200))


def test_a_backward_that_starts_again_looks_at_what_was_dropped() -> None:
    bench = Bench(max_in_bytes=8 * ROW)
    slots = [bench.evict(i) for i in range(6)]
    bench.traffic.settle_all()
    bench.traffic.start_backward(bench.traffic.forward_pass, 6)
    assert bench.ledger.snapshot().num_fetches == 6
    for slot in slots[1:]:
        bench.traffic.release(slot)
    bench.traffic.start_backward(bench.traffic.forward_pass, 6)
    assert bench.ledger.snapshot().num_fetches == 11, "row 0 was still there"


def count_looks(bench: Bench) -> list[int]:
    """Return the numbers of the slots that are looked at from now on, each time anew."""
    looked: list[int] = []
    order = bench.traffic._order  # pyright: ignore[reportPrivateUsage]

    class Counted:
        def get(self, index: int) -> Slot | None:
            looked.append(index)
            return order.get(index)

    bench.traffic._order = Counted()  # pyright: ignore
    return looked


# -- several streams -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_evict_is_queued_behind_the_stream_that_is_current_then(schedule: Schedule) -> None:
    """Design rule 6: the stream is asked for at each call."""
    bench = Bench(schedule=schedule)
    slots: list[Slot] = []
    for i, stream in enumerate(["main", "side", "main", "third"]):
        with bench.device.stream(stream):
            slots.append(bench.evict(i))
    bench.traffic.settle_all()
    assert [values(bench.traffic.bytes_of(s)) for s in slots] == [{0}, {1}, {2}, {3}]
    assert bench.device.violations == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fetch_is_ready_on_the_stream_that_asked_for_it(schedule: Schedule) -> None:
    """Design rule 6: evicted on one stream, settled on a second, used on a third."""
    bench = Bench(schedule=schedule)
    slot = bench.evict(7)
    with bench.device.stream("side"):
        bench.traffic.settle(slot)
    with bench.device.stream("third"), bench.device.watch():
        assert int(bench.traffic.bytes_of(slot).sum()) == 7 * ROW
        bench.traffic.release(slot)
    del slot
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_row_fetched_for_one_stream_is_copied_for_another(schedule: Schedule) -> None:
    """Design rule 6: memory is used on the stream that owns it, or in a copy."""
    bench = Bench(schedule=schedule)
    slot = bench.evict(7)
    bench.traffic.settle_all()
    bench.traffic.fetch_ahead(bench.traffic.next_index)
    with bench.device.watch():
        with bench.device.stream("side"):
            other = bench.traffic.bytes_of(slot)
            assert int(other.sum()) == 7 * ROW
            bench.traffic.release(slot)
        own = bench.traffic.bytes_of(slot)
        assert int(own.sum()) == 7 * ROW
        bench.traffic.release(slot)
    assert own.data_ptr() != other.data_ptr()
    del slot, own
    with bench.device.stream("side"):
        del other
    bench.assert_nothing_is_left()


def test_a_leaving_row_is_copied_for_another_stream() -> None:
    """Design rules 1 and 6: its source may only go behind that copy."""
    bench = Bench()
    row = torch.full((ROW,), 7, dtype=torch.uint8)
    slot = bench.evict_row(row)
    with bench.device.stream("side"), bench.device.watch():
        other = bench.traffic.bytes_of(slot)
        assert other.data_ptr() != row.data_ptr()
        assert int(other.sum()) == 7 * ROW
    assert bench.ledger.snapshot().num_resurrections == 1
    assert bench.device.violations == []


def test_a_place_waits_for_every_fetch_of_its_last_owner() -> None:
    """Design rule 1: also for an earlier fetch, on another stream than the last one."""
    bench = Bench()
    slot = bench.evict(7)
    bench.traffic.settle(slot)
    with bench.device.stream("side"):
        bench.traffic.bytes_of(slot)
        bench.traffic.release(slot)
    bench.traffic.bytes_of(slot)
    bench.traffic.release(slot)
    del slot
    again = bench.evict(8)
    assert bench.device.violations == []
    assert values(bench.traffic.bytes_of(again)) == {8}


def test_a_place_given_up_unused_still_waits_for_the_owner_before() -> None:
    """Design rule 1: room that was only reserved passes its last copy on."""
    bench = Bench()
    slot = bench.evict(7)
    bench.traffic.settle(slot)
    with bench.device.stream("side"):
        bench.traffic.bytes_of(slot)
        del slot
        bench.traffic.bury()
    reserved = bench.tiers.take(Decision.HOST, ROW)
    assert reserved is not None
    bench.tiers.give_back(reserved, None)
    assert values(bench.traffic.bytes_of(bench.evict(8))) == {8}
    assert bench.device.violations == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_calls_on_any_streams_gives_the_right_bytes(
    schedule: Schedule, seed: int
) -> None:
    """Design rules 1, 4, 6 and 10 at once, with calls drawn at random."""
    bench = Bench(schedule=schedule, seed=seed, max_out_bytes=3 * ROW, max_in_bytes=2 * ROW)
    draw = random.Random(seed)
    alive: dict[int, Slot] = {}
    for number in range(100):
        call = draw.choice(["evict", "evict", "use", "use", "release", "settle", "drop", "turn"])
        with bench.device.stream(draw.choice(["main", "main", "side", "third"])):
            if call == "evict" and len(alive) < HOST_ROWS:
                bench.traffic.bury()
                alive[number] = bench.evict(number)
            elif call == "turn":
                bench.traffic.settle_all()
                bench.traffic.fetch_ahead(bench.traffic.next_index)
            elif alive:
                chosen = draw.choice(list(alive))
                if call == "use":
                    with bench.device.watch():
                        found = bench.traffic.bytes_of(alive[chosen])
                        assert int(found.long().sum()) == chosen * ROW
                    del found
                elif call == "release":
                    bench.traffic.release(alive[chosen])
                elif call == "settle":
                    bench.traffic.settle(alive[chosen])
                else:
                    del alive[chosen]
        assert bench.device.violations == []
    counts = bench.ledger.snapshot()
    assert ROW < bench.device.peak_out_bytes <= 3 * ROW
    assert bench.device.peak_in_bytes == 2 * ROW
    assert counts.num_evictions > HOST_ROWS and counts.num_fetches > HOST_ROWS
    alive.clear()
    bench.assert_nothing_is_left()


# -- the end ---------------------------------------------------------------------------------------


def test_close_gives_the_host_memory_back_behind_the_copies() -> None:
    bench = Bench(schedule="late")
    slot, host = bench.evict(7), bench.tiers.host
    bench.traffic.close()
    assert host is not None  # it is not its end that gives the memory back
    assert values(bench.device.host[:ROW]) == {7}
    assert bench.tiers.host is None
    del slot
    bench.traffic.bury()
    assert bench.ledger.snapshot().held_device_bytes == 0
    assert bench.ledger.snapshot().host.held_bytes == 0
    assert bench.device.violations == []


def test_after_close_only_what_had_not_left_the_device_can_be_had() -> None:
    bench = Bench()
    away, leaving = bench.evict(1), bench.evict(2)
    bench.traffic.settle(away)
    bench.traffic.close()
    assert values(bench.traffic.bytes_of(leaving)) == {2}
    with pytest.raises(RuntimeStateError) as error:
        bench.traffic.bytes_of(away)
    assert str(error.value) == CLOSED.format(name="row 0")
    assert bench.ledger.snapshot().num_fetches == 0


def test_a_write_to_a_watched_part_of_a_leaving_row_raises_and_to_one_that_left_does_not() -> None:
    """Tensors of one storage may count their versions apart."""
    for is_leaving in (True, False):
        bench = Bench()
        first, second = torch.full((ROW,), 7, dtype=torch.uint8).unsafe_chunk(2)
        whole = first.as_strided((ROW,), (1,))
        slot = bench.evict_row(whole)
        bench.traffic.watch(slot, second)
        if not is_leaving:
            bench.traffic.settle(slot)
        second.zero_()
        assert whole._version == 0
        if is_leaving:
            with pytest.raises(RuntimeError) as error:
                bench.traffic.bytes_of(slot)
            assert str(error.value) == MUTATED.format(name=slot.name, saved=0, now=1)
        else:
            assert values(bench.traffic.bytes_of(slot)) == {7}


def test_a_write_by_way_of_another_counter_is_seen_while_the_row_is_leaving() -> None:
    """Such as a DTensor's: its local part counts nothing."""
    bench = Bench()
    row, outer = torch.full((ROW,), 7, dtype=torch.uint8), torch.zeros(1)
    leaving = bench.evict_row(row)
    bench.traffic.watch_alias(leaving, outer, outer._version)
    outer.add_(1)
    with pytest.raises(RuntimeError) as error:
        bench.traffic.bytes_of(leaving)
    assert str(error.value) == MUTATED.format(name=leaving.name, saved=0, now=1)
    gone = bench.evict(8)
    bench.traffic.settle(gone)
    bench.traffic.watch_alias(gone, outer, outer._version)
    outer.add_(1)
    assert values(bench.traffic.bytes_of(gone)) == {8}


def test_a_row_that_is_written_to_next_is_not_found_again() -> None:
    bench = Bench()
    row = torch.full((ROW,), 7, dtype=torch.uint8)
    slots = [bench.evict_row(row), bench.evict_row(row)]
    assert slots[0] is slots[1]
    bench.traffic.settle(slots[0])
    bench.traffic.unshare(slots[0])
    row.data.fill_(8)
    slots.append(bench.evict_row(row))
    assert row._version == 0 and slots[2] is not slots[0]
    bench.traffic.settle(slots[2])
    assert [values(bench.traffic.bytes_of(slot)) for slot in slots[1:]] == [{7}, {8}]
