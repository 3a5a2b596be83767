"""What `Tide.report` says: the plan, and what was moved and recomputed, in a few lines."""

from __future__ import annotations

import torch

from ebbtide.memory.ledger import SanitizerStatistics, Statistics
from ebbtide.plan import Decision, Plan
from ebbtide.planner.advice import advise_on_logits
from ebbtide.units import format_bytes
from ebbtide.workload import Workload


def write_report(
    plan: Plan, counts: Statistics, workload: Workload | None, device: torch.device
) -> str:
    """Return lines for people, with line breaks between."""
    num = {d: sum(1 for v in plan.decisions.values() if v is d) for d in Decision}
    lines = [
        f"plan {plan.name}: " + ", ".join(f"{num[d]} {d.value}" for d in Decision if num[d]),
        f"moved out {format_bytes(counts.moved_out_bytes)}, "
        f"in {format_bytes(counts.moved_in_bytes)}; "
        f"{counts.num_resurrections} fetches avoided, "
        f"{counts.num_recomputed_ops} operators run again",
        f"peaks: host {format_bytes(counts.host.peak_held_bytes)}, "
        f"disk {format_bytes(counts.disk.peak_held_bytes)}, "
        f"in flight on the device {format_bytes(counts.peak_held_device_bytes)}",
    ]
    if counts.stall_ns:
        lines.append(f"compute waited {counts.stall_ns / 1e6:.1f} ms for copies")
    if plan.budget_bytes:
        gap = plan.predicted_step_ns / max(plan.bound_step_ns, 1) - 1
        lines.insert(
            1,
            f"predicted: forward and backward {plan.predicted_step_ns / 1e6:.1f} ms, at most "
            f"{gap:.2%} over the least possible; peak {format_bytes(plan.peak_bytes)} of a "
            f"budget of {format_bytes(plan.budget_bytes)}",
        )
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            lines.insert(2, f"measured: peak {format_bytes(peak)} allocated")
    outside = None if workload is None else workload.outside
    if plan.budget_bytes and outside is not None:
        advice = advise_on_logits(outside, plan.peak_bytes)
        lines += [advice] if advice else []
    lines += [f"kept on the device: {n} ({why})" for why, n in counts.num_kept_not_understood]
    if counts.sanitizer is not None:
        lines += _describe_sanitizer(counts.sanitizer)
    return "\n".join(lines)


def _describe_sanitizer(counts: SanitizerStatistics) -> list[str]:
    return [
        f"sanitizer, {counts.num_steps} steps: {counts.num_tensors} saved tensors and "
        f"{counts.num_copies} fetches compared ({format_bytes(counts.compared_bytes)}), no "
        f"difference; {format_bytes(counts.poisoned_bytes)} poisoned",
        f"it took {counts.check_ns / 1e6:.0f} ms of the host's time; {counts.num_delays} copies "
        f"were held back, for {counts.delay_ns / 1e6:.0f} ms in all or until they were wanted",
    ]
