"""From what was measured of compiled blocks of one kind to one block of a workload.

A compiled block can be timed as a whole only. Most blocks of a kind run with all that is dear made
again in backward, one with all of it saved: what the backward of that one takes less is what
making it again costs. It is shared out by what each product and each attention takes by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from ebbtide.workload import BackwardEvent, Block, OpKind

MOST_CORRECTED: Final = 2
"""What was measured of a block as a whole makes its parts' times at most so many times as long,
or as short: beyond that it is chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRun:
    """What was measured of one compiled block in a step."""

    is_full: bool
    """It saved all that it could; else as little."""
    forward_ns: int
    backward_ns: int
    held_bytes: int
    """Most bytes in backward beyond what is counted elsewhere."""
    workspace_bytes: int
    """Most bytes in forward beyond its activations and what is counted elsewhere."""
    gradient_bytes: int
    """Gradients of parameters that its backward left."""


def fused_block(block: Block, runs: Sequence[FusedRun], call_ns: Mapping[str, int]) -> Block:
    """Return the block with times and memory.

    Args:
        block: With all that it could save.
        runs: Of the blocks of its kind; one at least.
        call_ns: Group of activations to the time of their call by itself. What is missing is
            taken to be as slow as the whole forward.
    """
    full = [run for run in runs if run.is_full]
    least = [run for run in runs if not run.is_full]
    forward_ns = _middle(run.forward_ns for run in least or full)
    again = {a.group: call_ns.get(a.group, forward_ns) for a in block.activations
             if a.is_replayable}  # fmt: skip
    factor = Fraction(1)
    if full and least:
        saved_ns = _middle(r.backward_ns for r in least) - _middle(r.backward_ns for r in full)
        factor = Fraction(max(saved_ns, 0), max(sum(again.values()), 1))
        factor = min(max(factor, Fraction(1, MOST_CORRECTED)), Fraction(MOST_CORRECTED))
    made_ns = {group: int(ns * factor) for group, ns in again.items()}
    if full:
        compute_ns = _middle(run.backward_ns for run in full)
    else:
        compute_ns = max(0, _middle(run.backward_ns for run in least) - sum(made_ns.values()))
    made_bytes = sum(a.num_bytes for a in block.activations if a.kind is not OpKind.INPUT)
    event = BackwardEvent(
        uses=tuple(a.name for a in block.activations if a.is_saved),
        compute_ns=compute_ns,
        # All that a block could save is there in its one event, saved or made again.
        held_bytes=max(0, *(run.held_bytes - made_bytes for run in runs)),
        gradient_bytes=max(run.gradient_bytes for run in runs),
    )
    return replace(
        block,
        activations=tuple(replace(a, make_ns=made_ns.get(a.group, 0)) for a in block.activations),
        backward=(event,),
        rest_ns=max(0, forward_ns - sum(made_ns.values())),
        workspace_bytes=max(0, *(run.workspace_bytes for run in runs)),
        is_fused=True,
    )


def _middle(numbers: Iterable[int]) -> int:
    return statistics.median_low(numbers)
