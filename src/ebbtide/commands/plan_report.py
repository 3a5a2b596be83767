"""A plan in words and columns, for people."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ebbtide.block import LOCAL_MARKS
from ebbtide.commands.columns import align_columns
from ebbtide.machine import Machine
from ebbtide.plan import Decision, Plan
from ebbtide.planner.endurance import bytes_per_day
from ebbtide.planner.result import Outcome
from ebbtide.simulate import BESIDE, STORING, simulate
from ebbtide.timeline import Lane, Timeline
from ebbtide.units import format_bytes
from ebbtide.workload import Workload

NUM_STALLS_SHOWN = 3

_COPIES = {
    Lane.COPY_OUT: "copies out",
    Lane.COPY_IN: "copies in",
    Lane.DISK_WRITE: "disk writes",
    Lane.DISK_READ: "disk reads",
}


def write_report(
    outcome: Outcome, workload: Workload, machine: Machine, *, planning_ns: int
) -> list[str]:
    """Return what was planned: the message, decisions, times, and who planned how long."""
    lines = [outcome.message]
    plan = outcome.plan
    if plan is not None:
        timeline = simulate(plan, workload, machine)
        lines += ["", *write_decisions(plan, workload), "", *_write_times(plan, workload, timeline)]
    return [*lines, f"planned by {outcome.planner} in {planning_ns / 1e6:.0f} ms"]


def write_decisions(plan: Plan, workload: Workload) -> list[str]:
    """Return a table: what becomes of each kind of activation, over all blocks.

    A kind is a name below its block, such as `.mlp.gate_proj`.
    """
    counts: dict[str, _Kind] = {}
    num_bytes: Counter[Decision] = Counter()
    for block in workload.blocks:
        for activation in block.activations:
            decision = plan.decision(activation.name)
            if decision is None:
                continue
            kind = counts.setdefault(_local_name(activation.name, block.name), _Kind())
            kind.decided[decision] += 1
            kind.largest_bytes = max(kind.largest_bytes, activation.num_bytes)
            num_bytes[decision] += activation.num_bytes
    return align_columns(
        [
            ["activation", "each", *(decision.value for decision in Decision)],
            *(
                [name, format_bytes(kind.largest_bytes), *(str(kind.decided[d]) for d in Decision)]
                for name, kind in counts.items()
            ),
            ["bytes", "", *(format_bytes(num_bytes[d]) for d in Decision)],
        ]
    )


def gap_of(plan: Plan) -> float:
    """Return by how much the plan's step may be longer than the shortest, as a fraction."""
    if not plan.bound_step_ns:
        return 0.0
    return plan.predicted_step_ns / plan.bound_step_ns - 1


@dataclass(slots=True)
class _Kind:
    decided: Counter[Decision] = field(default_factory=Counter[Decision])
    largest_bytes: int = 0


def _local_name(name: str, block_name: str) -> str:
    rest = name.removeprefix(block_name)
    return rest if rest != name and rest.startswith(LOCAL_MARKS) else name


def _write_times(plan: Plan, workload: Workload, timeline: Timeline) -> Iterator[str]:
    outside = workload.outside
    assert outside is not None, "bug in ebbtide: a plan for a workload without times"
    kept_ns = outside.turn_ns + outside.ends_ns
    kept_ns += sum(block.forward_ns + block.backward_ns for block in workload.blocks)
    beside_ns = sum(
        span.end_ns - span.start_ns for span in timeline.spans if span.name.startswith(BESIDE)
    )
    storing_ns = sum(
        span.end_ns - span.start_ns for span in timeline.spans if span.name.startswith(STORING)
    )
    again_ns = timeline.busy_ns(Lane.COMPUTE) - kept_ns - beside_ns - storing_ns
    yield (
        f"step: {_ms(timeline.step_ns)} = {_ms(kept_ns)} when all is kept "
        f"+ {_ms(again_ns)} of recomputation + {_ms(beside_ns)} slower beside copies "
        + (f"+ {_ms(storing_ns)} of {STORING} " if storing_ns else "")
        + f"+ {_ms(timeline.stall_ns)} of stalls"
    )
    yield f"bound: {_ms(plan.bound_step_ns)}; no plan for this budget is faster"
    for lane, title in _COPIES.items():
        moved = sum(span.num_bytes for span in timeline.spans if span.lane is lane)
        if moved:
            yield f"{title}: {format_bytes(moved)} in {_ms(timeline.busy_ns(lane))}"
    if plan.disk_bytes:
        written = bytes_per_day(plan.disk_bytes, timeline.step_ns)
        yield f"written to disk in a day of such steps: {format_bytes(written)}"
    yield from _write_stalls(timeline)


def _write_stalls(timeline: Timeline) -> Iterator[str]:
    stalls: Counter[str] = Counter()
    for span in timeline.spans:
        if span.lane is Lane.STALL:
            stalls[span.name] += span.end_ns - span.start_ns
    if stalls:
        shown = (f"{_ms(ns)} for {name}" for name, ns in stalls.most_common(NUM_STALLS_SHOWN))
        yield f"longest stalls: {', '.join(shown)}"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f} ms"
