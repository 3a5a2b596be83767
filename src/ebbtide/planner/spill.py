"""Plans that move more than a tier holds: what is left over goes to disk, or is recomputed."""

from dataclasses import replace

from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import needed
from ebbtide.workload import Workload


def spill_to_disk(plan: Plan, workload: Workload, host_cap_bytes: int) -> Plan:
    """Return `plan` with its host bytes at most `host_cap_bytes`; the rest goes to disk.

    The last blocks keep their host memory: backward wants them first, while the disk, which is
    slower, has until the end of backward to bring back the first ones. Deterministic.

    Args:
        plan: A plan for `workload`.
        workload: Gives the order and the bytes.
        host_cap_bytes: Most bytes of pinned host memory.
    """
    decisions = dict(plan.decisions)
    host_bytes, disk_bytes = 0, plan.disk_bytes
    for block in reversed(workload.blocks):
        for activation in reversed(block.activations):
            if decisions.get(activation.name) is not Decision.HOST:
                continue
            if host_bytes + activation.num_bytes <= host_cap_bytes:
                host_bytes += activation.num_bytes
            else:
                decisions[activation.name] = Decision.DISK
                disk_bytes += activation.num_bytes
    return Plan(
        name=plan.name,
        model=plan.model,
        fingerprint=plan.fingerprint,
        decisions=decisions,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        max_out_bytes_in_flight=plan.max_out_bytes_in_flight,
        max_in_bytes_in_flight=plan.max_in_bytes_in_flight,
    )


def recompute_rest(plan: Plan, workload: Workload, *, host_bytes: int, disk_bytes: int) -> Plan:
    """Return `plan` with at most so many bytes in each tier; the rest is recomputed.

    What cannot be made again comes first, since it would be kept on the device; then the first
    blocks, since backward wants the last ones as soon as they are evicted. A plan that fits
    comes back as it is; another one loses its budget and its predictions, which hold no more.
    Deterministic.

    Args:
        plan: A complete plan for `workload`; it stays complete.
        workload: Gives the order, the bytes, and what the recomputed is made from.
        host_bytes: Most bytes of pinned host memory.
        disk_bytes: Most bytes on disk.
    """
    left = {Decision.HOST: host_bytes, Decision.DISK: disk_bytes}
    without_room: set[str] = set()
    for is_replayable in (False, True):
        for block in workload.blocks:
            for activation in block.activations:
                tier = plan.decision(activation.name)
                if activation.is_replayable is not is_replayable or tier not in left:
                    continue
                if activation.num_bytes <= left[tier]:
                    left[tier] -= activation.num_bytes
                else:
                    without_room.add(activation.name)
    if not without_room:
        return plan
    decisions = {n: d for n, d in plan.decisions.items() if n not in without_room}
    for block in workload.blocks:
        if not any(activation.name in without_room for activation in block.activations):
            continue
        stored = {n for n, d in decisions.items() if d is not Decision.RECOMPUTE}
        names = needed(block, stored)
        for activation in block.activations:
            if activation.name in names:
                otherwise = Decision.RECOMPUTE if activation.is_replayable else Decision.KEEP
                decisions.setdefault(activation.name, otherwise)
    sizes = {a.name: a.num_bytes for block in workload.blocks for a in block.activations}
    on = {t: sum(sizes[n] for n, d in decisions.items() if d is t and n in sizes) for t in left}
    evicted = {name for name, decision in decisions.items() if decision in left}
    return replace(
        plan,
        decisions=decisions,
        host_bytes=on[Decision.HOST],
        disk_bytes=on[Decision.DISK],
        release_at={name: at for name, at in plan.release_at.items() if name in evicted},
        fetch_at={name: at for name, at in plan.fetch_at.items() if name in evicted},
        budget_bytes=0,
        peak_bytes=0,
        predicted_step_ns=0,
        bound_step_ns=0,
    )
