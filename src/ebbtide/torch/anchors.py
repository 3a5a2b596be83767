"""A plan's moments, as numbers that the runtime compares while a step runs.

`Plan.release_at` and `Plan.fetch_at` name activations. What has to happen when such a moment was
missed (a block was skipped, an operator did not run) is a question of order: all that lies before
the moment that was reached is due. So each moment gets its place in the order of
`docs/planner.md`, once for each plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbtide.errors import PlanError
from ebbtide.plan import MOVED, TURN_END, TURN_START, Plan
from ebbtide.workload import Block, Workload

TURN_END_RANK = -1
"""The start of backward, before every use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """When evictions are let go and fetches start; all empty for a plan that says nothing of it."""

    call_ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    """Group of activations to the place of the moment that makes them, in forward order: of their
    call, or of their fused block."""
    use_ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    """Saved activation to the place of its first use, in the order of backward."""
    release_ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    """Evicted activation to the moment before which its device memory is let go."""
    fetch_ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    """Evicted activation to the use at which its fetch starts."""
    turn_start_rank: int = 0
    """Comes after every moment of forward; the turn's end comes one later."""
    blocks: frozenset[str] = frozenset()
    """Blocks in which some moment lies: they are recorded even where they keep everything."""

    @property
    def has_releases(self) -> bool:
        """Whether the plan says when evictions are let go."""
        return bool(self.release_ranks)

    @property
    def has_fetches(self) -> bool:
        """Whether the plan says when fetches start; else only the bytes in flight bound them."""
        return bool(self.fetch_ranks)

    @classmethod
    def of(cls, plan: Plan, workload: Workload) -> Anchors:
        """Work out the moments of `plan`.

        Without backward events the uses within a block are taken to come in the reverse order of
        making, which is only nearly so.

        Raises:
            PlanError: A moment is no activation of the workload, or a fetch starts at one that
                backward never asks for.
        """
        evicted = {n for n, d in plan.decisions.items() if d in MOVED}
        release_at = {n: m for n, m in plan.release_at.items() if n in evicted}
        fetch_at = {n: m for n, m in plan.fetch_at.items() if n in evicted}
        if not release_at and not fetch_at:
            return cls()
        call_ranks: dict[str, int] = {}
        group_of: dict[str, str] = {}
        block_of: dict[str, str] = {}
        num_ranks = 0
        for block in workload.blocks:
            first_rank = num_ranks
            for activation in block.activations:
                if activation.group not in call_ranks:
                    call_ranks[activation.group] = first_rank if block.is_fused else num_ranks
                    num_ranks = call_ranks[activation.group] + 1
                group_of[activation.name] = activation.group
                block_of[activation.name] = block.name
        use_ranks = _use_ranks(workload)
        turn_start = num_ranks
        moments = {name: call_ranks[group] for name, group in group_of.items()}
        moments |= {TURN_START: turn_start, TURN_END: turn_start + 1}
        uses = {**use_ranks, TURN_END: TURN_END_RANK}
        for name, moment in release_at.items():
            if moment not in moments:
                raise PlanError(_unknown_moment(plan, name, moment, "lets", "go before"))
        for name, moment in fetch_at.items():
            if moment not in uses:
                raise PlanError(_unknown_moment(plan, name, moment, "fetches", "at the use of"))
        named = {*release_at.values(), *fetch_at.values()} - {TURN_START, TURN_END}
        return cls(
            call_ranks=call_ranks,
            use_ranks=use_ranks,
            release_ranks={name: moments[moment] for name, moment in release_at.items()},
            fetch_ranks={name: uses[moment] for name, moment in fetch_at.items()},
            turn_start_rank=turn_start,
            blocks=frozenset(block_of[name] for name in named),
        )


def _use_ranks(workload: Workload) -> dict[str, int]:
    ranks: dict[str, int] = {}
    num_events = 0
    for block in reversed(workload.blocks):
        for uses in _events(block):
            for name in uses:
                ranks.setdefault(name, num_events)
            num_events += 1
    return ranks


def _events(block: Block) -> list[tuple[str, ...]]:
    """What backward asks for in each event, and at the end what it was never seen to ask for."""
    saved = [a.name for a in block.activations if a.is_saved]
    if not block.backward:
        return [(name,) for name in reversed(saved)]
    return [*(event.uses for event in block.backward), tuple(saved)]


def _unknown_moment(plan: Plan, name: str, moment: str, does: str, when: str) -> str:
    return (
        f"plan {plan.name!r} {does} {name} {when} {moment!r}, which the workload does not have. "
        "A moment is an activation's name, for a fetch that of a saved one, or a side of the "
        "turn. Make the plan again for this model."
    )
