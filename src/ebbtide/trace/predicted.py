"""The same figures of a plan's simulated step and of a recorded one, side by side."""

from dataclasses import dataclass

from ebbtide.machine import Machine
from ebbtide.plan import Plan
from ebbtide.simulate import simulate
from ebbtide.timeline import Lane, Timeline
from ebbtide.trace.overlap import Analysis, analyse, clip
from ebbtide.workload import Workload

NUM_PARTINGS = 10
"""So many activations are named, those that part most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The copies of one activation, one way."""

    name: str
    lane: Lane
    predicted_exposed_ns: int
    measured_exposed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One step, predicted and measured."""

    step: str
    """Which step was measured: the one of the median time, or the whole trace."""
    predicted: Analysis
    measured: Analysis
    partings: tuple[Parting, ...]
    """Activations whose exposed time differs, those that differ most first."""
    num_unnamed: int
    """Measured copies that carry no activation's name of the workload."""


def compare_with_plan(
    timeline: Timeline, plan: Plan, workload: Workload, machine: Machine
) -> Comparison:
    """Set a recorded step beside the plan's simulated one.

    Of several marked steps the one with the median time is taken; without any, the whole trace.

    Raises:
        PlanError: The plan is for another workload, or the workload was not timed.
    """
    predicted = analyse(simulate(plan, workload, machine), machine)
    steps = sorted(analyse(timeline).steps, key=lambda s: (s.end_ns - s.start_ns, s.start_ns))
    name, measured = "the whole trace", timeline
    if steps:
        step = steps[(len(steps) - 1) // 2]
        name, measured = step.name, clip(timeline, step.start_ns, step.end_ns)
    figures = analyse(measured, machine)
    known = {a.name for block in workload.blocks for a in block.activations}
    exposed = [
        {(m.name, m.lane): m.exposed_ns for m in analysis.moved if m.name in known}
        for analysis in (predicted, figures)
    ]
    pairs = (
        Parting(
            name=key[0],
            lane=key[1],
            predicted_exposed_ns=exposed[0].get(key, 0),
            measured_exposed_ns=exposed[1].get(key, 0),
        )
        for key in {**exposed[0], **exposed[1]}
    )
    parting = sorted(
        (p for p in pairs if p.predicted_exposed_ns != p.measured_exposed_ns),
        key=lambda p: (-abs(p.measured_exposed_ns - p.predicted_exposed_ns), p.name, p.lane.value),
    )
    return Comparison(
        step=name,
        predicted=predicted,
        measured=figures,
        partings=tuple(parting[:NUM_PARTINGS]),
        num_unnamed=sum(m.num_copies for m in figures.moved if m.name not in known),
    )
