"""From what was observed to what the runtime executes: the plan, and the traffic that runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ebbtide.errors import EbbtideError
from ebbtide.memory.arena import ALIGNMENT_BYTES
from ebbtide.memory.disk import DiskStore
from ebbtide.memory.ledger import Ledger
from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import named_plan
from ebbtide.planner.spill import spill_to_disk
from ebbtide.torch.anchors import Anchors
from ebbtide.torch.budgets import BudgetPlanner, Shape, bucket
from ebbtide.torch.devices.cpu import CpuDevice
from ebbtide.torch.devices.cuda import CudaDevice, pin_host_region
from ebbtide.torch.tiers import Tiers
from ebbtide.torch.traffic import Traffic
from ebbtide.workload import Workload


class PlanMaker:
    """Makes the plan and the tiers once the model was observed.

    The runtime holds it, and the model holds the runtime, so it must not hold the model: the
    table of attached models would then keep every model alive.
    """

    def __init__(
        self,
        plan: str | Plan,
        *,
        budgets: BudgetPlanner | None,
        device: torch.device,
        host_cap_bytes: int | None,
        disk: DiskStore | None,
        min_bytes: int,
        ledger: Ledger,
    ) -> None:
        self.close: Callable[[], None] | None = None
        """Takes the hooks off, where there can be no plan."""
        self._budgets = budgets
        self._tiers: Tiers | None = None
        self._made: dict[Shape, tuple[Plan, Traffic | None]] = {}
        """Plans for a budget, by bucket of shapes."""
        self._now: Plan | None = None
        self._observed_shape: Shape | None = None
        self._plan = plan
        self._device = device
        self._host_cap = host_cap_bytes
        self._disk = disk
        self._min_bytes = min_bytes
        self._ledger = ledger

    def follow_shape(
        self, workload: Workload, observed: torch.Size, size: torch.Size
    ) -> tuple[Plan, Traffic | None]:
        """Return the plan for a batch whose activations have this size; made at its first use.

        Only while nothing is held in the tiers, since they may grow.

        Raises:
            BudgetError: No plan keeps to the budget; the tide is closed then.
        """
        shape, observed_shape = Shape.of(size), Shape.of(observed)
        self._observed_shape = observed_shape
        key = shape if shape == observed_shape else bucket(shape)
        if key not in self._made:
            self._made[key] = self._make(workload, observed_shape, shape)
        self._now = self._made[key][0]
        return self._made[key]

    def note_pace(
        self, workload: Workload, plan: Plan, measured_ns: int
    ) -> tuple[Workload, Plan, Traffic | None] | None:
        """Correct the times by what steps under `plan` took; returns what to go on with.

        Plans for other shapes are made anew from the corrected times. None for a plan for another
        shape than was measured, or one that is made anew in any case.
        """
        assert self._budgets is not None, "bug in ebbtide"
        key = next((k for k, made in self._made.items() if made[0] is plan), None)
        if key is None or key != self._observed_shape:
            return None
        paced, better = self._budgets.correct(workload, plan, measured_ns)
        # What the traffic was made from; the predictions alone may differ.
        is_same = (better.decisions, better.release_at, better.fetch_at) == (
            plan.decisions,
            plan.release_at,
            plan.fetch_at,
        )
        traffic = self._made[key][1]
        if not is_same:
            traffic = self._traffic(better, Anchors.of(better, paced))
        self._made = {key: (better, traffic)}
        self._now = better
        return paced, better, traffic

    def forget_plans(self) -> None:
        """Make every plan anew when it is asked for: less of the budget is left."""
        self._made.clear()

    def note_out_of_memory(self) -> str:
        """Plan more frugally from the next step on; returns what to tell the user."""
        self._made.clear()
        if self._budgets is None or self._now is None:
            return ""
        is_cuda = self._device.type == "cuda"
        actual_bytes = torch.cuda.max_memory_allocated(self._device) if is_cuda else 0
        return self._budgets.shrink(self._now, actual_bytes)

    def make_plan(self, workload: Workload) -> tuple[Plan, Traffic | None]:
        """Make the plan once the model was observed."""
        return self._make(workload, None, None)

    def _make(
        self, workload: Workload, observed: Shape | None, now: Shape | None
    ) -> tuple[Plan, Traffic | None]:
        try:
            if self._budgets is not None:
                plan = self._budgets.make(workload, observed, now)
            elif isinstance(self._plan, Plan):
                self._plan.check_fits(workload)
                plan = self._plan
            else:
                to_host = self._disk is None or self._host_cap is not None
                tier = Decision.HOST if to_host else Decision.DISK
                plan = named_plan(self._plan, workload, tier=tier, min_bytes=self._min_bytes)
                if self._disk is not None and self._host_cap is not None:
                    plan = spill_to_disk(plan, workload, self._host_cap)
            return plan, self._traffic(plan, Anchors.of(plan, workload))
        except EbbtideError:
            if self.close is not None:
                self.close()  # the model is left as it was, and trains on
            raise

    def _traffic(self, plan: Plan, anchors: Anchors) -> Traffic | None:
        if not plan.host_bytes and not plan.disk_bytes:
            return None
        # Every region is rounded up to the arena's alignment.
        host_bytes, disk_bytes = (
            num_bytes + ALIGNMENT_BYTES * sum(1 for d in plan.decisions.values() if d is tier)
            for num_bytes, tier in (
                (plan.host_bytes, Decision.HOST),
                (plan.disk_bytes, Decision.DISK),
            )
        )
        if self._tiers is None:
            self._tiers = Tiers(host=None, disk=self._disk, make_host=pin_host_region)
            self._tiers.host_cap_bytes = self._host_cap
            if self._budgets is not None:
                self._tiers.host_cap_bytes = self._budgets.machine.host_bytes_per_rank
        tiers = self._tiers
        taken = 0 if tiers.host is None else tiers.host.buffer.numel()
        if plan.host_bytes and host_bytes > taken:
            tiers.reserve_host(host_bytes)
        if self._disk is not None:
            self._disk.reserve(disk_bytes)
        device = CpuDevice(self._disk)
        if self._device.type == "cuda":
            in_flight = plan.max_out_bytes_in_flight + plan.max_in_bytes_in_flight
            bounce_bytes = min(in_flight, 2 * disk_bytes)
            device = CudaDevice(
                self._device, tiers, bounce_bytes=bounce_bytes if plan.disk_bytes else 0
            )
        return Traffic(
            device,
            tiers,
            self._ledger,
            max_out_bytes_in_flight=plan.max_out_bytes_in_flight,
            max_in_bytes_in_flight=plan.max_in_bytes_in_flight,
            anchors=anchors,
        )
