import platform

import pytest
import torch

from ebbtide.compare.meter import (
    ALLOCATED_MEANING,
    CUDA_MEMORY_MEANING,
    RESIDENT_MEANING,
    ProcessMeter,
    StepTimer,
    TransferCounter,
    describe_memory,
    make_meter,
)

MIB = 1 << 20
BLOCK_BYTES = 128 * MIB
CPU = torch.device("cpu")


def take_block() -> torch.Tensor:
    return torch.ones(BLOCK_BYTES, dtype=torch.uint8)


def test_a_block_that_is_freed_within_a_step_is_in_its_peaks() -> None:
    meter = ProcessMeter()
    meter.reset()
    with meter.watch():
        pass
    before = meter.read()
    with meter.watch():
        block = take_block()
        del block
        grown = take_block()
    after = meter.read()
    assert grown[-1] == 1
    assert before.reserved_bytes is not None and after.reserved_bytes is not None
    assert 0.9 < (after.peak_bytes - before.peak_bytes) / BLOCK_BYTES < 1.5
    assert 0.9 < (after.reserved_bytes - before.reserved_bytes) / BLOCK_BYTES < 1.5


def test_a_reset_forgets_the_peaks() -> None:
    meter = ProcessMeter()
    with meter.watch():
        block = take_block()
    high = meter.read()
    del block
    meter.reset()
    assert meter.read().peak_bytes == 0
    with meter.watch():
        pass
    low = meter.read()
    assert high.peak_bytes - low.peak_bytes > 0.9 * BLOCK_BYTES


def test_without_glibc_the_resident_set_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (("musl", "1.2"), ("glibc", "2.31"), ("", "")):
        monkeypatch.setattr(platform, "libc_ver", lambda library=library: library)
        assert describe_memory(CPU) == RESIDENT_MEANING
        meter = make_meter(CPU)
        with meter.watch():
            pass
        assert meter.read().peak_bytes > 50 * MIB
        assert meter.read().reserved_bytes is None
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert describe_memory(CPU) == ALLOCATED_MEANING
    assert describe_memory(torch.device("cuda:0")) == CUDA_MEMORY_MEANING


def test_a_paused_timer_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 300, 1_000, 50_000, 50_200])
    monkeypatch.setattr("ebbtide.compare.meter.perf_counter_ns", lambda: next(ticks))
    timer = StepTimer(CPU)
    timer.begin()
    timer.end_forward()
    timer.pause()
    timer.resume()
    times = timer.finish()
    assert times.forward_ns == 300
    assert times.step_ns == 1_200


def test_only_copies_between_devices_are_counted() -> None:
    counter = TransferCounter()
    source = torch.ones(256, dtype=torch.float32)
    with counter:
        source.clone()
        source.to(torch.float64)
        source.to("meta")
        torch.empty(256, device="meta").copy_(source)
    # The meta device stands in for a GPU.
    assert counter.read().in_bytes == 2 * 1024
    assert counter.read().out_bytes == 0
