"""Traffic and models on a fake device, put together by hand, and checks of what they left there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn

from ebbtide.memory.disk import DiskStore
from ebbtide.memory.ledger import Ledger
from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import named_plan
from ebbtide.torch.anchors import Anchors
from ebbtide.torch.blocks import find_blocks
from ebbtide.torch.devices.fake import FakeDevice, Schedule
from ebbtide.torch.devices.pinned import AbstractDriver
from ebbtide.torch.hooks import Hooks
from ebbtide.torch.runtime import Runtime
from ebbtide.torch.sanitizer import Sanitizer
from ebbtide.torch.tiers import HostRegion, Tiers
from ebbtide.torch.traffic import Slot, Traffic
from ebbtide.workload import Workload

NUM_HOST_BYTES = 2 << 20
MIN_BYTES = 512
"""The arena's unit: what is moved takes little more host space than it has bytes."""

ROW = 512
"""Bytes of most rows on a `Bench`: one unit of the host arena."""
HOST_ROWS = 8


class FakeDriver(AbstractDriver):
    """Pins nothing, notes what it is asked for, and refuses where a test wants it.

    Args:
        max_bytes: Most bytes that are registered at once.
        status: What it answers above that; a cudaError_t.
    """

    def __init__(self, max_bytes: int = 2**62, status: int = 2) -> None:
        self.registered: dict[int, int] = {}
        """Bytes by address, of what is registered now."""
        self.asked: list[int] = []
        """Bytes of every region that was asked for."""
        self.max_bytes = max_bytes
        self._status = status

    def register(self, address: int, num_bytes: int) -> int:
        """Refuse what is too much."""
        self.asked.append(num_bytes)
        if sum(self.registered.values()) + num_bytes > self.max_bytes:
            return self._status
        self.registered[address] = num_bytes
        return 0

    def unregister(self, address: int) -> None:
        """Forget a region, which must be registered."""
        del self.registered[address]


MakePlan = Callable[[Workload], Plan]


def planned(name: str) -> MakePlan:
    """Return a maker of the named plan, which moves even small activations."""

    def make_plan(workload: Workload) -> Plan:
        return named_plan(name, workload, min_bytes=MIN_BYTES)

    return make_plan


def offload_everything(workload: Workload) -> Plan:
    """Evict every saved activation of every block."""
    return named_plan(f"offload-last:{len(workload.blocks)}", workload, min_bytes=MIN_BYTES)


def with_little_in_flight(name: str) -> MakePlan:
    """Return a maker of the named plan with both limits at its largest activation."""

    def make_plan(workload: Workload) -> Plan:
        plan = named_plan(name, workload, min_bytes=MIN_BYTES)
        largest_bytes = max(
            activation.num_bytes
            for block in workload.blocks
            for activation in block.activations
            if plan.decision(activation.name) is Decision.HOST
        )
        return replace(
            plan, max_out_bytes_in_flight=largest_bytes, max_in_bytes_in_flight=largest_bytes
        )

    return make_plan


@dataclass(slots=True, kw_only=True)
class Bench:
    """Traffic on a fake device with a host tier of `num_host_rows` rows."""

    schedule: Schedule = "late"
    seed: int = 0
    max_out_bytes: int = 4 * ROW
    max_in_bytes: int = 4 * ROW
    num_host_rows: int = HOST_ROWS
    anchors: Anchors = field(default_factory=Anchors)
    trim: Callable[[], None] | None = None
    device: FakeDevice = field(init=False)
    ledger: Ledger = field(init=False)
    tiers: Tiers = field(init=False)
    traffic: Traffic = field(init=False)

    def __post_init__(self) -> None:
        self.device = FakeDevice(self.num_host_rows * ROW, schedule=self.schedule, seed=self.seed)
        self.ledger = Ledger()
        host = HostRegion(self.device.host, unpin=self.device.finish)
        self.tiers = Tiers(host=host, disk=None)
        self.traffic = Traffic(
            self.device,
            self.tiers,
            self.ledger,
            max_out_bytes_in_flight=self.max_out_bytes,
            max_in_bytes_in_flight=self.max_in_bytes,
            anchors=self.anchors,
            trim=self.trim,
        )

    def evict(self, value: int, num_bytes: int = ROW) -> Slot:
        """Evict a row that holds `value` and that nobody else refers to."""
        return self.evict_row(torch.full((num_bytes,), value, dtype=torch.uint8))

    def evict_row(self, row: Tensor) -> Slot:
        """Evict a row, as the runtime does: it passes an alias on and keeps none."""
        self.traffic.bury()  # so that the last owner's place is taken again
        place = self.tiers.take(Decision.HOST, row.numel())
        assert place is not None, "the test takes more than the host tier has"
        return self.traffic.evict(f"row {place.region.offset_bytes}", row[:], place, row.detach())

    def assert_nothing_is_left(self) -> None:
        self.traffic.bury()
        counts = self.ledger.snapshot()
        assert self.device.violations == []
        assert self.traffic.is_idle
        assert counts.host.held_bytes == self.tiers.held_bytes(Decision.HOST) == 0
        assert self.traffic.bytes_in_flight == (0, 0)
        assert counts.held_device_bytes == 0


class FakeTide:
    """A model attached to a fake device: what `attach` does, with every part in the open.

    Args:
        model: Attached until `close`.
        make_plan: Called once the blocks are observed.
        schedule: When copies run.
        seed: For the schedule `random`.
        num_host_bytes: Size of the host tier.
        is_growing: Start with as much of the tiers as the plan says, and grow to all of them.
        sanitizer: Looks at everything that comes back.
        disk: Gives the disk tier its size and its places; the bytes are in the fake device's
            memory. It is closed with this.
    """

    def __init__(
        self,
        model: nn.Module,
        make_plan: MakePlan,
        *,
        schedule: Schedule = "late",
        seed: int = 0,
        num_host_bytes: int = NUM_HOST_BYTES,
        is_growing: bool = False,
        sanitizer: Sanitizer | None = None,
        disk: DiskStore | None = None,
    ) -> None:
        num_disk_bytes = 0 if disk is None else disk.statistics().cap_bytes
        self.device = FakeDevice(
            num_host_bytes, schedule=schedule, seed=seed, num_disk_bytes=num_disk_bytes
        )
        self._disk = disk
        self.ledger = Ledger()
        self._make_plan = make_plan
        self._is_growing = is_growing
        self.runtime = Runtime(model, find_blocks(model), self._prepare, self.ledger)
        self.runtime.sanitizer = self._sanitizer = sanitizer
        self._hooks = Hooks(self.runtime)

    @property
    def plan(self) -> Plan:
        """The plan; only after the first training step."""
        assert self.runtime.plan is not None
        return self.runtime.plan

    @property
    def traffic(self) -> Traffic:
        """The copies; only after the first training step."""
        assert self.runtime.traffic is not None
        return self.runtime.traffic

    @property
    def held_host_bytes(self) -> int:
        """Bytes of the host tier that graphs hold, by the ledger and by the arena alike."""
        self.traffic.bury()
        held_bytes = self.ledger.snapshot().host.held_bytes
        assert self.traffic.tiers.held_bytes(Decision.HOST) == held_bytes
        return held_bytes

    @property
    def held_disk_bytes(self) -> int:
        """Bytes of the disk tier that graphs hold, by the ledger and by the store alike."""
        self.traffic.bury()
        held_bytes = self.ledger.snapshot().disk.held_bytes
        # A closed store forgets nobody who still holds a part of it.
        if self._disk is not None and not self._disk.is_closed:
            assert self._disk.statistics().held_bytes == held_bytes
        return held_bytes

    def assert_nothing_is_left(self) -> None:
        """Check that no graph holds anything any more and that no rule was broken."""
        assert self.held_host_bytes == self.held_disk_bytes == 0
        assert self.device.violations == []
        assert self.traffic.is_idle
        assert self.traffic.bytes_in_flight == (0, 0)
        assert self.ledger.snapshot().held_device_bytes == 0

    def assert_bounds_were_kept(self) -> None:
        """Check the bytes in flight, as the device saw them, against the plan."""
        assert self.device.peak_out_bytes <= self.plan.max_out_bytes_in_flight
        assert self.device.peak_in_bytes <= self.plan.max_in_bytes_in_flight

    def close(self) -> None:
        """Take the hooks off and give the host tier back."""
        self._hooks.close()
        self.runtime.close()
        if self.runtime.traffic is not None:
            self.runtime.traffic.close()
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, workload: Workload) -> tuple[Plan, Traffic]:
        plan = self._make_plan(workload)
        all_bytes = self.device.host.numel()
        disk = self._disk
        tiers = Tiers(host=None, disk=disk, make_host=self._host, host_cap_bytes=all_bytes)
        tiers.reserve_host(plan.host_bytes if self._is_growing else all_bytes)
        if disk is not None:
            cap_bytes = self.device.disk.numel()
            disk.reserve(min(plan.disk_bytes, cap_bytes) if self._is_growing else cap_bytes)
        sanitizer, device = self._sanitizer, self.device
        traffic = Traffic(
            device if sanitizer is None else sanitizer.guard_device(device, tiers),
            tiers,
            self.ledger,
            max_out_bytes_in_flight=plan.max_out_bytes_in_flight,
            max_in_bytes_in_flight=plan.max_in_bytes_in_flight,
            anchors=Anchors.of(plan, workload),
        )
        if sanitizer is not None:
            sanitizer.guard_traffic(traffic)
        return plan, traffic

    def _host(self, num_bytes: int) -> HostRegion:
        return HostRegion(self.device.host[:num_bytes], unpin=self.device.finish)
