"""What several ranks measured of the same blocks, as one: the slowest times, the least memory.

Ranks that run one plan wait for each other in every collective, so it is the slowest of them that a
plan has to be good for, and the one with least memory that it has to fit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from ebbtide.block import Activation, BackwardEvent, Block
from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.workload import Outside, Workload


def worst_machine(machines: Sequence[Machine]) -> Machine:
    """Return a machine that promises what each of `machines` has; at least one.

    Its `host_bytes_per_rank` is the least of theirs.
    """
    first = machines[0]
    num_local_ranks = max(machine.num_local_ranks for machine in machines)
    least = {
        name: min(getattr(machine, name) for machine in machines)
        for name in _NUMBERS
        if name not in ("slowdown_ppm", "num_local_ranks", "host_bytes")
    }
    return replace(
        first,
        **least,
        host_bytes=num_local_ranks * min(machine.host_bytes_per_rank for machine in machines),
        slowdown_ppm=max(machine.slowdown_ppm for machine in machines),
        num_local_ranks=num_local_ranks,
        source=f"the worst of {len(machines)} ranks; the first is {first.source}",
    )


def worst_workload(workloads: Sequence[Workload], names: Sequence[str]) -> Workload:
    """Return the workload with the longest times and the most bytes of all; at least one.

    Args:
        workloads: Of the same blocks, at the same batch shape.
        names: Who observed each, for messages.

    Raises:
        PlanError: They observed different blocks or activations.
    """
    first = workloads[0]
    for workload, name in zip(workloads, names, strict=True):
        if workload.fingerprint != first.fingerprint:
            raise PlanError(
                f"{name} observed other blocks or activations than {names[0]}: "
                f"{_difference(workload, first)}. Ranks can share a plan where they run the same "
                "blocks on the same branches: of a pipeline, the ranks of one stage."
            )
    outsides = [workload.outside for workload in workloads if workload.outside is not None]
    return replace(
        first,
        blocks=tuple(
            _worst_block([w.blocks[index] for w in workloads]) for index in range(len(first.blocks))
        ),
        outside=_most(outsides, _names_of(Outside)) if outsides else None,
    )


_NUMBERS = tuple(f.name for f in fields(Machine) if f.name not in ("name", "source"))


def _names_of(kind: type[Outside]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


_Measured = TypeVar("_Measured", Outside, BackwardEvent)


def _most(values: Sequence[_Measured], names: Iterable[str]) -> _Measured:
    return replace(values[0], **{name: max(getattr(v, name) for v in values) for name in names})


def _worst_block(blocks: Sequence[Block]) -> Block:
    first = blocks[0]
    return replace(
        first,
        activations=tuple(
            _worst_activation([block.activations[index] for block in blocks])
            for index in range(len(first.activations))
        ),
        backward=_worst_events(blocks),
        rest_ns=max(block.rest_ns for block in blocks),
        workspace_bytes=max(block.workspace_bytes for block in blocks),
        store_ns_per_gib=max(block.store_ns_per_gib for block in blocks),
    )


def _worst_activation(activations: Sequence[Activation]) -> Activation:
    return replace(
        activations[0],
        num_bytes=max(a.num_bytes for a in activations),
        make_ns=max(a.make_ns for a in activations),
        is_saved=any(a.is_saved for a in activations),
        is_replayable=all(a.is_replayable for a in activations),
    )


def _worst_events(blocks: Sequence[Block]) -> tuple[BackwardEvent, ...]:
    """Return the events one by one at their worst; where they differ, those of the slowest."""
    uses = {tuple(event.uses for event in block.backward) for block in blocks}
    if len(uses) > 1:
        return max(blocks, key=_backward_ns).backward
    names = ("compute_ns", "held_bytes", "gradient_bytes")
    return tuple(
        _most([block.backward[index] for block in blocks], names)
        for index in range(len(blocks[0].backward))
    )


def _backward_ns(block: Block) -> int:
    return block.backward_ns


def _difference(workload: Workload, other: Workload) -> str:
    """Say in a few words where two workloads part."""
    mine = [activation.name for block in workload.blocks for activation in block.activations]
    others = [activation.name for block in other.blocks for activation in block.activations]
    for name, known in zip(mine, others, strict=False):
        if name != known:
            return f"{name} where that has {known}"
    return f"{len(mine)} activations in {len(workload.blocks)} blocks, not {len(others)}"
