"""Offloading by name, as policies of MaxText and jax do: the same names in every layer.

The input of each layer is kept, what is named goes to the host, all else is made again. Two ways
of copying:

- overlapped: a layer's copies may take as long as the next layer's forward, and fetches start one
  layer ahead, as XLA's pipelined host offloading does;
- not overlapped: compute waits for each copy, out and in.
"""

from ebbtide.block import Block, OpKind
from ebbtide.plan import TURN_END, Decision, Plan
from ebbtide.planner import needed
from ebbtide.workload import Workload


def plan_by_names(
    workload: Workload,
    names: frozenset[str],
    *,
    is_overlapped: bool,
    tier: Decision = Decision.HOST,
) -> Plan:
    """Return the plan that moves what is named.

    Args:
        workload: Of the step.
        names: Local to a block, such as `.self_attn.q_proj`; none: full recomputation.
        is_overlapped: Whether copies run beside compute.
        tier: Where what is named goes; KEEP: it stays on the device.
    """
    decisions: dict[str, Decision] = {}
    release_at: dict[str, str] = {}
    fetch_at: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for index, block in enumerate(workload.blocks):
        stored = _stored(block, names)
        moved: list[str] = []
        wanted = needed(block, stored)
        for activation in block.activations:
            name = activation.name
            if name not in wanted and name not in stored:
                continue
            if name in stored and name.removeprefix(block.name) in names:
                decisions[name] = tier
                if tier is Decision.KEEP:
                    continue
                moved.append(name)
                sizes[name] = activation.num_bytes
            else:
                decisions[name] = Decision.KEEP if name in stored else Decision.RECOMPUTE
        following = workload.blocks[index + 1] if index + 1 < len(workload.blocks) else None
        if is_overlapped:
            for name in moved:
                anchor = None if following is None else _same(name, block, following)
                if anchor is not None:
                    release_at[name] = anchor
                fetch_at[name] = TURN_END if following is None else _first_used(following)
        else:
            release_at.update(_next_made(block, following, moved))
    host = sum(sizes.values())
    most = max((sum(sizes.get(a.name, 0) for a in b.activations) for b in workload.blocks),
               default=0)  # fmt: skip
    return Plan(
        name="offload by name" if names else "recompute",
        model=workload.model,
        fingerprint=workload.fingerprint,
        decisions=decisions,
        host_bytes=host if tier is Decision.HOST else 0,
        disk_bytes=host if tier is Decision.DISK else 0,
        max_out_bytes_in_flight=2 * most,
        max_in_bytes_in_flight=2 * most,
        release_at=release_at,
        fetch_at=fetch_at,
    )


def _stored(block: Block, names: frozenset[str]) -> frozenset[str]:
    stored = {
        activation.name
        for activation in block.activations
        if activation.name.removeprefix(block.name) in names
        or activation.kind is OpKind.INPUT
        or not activation.is_replayable
    }
    # What is not needed with these stored need not be there.
    wanted = needed(block, frozenset(stored))
    return frozenset(
        name for name in stored if name in wanted or name.removeprefix(block.name) in names
    )


def _same(name: str, block: Block, following: Block) -> str | None:
    """Return the activation of the next block at whose making the copy must be done."""
    local = name.removeprefix(block.name)
    have = {a.name for a in following.activations}
    same = following.name + local
    return same if same in have else following.activations[-1].name


def _first_used(block: Block) -> str:
    """Return an activation that this block's backward asks for first."""
    for event in block.backward:
        if event.uses:
            return event.uses[0]
    return TURN_END


def _next_made(block: Block, following: Block | None, moved: list[str]) -> dict[str, str]:
    """Let each go before the next call runs; the block's last at the next block's first."""
    groups = [a.group for a in block.activations]
    after: dict[str, str] = {}
    for index, activation in enumerate(block.activations):
        if activation.name not in moved:
            continue
        later = [a.name for a, g in zip(block.activations[index:], groups[index:], strict=True)
                 if g != activation.group]  # fmt: skip
        if later and not block.is_fused:
            after[activation.name] = later[0]
        elif following is not None:
            after[activation.name] = following.activations[0].name
    return after
