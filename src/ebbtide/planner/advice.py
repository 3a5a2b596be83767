"""What to do about memory that no plan can lower, and about steps that are not as planned."""

from __future__ import annotations

from typing import Final

from ebbtide.units import format_bytes
from ebbtide.workload import Outside

CHUNKED_LOSS = (
    "compute the loss in chunks, with Liger's fused linear cross-entropy (liger_kernel) or, from "
    "torch 2.13 on, torch.nn.functional.linear_cross_entropy with LinearCrossEntropyOptions; "
    "`ebbtide compare --chunked-loss` measures what that gives"
)
"""How to keep logits from being there all at once: libraries that do, and the trial of it."""

RESERVED_FRACTION: Final = 0.2
"""Of what is in use, held by the allocator beyond it: more is worth a setting."""

EXPANDABLE: Final = "Set PYTORCH_ALLOC_CONF=expandable_segments:True"
"""How to let torch's allocator take less beyond what is in use; half a sentence."""

LATE_FRACTION: Final = 0.1
"""Of the predicted time, by which steps take longer: single steps vary by half of it."""


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


def is_fragmented(used_bytes: int, reserved_bytes: int) -> bool:
    """Return whether an allocator held much more than was in use at the peak."""
    return used_bytes > 0 and reserved_bytes - used_bytes >= RESERVED_FRACTION * used_bytes


def advise_on_allocator(used_bytes: int, reserved_bytes: int, num_retries: int) -> str | None:
    """Say that the allocator holds much beyond what is used, or had to give memory back.

    Args:
        used_bytes: Most that was in use at once.
        reserved_bytes: Most that the allocator held.
        num_retries: How often it gave its cache back to the driver and asked again.
    """
    if num_retries:
        return (
            f"the allocator ran full and gave its cache back {num_retries} times, which waits for "
            f"the device: {EXPANDABLE[0].lower()}{EXPANDABLE[1:]}, or lower the budget"
        )
    if is_fragmented(used_bytes, reserved_bytes):
        return (
            f"the allocator held {format_bytes(reserved_bytes)} for a peak of "
            f"{format_bytes(used_bytes)} in use: {EXPANDABLE[0].lower()}{EXPANDABLE[1:]}"
        )
    return None


def advise_on_time(predicted_ns: int, measured_ns: int) -> str | None:
    """Say that steps take longer than was predicted, and how to see where."""
    if not predicted_ns or measured_ns <= predicted_ns * (1 + LATE_FRACTION):
        return None
    return (
        f"steps took {measured_ns / predicted_ns - 1:.0%} longer than was predicted: "
        "`ebbtide trace --record` shows what compute waited for, and `ebbtide doctor` whether the "
        "machine is set up badly"
    )
