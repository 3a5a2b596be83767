"""What to do about memory that no plan can lower."""

from __future__ import annotations

from ebbtide.units import format_bytes
from ebbtide.workload import Outside

CHUNKED_LOSS = (
    "compute the loss in chunks, with Liger's fused linear cross-entropy (liger_kernel) or, from "
    "torch 2.13 on, torch.nn.functional.linear_cross_entropy with LinearCrossEntropyOptions; "
    "`ebbtide compare --chunked-loss` measures what that gives"
)
"""How to keep logits from being there all at once: libraries that do, and the trial of it."""


def advise_on_logits(outside: Outside, peak_bytes: int) -> str | None:
    """Say that logits and loss hold most of what a plan's peak has beyond weights.

    Args:
        outside: What the step holds outside of the blocks.
        peak_bytes: The plan's peak.

    Returns:
        A sentence, or `None` where they hold less than half of it.
    """
    beyond_bytes = peak_bytes - outside.resident_bytes
    if outside.turn_bytes * 2 <= beyond_bytes:
        return None
    return (
        f"logits and loss hold {format_bytes(outside.turn_bytes)} of the peak's "
        f"{format_bytes(beyond_bytes)} beyond weights, gradients and optimizer state, and no plan "
        f"lowers that: {CHUNKED_LOSS}"
    )
