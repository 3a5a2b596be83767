"""The same figures of a plan's simulated step and of a recorded one, side by side."""

from collections import Counter
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
    """Without the block's, for all blocks together, where the trace has it so."""
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
    names = _traced_names(workload, {moved.name for moved in figures.moved})
    exposed = [_exposed(analysis, names) for analysis in (predicted, figures)]
    pairs = (
        Parting(
            name=key[0],
            lane=key[1],
            predicted_exposed_ns=exposed[0][key],
            measured_exposed_ns=exposed[1][key],
        )
        for key in exposed[0].keys() | exposed[1].keys()
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
        num_unnamed=sum(m.num_copies for m in figures.moved if m.name not in names),
    )


def _traced_names(workload: Workload, traced: set[str]) -> dict[str, str]:
    """Return for each name of an activation the one that the trace has for it.

    Blocks that are one body of a loop, as in a scan, have no block's name in a trace.
    """
    names: dict[str, str] = {}
    for block in workload.blocks:
        for activation in block.activations:
            within = activation.name.removeprefix(f"{block.name}.")
            name = within if within in traced else activation.name
            names[activation.name] = names[name] = name
    return names


def _exposed(analysis: Analysis, names: dict[str, str]) -> Counter[tuple[str, Lane]]:
    exposed: Counter[tuple[str, Lane]] = Counter()
    for moved in analysis.moved:
        if moved.name in names:
            exposed[names[moved.name], moved.lane] += moved.exposed_ns
    return exposed
