"""A workload in a few lines, for people."""

from collections import Counter

from ebbtide.units import format_bytes
from ebbtide.workload import Workload


def write_workload_summary(workload: Workload) -> list[str]:
    """Return the blocks by class, what they save, and where the step's time and memory go."""
    classes = Counter(block.class_name for block in workload.blocks)
    named = ", ".join(f"{num} x {name}" for name, num in classes.items())
    num_saved = sum(a.is_saved for block in workload.blocks for a in block.activations)
    lines = [
        f"{workload.model}: {len(workload.blocks)} blocks ({named})",
        f"saved for backward: {format_bytes(workload.num_bytes_saved)} in {num_saved} activations",
        f"blocks: {_ms(sum(block.forward_ns for block in workload.blocks))} forward, "
        f"{_ms(sum(block.backward_ns for block in workload.blocks))} backward",
    ]
    outside = workload.outside
    if outside is not None:
        lines += [
            f"outside of the blocks: {_ms(outside.turn_ns)} between forward and backward (logits "
            f"and loss), {_ms(outside.ends_ns)} before and after",
            f"held all through: {format_bytes(outside.resident_bytes)}; for logits and loss: "
            f"{format_bytes(outside.turn_bytes)}",
        ]
    if workload.gradient_bytes:
        lines.append(f"made by backward: {format_bytes(workload.gradient_bytes)} of gradients")
    return lines


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f} ms"
