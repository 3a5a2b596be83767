"""The sanitizer: it finds what is planted within five steps, and is not there when it is off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.errors import CorruptionError
from ebbtide.memory.arena import Region
from ebbtide.plan import Decision
from ebbtide.torch import Tide
from ebbtide.torch.devices.base import AbstractDevice, Event, Place
from ebbtide.torch.devices.cpu import CpuDevice
from ebbtide.torch.devices.delays import NoDelay
from ebbtide.torch.devices.fake import Schedule
from ebbtide.torch.sanitizer import MAX_DELAY_NS, POISON, SanitizedDevice, Sanitizer
from tests.torch import faults
from tests.torch.fakes import Bench, FakeTide, offload_everything, planned
from tests.torch.models import WIDTH, Gated, Stack, Views, features, gpt2, llama
from tests.torch.training import (
    attach_here,
    differences,
    feature_step,
    language_step,
    seeded,
    train,
)

NUM_BLOCKS = 4
MAX_STEPS = 5
"""A fault is found within so many."""


def stack(make_block: Callable[[], nn.Module] = Gated) -> nn.Module:
    return seeded(lambda: Stack(make_block, NUM_BLOCKS))


def steps_until_found(model: nn.Module) -> tuple[int, str]:
    """Train until the sanitizer stops it; returns in which step, and what it said."""
    for step in range(1, MAX_STEPS + 1):
        try:
            feature_step(model, step)
        except CorruptionError as error:
            return step, str(error)
        model.zero_grad()
    pytest.fail("the fault was not found")


# -- planted faults --------------------------------------------------------------------------------


FAULTS = {
    "race": (faults.race, Gated, "came back with other bits"),
    "lost stride": (faults.lost_stride, faults.Permuted, "came back in another layout"),
    "lost order": (faults.lost_order, faults.Permuted, "came back with other bits"),
    "swapped": (faults.swapped, Gated, "came back with other bits"),
    "stale": (faults.stale, Gated, "was fetched from host with other bits than were evicted"),
}


@pytest.mark.parametrize("schedule", ["late", "random"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_in_the_first_step(name: str, schedule: Schedule) -> None:
    plant, make_block, said = FAULTS[name]
    model = stack(make_block)
    with FakeTide(
        model, offload_everything, schedule=schedule, sanitizer=Sanitizer(NoDelay())
    ) as tide:
        train(model, feature_step, num_steps=3)
        with plant(tide.device):
            step, message = steps_until_found(model)
    assert step == 1
    assert message.startswith("step 4: blocks.3")
    assert said in message


def test_dropout_that_is_run_again_is_found() -> None:
    model = stack(faults.Dropping)
    sanitizer = Sanitizer(NoDelay())
    with (
        faults.dropout_again(),
        FakeTide(model, planned("recompute"), sanitizer=sanitizer),
    ):
        step, message = steps_until_found(model)
    assert step == 1
    assert message.startswith("step 1: blocks.3:native_dropout.1, which autograd saved in blocks.3")
    assert "it was made again" in message


def test_a_race_with_real_threads_is_found(tmp_path: Path) -> None:
    """Of several fetches in a step some start only when they are waited for, which none is."""
    model = stack()
    with attach_here(model, "offload", tmp_path, sanitize=True):
        train(model, feature_step, num_steps=3)
        with faults.race():
            step, message = steps_until_found(model)
    assert step == 1
    assert "came back with other bits" in message


# -- a correct runtime -----------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
@pytest.mark.parametrize("plan", ["offload", "balanced", "offload-last:2"])
def test_a_correct_runtime_passes_and_no_bit_changes(plan: str, schedule: Schedule) -> None:
    wanted = train(stack(Views), feature_step, num_steps=MAX_STEPS)
    model, sanitizer = stack(Views), Sanitizer(NoDelay())
    with FakeTide(model, planned(plan), schedule=schedule, sanitizer=sanitizer) as tide:
        got = train(model, feature_step, num_steps=MAX_STEPS)
        assert differences(got, wanted) == []
        assert tide.ledger.snapshot().host.moved_in_bytes > 0
        tide.assert_nothing_is_left()
    counts = sanitizer.statistics()
    assert counts.num_steps == MAX_STEPS
    # What a checked step fetched ahead, and dropped, nobody asks for.
    num_fetches = tide.ledger.snapshot().num_fetches
    assert 0.9 * num_fetches <= counts.num_copies <= num_fetches
    assert counts.num_tensors > MAX_STEPS * NUM_BLOCKS
    assert counts.poisoned_bytes > 0


@pytest.mark.parametrize(
    ("build", "step"),
    [(gpt2, language_step), (llama, language_step), (lambda: Stack(Views), feature_step)],
    ids=["gpt2", "llama", "views"],
)
def test_on_the_cpu_no_bit_changes_and_the_report_says_what_it_took(
    build: Callable[[], nn.Module], step: Any, tmp_path: Path
) -> None:
    wanted = train(seeded(build), step, num_steps=MAX_STEPS)
    model = seeded(build)
    with attach_here(model, "offload", tmp_path, sanitize=True) as tide:
        assert differences(train(model, step, num_steps=MAX_STEPS), wanted) == []
        statistics, report = tide.statistics(), tide.report()
    counts = statistics.sanitizer
    assert counts is not None
    assert 0 < counts.num_copies <= statistics.num_fetches
    assert counts.compared_bytes > statistics.moved_in_bytes
    # Of all copies, about seven in ten: which, is drawn from a seed.
    num_copies = statistics.num_evictions + statistics.num_fetches
    assert num_copies / 2 < counts.num_delays < num_copies
    assert 0 < counts.delay_ns < counts.num_delays * MAX_DELAY_NS
    assert counts.check_ns > 0
    assert f"sanitizer, {MAX_STEPS} steps: {counts.num_tensors} saved tensors" in report
    assert f"ms of the host's time; {counts.num_delays} copies were held back" in report


# -- off -------------------------------------------------------------------------------------------


def device_under(tide: Tide) -> AbstractDevice:
    assert tide.runtime is not None and tide.runtime.traffic is not None
    return tide.runtime.traffic.device


@pytest.mark.parametrize("what", ["a parameter", "a large table"])
def test_a_write_by_way_of_data_before_backward_is_found(what: str, tmp_path: Path) -> None:
    """No version tells of it, and what is made again from it has other bits."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.table = torch.ones(64 * 1024 // WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.linear(x) + self.table[0]).tanh().exp().sigmoid()

    blocks = [Shifted(), Shifted()]
    model = nn.Sequential(*blocks)
    with attach_here(model, "recompute", tmp_path, sanitize=True):
        for _ in range(4):
            feature_step(model, 0)
        loss = model(features()).square().mean()
        written = blocks[0].linear.bias if what == "a parameter" else blocks[0].table
        written.data.add_(0.3)
        with pytest.raises(CorruptionError, match="it was made again"):
            loss.backward()


def test_without_it_the_plain_objects_are_used(tmp_path: Path) -> None:
    model = stack()
    with attach_here(model, "offload", tmp_path) as tide:
        train(model, feature_step, num_steps=3)
        assert tide.runtime is not None and tide.runtime.traffic is not None
        traffic = tide.runtime.traffic
        assert type(device_under(tide)) is CpuDevice
        assert traffic.give_back == traffic.tiers.give_back
        assert tide.runtime.sanitizer is None
        assert tide.statistics().sanitizer is None
        assert "sanitizer" not in tide.report()


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_switches_it_on(
    value: str, is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBTIDE_SANITIZE", value)
    model = stack()
    with attach_here(model, "offload", tmp_path) as tide:
        train(model, feature_step, num_steps=3)
        assert (type(device_under(tide)) is SanitizedDevice) == is_on
        assert (tide.statistics().sanitizer is not None) == is_on


# -- places ----------------------------------------------------------------------------------------


def sanitized_bench() -> tuple[Bench, Sanitizer, SanitizedDevice]:
    bench, sanitizer = Bench(), Sanitizer(NoDelay())
    device = sanitizer.guard_device(bench.device, bench.tiers)
    assert isinstance(device, SanitizedDevice)
    return bench, sanitizer, device


def place_at(offset_bytes: int, num_bytes: int) -> Place:
    region = Region(offset_bytes=offset_bytes, num_bytes=num_bytes, taken_bytes=num_bytes)
    return Place(tier=Decision.HOST, region=region)


def test_a_copy_beyond_its_tier_is_refused() -> None:
    bench, _, device = sanitized_bench()
    capacity = bench.tiers.host_bytes
    row = torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(CorruptionError, match=rf"{capacity - 256} to {capacity + 256} of host"):
        device.copy(row, place_at(capacity - 256, 512), stream="main", after=())


def test_a_copy_of_another_size_than_its_place_is_refused() -> None:
    _, _, device = sanitized_bench()
    row = torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(CorruptionError, match="a copy of 512 bytes from or to bytes 0 to 256"):
        device.copy(row, place_at(0, 256), stream="main", after=())


def test_an_evict_over_what_is_still_held_is_refused() -> None:
    _, _, device = sanitized_bench()
    row = torch.zeros(512, dtype=torch.uint8)
    event: Event = device.copy(row, place_at(512, 512), stream="main", after=())
    device.wait("main", event)
    with pytest.raises(CorruptionError, match="bytes 768 to 1280 of host, of which another"):
        device.copy(row, place_at(768, 512), stream="main", after=())


def test_a_fetch_from_a_place_that_was_given_back_is_refused() -> None:
    _, _, device = sanitized_bench()
    row = torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(CorruptionError, match="is fetched from a place that was given back"):
        device.copy(place_at(0, 512), row, stream="main", after=())


def test_places_and_rows_that_hold_nothing_hold_poison() -> None:
    model, sanitizer = stack(), Sanitizer(NoDelay())
    with FakeTide(model, offload_everything, sanitizer=sanitizer) as tide:
        train(model, feature_step, num_steps=4)
        assert tide.held_host_bytes == 0
        tide.device.finish()
        assert bool((tide.device.host == POISON).all())
        row: Tensor = tide.traffic.device.allocate(64)
        assert bool((row == POISON).all())


def test_poison_waits_for_the_copies_of_another_stream() -> None:
    model = stack()
    with FakeTide(model, offload_everything, sanitizer=Sanitizer(NoDelay())) as tide:
        train(model, feature_step, num_steps=3)
        with tide.device.stream("side"):
            loss = model(features())
        del loss  # what it evicted on that stream dies on this one
        tide.assert_nothing_is_left()
        tide.device.finish()
        assert bool((tide.device.host == POISON).all())


def test_delays_follow_their_seed() -> None:
    one, same, other = (Sanitizer(NoDelay(), seed=seed) for seed in (1, 1, 2))
    drawn = [one.choose_delay_ns() for _ in range(100)]
    assert drawn == [same.choose_delay_ns() for _ in range(100)]
    assert drawn != [other.choose_delay_ns() for _ in range(100)]
    slept = [ns for ns in drawn if ns]
    assert 20 <= len(slept) <= 40 and 30 <= drawn.count(None) <= 50
    assert min(slept) >= 1 and max(slept) < MAX_DELAY_NS


def test_a_copy_on_a_thread_starts_no_sooner_than_its_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("ebbtide.torch.devices.delays.time.sleep", slept.append)
    model = stack()
    with attach_here(model, "offload", tmp_path, sanitize=True) as tide:
        train(model, feature_step, num_steps=3)
        counts = tide.statistics().sanitizer
    assert counts is not None
    assert 0 < len(slept) < counts.num_delays
    assert sum(slept) == pytest.approx(counts.delay_ns / 1e9)
