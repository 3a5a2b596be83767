import threading

import pytest

from ebbtide.memory.ledger import Ledger, Statistics, TierStatistics
from ebbtide.plan import Decision


def test_a_new_ledger_has_counted_nothing() -> None:
    assert Ledger().snapshot() == Statistics(
        host=TierStatistics(),
        disk=TierStatistics(),
        held_device_bytes=0,
        peak_held_device_bytes=0,
        num_evictions=0,
        num_fetches=0,
        num_resurrections=0,
        num_recomputed_ops=0,
        stall_ns=0,
        num_kept_not_understood=(),
    )


def test_each_tier_counts_its_own_traffic() -> None:
    ledger = Ledger()
    ledger.count_eviction(Decision.HOST, 100)
    ledger.count_eviction(Decision.DISK, 7)
    ledger.count_fetch(Decision.HOST, 100)
    statistics = ledger.snapshot()
    assert statistics.host == TierStatistics(
        moved_out_bytes=100, moved_in_bytes=100, held_bytes=100, peak_held_bytes=100
    )
    assert statistics.disk == TierStatistics(
        moved_out_bytes=7, moved_in_bytes=0, held_bytes=7, peak_held_bytes=7
    )
    assert (statistics.num_evictions, statistics.num_fetches) == (2, 1)


def test_a_fetch_releases_nothing_and_can_come_twice() -> None:
    ledger = Ledger()
    ledger.count_eviction(Decision.DISK, 10)
    ledger.count_fetch(Decision.DISK, 10)
    ledger.count_fetch(Decision.DISK, 10)
    ledger.count_release(Decision.DISK, 10)
    assert ledger.snapshot().disk == TierStatistics(
        moved_out_bytes=10, moved_in_bytes=20, held_bytes=0, peak_held_bytes=10
    )


def test_the_peak_is_the_most_held_at_once() -> None:
    ledger = Ledger()
    ledger.count_eviction(Decision.HOST, 10)
    ledger.count_eviction(Decision.HOST, 20)
    ledger.count_release(Decision.HOST, 10)
    ledger.count_eviction(Decision.HOST, 5)
    host = ledger.snapshot().host
    assert (host.held_bytes, host.peak_held_bytes, host.moved_out_bytes) == (25, 30, 35)


def test_device_bytes_go_up_and_down_with_a_peak() -> None:
    ledger = Ledger()
    ledger.count_device_bytes(30)
    ledger.count_device_bytes(-10)
    ledger.count_device_bytes(5)
    statistics = ledger.snapshot()
    assert (statistics.held_device_bytes, statistics.peak_held_device_bytes) == (25, 30)


def test_other_counters_count() -> None:
    ledger = Ledger()
    ledger.count_resurrection()
    ledger.count_recomputed_ops(3)
    ledger.count_recomputed_ops(4)
    ledger.count_stall(5)
    ledger.count_stall(6)
    ledger.count_kept_not_understood("unknown subclass")
    ledger.count_kept_not_understood("graph pool")
    ledger.count_kept_not_understood("unknown subclass")
    statistics = ledger.snapshot()
    assert statistics.num_resurrections == 1
    assert statistics.num_recomputed_ops == 7
    assert statistics.stall_ns == 11
    assert statistics.num_kept_not_understood == (("graph pool", 1), ("unknown subclass", 2))


def test_moved_bytes_are_summed_over_tiers() -> None:
    ledger = Ledger()
    ledger.count_eviction(Decision.HOST, 100)
    ledger.count_eviction(Decision.DISK, 7)
    ledger.count_fetch(Decision.DISK, 7)
    ledger.count_fetch(Decision.DISK, 7)
    statistics = ledger.snapshot()
    assert (statistics.moved_out_bytes, statistics.moved_in_bytes) == (107, 14)


def test_a_reset_keeps_what_is_held_and_makes_it_the_peak() -> None:
    ledger = Ledger()
    ledger.count_eviction(Decision.HOST, 100)
    ledger.count_eviction(Decision.HOST, 20)
    ledger.count_release(Decision.HOST, 100)
    ledger.count_fetch(Decision.HOST, 20)
    ledger.count_device_bytes(50)
    ledger.count_device_bytes(-20)
    ledger.count_resurrection()
    ledger.count_recomputed_ops(3)
    ledger.count_kept_not_understood("unknown subclass")
    ledger.reset()
    assert ledger.snapshot() == Statistics(
        host=TierStatistics(held_bytes=20, peak_held_bytes=20),
        disk=TierStatistics(),
        held_device_bytes=30,
        peak_held_device_bytes=30,
        num_evictions=0,
        num_fetches=0,
        num_resurrections=0,
        num_recomputed_ops=0,
        stall_ns=0,
        num_kept_not_understood=(),
    )


def test_a_snapshot_does_not_change_later() -> None:
    ledger = Ledger()
    before = ledger.snapshot()
    ledger.count_eviction(Decision.HOST, 10)
    ledger.count_kept_not_understood("unknown subclass")
    assert before == Ledger().snapshot()


def test_releasing_more_than_is_held_is_a_bug() -> None:
    ledger = Ledger()
    ledger.count_eviction(Decision.HOST, 10)
    with pytest.raises(AssertionError, match="11 bytes of host were released, but only 10 are"):
        ledger.count_release(Decision.HOST, 11)


def test_letting_go_more_device_bytes_than_are_held_is_a_bug() -> None:
    ledger = Ledger()
    ledger.count_device_bytes(10)
    with pytest.raises(AssertionError, match="11 device bytes were let go, but only 10 are held"):
        ledger.count_device_bytes(-11)


@pytest.mark.parametrize("tier", [Decision.KEEP, Decision.RECOMPUTE])
def test_only_tiers_hold_moved_bytes(tier: Decision) -> None:
    with pytest.raises(ValueError, match=f"tier is '{tier.value}'; only 'host' and 'disk'"):
        Ledger().count_eviction(tier, 1)


def test_a_negative_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="num_bytes is -1; it must be 0 or more"):
        Ledger().count_fetch(Decision.HOST, -1)


def test_threads_lose_no_count() -> None:
    ledger = Ledger()

    def move_and_release() -> None:
        for _ in range(500):
            ledger.count_eviction(Decision.HOST, 3)
            ledger.count_fetch(Decision.HOST, 3)
            ledger.count_release(Decision.HOST, 3)
            ledger.count_recomputed_ops(1)

    threads = [threading.Thread(target=move_and_release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statistics = ledger.snapshot()
    assert statistics.host.moved_out_bytes == 6000
    assert statistics.host.moved_in_bytes == 6000
    assert statistics.host.held_bytes == 0
    assert statistics.num_evictions == statistics.num_fetches == 2000
    assert statistics.num_recomputed_ops == 2000
