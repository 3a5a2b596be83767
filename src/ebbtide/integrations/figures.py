"""The figures of an attached model, as the names and numbers that a trainer logs."""

from __future__ import annotations

import torch

from ebbtide.torch import Tide


def figures_of(tide: Tide) -> dict[str, int | float]:
    """Return what a training loop may log now; empty before there is a plan.

    Args:
        tide: An attached model.

    Returns:
        `ebbtide/moved_out_bytes`, `moved_in_bytes`, `recomputed_ops`, `host_peak_bytes` and
        `disk_peak_bytes`, all counted since `attach`. With a budget also what the plan predicts:
        `predicted_step_ms` and `bound_step_ms` of one forward and backward, and
        `predicted_peak_bytes`. On a CUDA device `measured_peak_bytes`, the most that torch had
        allocated since its counter was last reset. What was not measured is not among them.
    """
    plan = tide.plan
    if plan is None or tide.runtime is None:
        return {}
    counts = tide.statistics()
    figures: dict[str, int | float] = {
        "moved_out_bytes": counts.moved_out_bytes,
        "moved_in_bytes": counts.moved_in_bytes,
        "recomputed_ops": counts.num_recomputed_ops,
        "host_peak_bytes": counts.host.peak_held_bytes,
        "disk_peak_bytes": counts.disk.peak_held_bytes,
    }
    if plan.budget_bytes:
        figures["predicted_step_ms"] = plan.predicted_step_ns / 1e6
        figures["bound_step_ms"] = plan.bound_step_ns / 1e6
        figures["predicted_peak_bytes"] = plan.peak_bytes
    if tide.runtime.device.type == "cuda":
        figures["measured_peak_bytes"] = torch.cuda.max_memory_allocated(tide.runtime.device)
    return {f"ebbtide/{name}": value for name, value in figures.items()}
