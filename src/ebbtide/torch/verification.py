"""What `Tide.verify` found, as data and in words."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from ebbtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The place where a planned step first went another way than the step without a plan."""

    step: int
    """The compared step, from 1."""
    block: str
    """Path of the block; empty for what lies outside of the blocks."""
    tensor: str
    """What differs: `loss`, `output`, `gradient of its input`, `gradient of NAME`, `buffer NAME`
    or `random state`."""
    largest_difference: float
    """Of its elements; NaN where it is not known or not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What comparing steps with and without a plan found."""

    equal: bool
    """Nothing differs: in no bit, or where runs without a plan differ, by no more than these."""
    largest_difference: float
    """Between any tensor of a planned step and of a step without; NaN: not finite, or missing."""
    noise: float
    """Largest difference between two runs without a plan; 0: every bit was compared."""
    first_difference: Difference | None
    """None if nothing differs."""
    model: str
    """Class of the model."""
    plan: str
    """Name of the plan; `keep` where nothing is installed."""
    reference: str
    """What ran without the plan: `plain`, or `recompute` under torch's own checkpointing."""
    is_deterministic: bool
    """Kernels that give the same bits each time were asked for, and were there."""
    is_training: bool
    """The model was in training mode: else dropout did nothing."""
    num_steps: int
    """Planned steps that were compared."""
    num_tensors: int
    """Tensors that were compared in each."""
    loss: float
    """Of the step without a plan."""
    moved_out_bytes: int
    """Bytes evicted in the compared steps."""
    moved_in_bytes: int
    """Bytes fetched in the compared steps."""
    num_recomputed_ops: int
    """Operators run again in the compared steps."""

    def to_json(self) -> str:
        """Return one JSON object, with the fields of this class; what is not finite is null."""
        record: dict[str, Any] = asdict(self)
        if self.first_difference is not None:
            record["first_difference"] = _finite(record["first_difference"])
        return json.dumps(_finite(record), indent=2)

    def __str__(self) -> str:
        """Return lines for people."""
        steps = f"{self.num_steps} step" + "s" * (self.num_steps != 1)
        lines = [
            f"{self.model}, plan {self.plan}: {steps} compared with the same step without "
            f"({self.reference}, {'deterministic' if self.is_deterministic else 'default'} "
            f"kernels), {self.num_tensors} tensors each",
            f"moved out {format_bytes(self.moved_out_bytes)}, in "
            f"{format_bytes(self.moved_in_bytes)}; {self.num_recomputed_ops} operators run again",
        ]
        found = self.first_difference
        if found is not None:
            where = f"in block {found.block}" if found.block else "outside of the blocks"
            lines += [
                f"DIFFERENT: first {found.tensor}, {where}, in step {found.step}, by "
                f"{found.largest_difference:.3g}",
                f"largest difference {self.largest_difference:.3g}, noise {self.noise:.3g}",
            ]
        elif self.noise:
            lines.append(
                f"equal within noise: two runs without a plan differ by {self.noise:.3g}, the "
                f"planned ones by {self.largest_difference:.3g}"
            )
        else:
            lines.append("equal: the loss, every gradient and every buffer, in every bit")
        if not self.moved_out_bytes and not self.num_recomputed_ops:
            lines.append("note: nothing was moved or run again, so this says little of the plan")
        if not math.isfinite(self.loss):
            lines.append(f"note: the loss is {self.loss}, which can hide what differs")
        if not self.is_training:
            lines.append("note: the model is in evaluation mode, so dropout did nothing")
        return "\n".join(lines)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
