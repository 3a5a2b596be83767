"""The named plans: fixed rules for all blocks, no budget and no machine needed.

Sources: full checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
2016), its inputs offloaded (DeepSpeed `cpu_checkpointing`), and the prices of recomputing:
attention and matmul outputs are worth moving; norms, rotary embeddings, casts and activation
products are worth recomputing. Other names: selective checkpointing (Megatron-LM). What differs
here: a decision is for one activation, the cones that recomputation needs are worked out from
what each op reads, and what is stored moves along cheap ops to where one activation serves
instead of two (the dominance rule, `_store_dominating`). Known weakness: the rules see no
bandwidth and no time, so a plan may move more than a slow link carries.
"""

import enum
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import assert_never

from ebbtide.errors import PlanError
from ebbtide.naming import unknown_name_message
from ebbtide.plan import Decision, Plan
from ebbtide.workload import Activation, Block, OpKind, Workload

NAMED_PLANS: tuple[str, ...] = (
    "keep",
    "recompute",
    "offload-inputs",
    "offload",
    "balanced",
    "offload-last:K",
)
"""Every name that `named_plan` takes; K stands for a number of blocks."""

# A copy of 64 KiB takes 1.2 us at 55 GB/s, measured on PCIe 5 x16; launching it takes longer.
MIN_BYTES = 64 * 1024

# 256 MiB are 5 ms of copying at 55 GB/s (PCIe 5 x16, measured): enough that the link does not
# run dry while one small block is computed, and 0.2 % of the device that it was measured on.
MIN_IN_FLIGHT_BYTES = 256 * 1024 * 1024

# A matmul output of more than two block inputs is a feed-forward or a fused projection. Evicting
# one of two and recomputing the other took 1317 ms a step, evicting both 1348 (Llama-3-8B shape,
# 8 layers, 32k tokens, bf16, one H200 on PCIe 5 x16).
WIDE_IN_BLOCK_INPUTS = 2

CHEAP = frozenset({OpKind.ELEMENTWISE, OpKind.NORM})

# int() would also take "+1", " 1", "1_0" and digits of other scripts.
_COUNT = re.compile("[1-9][0-9]{0,8}")


@enum.unique
class PlanFamily(enum.Enum):
    """The rule that a named plan follows."""

    KEEP = "keep"
    """Everything that autograd saves stays on the device."""
    RECOMPUTE = "recompute"
    """Only what cannot be made again stays; the rest is recomputed."""
    OFFLOAD_INPUTS = "offload-inputs"
    """As RECOMPUTE, with block inputs and random results evicted."""
    OFFLOAD = "offload"
    """What is dear to recompute is evicted; norms and elementwise ops are recomputed."""
    BALANCED = "balanced"
    """As OFFLOAD, but all wide matmuls of a block except the first are recomputed."""
    OFFLOAD_LAST = "offload-last"
    """Everything saved in the last K blocks is evicted; the other blocks keep all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanName:
    """A plan's name, taken apart."""

    family: PlanFamily
    """The rule."""
    num_last_blocks: int | None
    """K of `offload-last:K`, 1 or more; None for the other families."""


def parse_plan_name(name: str) -> PlanName:
    """Return what the name of a named plan means.

    Raises:
        PlanError: The name is none of `NAMED_PLANS`, or its K is not a whole number of 1 or
            more.
    """
    family_name, colon, count = name.partition(":")
    if family_name == PlanFamily.OFFLOAD_LAST.value:
        if not _COUNT.fullmatch(count):
            raise PlanError(
                f"plan {name!r}: K is {count!r}; K is the number of last blocks to evict, a whole "
                f"number of 1 or more, as in 'offload-last:2'. {_valid_names(name)}"
            )
        return PlanName(family=PlanFamily.OFFLOAD_LAST, num_last_blocks=int(count))
    if colon or family_name not in NAMED_PLANS:
        raise PlanError(_valid_names(name))
    return PlanName(family=PlanFamily(family_name), num_last_blocks=None)


def named_plan(
    name: str,
    workload: Workload,
    *,
    tier: Decision = Decision.HOST,
    min_bytes: int = MIN_BYTES,
    min_in_flight_bytes: int = MIN_IN_FLIGHT_BYTES,
) -> Plan:
    """Make the plan called `name` for a workload.

    The plan is complete: every saved activation is stored or can be recomputed from what is
    stored (`missing` returns nothing). Activations that no saved one needs have no decision.
    Pure and deterministic.

    Args:
        name: One of `NAMED_PLANS`.
        workload: What the model keeps, as observed.
        tier: HOST or DISK: where evicted activations go.
        min_bytes: A smaller activation is never moved; where it would be, it is KEEP.
        min_in_flight_bytes: In each direction so much may be on its way at once, or what a block
            moves where that is more.

    Raises:
        PlanError: The name is unknown, or K is malformed or more than the workload's blocks.
        ValueError: `tier` is not a tier, or `min_bytes` is negative.
    """
    if tier is not Decision.HOST and tier is not Decision.DISK:
        raise ValueError(f"tier is {tier}; evicted activations go to Decision.HOST or .DISK")
    if min_bytes < 0:
        raise ValueError(f"min_bytes is {min_bytes}; it must be 0 or more")
    parsed = parse_plan_name(name)
    num_blocks = len(workload.blocks)
    if parsed.num_last_blocks is not None and parsed.num_last_blocks > num_blocks:
        raise PlanError(
            f"plan {name!r} evicts the last {parsed.num_last_blocks} blocks, but the workload has "
            f"{num_blocks}; K is at most the number of blocks. Ask for 'offload-last:{num_blocks}'"
            " or fewer."
        )
    decisions: dict[str, Decision] = {}
    max_block_bytes = 0
    for index, block in enumerate(workload.blocks):
        chosen = _choose(parsed, block, num_blocks_left=num_blocks - index)
        block_decisions = _block_decisions(block, chosen, tier=tier, min_bytes=min_bytes)
        decisions.update(block_decisions)
        max_block_bytes = max(max_block_bytes, _sum_bytes(block, block_decisions, tier))
    # No smaller than any single activation that moves, since it is no smaller than the sum over
    # its block; a limit below that would let the runtime wait for ever.
    in_flight_bytes = max(min_in_flight_bytes, max_block_bytes)
    return Plan(
        name=name,
        model=workload.model,
        fingerprint=workload.fingerprint,
        decisions=decisions,
        host_bytes=sum(_sum_bytes(block, decisions, Decision.HOST) for block in workload.blocks),
        disk_bytes=sum(_sum_bytes(block, decisions, Decision.DISK) for block in workload.blocks),
        max_out_bytes_in_flight=in_flight_bytes,
        max_in_bytes_in_flight=in_flight_bytes,
    )


def needed(block: Block, stored: AbstractSet[str]) -> set[str]:
    """Return the activations that backward needs when those in `stored` are stored.

    These are the saved activations and the cones of those that are recomputed: their inputs,
    and so on until stored activations or such that no op of the block can make again.

    Args:
        block: The block; `stored` may hold other names, which are ignored.
        stored: Names of the activations that are kept or evicted.
    """
    by_name = {activation.name: activation for activation in block.activations}
    found: set[str] = set()
    waiting = [activation.name for activation in block.activations if activation.is_saved]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name not in stored and by_name[name].is_replayable:
            waiting.extend(by_name[name].inputs)
    return found


def missing(plan: Plan, workload: Workload) -> list[str]:
    """Return the saved activations that backward could not restore under a plan.

    An independent check, written against the meaning of decisions and not the planners'
    rules: one pass in execution order, in which an activation can be restored if it is stored,
    or replayable with inputs that can all be restored. Empty for a complete plan.
    """
    lost: list[str] = []
    for block in workload.blocks:
        can_restore: dict[str, bool] = {}
        for activation in block.activations:
            decision = plan.decision(activation.name)
            match decision:
                case Decision.KEEP | Decision.HOST | Decision.DISK:
                    can_restore[activation.name] = True
                case Decision.RECOMPUTE | None:
                    can_restore[activation.name] = activation.is_replayable and all(
                        can_restore[name] for name in activation.inputs
                    )
                case _:
                    assert_never(decision)
            if activation.is_saved and not can_restore[activation.name]:
                lost.append(activation.name)
    return lost


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What a rule says about one block."""

    stored: frozenset[str]
    """Activations to keep or evict; the rest of what is needed is recomputed."""
    evicted: frozenset[str] = frozenset()
    """What goes to the tier if it is large enough; of what is stored, the rest is kept."""


def _valid_names(name: str) -> str:
    return unknown_name_message("plan", name, NAMED_PLANS)


def _choose(parsed: PlanName, block: Block, *, num_blocks_left: int) -> _Choice:
    """Apply a family's rule; `num_blocks_left` counts the block itself, so the last has 1."""
    is_last = num_blocks_left == 1
    saved = frozenset(activation.name for activation in block.activations if activation.is_saved)
    match parsed.family:
        case PlanFamily.KEEP:
            return _Choice(stored=saved)
        case PlanFamily.RECOMPUTE:
            return _Choice(stored=_not_replayable(block))
        case PlanFamily.OFFLOAD_INPUTS:
            stored = _not_replayable(block)
            return _Choice(stored=stored, evicted=frozenset() if is_last else stored)
        case PlanFamily.OFFLOAD:
            # Backward starts with the last block: what it evicts would be wanted at once.
            if is_last:
                return _Choice(stored=saved)
            stored = _store_dominating(block, _not_cheap(block, recomputed=frozenset()))
            return _Choice(stored=stored, evicted=stored)
        case PlanFamily.BALANCED:
            stored = _store_dominating(block, _not_cheap_nor_wide(block))
            # Of the last block, backward wants the input last: a whole block's time from then.
            return _Choice(stored=stored, evicted=_inputs(block) if is_last else stored)
        case PlanFamily.OFFLOAD_LAST:
            assert parsed.num_last_blocks is not None, "K was not parsed; this is a bug in ebbtide"
            is_evicting = num_blocks_left <= parsed.num_last_blocks
            return _Choice(stored=saved, evicted=saved if is_evicting else frozenset())
        case _:
            assert_never(parsed.family)


def _block_decisions(
    block: Block, choice: _Choice, *, tier: Decision, min_bytes: int
) -> dict[str, Decision]:
    names = needed(block, choice.stored)
    # An empty storage has nothing to copy, even when min_bytes is 0.
    min_moved_bytes = max(min_bytes, 1)
    decisions: dict[str, Decision] = {}
    for activation in block.activations:
        if activation.name not in names:
            continue
        if activation.name not in choice.stored:
            decisions[activation.name] = Decision.RECOMPUTE
        elif activation.name in choice.evicted and activation.num_bytes >= min_moved_bytes:
            decisions[activation.name] = tier
        else:
            decisions[activation.name] = Decision.KEEP
    return decisions


def _sum_bytes(block: Block, decisions: Mapping[str, Decision], tier: Decision) -> int:
    return sum(
        activation.num_bytes
        for activation in block.activations
        if decisions.get(activation.name) is tier
    )


def _inputs(block: Block) -> frozenset[str]:
    return frozenset(a.name for a in block.activations if a.kind is OpKind.INPUT)


def _not_replayable(block: Block) -> frozenset[str]:
    return frozenset(
        activation.name for activation in block.activations if not activation.is_replayable
    )


def _not_cheap(block: Block, *, recomputed: AbstractSet[str]) -> frozenset[str]:
    """What is needed when cheap ops and those in `recomputed` are run again, and no others.

    All saved outputs of an attention op are among it if one output is: attention is not cheap,
    so each output that is needed is stored.
    """
    stored = {
        activation.name
        for activation in block.activations
        if not (_is_cheap(activation) or activation.name in recomputed)
    }
    return frozenset(stored & needed(block, stored))


def _is_cheap(activation: Activation) -> bool:
    return activation.kind in CHEAP and activation.is_replayable


def _not_cheap_nor_wide(block: Block) -> frozenset[str]:
    """As `_not_cheap`, with every needed wide matmul recomputed except the first of the block."""
    input_bytes = next(
        (
            activation.num_bytes
            for activation in block.activations
            if activation.kind is OpKind.INPUT
        ),
        None,
    )
    if input_bytes is None:
        return _not_cheap(block, recomputed=frozenset())
    wide = [
        activation.name
        for activation in block.activations
        if activation.kind is OpKind.MATMUL
        and activation.is_replayable
        and activation.num_bytes > WIDE_IN_BLOCK_INPUTS * input_bytes
    ]
    recomputed: frozenset[str] = frozenset()
    while True:
        stored = _not_cheap(block, recomputed=recomputed)
        # Recomputing a wide matmul can make an earlier one needed, which is then the first. The
        # set only grows, so this ends.
        needed_wide = [name for name in wide if name in stored or name in recomputed]
        if recomputed == frozenset(needed_wide[1:]):
            return stored
        recomputed = frozenset(needed_wide[1:])


def _store_dominating(block: Block, stored: frozenset[str]) -> frozenset[str]:
    """The dominance rule: store what is made from an activation, where that serves instead.

    A stored activation that autograd does not save is only there to recompute others. If one
    of these is no larger, is reached through replayable elementwise ops alone, and makes the
    first one unneeded when it is stored itself, it is stored instead: the query after its
    rotary embedding instead of before, the residual stream instead of the projection that is
    added to it. Repeated until nothing changes; each step moves later in execution order, so
    this ends. What is needed only shrinks, so a complete choice stays complete.
    """
    while True:
        better = _find_better(block, stored)
        if better is None:
            return stored
        stored = better


def _find_better(block: Block, stored: frozenset[str]) -> frozenset[str] | None:
    """One step of the dominance rule, or None if no step is left."""
    needed_before = needed(block, stored)
    for source in block.activations:
        if source.name not in stored or source.is_saved:
            continue
        for target in _targets(block, source, needed_before - stored):
            with_target = stored | {target.name}
            needed_after = needed(block, with_target)
            if source.name not in needed_after:
                return with_target & needed_after
    return None


def _targets(block: Block, source: Activation, recomputed: AbstractSet[str]) -> list[Activation]:
    """What elementwise ops that are run again make from `source` and is no larger.

    Fewest bytes first, then in execution order: of two equals that both serve, the fixed point
    passes from the first to the second.
    """
    reached = {source.name}
    targets: list[Activation] = []
    for activation in block.activations:
        if (
            activation.name in recomputed
            and activation.kind is OpKind.ELEMENTWISE
            and not reached.isdisjoint(activation.inputs)
        ):
            reached.add(activation.name)
            if activation.num_bytes <= source.num_bytes:
                targets.append(activation)
    return sorted(targets, key=lambda target: target.num_bytes)
