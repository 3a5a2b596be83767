"""Blocks of one kind get equal numbers: the median of their times and the most of their bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ebbtide.workload import Block


def equalised(
    blocks: Sequence[Block],
) -> tuple[tuple[Block, ...], tuple[tuple[str, ...], ...]]:
    """Return the blocks with the numbers of their kind, and the names of each kind."""
    classes: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        classes.setdefault(signature_of(block), []).append(block)
    typical = {key: _numbers_of(alike) for key, alike in classes.items()}
    return (
        tuple(typical[signature_of(block)].given_to(block) for block in blocks),
        tuple(tuple(block.name for block in alike) for alike in classes.values()),
    )


def signature_of(block: Block) -> tuple[object, ...]:
    """Return all of a block but its path and what was measured."""

    def local(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name.removeprefix(block.name) for name in names)

    activations = tuple(
        (
            a.op,
            a.kind,
            a.num_bytes,
            a.is_saved,
            a.is_replayable,
            local((a.name, a.group, *a.inputs)),
        )
        for a in block.activations
    )
    return block.class_name, activations, tuple(local(event.uses) for event in block.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """What is measured of the blocks of one class."""

    make_ns: tuple[int, ...]
    compute_ns: tuple[int, ...]
    held_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    rest_ns: int
    workspace_bytes: int

    def given_to(self, block: Block) -> Block:
        """Return `block` with these numbers."""
        activations = zip(block.activations, self.make_ns, strict=True)
        numbers = zip(self.compute_ns, self.held_bytes, self.gradient_bytes, strict=True)
        events = zip(block.backward, numbers, strict=True)
        return replace(
            block,
            activations=tuple(replace(a, make_ns=ns) for a, ns in activations),
            backward=tuple(
                replace(event, compute_ns=ns, held_bytes=held, gradient_bytes=gradients)
                for event, (ns, held, gradients) in events
            ),
            rest_ns=self.rest_ns,
            workspace_bytes=self.workspace_bytes,
        )


def _numbers_of(alike: Sequence[Block]) -> _Numbers:
    # Times scatter, so the median; bytes that differ have a reason, and a budget must hold.
    makes = zip(*([a.make_ns for a in block.activations] for block in alike), strict=True)
    computes = zip(*([e.compute_ns for e in block.backward] for block in alike), strict=True)
    helds = zip(*([e.held_bytes for e in block.backward] for block in alike), strict=True)
    gradients = zip(*([e.gradient_bytes for e in block.backward] for block in alike), strict=True)
    return _Numbers(
        make_ns=tuple(statistics.median_low(ns) for ns in makes),
        compute_ns=tuple(statistics.median_low(ns) for ns in computes),
        held_bytes=tuple(max(num_bytes) for num_bytes in helds),
        gradient_bytes=tuple(max(num_bytes) for num_bytes in gradients),
        rest_ns=statistics.median_low(block.rest_ns for block in alike),
        workspace_bytes=max(block.workspace_bytes for block in alike),
    )
