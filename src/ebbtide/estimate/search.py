"""The largest context or batch that fits, with and without offloading."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ebbtide.catalog.calls import Rates
from ebbtide.estimate.named import plan_by_names
from ebbtide.estimate.resident import resident_of, stages_of
from ebbtide.estimate.setup import MOST_TOKENS, Setup
from ebbtide.estimate.step import make_workload
from ebbtide.estimate.strategies import Limits
from ebbtide.machine import Machine
from ebbtide.plan import Plan
from ebbtide.planner import named_plan
from ebbtide.simulate import simulate
from ebbtide.workload import Workload

CONTEXT_STEP = 1024
"""Contexts are searched in steps of so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest value that fits; 0: not even the smallest does."""

    keep: int
    """Everything kept."""
    remat: int
    """With full checkpointing."""
    offload: int
    """With full checkpointing whose inputs are on the host, as far as the host has room."""


def find_largest(
    axis: str, setup: Setup, machine: Machine, rates: Rates, limits: Limits
) -> Largest:
    """Return the largest `context` or `batch` that fits, all else as asked.

    Args:
        axis: `context`, in steps of 1024 tokens, or `batch`.
        setup: The question; its own value on the axis does not matter.
        machine: What can be held and copied.
        rates: Of the device.
        limits: Of memory.
    """
    degrees = setup.degrees
    step = 1
    if axis == "context":
        split = degrees.cp * (degrees.tp if degrees.sp else 1)
        step = CONTEXT_STEP * split
        other = setup.batch
    else:
        other = setup.context
    most = MOST_TOKENS * degrees.cp // (other * step)

    def fits(number: int, make: Callable[[Workload], Plan], is_rerun: bool) -> bool:
        value = number * step
        asked = replace(setup, **{axis: value})
        for stage in stages_of(asked):
            resident = resident_of(asked, stage)
            if resident.total > limits.budget_bytes:
                return False
            workload = make_workload(asked, stage, resident, rates, is_rerun=is_rerun)
            plan = make(workload)
            if plan.host_bytes > limits.host_bytes:
                return False
            if simulate(plan, workload, machine).peak_bytes > limits.budget_bytes:
                return False
        return True

    def search(make: Callable[[Workload], Plan], *, is_rerun: bool) -> int:
        low, high = 0, 1
        while high <= most and fits(high, make, is_rerun):
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > max(1, low >> 7):
            middle = (low + high) // 2
            if fits(middle, make, is_rerun):
                low = middle
            else:
                high = middle
        return low * step

    return Largest(
        keep=search(lambda w: named_plan("keep", w), is_rerun=False),
        remat=search(_remat, is_rerun=True),
        offload=search(_offload_inputs, is_rerun=True),
    )


def _remat(workload: Workload) -> Plan:
    return plan_by_names(workload, frozenset(), is_overlapped=False)


def _offload_inputs(workload: Workload) -> Plan:
    return plan_by_names(workload, frozenset({".input"}), is_overlapped=True)
