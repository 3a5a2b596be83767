"""From a budget to plans for one attached model: probe once, then plan for each batch shape.

Shapes are put into buckets of tokens, an eighth of a power of two wide, and planned for the largest
batch of their bucket, so that one plan serves all of it. A shape that was not observed is planned
from the scaled workload. After a few steps the times are corrected by what they really took, and
after an out-of-memory error the budget is lowered by what was over it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from ebbtide.budget import parse_budget
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan import Decision, Plan
from ebbtide.planner.result import Code, Outcome
from ebbtide.planner.scale import Scale, pace_workload, scale_workload
from ebbtide.planner.solve import plan_for_budget
from ebbtide.simulate import simulate
from ebbtide.torch.common_plan import Agreed, Found, agree
from ebbtide.torch.probe import LINK_BYTES, probe_machine
from ebbtide.torch.ranks import Ranks
from ebbtide.units import DiskSpec, format_bytes
from ebbtide.workload import Workload

log = logging.getLogger("ebbtide")

# What stays free for other programs when nobody said how much host memory to take.
FREE_HOST_SHARE = Fraction(1, 8)

# After an out-of-memory error the next plan takes this much less, beside what was over.
OOM_SHARE = Fraction(1, 20)

# Less is copied in no time, and tells little of the link.
MIN_LINK_BYTES = 16 * 2**20

BUCKETS_PER_OCTAVE = 8

_NUM_TRIES = 10
"""Of budgets for one graph, where several share one: the last is within a 512th."""

MIN_GAIN = Fraction(1, 100)
"""Of a step: for less, a plan that runs is kept when its prediction is corrected."""

# Each corrects what the last one left, since copies do not slow down with compute.
NUM_CORRECTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The batch that a block is given."""

    rows: int
    """Sequences."""
    length: int
    """Tokens in each."""

    @classmethod
    def of(cls, size: torch.Size) -> Shape:
        """Return the shape of activations of this size: rows, tokens, width."""
        if len(size) < 3:
            return cls(rows=max(1, size[0] if len(size) > 0 else 1), length=1)
        return cls(rows=max(1, size[0]), length=max(1, size[1]))


class BudgetPlanner:
    """Makes the plans of one attached model.

    Args:
        budget: Most device memory of a step: a size, a share of the device or "auto".
        device: Where the model is.
        host_bytes: Most pinned host memory of the node; None: what is free, less a reserve.
        disks: The folders of the disk tier, if there is one.
        decide: Decisions to keep to, by pattern.
        min_bytes: Smaller activations never move.
        planner: One of `ebbtide.planner.BUDGET_PLANNERS`.
        written_bytes_per_day: Most bytes that a day of steps may write to disk; 0: no limit.
        ranks: Who shares the plan, if somebody does; nothing is known of the machine then until
            `agree` was called.

    Raises:
        ValueError: The budget cannot be read.
    """

    def __init__(
        self,
        budget: str | int,
        *,
        device: torch.device,
        host_bytes: int | None,
        disks: Sequence[DiskSpec],
        decide: Mapping[str, str | Decision] | None,
        min_bytes: int,
        planner: str,
        written_bytes_per_day: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self._machine: Machine | None = None
        self._written_bytes_per_day = written_bytes_per_day
        self.num_graphs = 1
        """Forwards whose graphs are alive at once, as those of a pipeline's micro-batches."""
        self._ranks = ranks
        self._agreed: Agreed | None = None
        self._device = device
        self._host_bytes = host_bytes
        self._disks = tuple(disks)
        self._decide = dict(decide or {})
        self._min_bytes = min_bytes
        self._planner = planner
        self._given = budget
        self._refusal = ""
        """Why less host memory than the machine has, or no disk, is planned with."""
        self._less_bytes = 0
        """What the plans must stay under the budget, after out-of-memory errors."""
        parse_budget(budget, 2**50)  # refuse what cannot be read before anything is measured

    @property
    def machine(self) -> Machine:
        """The machine at hand; probed at the first call, under a second."""
        if self._machine is None:
            assert self._ranks is None, "bug in ebbtide: ranks were not asked before planning"
            self._machine = self._probed()
        return self._machine

    @property
    def is_known(self) -> bool:
        """Whether `machine` can be had without the other ranks."""
        return self._ranks is None or self._machine is not None

    def agree(self, workload: Workload, observed: Shape) -> tuple[Workload, Shape]:
        """Make one plan with the other ranks, which all make this call.

        Returns:
            What all of them go on with instead: the worst of what they measured, and its shape.

        Raises:
            BudgetError: No plan keeps to the budget; on all ranks alike.
            PlanError: They run other blocks, or a pattern of `decide` matches nothing.
            RankError: Some did not come, or were asked for something else.
        """
        assert self._ranks is not None, "bug in ebbtide: there is nobody to agree with"
        found = Found(
            workload=workload,
            machine=self._probed(),
            rows=observed.rows,
            length=observed.length,
            num_graphs=self.num_graphs,
        )
        self._agreed = agree(
            self._ranks, found, self._wishes(), scaled=_scaled, make=self._make_common
        )
        common = self._agreed.found
        self._machine, self.num_graphs = common.machine, common.num_graphs
        log.info("one plan for %s", ", ".join(self._ranks.names))
        return common.workload, Shape(rows=common.rows, length=common.length)

    def _make_common(self, found: Found) -> Plan:
        self._machine, self.num_graphs = found.machine, found.num_graphs
        return self.make(found.workload)

    def _wishes(self) -> dict[str, str]:
        decide = {name: str(decision) for name, decision in self._decide.items()}
        return {
            "budget": str(self._given),
            "host": str(self._host_bytes),
            "disk": str([spec.cap_bytes for spec in self._disks]),
            "disk_write_per_day": str(self._written_bytes_per_day),
            "decide": str(decide),
            "min_bytes": str(self._min_bytes),
            "planner": self._planner,
        }

    def _probed(self) -> Machine:
        meet = None if self._ranks is None else self._ranks.meet
        probed = probe_machine(
            self._device, disks=self._disks, num_bytes=self._probe_bytes(), meet=meet
        )
        free = probed.host_bytes - int(probed.host_bytes * FREE_HOST_SHARE)
        host = free if self._host_bytes is None else self._host_bytes
        return replace(
            probed,
            host_bytes=host if probed.host_bytes else 0,
            disk_write_bytes_per_day=self._written_bytes_per_day,
        )

    def _probe_bytes(self) -> int:
        """Return how much the probe copies: it takes that on the device, within the budget."""
        if self._device.type != "cuda" or self._ranks is not None:
            return LINK_BYTES  # ranks must probe alike
        total_bytes = torch.cuda.mem_get_info(self._device)[1]
        taken_bytes = torch.cuda.memory_allocated(self._device)
        left_bytes = parse_budget(self._given, total_bytes) - taken_bytes
        # Half: the allocator may hand out up to a MiB more than is asked for.
        return min(LINK_BYTES, max(MIN_LINK_BYTES, left_bytes // 2))

    @property
    def budget_bytes(self) -> int:
        """Most device memory that a plan may take now."""
        return max(0, parse_budget(self._given, self.machine.device_bytes) - self._less_bytes)

    def make(
        self, workload: Workload, observed: Shape | None = None, now: Shape | None = None
    ) -> Plan:
        """Plan for a workload, scaled from the observed shape to that of `now` if they are given.

        Raises:
            BudgetError: No plan keeps to the budget.
            PlanError: A pattern of `decide` matches nothing, or pins what cannot be.
        """
        agreed = self._agreed
        if agreed is not None and agreed.found.workload is workload and observed == now:
            return agreed.plan
        if observed is not None and now is not None and now != observed:
            workload = scale_workload(workload, _scale(observed, bucket(now)))
        budget_bytes = self.budget_bytes
        outcome = self._outcome(workload, budget_bytes)
        if outcome.code is Code.NOTHING_FITS or outcome.plan is None:
            raise BudgetError(f"{outcome.message} {self._refusal}".rstrip())
        log.info("%s: %s", outcome.planner, outcome.message)
        if self.num_graphs == 1:
            return outcome.plan
        return self._plan_for_graphs(workload, budget_bytes, outcome.plan)

    def _outcome(self, workload: Workload, budget_bytes: int) -> Outcome:
        machine = self.machine
        return plan_for_budget(
            workload,
            machine,
            budget_bytes=budget_bytes,
            host_bytes=machine.host_bytes_per_rank // self.num_graphs,
            disk_bytes=machine.disk_bytes // self.num_graphs,
            planner=self._planner,
            decide=self._decide,
            min_bytes=self._min_bytes,
        )

    def _plan_for_graphs(self, workload: Workload, budget_bytes: int, plan: Plan) -> Plan:
        """Leave room in the budget for what the plan keeps of the other graphs.

        Searches the budget of one graph: the larger it is, the more all of them keep.
        """
        low, high, tried, found = 0, budget_bytes, budget_bytes, None
        given: Plan | None = plan
        for _ in range(_NUM_TRIES):
            others_bytes = 0
            if given is not None:
                others_bytes = (self.num_graphs - 1) * _kept_bytes(given, workload)
            if given is not None and given.peak_bytes + others_bytes <= budget_bytes:
                found, low = replace(given, peak_bytes=given.peak_bytes + others_bytes), tried
                if tried == budget_bytes:
                    break
            elif given is not None:
                high = tried
            else:
                low = tried
            tried = (low + high) // 2
            given = self._outcome(workload, tried).plan
        if found is None:
            raise BudgetError(
                f"no plan of {self._planner} fits a budget of {format_bytes(budget_bytes)} with "
                f"{self.num_graphs} forwards before the first one's backward, as in a pipeline: "
                "what all of them keep adds up. Take fewer micro-batches at once, a larger "
                f"budget, or a plan by name, such as 'balanced'. {self._refusal}".rstrip()
            )
        return found

    def plan_with_less(self, refusal: str, *, host_bytes: int, has_disk: bool) -> None:
        """Plan with the memory that the system gave when it refused what a plan needed.

        Args:
            refusal: Why; told again where nothing fits then.
            host_bytes: Most pinned host memory of this rank.
            has_disk: Whether the disk can still be used.
        """
        machine = self.machine
        self._agreed = None  # from now on this rank plans for what it got
        self._refusal = refusal
        self._machine = replace(
            machine,
            host_bytes=min(machine.host_bytes, host_bytes * machine.num_local_ranks),
            disk_bytes=machine.disk_bytes if has_disk else 0,
        )

    def correct(self, workload: Workload, plan: Plan, measured_ns: int) -> tuple[Workload, Plan]:
        """Correct the times of a workload by what steps under a plan took, and plan again.

        The plan is kept, with the new prediction, if another one gains less than 1 %.

        Returns:
            The workload whose times give what was measured, and the plan for it.
        """
        paced = workload
        factor = Fraction(1)
        for _ in range(NUM_CORRECTIONS):
            predicted = simulate(plan, paced, self.machine).step_ns
            factor *= Fraction(measured_ns, max(predicted, 1))
            paced = pace_workload(workload, factor.limit_denominator(10**6))
        again = self.make(paced)
        same_ns = simulate(plan, paced, self.machine).step_ns
        if again.predicted_step_ns < same_ns * (1 - MIN_GAIN):
            return paced, again
        bound_ns = min(again.bound_step_ns, same_ns)
        return paced, replace(plan, predicted_step_ns=same_ns, bound_step_ns=bound_ns)

    def shrink(self, plan: Plan, actual_bytes: int) -> str:
        """Plan more frugally from now on, after a step ran out of memory.

        Returns:
            What was predicted against what was, for people.
        """
        budget = self.budget_bytes
        self._agreed = None  # this rank plans on its own from now on
        over = max(0, actual_bytes - plan.peak_bytes)
        self._less_bytes += over + int(budget * OOM_SHARE)
        # On the CPU no allocator counts.
        actual = f"; {format_bytes(actual_bytes)} were allocated then" if actual_bytes else ""
        return (
            f"ebbtide predicted a peak of {format_bytes(plan.peak_bytes)} for a budget of "
            f"{format_bytes(budget)}, and memory ran out{actual}. The next step is planned for "
            f"{format_bytes(self.budget_bytes)}."
        )


def _kept_bytes(plan: Plan, workload: Workload) -> int:
    """Return what a forward leaves on the device for its backward under a plan."""
    return sum(
        activation.num_bytes
        for block in workload.blocks
        for activation in block.activations
        if plan.decision(activation.name) is Decision.KEEP
    )


def bucket(shape: Shape) -> Shape:
    """Return the largest batch that is planned like `shape`."""
    return replace(shape, length=_round_up(shape.length))


def _round_up(number: int) -> int:
    step = max(1, (1 << (number.bit_length() - 1)) // BUCKETS_PER_OCTAVE)
    return -(-number // step) * step


def _scaled(found: Found, rows: int, length: int) -> Workload:
    observed = Shape(rows=found.rows, length=found.length)
    return scale_workload(found.workload, _scale(observed, Shape(rows=rows, length=length)))


def _scale(observed: Shape, now: Shape) -> Scale:
    return Scale(
        rows=Fraction(now.rows, observed.rows), length=Fraction(now.length, observed.length)
    )
