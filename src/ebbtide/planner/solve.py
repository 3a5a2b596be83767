"""A memory budget in, a plan out: the one way to all planners that know times.

The driver owns what planners must not forget: nothing is done where everything fits, every plan
carries its bound, and where nothing fits the answer names the smallest budget and the holders.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.naming import unknown_name_message
from ebbtide.plan import Decision, Plan
from ebbtide.planner.advice import CHUNKED_LOSS
from ebbtide.planner.baselines import Baseline, plan_baseline
from ebbtide.planner.bound import closed_form_ns
from ebbtide.planner.candidate import Found, lay_out_states, order
from ebbtide.planner.caps import Caps
from ebbtide.planner.chain import Chain, compile_chain
from ebbtide.planner.endurance import most_bytes_in_step
from ebbtide.planner.greedy import plan_greedily
from ebbtide.planner.layout import Treatment
from ebbtide.planner.named import MIN_BYTES
from ebbtide.planner.pins import resolve_pins
from ebbtide.planner.result import Code, Outcome, UnsolvedError
from ebbtide.planner.space import Space
from ebbtide.planner.uniform import plan_uniformly
from ebbtide.units import format_bytes
from ebbtide.workload import Workload

log = logging.getLogger("ebbtide")

BUDGET_PLANNERS: tuple[str, ...] = ("lp", "greedy", "uniform", *(b.value for b in Baseline))
"""Every planner that takes a budget."""

TIME_LIMIT_S = 5.0
"""For the solver; greedy plans where it takes longer."""

# Slots of a block for the fast estimate: op by op in short chains, where a block is much of the
# step, and few in long ones, where planning time counts. See docs/planner.md.
_FINE_BLOCKS, _FINE_SLOTS, _COARSE_SLOTS, _GREEDY_SLOTS = 16, 16, 4, 2

_NUM_LESS = 8
"""Tries to find a plan that is as fast and takes less, where nothing is lost at all."""

# The smallest budget is searched to this share of itself.
_BUDGET_SHARE = 1 / 512


def plan_for_budget(
    workload: Workload,
    machine: Machine,
    *,
    budget_bytes: int,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    planner: str = "lp",
    decide: Mapping[str, str | Decision] | None = None,
    min_bytes: int = MIN_BYTES,
    time_limit_s: float = TIME_LIMIT_S,
) -> Outcome:
    """Find the fastest plan whose step stays within a budget of device memory.

    Pure and deterministic: the same arguments give the same plan, byte for byte, as long as the
    solver keeps to its time limit.

    Args:
        workload: A timed one, as `observe` makes it.
        machine: The links, and what the tiers can hold.
        budget_bytes: Most device memory at every moment of the step.
        host_bytes: Most pinned host memory of this rank. Default: its share of the machine's.
        disk_bytes: Most bytes on disk. Default: the machine's. What the machine lets be written
            in a day holds too.
        planner: One of `BUDGET_PLANNERS`.
        decide: Decisions to keep to, by pattern over activation names.
        min_bytes: Smaller activations are never moved.
        time_limit_s: For the solver.

    Raises:
        PlanError: The workload has no times, the planner is unknown, or a pin is wrong.
        ValueError: The budget is negative.
    """
    if planner not in BUDGET_PLANNERS:
        raise PlanError(unknown_name_message("planner", planner, BUDGET_PLANNERS))
    if budget_bytes < 0:
        raise ValueError(f"budget_bytes is {budget_bytes}; it must be 0 or more")
    chain = compile_chain(workload, resolve_pins(decide, workload))
    disk_bytes = machine.disk_bytes if disk_bytes is None else disk_bytes
    if machine.disk_write_bytes_per_day:
        written = most_bytes_in_step(machine.disk_write_bytes_per_day, chain.base_ns)
        disk_bytes = min(disk_bytes, written)
    caps = Caps(
        device_bytes=budget_bytes,
        host_bytes=machine.host_bytes_per_rank if host_bytes is None else host_bytes,
        disk_bytes=disk_bytes,
    )
    solver = _Solver(workload, chain, machine, planner, min_bytes, time_limit_s)
    return solver.solve(caps)


class _Solver:
    def __init__(
        self,
        workload: Workload,
        chain: Chain,
        machine: Machine,
        planner: str,
        min_bytes: int,
        time_limit_s: float,
    ) -> None:
        self._workload, self._chain, self._machine = workload, chain, machine
        self._planner, self._time_limit_s = planner, time_limit_s
        slots = _FINE_SLOTS if len(chain.class_of) <= _FINE_BLOCKS else _COARSE_SLOTS
        if planner == "greedy" and slots == _COARSE_SLOTS:
            slots = _GREEDY_SLOTS
        self._space = Space(chain, num_slots=slots, min_bytes=min_bytes)

    def solve(self, caps: Caps) -> Outcome:
        machine = self._machine
        everything = plan_baseline(self._space, Baseline.KEEP, machine, caps)
        if everything is not None:
            plan = self._plan(everything, caps, self._chain.base_ns)
            message = f"everything fits: the step takes {format_bytes(plan.peak_bytes)} at most"
            return self._outcome(Code.EVERYTHING_FITS, plan, message)
        found, bound_ns = self._find_with_or_without_disk(caps)
        if found is None:
            smallest = self._smallest(caps)
            message = self._refusal(caps, smallest)
            return replace(
                self._outcome(Code.NOTHING_FITS, None, message), smallest_budget_bytes=smallest
            )
        found = self._at_less(found, caps)
        plan = self._plan(found, caps, bound_ns)
        # What nothing but stacking costs is not the budget's.
        storing_ns = sum(self._space.menus[c][0].store_ns for c in self._chain.class_of)
        slower = plan.predicted_step_ns / (self._chain.base_ns + storing_ns) - 1
        gap = plan.predicted_step_ns / plan.bound_step_ns - 1
        message = (
            f"{format_bytes(plan.peak_bytes)} at most; the step takes "
            f"{plan.predicted_step_ns / 1e6:.1f} ms, {abs(slower):.1%} "
            f"{'less' if slower < 0 else 'more'} than without a budget and "
            f"at most {gap:.2%} more than any plan"
        )
        return self._outcome(Code.FOUND, plan, message)

    def _outcome(self, code: Code, plan: Plan | None, message: str) -> Outcome:
        return Outcome(
            code=code, plan=plan, smallest_budget_bytes=0, message=message, planner=self._planner
        )

    def _find_with_or_without_disk(self, caps: Caps) -> tuple[Found | None, int]:
        """Return the faster plan, with the disk or without, and the bound with it.

        A search with one more tier looks elsewhere, and may miss what it finds without.
        """
        found, bound_ns = self._find(caps)
        if caps.disk_bytes:
            without, _ = self._find(replace(caps, disk_bytes=0))
            found = min((f for f in (without, found) if f is not None), key=order, default=None)
        return found, bound_ns

    def _find(self, caps: Caps) -> tuple[Found | None, int]:
        space, machine, menus = self._space, self._machine, tuple(self._space.menus)
        bound_ns = closed_form_ns(self._chain, menus, machine, caps)
        if self._planner == "greedy" or not _has_solver():
            if self._planner == "lp":
                _say_no_solver()
                self._planner = "greedy"
            return self._find_without_solver(caps), bound_ns
        # Only here: scipy is an extra.
        from ebbtide.planner.lp import plan_by_lp
        from ebbtide.planner.relax import relax

        num_blocks = len(self._chain.class_of)
        try:
            relaxed = relax(
                self._chain,
                menus,
                machine,
                caps,
                num_slots=6 if num_blocks <= _FINE_BLOCKS else 1,
                time_limit_s=self._time_limit_s,
            )
        except UnsolvedError as error:
            log.warning("%s; the greedy planner plans instead", error)
            self._planner = "greedy" if self._planner == "lp" else self._planner
            return self._find_without_solver(caps), bound_ns
        if relaxed is None:
            return None, bound_ns
        # The solver's own tolerance must not lift the bound above what it bounds.
        bound_ns = max(bound_ns, int(relaxed.step_ns * (1 - 1e-6)))
        if self._planner == "lp":
            return plan_by_lp(space, machine, caps, relaxed), bound_ns
        return self._find_without_solver(caps), bound_ns

    def _at_less(self, found: Found, caps: Caps) -> Found:
        """Where the budget costs no time, return a plan that takes no more than that needs.

        A larger budget then gets the same plan, and not one that is as fast and takes more. Only
        on machines whose copies cost compute nothing; long chains get one try, or it takes long.
        """
        is_short = len(self._chain.class_of) <= _FINE_BLOCKS
        for _ in range(_NUM_LESS if is_short else 1):
            if found.layout.step_ns > self._chain.base_ns:
                break
            less_caps = replace(caps, device_bytes=found.layout.peak_bytes - 1)
            less, _ = self._find_with_or_without_disk(less_caps)
            if less is None or less.layout.step_ns > found.layout.step_ns:
                break
            found = less
        return found

    def _find_without_solver(self, caps: Caps) -> Found | None:
        match self._planner:
            case "greedy":
                return plan_greedily(self._space, self._machine, caps)
            case "uniform":
                return plan_uniformly(self._space, self._machine, caps)
            case name:
                return plan_baseline(self._space, Baseline(name), self._machine, caps)

    def _smallest(self, caps: Caps) -> int:
        """Return the smallest budget that this planner keeps to."""
        high = self._keep_peak()
        low = caps.device_bytes
        if self._find_without_solver_as_greedy(replace(caps, device_bytes=high)) is None:
            return high
        while high - low > max(1, int(high * _BUDGET_SHARE)):
            middle = (low + high) // 2
            found = self._find_without_solver_as_greedy(replace(caps, device_bytes=middle))
            if found is None:
                low = middle
            else:
                high = min(middle, found.layout.peak_bytes)
        return high

    def _find_without_solver_as_greedy(self, caps: Caps) -> Found | None:
        if self._planner == "lp":
            return plan_greedily(self._space, self._machine, caps)
        return self._find_without_solver(caps)

    def _keep_peak(self) -> int:
        endless = Caps(device_bytes=2**62, host_bytes=2**62, disk_bytes=2**62)
        states = [self._space.states[self._space.rows[c][0][0]] for c in self._chain.class_of]
        found = lay_out_states(self._space, states, self._machine, endless)
        assert found is not None, "bug in ebbtide: no layout without limits"
        return found.layout.peak_bytes

    def _refusal(self, caps: Caps, smallest: int) -> str:
        outside = self._chain.outside
        holders = {
            "parameters, gradients and optimizer state": outside.resident_bytes,
            "gradients that backward makes": self._chain.most_gradient_bytes,
            "logits and loss": outside.turn_bytes,
            "what is held around the blocks": outside.constant_bytes,
            "the optimizer's step": outside.ends_bytes,
        }
        named = sorted(holders.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in named if size)
        text = (
            f"no plan of {self._planner} fits a budget of {format_bytes(caps.device_bytes)}; the "
            f"smallest that fits is {_at_least(smallest)}."
        )
        if shown:
            text += f" The rest of the step holds: {shown}."
        daily = self._machine.disk_write_bytes_per_day
        if daily and caps.disk_bytes == most_bytes_in_step(daily, self._chain.base_ns):
            text += (
                f" Not more than {format_bytes(caps.disk_bytes)} a step may go to disk, since a "
                f"day may write {format_bytes(daily)}."
            )
        held = outside.resident_bytes + outside.constant_bytes + outside.turn_bytes
        if held > caps.device_bytes >= held - outside.turn_bytes:
            text += (
                " The logits hold the peak, and moving activations cannot help that: "
                f"{CHUNKED_LOSS}."
            )
        return text

    def _plan(self, found: Found, caps: Caps, bound_ns: int) -> Plan:
        decisions: dict[str, Decision] = {}
        for block, treatment in enumerate(found.treatments):
            names = self._chain.names[block]
            for i, decision in self._decisions(block, treatment).items():
                decisions[names[i]] = decision
        layout = found.layout
        return Plan(
            name=self._planner,
            model=self._workload.model,
            fingerprint=self._workload.fingerprint,
            decisions=decisions,
            host_bytes=sum(t.bytes_on(Decision.HOST) for t in found.treatments),
            disk_bytes=sum(t.bytes_on(Decision.DISK) for t in found.treatments),
            max_out_bytes_in_flight=layout.max_out_bytes_in_flight,
            max_in_bytes_in_flight=layout.max_in_bytes_in_flight,
            release_at=layout.release_at,
            fetch_at=layout.fetch_at,
            budget_bytes=caps.device_bytes,
            peak_bytes=layout.peak_bytes,
            predicted_step_ns=layout.step_ns,
            bound_step_ns=bound_ns,
        )

    def _decisions(self, block: int, treatment: Treatment) -> dict[int, Decision]:
        """Return what becomes of each activation of a block that backward needs."""
        block_class = self._chain.classes[self._chain.class_of[block]]
        stored = treatment.program.option.stored
        decisions: dict[int, Decision] = {}
        todo = [i for i, is_saved in enumerate(block_class.is_saved) if is_saved]
        while todo:
            i = todo.pop()
            if i in decisions:
                continue
            if i in stored:
                decisions[i] = treatment.tiers.get(i, Decision.KEEP)
                continue
            decisions[i] = Decision.RECOMPUTE
            todo += block_class.calls[block_class.call_of[i]].inputs
        return decisions


def _at_least(num_bytes: int) -> str:
    """Write a size that is not below `num_bytes`, so that asking for it is enough."""
    unit, name = next(
        (size, name)
        for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
        if num_bytes >= size or name == "KiB"
    )
    hundredths = -(-num_bytes * 100 // unit)
    return f"{hundredths // 100}.{hundredths % 100:02d} {name}"


@cache
def _has_solver() -> bool:
    return find_spec("scipy") is not None


@cache
def _say_no_solver() -> None:
    """Warn once in a process."""
    log.warning(
        "scipy is not installed: the greedy planner plans instead of lp. "
        "Install it with: pip install 'ebbtide[solver]'"
    )
