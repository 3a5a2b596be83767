"""Pinned host memory that is refused: the plan is made again for what can be had, end to end.

The models are on the CPU and `attach` takes that for a GPU: pages are real, only the driver that
pins them and the device that copies are fake.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.memory.limits import ProcessLimits
from ebbtide.plan import Decision, Plan
from ebbtide.planner.solve import plan_for_budget
from ebbtide.torch import Tide, attach
from ebbtide.torch.budgets import BudgetPlanner
from ebbtide.torch.devices.base import AbstractDevice
from ebbtide.torch.devices.cpu import CpuDevice
from ebbtide.torch.devices.fake import FakeDevice, FakeMeter
from ebbtide.torch.devices.pinned import PinnedMemory
from ebbtide.torch.pace import NUM_SKIPPED
from ebbtide.torch.pace import NUM_STEPS as NUM_TIMED
from ebbtide.torch.tiers import Tiers
from ebbtide.workload import Workload
from tests.torch.fakes import MIN_BYTES, FakeDriver
from tests.torch.models import Gated, Stack
from tests.torch.training import Trace, differences, feature_step, run_step, seeded, sgd, train

_attach: Any = import_module("ebbtide.torch.attach")
_budgets: Any = import_module("ebbtide.torch.budgets")
_maker: Any = import_module("ebbtide.torch.maker")
_pinned: Any = import_module("ebbtide.torch.devices.pinned")
_runtime: Any = import_module("ebbtide.torch.runtime")

NUM_STEPS = 4
MIB = 2**20

MACHINE = Machine(
    name="a test",
    device_bytes=2**40,
    host_bytes=2**30,
    out_bytes_per_s=10**9,
    in_bytes_per_s=10**9,
    both_bytes_per_s=2 * 10**9,
    disk_bytes=0,
    disk_write_bytes_per_s=0,
    disk_read_bytes_per_s=0,
)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Let torch refuse every kernel whose bits vary."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def build() -> nn.Module:
    return Stack(Gated, 5)


@dataclass(slots=True, kw_only=True)
class Host:
    """The host of a GPU that is not there."""

    root: Path
    """Holds `proc` and `sys`; empty at first, so that there are no limits."""
    driver: FakeDriver
    devices: list[FakeDevice]

    def limit_available(self, num_bytes: int) -> None:
        self._write("proc/meminfo", f"MemAvailable: {num_bytes // 1024} kB")

    def limit_group(self, num_bytes: int) -> None:
        self._write("proc/self/cgroup", "0::/pod")
        self._write("sys/fs/cgroup/pod/memory.max", str(num_bytes + 4096))
        self._write("sys/fs/cgroup/pod/memory.current", "4096")

    def limit_group_1(self, num_bytes: int) -> None:
        self._write("proc/self/cgroup", "3:memory:/pod")
        self._write("sys/fs/cgroup/memory/pod/memory.limit_in_bytes", str(num_bytes + 4096))
        self._write("sys/fs/cgroup/memory/pod/memory.usage_in_bytes", "4096")

    def _write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Let `attach` find a GPU, and its driver pin what the test lets it."""
    host = Host(root=tmp_path / "root", driver=FakeDriver(), devices=[])

    def device_of(blocks: Any) -> torch.device:
        del blocks
        return torch.device("cuda", 0)

    def memory_of(device: torch.device) -> PinnedMemory:
        assert device.type == "cuda"
        return PinnedMemory(host.driver, root=host.root)

    def make_device(device: torch.device, tiers: Tiers) -> AbstractDevice:
        assert device.type == "cuda"
        if tiers.host is None:
            return CpuDevice(tiers.disk)
        fake = FakeDevice(0)
        fake.host = tiers.host.buffer
        host.devices.append(fake)
        return fake

    def no_ooms(_: torch.device) -> int:
        return 0

    def meter_of(_: torch.device) -> FakeMeter:
        return FakeMeter(tick_ns=100_000)

    monkeypatch.setattr(_attach, "device_of", device_of)
    monkeypatch.setattr(_attach, "meter_of", meter_of)
    monkeypatch.setattr(_maker, "pinned_memory_of", memory_of)
    monkeypatch.setattr(_maker, "CudaDevice", make_device)
    monkeypatch.setattr(_runtime, "count_ooms", no_ooms)
    monkeypatch.setattr(_pinned, "read_process_limits", ProcessLimits)
    monkeypatch.setattr(_budgets, "probe_machine", lambda *_, **__: MACHINE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**40, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_allocated", no_ooms)
    return host


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a training left."""

    plan: Plan
    host_taken_bytes: int
    moved_bytes: int
    """In the last step."""
    num_without_room: int


@cache
def plain() -> Trace:
    """What the same training leaves without ebbtide."""
    return train(seeded(build), feature_step, num_steps=NUM_STEPS)


def run(there: Host, plan: str | Plan | None = "offload", **options: Any) -> Run:
    """Train, and check that every bit is as without ebbtide."""
    model, trace = seeded(build), Trace()
    optimizer = sgd(model)
    with attach(model, plan, min_bytes=MIN_BYTES, **options) as tide:
        for index in range(NUM_STEPS):
            tide.reset_statistics()
            run_step(model, feature_step, index, trace, optimizer)
        counts, made = tide.statistics(), tide.plan
        assert made is not None
        taken = tide.host_taken_bytes
        assert sum(there.driver.registered.values()) == taken + bounce_bytes(tide)
    assert there.driver.registered == {}
    assert differences(trace, plain()) == []
    assert all(device.violations == [] for device in there.devices)
    assert counts.moved_out_bytes == made.host_bytes + made.disk_bytes
    return Run(
        plan=made,
        host_taken_bytes=taken,
        moved_bytes=counts.moved_out_bytes,
        num_without_room=len(counts.num_kept_not_understood),
    )


def bounce_bytes(tide: Tide) -> int:
    tiers = None if tide.runtime is None else tide.runtime.tiers
    return 0 if tiers is None or tiers.bounce is None else tiers.bounce.buffer.numel()


def only_warning(caplog: pytest.LogCaptureFixture) -> str:
    (message,) = [r.getMessage() for r in caplog.records if r.levelname != "DEBUG"]
    assert "pinned host memory was refused" in message
    assert "out of memory" not in message.lower()
    return message


def test_what_is_not_refused_is_taken_in_one_region_without_a_word(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(host)
    assert caplog.records == []
    num_moved = sum(1 for d in whole.plan.decisions.values() if d is Decision.HOST)
    assert host.driver.asked == [whole.plan.host_bytes + 512 * num_moved]
    assert whole.moved_bytes == whole.plan.host_bytes > 0


LIMITS: dict[str, tuple[Callable[[Host, int], None], str, str]] = {
    "the machine": (Host.limit_available, "MemAvailable in /proc/meminfo is ", "Free memory"),
    "a control group": (
        Host.limit_group,
        "/sys/fs/cgroup/pod/memory.max, is ",
        "Raise the container's memory limit",
    ),
    "a control group of version 1": (
        Host.limit_group_1,
        "/sys/fs/cgroup/memory/pod/memory.limit_in_bytes, is ",
        "Raise the container's memory limit",
    ),
}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("the machine", "offload-inputs"),
        ("the machine", "offload-last:5"),
        ("a control group", "offload"),
        ("a control group of version 1", "balanced"),
    ],
)
def test_a_limit_that_would_be_passed_makes_the_plan_smaller(
    name: str, plan: str, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(host, plan)
    needed_bytes = host.driver.asked.pop()
    limit, text, advice = LIMITS[name]
    limit(host, needed_bytes // 2)
    less = run(host, plan)
    message = only_warning(caplog)
    assert text in message and advice in message
    assert message.startswith(f"{needed_bytes / 1024:.1f} KiB of pinned host memory was refused: ")
    room = needed_bytes // 2 * 15 // 16
    # What would be refused is not asked of the driver: touching it is what gets one killed.
    assert max(host.driver.asked) <= room
    assert needed_bytes // 4 <= less.host_taken_bytes <= room
    assert less.moved_bytes == less.plan.host_bytes < whole.plan.host_bytes
    assert less.num_without_room == 0
    assert less.plan.name == plan


def test_a_driver_that_refuses_makes_the_plan_smaller(
    host: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(host)
    needed_bytes = host.driver.asked.pop()
    host.driver = FakeDriver(needed_bytes // 2 + 4096)
    monkeypatch.setattr(_pinned, "read_process_limits", lambda: ProcessLimits(memlock_bytes=4096))
    less = run(host)
    message = only_warning(caplog)
    assert "cudaHostRegister answered 2 (cudaErrorMemoryAllocation)" in message
    assert "RLIMIT_MEMLOCK (`ulimit -l`) is 4.0 KiB" in message and "ulimit -l unlimited" in message
    assert message.endswith("KiB.") and " The plan is made with " in message
    assert needed_bytes // 4 < less.host_taken_bytes <= needed_bytes // 2 + 4096
    assert less.moved_bytes == less.plan.host_bytes < whole.plan.host_bytes
    assert less.num_without_room == 0


def test_a_system_that_maps_nothing_leaves_recomputation(
    host: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    without = run(host)
    message = only_warning(caplog)
    assert "mmap failed (Cannot allocate memory)" in message
    assert message.endswith("The plan is made without.")
    assert host.driver.asked == []
    assert without.host_taken_bytes == without.plan.host_bytes == without.moved_bytes == 0
    assert set(without.plan.decisions.values()) == {Decision.KEEP, Decision.RECOMPUTE}


@pytest.mark.parametrize("given", [None, "1GiB"])
def test_a_driver_that_pins_nothing_leaves_recomputation(
    given: str | None, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """`host=` is the most that may be taken, never a demand."""
    host.driver = FakeDriver(0, status=304)
    without = run(host, host=given)
    assert only_warning(caplog).endswith("The plan is made without.")
    assert without.host_taken_bytes == without.moved_bytes == 0
    assert without.num_without_room == 0


def test_a_plan_of_the_callers_own_is_cut_to_what_there_is(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(host)
    host.limit_available(host.driver.asked.pop() // 2)
    less = run(host, whole.plan)
    assert only_warning(caplog)
    assert 0 < less.plan.host_bytes < whole.plan.host_bytes
    evicted = {n for n, d in less.plan.decisions.items() if d is Decision.HOST}
    assert evicted < {n for n, d in whole.plan.decisions.items() if d is Decision.HOST}


def test_after_a_refusal_nothing_is_asked_again(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """Design rule 7: nothing is pinned in a step, and what was refused is not tried in each."""
    run(host)
    needed_bytes = host.driver.asked.pop()
    host.driver = FakeDriver(needed_bytes // 2)
    model, optimizer = seeded(build), sgd(seeded(build))
    with attach(model, "offload", min_bytes=MIN_BYTES) as tide:
        for index in range(3):
            run_step(model, feature_step, index, Trace(), optimizer)
        num_asked, address = len(host.driver.asked), tide.host_region_address
        for index in range(4):
            run_step(model, feature_step, index, Trace(), optimizer)
        assert len(host.driver.asked) == num_asked
        assert tide.host_region_address == address != 0
    assert only_warning(caplog)


# -- the memory that copies to disk pass through ---------------------------------------------------


def test_without_bounce_memory_nothing_goes_to_disk(
    host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_disk = run(host, disk=f"{tmp_path}:200MiB")
    assert with_disk.plan.disk_bytes > 0
    host.driver = FakeDriver(0)
    without = run(host, disk=f"{tmp_path}:200MiB")
    assert only_warning(caplog).endswith("Copies to disk need it: the plan is made without.")
    assert (without.plan.disk_bytes, without.moved_bytes, without.num_without_room) == (0, 0, 0)


def test_what_host_memory_does_not_hold_goes_to_the_disk_that_was_given(
    host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of it, where the driver pins the bounce memory and no more."""
    folder = f"{tmp_path}:200MiB"
    in_host = run(host, host="1GiB")
    needed_bytes = host.driver.asked.pop()

    class Small(FakeDriver):
        def register(self, address: int, num_bytes: int) -> int:
            # The bounce memory is larger: room for as much each way.
            if num_bytes > needed_bytes:
                return super().register(address, num_bytes)
            self.asked.append(num_bytes)
            return 2

    host.driver = Small()
    on_disk = run(host, host="1GiB", disk=folder)
    assert only_warning(caplog).endswith("The plan is made without.")
    assert host.driver.asked[0] == needed_bytes
    assert (on_disk.plan.host_bytes, on_disk.host_taken_bytes) == (0, 0)
    assert on_disk.plan.disk_bytes == on_disk.moved_bytes == in_host.plan.host_bytes


# -- with a budget ---------------------------------------------------------------------------------


def budget_between(host: Host) -> tuple[int, int]:
    """Return the smallest budgets that hold with all host memory, and without any."""
    model = seeded(build)
    with attach(model, budget="1GiB", min_bytes=MIN_BYTES) as tide:
        train(model, feature_step, num_steps=3)
        workload = tide.workload
    assert workload is not None
    host.driver.asked.clear()
    least: list[int] = []
    for machine in (MACHINE, replace(MACHINE, host_bytes=0)):
        outcome = plan_for_budget(workload, machine, budget_bytes=1, min_bytes=MIN_BYTES)
        least.append(outcome.smallest_budget_bytes)
    return least[0], least[1]


def test_a_budget_is_planned_again_with_the_host_memory_that_there_is(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with_host, without_host = budget_between(host)
    assert with_host < without_host
    budget = without_host + 4096
    whole = run(host, None, budget=budget)
    assert whole.plan.host_bytes > 0
    needed_bytes = host.driver.asked[0]
    host.driver = FakeDriver(needed_bytes // 2)
    less = run(host, None, budget=budget)
    assert only_warning(caplog).startswith(f"{needed_bytes / 1024:.1f} KiB of pinned host memory")
    assert less.plan.peak_bytes <= budget == less.plan.budget_bytes
    assert less.plan.host_bytes <= less.host_taken_bytes <= needed_bytes // 2
    assert less.num_without_room == 0


def test_a_better_plan_whose_memory_is_refused_is_not_taken(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan that runs goes on, in the memory that it had."""
    correct = BudgetPlanner.correct

    def evict_more(
        planner: BudgetPlanner, workload: Workload, plan: Plan, measured_ns: int
    ) -> tuple[Workload, Plan]:
        paced, _ = correct(planner, workload, plan, measured_ns)
        decisions = dict(plan.decisions)
        sizes = {a.name: a.num_bytes for block in paced.blocks for a in block.activations}
        more = next(n for n, d in decisions.items() if d is not Decision.HOST)
        decisions[more] = Decision.HOST
        host_bytes = plan.host_bytes + sizes[more]
        return paced, replace(plan, decisions=decisions, host_bytes=host_bytes)

    monkeypatch.setattr(BudgetPlanner, "correct", evict_more)
    _, without_host = budget_between(host)
    model, trace = seeded(build), Trace()
    optimizer = sgd(model)
    num_steps = 3 + NUM_SKIPPED + NUM_TIMED + 2
    before: Mapping[str, Decision] = {}
    with attach(model, budget=without_host + 4096, min_bytes=MIN_BYTES) as tide:
        for index in range(num_steps):
            run_step(model, feature_step, index, trace, optimizer)
            if index == 2:
                assert tide.plan is not None and len(host.driver.asked) == 1
                before = tide.plan.decisions
                # From now on the driver pins what is pinned, and no more.
                host.driver.max_bytes = sum(host.driver.registered.values())
        assert tide.plan is not None
        assert tide.plan.decisions == before
        assert host.driver.asked[0] < host.driver.asked[1]
        assert tide.host_taken_bytes == host.driver.asked[0]
    assert only_warning(caplog)
    wanted = train(seeded(build), feature_step, num_steps=num_steps)
    assert differences(trace, wanted) == []
    assert all(device.violations == [] for device in host.devices)


def test_a_budget_that_needs_the_host_memory_says_what_was_refused(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with_host, without_host = budget_between(host)
    host.driver = FakeDriver(0)
    model = seeded(build)
    tide = attach(model, budget=(with_host + without_host) // 2, min_bytes=MIN_BYTES)
    for index in range(2):
        feature_step(model, index)
        model.zero_grad()  # gradients that stay would take room, too
    with pytest.raises(BudgetError) as caught:
        feature_step(model, 2)
    message = str(caught.value)
    assert "the smallest that fits is" in message
    assert "of pinned host memory was refused: cudaHostRegister answered 2" in message
    assert only_warning(caplog) in message
    assert tide.plan is None and host.driver.registered == {}
    model.zero_grad()
    assert differences(train(model, feature_step), train(seeded(build), feature_step)) == []
