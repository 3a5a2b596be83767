"""From what was observed to what the runtime executes: the plan, and the traffic that runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ebbtide.errors import EbbtideError
from ebbtide.memory.arena import ALIGNMENT_BYTES
from ebbtide.memory.bounce import bounce_bytes
from ebbtide.memory.disk import DISK_ALIGNMENT_BYTES, DiskStore
from ebbtide.memory.heap import find_trim
from ebbtide.memory.ledger import Ledger
from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import MIN_IN_FLIGHT_BYTES, named_plan
from ebbtide.planner.spill import recompute_rest, spill_to_disk
from ebbtide.torch.anchors import Anchors
from ebbtide.torch.budgets import BudgetPlanner, Shape, bucket
from ebbtide.torch.devices.cpu import CpuDevice
from ebbtide.torch.devices.cuda import CudaDevice
from ebbtide.torch.devices.pinned import pinned_memory_of
from ebbtide.torch.sanitizer import Sanitizer
from ebbtide.torch.tiers import HostRegion, Tiers
from ebbtide.torch.traffic import Traffic
from ebbtide.units import format_bytes
from ebbtide.workload import Workload

log = logging.getLogger("ebbtide")

_ENDLESS_BYTES = 2**62

CPU_MIN_IN_FLIGHT_BYTES = 32 * 2**20
"""For `named_plan`. A CPU takes longer over a block than a disk does, so that the 256 MiB of a
GPU's link would only be held for longer: `offload` of SmolLM2-135M at 2048 tokens took 24.2 s of
CPU time a step with them and 23.9 with this (one run each, one thread, 2026-11-30)."""


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
        sanitizer: Sanitizer | None = None,
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
        self._sanitizer = sanitizer
        self._host_room: int | None = None
        """What the system gave of the pinned host memory that a plan needed; None: all."""
        self._has_bounce = True
        """The system gave the pinned memory that copies to disk pass through."""

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

    def agree(self, workload: Workload, observed: torch.Size) -> tuple[Workload, torch.Size]:
        """Make one plan with the other ranks; returns what all of them plan for from now on.

        Raises:
            BudgetError, PlanError, RankError: There is none; the tide is closed then.
        """
        assert self._budgets is not None, "bug in ebbtide"
        try:
            common, shape = self._budgets.agree(workload, Shape.of(observed))
        except EbbtideError:
            if self.close is not None:
                self.close()  # the model is left as it was, and trains on
            raise
        return common, torch.Size((shape.rows, shape.length, 1))

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
        if not is_same and self._take_memory(better):
            traffic = self._traffic(better, Anchors.of(better, paced))
        elif not is_same:
            better = plan  # the system gives less than the better one needs
        self._made = {key: (better, traffic)}
        self._now = better
        return paced, better, traffic

    def note_num_graphs(self, num_graphs: int) -> None:
        """Plan for so many graphs that are alive at once."""
        assert self._budgets is not None, "bug in ebbtide"
        self._budgets.num_graphs = num_graphs

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
            plan = self._decide(workload, observed, now)
            # Each refusal lowers what the next plan may use, so this ends.
            while not self._take_memory(plan):
                plan = self._decide(workload, observed, now)
            return plan, self._traffic(plan, Anchors.of(plan, workload))
        except EbbtideError:
            if self.close is not None:
                self.close()  # the model is left as it was, and trains on
            raise

    def _decide(self, workload: Workload, observed: Shape | None, now: Shape | None) -> Plan:
        """Make the plan for what the system was found to give so far."""
        if self._budgets is not None:
            return self._budgets.make(workload, observed, now)
        if isinstance(self._plan, Plan):
            self._plan.check_fits(workload)
            plan = self._plan
        else:
            to_host = self._disk is None or self._host_cap is not None
            tier = Decision.HOST if to_host else Decision.DISK
            plan = named_plan(
                self._plan,
                workload,
                tier=tier,
                min_bytes=self._min_bytes,
                min_in_flight_bytes=(
                    CPU_MIN_IN_FLIGHT_BYTES if self._device.type == "cpu" else MIN_IN_FLIGHT_BYTES
                ),
            )
            if self._disk is not None and self._host_cap is not None:
                room = self._host_cap if self._host_room is None else self._host_room
                plan = spill_to_disk(plan, workload, min(self._host_cap, room))
        if self._host_room is None and self._has_bounce:
            return plan
        disk_bytes = _ENDLESS_BYTES
        if self._disk is not None and self._host_room is not None:
            # More was spilled there than anybody asked for.
            disk_bytes = self._disk.statistics().cap_bytes - _rounding(plan, Decision.DISK)
        return recompute_rest(
            plan,
            workload,
            host_bytes=_ENDLESS_BYTES if self._host_room is None else self._host_room,
            disk_bytes=max(0, disk_bytes) if self._has_bounce else 0,
        )

    def _take_memory(self, plan: Plan) -> bool:
        """Take what a plan needs from the system; False where it refused and less is to be had."""
        if not plan.host_bytes and not plan.disk_bytes:
            return True
        tiers = self._tiers_now()
        if plan.host_bytes:
            host_bytes = self._num_graphs * (plan.host_bytes + _rounding(plan, Decision.HOST))
            if tiers.host_cap_bytes is not None:
                host_bytes = min(host_bytes, tiers.host_cap_bytes)
            # Where memory is scarce the region shrinks to what the plan still needs.
            is_first = not self._made and self._host_room is not None
            if host_bytes > tiers.host_bytes or (is_first and host_bytes < tiers.host_bytes):
                refusal = tiers.reserve_host(host_bytes)
                if refusal is not None:
                    room = tiers.host_bytes // self._num_graphs - _rounding(plan, Decision.HOST)
                    self._host_room = max(0, room)
                    had = (
                        f"with {format_bytes(tiers.host_bytes)}" if tiers.host_bytes else "without"
                    )
                    self._plan_with_less(f"{refusal} The plan is made {had}.")
                    return False
        if self._disk is not None:
            # What finds no room, since the rounding does not fit the cap either, stays.
            disk_bytes = self._num_graphs * plan.disk_bytes
            spare_bytes = max(0, self._disk.statistics().cap_bytes - disk_bytes)
            rounding_bytes = min(self._num_graphs * _rounding(plan, Decision.DISK), spare_bytes)
            self._disk.reserve(disk_bytes + rounding_bytes)
        if self._device.type == "cuda" and plan.disk_bytes:
            return self._take_bounce(plan, tiers)
        return True

    @property
    def _num_graphs(self) -> int:
        return 1 if self._budgets is None else self._budgets.num_graphs

    def _take_bounce(self, plan: Plan, tiers: Tiers) -> bool:
        """Take the memory that copies to disk pass through; False where there is none."""
        disk_bytes = plan.disk_bytes + _rounding(plan, Decision.DISK)
        out_bytes, in_bytes = plan.max_out_bytes_in_flight, plan.max_in_bytes_in_flight
        # The largest activation must pass, and is no larger than either.
        least_bytes = min(max(out_bytes, in_bytes), disk_bytes)
        cap_bytes = tiers.host_cap_bytes
        wanted_bytes = bounce_bytes(
            disk_bytes=disk_bytes,
            in_flight_bytes=out_bytes + in_bytes,
            room_bytes=None if cap_bytes is None else cap_bytes - tiers.host_bytes,
        )
        refusal = tiers.reserve_bounce(wanted_bytes, least_bytes=least_bytes)
        if refusal is not None:
            self._has_bounce = False
            self._plan_with_less(f"{refusal} Copies to disk need it: the plan is made without.")
        return refusal is None

    def _plan_with_less(self, refusal: str) -> None:
        log.warning("%s", refusal)
        if self._budgets is not None:
            room = _ENDLESS_BYTES if self._host_room is None else self._host_room
            room *= self._num_graphs
            self._budgets.plan_with_less(refusal, host_bytes=room, has_disk=self._has_bounce)

    def _tiers_now(self) -> Tiers:
        if self._tiers is None:
            self._tiers = Tiers(host=None, disk=self._disk, make_host=self._pin)
            self._tiers.host_cap_bytes = self._host_cap
            if self._budgets is not None:
                self._tiers.host_cap_bytes = self._budgets.machine.host_bytes_per_rank
        return self._tiers

    def _pin(self, num_bytes: int) -> HostRegion:
        return pinned_memory_of(self._device).pin(num_bytes)

    def _traffic(self, plan: Plan, anchors: Anchors) -> Traffic | None:
        """Return what carries out a plan whose memory is taken; None where it moves nothing."""
        if not plan.host_bytes and not plan.disk_bytes:
            return None
        tiers = self._tiers_now()
        device, trim = CpuDevice(self._disk, self._ledger.count_stall), find_trim()
        if self._device.type == "cuda":
            device, trim = (
                CudaDevice(self._device, tiers),
                None,
            )  # torch's allocator has its own pool
        if self._sanitizer is not None:
            device = self._sanitizer.guard_device(device, tiers)
        traffic = Traffic(
            device,
            tiers,
            self._ledger,
            max_out_bytes_in_flight=plan.max_out_bytes_in_flight,
            max_in_bytes_in_flight=plan.max_in_bytes_in_flight,
            anchors=anchors,
            trim=trim,
        )
        if self._sanitizer is not None:
            self._sanitizer.guard_traffic(traffic)
        return traffic


def _rounding(plan: Plan, tier: Decision) -> int:
    """Return the most that regions in a tier take beside their bytes: they start at whole units."""
    unit_bytes = DISK_ALIGNMENT_BYTES if tier is Decision.DISK else ALIGNMENT_BYTES
    return unit_bytes * sum(1 for d in plan.decisions.values() if d is tier)
