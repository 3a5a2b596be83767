"""Training with the disk tier, on disks that are several, slow, full or broken."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ebbtide.errors import MemoryTierError
from ebbtide.memory import disk
from ebbtide.memory.disk_rates import NUM_THREADS
from ebbtide.memory.file_calls import AbstractFileCalls, OpenFile, SystemFileCalls
from ebbtide.memory.heap import find_trim
from ebbtide.torch import Tide, attach
from tests.torch.models import Gated, Stack, features
from tests.torch.training import (
    Trace,
    assert_plan_was_run,
    differences,
    feature_step,
    run_step,
    seeded,
    sgd,
    train,
    train_attached,
)

DELAY_S = 0.1


class Faults(AbstractFileCalls):
    """Real files, for all stores of a test; any call can be made slow, short, wrong or failing."""

    def __init__(self) -> None:
        self.write_errno = 0
        self.read_errno = 0
        self.delay_s = 0.0
        self.most_bytes: int | None = None
        self.is_spoilt = False
        self._real = SystemFileCalls(is_direct=False)

    def open(self, path: Path) -> OpenFile:
        return self._real.open(path)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        self._real.allocate(descriptor, num_bytes)

    def write_at(self, descriptor: int, source: memoryview, offset_bytes: int) -> int:
        self._meet(self.write_errno)
        return self._real.write_at(descriptor, source[: self.most_bytes], offset_bytes)

    def read_at(self, descriptor: int, target: memoryview, offset_bytes: int) -> int:
        self._meet(self.read_errno)
        num_bytes = self._real.read_at(descriptor, target[: self.most_bytes], offset_bytes)
        if self.is_spoilt:
            target[0] ^= 1
        return num_bytes

    def _meet(self, number: int) -> None:
        time.sleep(self.delay_s)
        if number:
            raise OSError(number, os.strerror(number))


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    made = Faults()
    monkeypatch.setattr(disk, "SystemFileCalls", lambda: made)
    yield made


def stack() -> nn.Module:
    return Stack(Gated)


def in_folder(path: Path, **options: object) -> Callable[[nn.Module], Tide]:
    def attach_to(model: nn.Module) -> Tide:
        made: dict[str, object] = {"disk": f"{path}:200MiB", **options}
        return attach(model, "offload", min_bytes=1024, **made)  # pyright: ignore[reportArgumentType]

    return attach_to


def train_on_disk(attach_to: Callable[[nn.Module], Tide]) -> Trace:
    model = seeded(stack)
    with attach_to(model) as tide:
        trace = train_attached(tide, model, feature_step)
        assert_plan_was_run(tide)
    return trace


def test_two_disks_with_checksums_leave_the_bits_that_they_got(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    disks = [f"{path}:100MiB" for path in paths]
    trace = train_on_disk(in_folder(tmp_path, disk=disks, disk_checksums=True))
    assert differences(trace, train(seeded(stack), feature_step)) == []


def test_a_named_plan_has_less_in_flight_on_a_cpu_than_on_a_gpu(tmp_path: Path) -> None:
    model = seeded(stack)
    with in_folder(tmp_path)(model) as tide:
        train_attached(tide, model, feature_step)
        assert tide.plan is not None
        limits = (tide.plan.max_out_bytes_in_flight, tide.plan.max_in_bytes_in_flight)
    assert limits == (32 * 2**20, 32 * 2**20)


def test_checksums_without_a_disk_are_refused() -> None:
    with pytest.raises(ValueError, match="disk_checksums=True was given without a disk"):
        attach(seeded(stack), "recompute", disk_checksums=True)


@pytest.mark.slow
def test_a_slow_disk_stalls_and_says_so(tmp_path: Path, faults: Faults) -> None:
    faults.delay_s = DELAY_S
    model = seeded(stack)
    with in_folder(tmp_path)(model) as tide:
        trace = train_attached(tide, model, feature_step)
        # Backward begins with a fetch that nothing hides: it takes a request, at least.
        assert tide.statistics().stall_ns >= DELAY_S * 1e9
        waited = f"compute waited {tide.statistics().stall_ns / 1e6:.1f} ms for copies"
        assert waited in tide.report().splitlines()
    assert differences(trace, train(seeded(stack), feature_step)) == []


def test_short_writes_and_reads_are_continued(tmp_path: Path, faults: Faults) -> None:
    faults.most_bytes = 1000
    trace = train_on_disk(in_folder(tmp_path))
    assert differences(trace, train(seeded(stack), feature_step)) == []


def test_a_folder_that_is_removed_while_training_makes_no_difference(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    model, optimizer, trace = seeded(stack), None, Trace()
    with in_folder(folder)(model):
        optimizer = sgd(model)
        for index in range(4):
            run_step(model, feature_step, index, trace, optimizer)
            if folder.exists():
                folder.rmdir()
    assert differences(trace, train(seeded(stack), feature_step)) == []


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"write_errno": errno.ENOSPC}, "failed, since the disk or your quota is full (errno 28"),
        ({"write_errno": errno.EIO}, "failed (errno 5: Input/output error); activations there"),
        ({"read_errno": errno.EIO}, "failed (errno 5: Input/output error); activations there"),
        ({"is_spoilt": True}, "are not what was written there: their checksum is another"),
    ],
)
def test_a_fault_in_a_step_is_raised_and_the_step_can_be_run_again(
    tmp_path: Path, faults: Faults, what: dict[str, int | bool], words: str
) -> None:
    wanted = train(seeded(stack), feature_step)
    model, trace = seeded(stack), Trace()
    with in_folder(tmp_path, disk_checksums=True)(model) as tide:
        optimizer = sgd(model)
        for index in range(3):
            run_step(model, feature_step, index, trace, optimizer)
        for name, value in what.items():
            setattr(faults, name, value)
        with pytest.raises(MemoryTierError) as caught:
            run_step(model, feature_step, 3, Trace(), optimizer)
        assert words in str(caught.value)
        assert str(caught.value).startswith(f"disk folder '{tmp_path}': ")
        for name in what:
            setattr(faults, name, 0)
        optimizer.zero_grad()
        run_step(model, feature_step, 3, trace, optimizer)
        assert differences(trace, wanted) == []
        del caught  # its traceback holds the graph of the failed step
        gc.collect()
        run_step(model, feature_step, 4, Trace(), optimizer)
        assert tide.statistics().disk.held_bytes == 0


def test_a_backward_whose_read_failed_can_be_run_again(tmp_path: Path, faults: Faults) -> None:
    model, x_BTD = seeded(stack), features()
    with in_folder(tmp_path)(model):
        for index in range(3):
            run_step(model, feature_step, index, Trace(), sgd(model))
        loss = model(x_BTD).square().mean()
        faults.read_errno = errno.EIO
        with pytest.raises(MemoryTierError, match="reading"):
            loss.backward(retain_graph=True)
        faults.read_errno = 0
        model.zero_grad()
        loss.backward()
        got = [p.grad for p in model.parameters() if p.grad is not None]
    wanted = torch.autograd.grad(model(x_BTD).square().mean(), list(model.parameters()))
    assert len(got) == len(wanted) > 0
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.slow
def test_two_hundred_steps_leave_nothing_behind(tmp_path: Path) -> None:
    model = seeded(stack)
    # A pool begins a thread when all that it has are busy, in whichever step that may be.
    most_threads = threading.active_count() + NUM_THREADS
    with in_folder(tmp_path, disk_checksums=True)(model) as tide:
        optimizer = sgd(model)

        def step(index: int) -> tuple[int, int, int]:
            run_step(model, feature_step, index, Trace(), optimizer)
            assert threading.active_count() <= most_threads
            counts = tide.statistics().disk
            return len(os.listdir("/proc/self/fd")), counts.held_bytes, counts.peak_held_bytes

        settled = [step(index) for index in range(10)][-1]
        gc.collect()
        before = resident_bytes()
        after = [step(index) for index in range(10, 210)]
        assert set(after) == {settled}
        # The allocator keeps some pages; 200 steps move four times as much as is allowed here.
        moved_bytes = tide.statistics().disk.moved_out_bytes // 210
        assert resident_bytes() - before < 50 * moved_bytes
        assert settled[1] == 0


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_tier_is_closed_with_its_threads(tmp_path: Path) -> None:
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    model = seeded(stack)
    with in_folder(tmp_path)(model) as tide:
        train_attached(tide, model, feature_step)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (files, threads)
    assert torch.isfinite(next(model.parameters())).all()


@pytest.mark.slow
@pytest.mark.skipif(find_trim() is None, reason="the C library gives nothing back")
def test_on_a_cpu_the_process_has_less_memory_at_the_turn_by_more_than_was_evicted(
    tmp_path: Path,
) -> None:
    """In a process of its own, since others' holes are given back as well."""
    program = Path(__file__).with_name("resident_at_turn.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, given_back, evicted, is_equal = json.loads(done.stdout)
    assert is_equal
    assert evicted >= 40 * 2**20
    assert kept - given_back > evicted
