"""Move what host memory cannot hold on to disk."""

from ebbtide.plan import Decision, Plan
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
