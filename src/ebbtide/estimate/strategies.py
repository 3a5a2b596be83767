"""What each strategy gives: step time, memory by holder, and whether it fits."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ebbtide.catalog.accelerators import Accelerator
from ebbtide.catalog.calls import Rates
from ebbtide.catalog.maxtext import resolve_names
from ebbtide.catalog.networks import Axis, Network
from ebbtide.catalog.shapes import Family
from ebbtide.check import check_plan
from ebbtide.estimate.collectives import Between, between_layers, in_layers_ns, with_network
from ebbtide.estimate.measured import scale_measured
from ebbtide.estimate.named import plan_by_names
from ebbtide.estimate.resident import Resident, Stage, resident_of, stages_of
from ebbtide.estimate.setup import Optimizer, Setup
from ebbtide.estimate.step import logits_bytes, make_workload, model_flops
from ebbtide.machine import Machine
from ebbtide.plan import Decision, Plan
from ebbtide.planner import named_plan, plan_for_budget
from ebbtide.simulate import simulate
from ebbtide.timeline import Timeline
from ebbtide.workload import Workload

DEFAULT_NAMES = (
    "query_proj",
    "key_proj",
    "value_proj",
    "qkv_proj",
    "moe_mlpwi_0",
    "moe_mlpwi_1",
    "moe_mlpwo",
)
"""What is offloaded by name if nothing is named: queries, keys and values, and the experts'
products where there are any, as in NVIDIA's post on DeepSeek-V3 and Llama 3.1 405B."""

DEFAULT_PLANNER = "greedy"
"""Within 1 % of the bound (benchmarks/results/planning.md), and without the time that loading the
solver of `lp` takes."""


MOST_HELD_BYTES = 2**61
"""Of one device: planners count up to twice that."""


@enum.unique
class Strategy(enum.Enum):
    """A row."""

    KEEP = "keep"
    """Keep all that autograd saves."""
    REMAT = "remat"
    """Keep the input of each layer, run the layer again in backward."""
    OFFLOAD_SYNC = "offload-no-overlap"
    """As REMAT, with named activations on the host; compute waits for every copy."""
    OFFLOAD = "offload"
    """The same with copies beside compute, one layer ahead."""
    EBBTIDE = "ebbtide"
    """ebbtide's plan for the budget."""


@enum.unique
class Status(enum.Enum):
    """Whether a strategy can run."""

    FITS = "fits"
    OOM = "oom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the device, its host and its disk may give."""

    budget_bytes: int
    """Of device memory."""
    host_bytes: int
    """Pinned, of this rank."""
    disk_bytes: int
    """Of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one strategy gives on one device."""

    strategy: Strategy
    """Which."""
    status: Status
    """Whether it fits."""
    short: str
    """What it is short of; empty if it fits."""
    step_ns: int
    """Of a whole step, all micro-batches and the optimizer; 0 if there is no plan."""
    flops_per_s: float
    """Model FLOPs per second on one device."""
    peak_bytes: int
    """Most device memory."""
    host_bytes: int
    """Pinned host memory."""
    disk_bytes: int
    """On disk."""
    holders: Mapping[str, int]
    """What the peak is made of."""
    moved: Mapping[str, int]
    """Local name of what leaves the device, to bytes of all layers."""
    collectives: Mapping[Axis, int]
    """What those of a step take, in ns, each alone; empty if there are none, or no plan."""
    timeline: Timeline | None
    """Of one micro-batch; None if there is no plan."""


class Estimator:
    """Answers for one question on one machine.

    Args:
        setup: The question.
        machine: What can be held and copied.
        accelerator: What can be computed.
        limits: Of memory.
        network: What joins the devices; None: collectives take no time.
        names: What is offloaded by name, in MaxText's words or ours; None: `DEFAULT_NAMES`.
        rates: What is reached; None: what is assumed of the accelerator.
        planner: Of ebbtide's plan, one of `BUDGET_PLANNERS`.
        measured: A run of a few layers, whose blocks stand for the model's.

    Raises:
        ValueError: A name is not an activation of the model, or the device has no such dtype.
    """

    def __init__(
        self,
        setup: Setup,
        machine: Machine,
        accelerator: Accelerator,
        limits: Limits,
        *,
        network: Network | None = None,
        names: Sequence[str] | None = None,
        rates: Rates | None = None,
        planner: str = DEFAULT_PLANNER,
        measured: Workload | None = None,
    ) -> None:
        self.setup, self.machine, self.limits = setup, machine, limits
        self.accelerator = accelerator
        if not accelerator.peak_flops_per_s(setup.dtype.value):
            raise ValueError(
                f"--dtype {setup.dtype.value}: {machine.name} computes no products in it; give "
                "--dtype bf16"
            )
        self.network = network
        rates = rates or accelerator.rates(setup.dtype.value)
        self.rates = rates if network is None else with_network(rates, setup.degrees, network)
        self.planner, self.measured = planner, measured
        self.stages = stages_of(setup)
        self.names = self._resolve(names)

    def _resolve(self, names: Sequence[str] | None) -> frozenset[str]:
        workloads = self._workloads(is_rerun=True)
        # One block of each kind: the first and the last have all names.
        blocks = [block for w in workloads for block in (w.blocks[0], w.blocks[-1])]
        known = {a.name.removeprefix(b.name) for b in blocks for a in b.activations}
        if names is not None:
            return resolve_names(names, known)
        found: set[str] = set()
        for name in DEFAULT_NAMES:
            try:
                found |= resolve_names([name], known)
            except ValueError:
                continue  # Not every model has experts.
        return frozenset(found)

    @cached_property
    def residents(self) -> tuple[Resident, ...]:
        """What a device of each stage holds all through."""
        return tuple(resident_of(self.setup, stage) for stage in self.stages)

    def _workloads(self, *, is_rerun: bool) -> tuple[Workload, ...]:
        if is_rerun:
            return self._rerun_workloads
        return self.workloads

    @cached_property
    def workloads(self) -> tuple[Workload, ...]:
        """One for each stage, in which what draws random numbers or routes is never run again."""
        return self._make(is_rerun=False)

    @cached_property
    def _rerun_workloads(self) -> tuple[Workload, ...]:
        shape, degrees = self.setup.shape, self.setup.degrees
        is_pure = shape.family is not Family.GPT2 and shape.experts is None
        if is_pure and degrees.tp == degrees.cp == 1:
            return self.workloads  # No random op, nothing is routed or sent.
        return self._make(is_rerun=True)

    def _make(self, *, is_rerun: bool) -> tuple[Workload, ...]:
        workloads = self._unchecked(is_rerun=is_rerun)
        for workload in workloads:
            outside = workload.outside
            held = max((e.held_bytes for b in workload.blocks for e in b.backward), default=0)
            held += workload.num_bytes_saved
            if outside is not None:
                held += outside.resident_bytes + outside.turn_bytes
            if held > MOST_HELD_BYTES:
                raise ValueError(
                    f"a device would hold {held / 2**60:.0f} EiB with everything kept; more than "
                    f"{MOST_HELD_BYTES >> 60} are taken for a typing error. Look at --context "
                    f"{self.setup.context}, --batch {self.setup.batch} and the model's widths"
                )
        return workloads

    def _unchecked(self, *, is_rerun: bool) -> tuple[Workload, ...]:
        if self.measured is not None:
            num_layers = self.setup.shape.num_layers
            return (scale_measured(self.measured, self.setup, num_layers, self.residents[0]),)
        return tuple(
            make_workload(self.setup, stage, resident, self.rates, is_rerun=is_rerun)
            for stage, resident in zip(self.stages, self.residents, strict=True)
        )

    def row(self, strategy: Strategy) -> Row:
        """Return what a strategy gives."""
        return self.row_by_names(strategy, Decision.HOST)

    def row_by_names(self, strategy: Strategy, tier: Decision) -> Row:
        """Return what a strategy gives where what is named goes to `tier`.

        Args:
            strategy: Which; only those that go by names heed the tier.
            tier: HOST, DISK, or KEEP: what is named stays on the device.
        """
        is_rerun = strategy not in (Strategy.KEEP, Strategy.EBBTIDE)
        workloads = self._workloads(is_rerun=is_rerun)
        plans: list[Plan] = []
        for workload in workloads:
            plan, reason, smallest = self._plan(strategy, workload, tier)
            if plan is None:
                return _no_plan(strategy, reason, smallest)
            plans.append(plan)
        parts = [
            _part(plan, workload, self.machine, stage)
            for plan, workload, stage in zip(plans, workloads, self.stages, strict=True)
        ]
        worst = max(range(len(parts)), key=lambda i: parts[i].peak_bytes)
        accumulate, pp = self.setup.accumulate, self.setup.degrees.pp
        taken = [
            between.step_ns(part.micro_batch_ns, accumulate, pp)
            for part, between in zip(parts, self._between, strict=True)
        ]
        slowest = max(range(len(parts)), key=lambda i: taken[i])
        step_ns = taken[slowest] + self._update_ns()
        host = max(plan.host_bytes for plan in plans)
        disk = max(plan.disk_bytes for plan in plans)
        short = self._short(parts[worst].peak_bytes, host, disk)
        return Row(
            strategy=strategy,
            status=Status.OOM if short else Status.FITS,
            short=short,
            step_ns=step_ns,
            flops_per_s=model_flops(self.setup) * accumulate * 1e9 / step_ns,
            peak_bytes=parts[worst].peak_bytes,
            host_bytes=host,
            disk_bytes=disk,
            holders=self._holders(plans[worst], workloads[worst], worst),
            moved=_moved(plans[worst], workloads[worst]),
            collectives=self._collectives(plans[slowest], workloads[slowest], slowest),
            timeline=parts[slowest].timeline,
        )

    @cached_property
    def _between(self) -> tuple[Between, ...]:
        return tuple(
            between_layers(self.setup, stage, resident, self.network)
            for stage, resident in zip(self.stages, self.residents, strict=True)
        )

    def _collectives(self, plan: Plan, workload: Workload, stage: int) -> dict[Axis, int]:
        """Return what all collectives of a step take in one stage."""
        between, found = self._between[stage], dict[Axis, int]()
        if self.measured is None:
            of_stage = self.stages[stage]
            found.update(in_layers_ns(self.setup, of_stage, self.rates, plan, workload))
        found[Axis.SHARDS] = between.shards_ns
        found[Axis.STAGES] = between.stages_ns
        found = {axis: self.setup.accumulate * ns for axis, ns in found.items()}
        found[Axis.COPIES] = between.copies_ns
        return {axis: found[axis] for axis in Axis if found.get(axis)}

    def rows(self) -> tuple[Row, ...]:
        """Return all strategies."""
        return tuple(self.row(strategy) for strategy in Strategy)

    def _plan(
        self, strategy: Strategy, workload: Workload, tier: Decision
    ) -> tuple[Plan | None, str, int]:
        match strategy:
            case Strategy.KEEP:
                return named_plan("keep", workload), "", 0
            case Strategy.REMAT:
                return plan_by_names(workload, frozenset(), is_overlapped=False), "", 0
            case Strategy.OFFLOAD_SYNC:
                return plan_by_names(workload, self.names, is_overlapped=False, tier=tier), "", 0
            case Strategy.OFFLOAD:
                return plan_by_names(workload, self.names, is_overlapped=True, tier=tier), "", 0
            case Strategy.EBBTIDE:
                outcome = plan_for_budget(
                    workload,
                    self.machine,
                    budget_bytes=self.limits.budget_bytes,
                    host_bytes=self.limits.host_bytes,
                    disk_bytes=self.limits.disk_bytes,
                    planner=self.planner,
                )
                return outcome.plan, outcome.message, outcome.smallest_budget_bytes

    def _short(self, peak_bytes: int, host_bytes: int, disk_bytes: int) -> str:
        limits = self.limits
        for what, needed, given in (
            ("device", peak_bytes, limits.budget_bytes),
            ("host", host_bytes, limits.host_bytes),
            ("disk", disk_bytes, limits.disk_bytes),
        ):
            if needed > given:
                return f"{(needed - given) / 2**30:.1f} GiB of {what} memory"
        return ""

    def _update_ns(self) -> int:
        """Return the optimizer's step: it reads and writes all that it keeps, once."""
        if self.setup.optimizer is Optimizer.NONE:
            return 0
        return max(
            self.rates.moved_ns(
                2 * (r.optimizer + r.num_trained * self.setup.dtype.width_bytes) + r.gradients
            )
            for r in self.residents
        )

    def _holders(self, plan: Plan, workload: Workload, stage: int) -> dict[str, int]:
        resident = self.residents[stage]
        report = check_plan(plan, workload, self.machine)
        found = dict(report.holders)
        logits = 0
        turn = found.pop("turn (logits and loss)", 0)
        if turn:
            logits = min(turn, logits_bytes(self.setup)) if self.measured is None else turn
        found.pop("resident", 0)
        copies = sum(found.pop(name, 0) for name in ("leaving", "fetched"))
        held = {
            "weights": resident.weights,
            "gradients": resident.gradients,
            "optimizer": resident.optimizer,
            "activations": sum(found.values()) + turn - logits,
            "logits": logits,
            "copy_buffers": copies,
            "communication": resident.communication,
        }
        assert sum(held.values()) == report.peak_bytes, "bug in ebbtide: holders do not add up"
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One stage under one plan."""

    micro_batch_ns: int
    peak_bytes: int
    timeline: Timeline


def _part(plan: Plan, workload: Workload, machine: Machine, stage: Stage) -> _Part:
    timeline = simulate(plan, workload, machine)
    return _Part(
        micro_batch_ns=timeline.step_ns // stage.num_in_flight,
        peak_bytes=timeline.peak_bytes,
        timeline=timeline,
    )


def _no_plan(strategy: Strategy, reason: str, smallest: int) -> Row:
    return Row(
        strategy=strategy,
        status=Status.OOM,
        short=reason,
        step_ns=0,
        flops_per_s=0.0,
        peak_bytes=smallest,
        host_bytes=0,
        disk_bytes=0,
        holders={},
        moved={},
        collectives={},
        timeline=None,
    )


def _moved(plan: Plan, workload: Workload) -> dict[str, int]:
    moved: dict[str, int] = {}
    for block in workload.blocks:
        for activation in block.activations:
            if plan.decision(activation.name) in (Decision.HOST, Decision.DISK):
                local = activation.name.removeprefix(block.name)
                moved[local] = moved.get(local, 0) + activation.num_bytes
    return dict(sorted(moved.items(), key=lambda item: -item[1]))
