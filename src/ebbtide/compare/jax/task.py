"""What a parent process asks one row's child process to run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ebbtide.compare.jax.shapes import JaxModelSource

LEARNING_RATE = 2e-5
"""As the run with torch uses it for SmolLM2-135M."""

OUTCOME_ROW, OUTCOME_AGAIN = "row", "again"
"""Keys of the result file: a row; or the flag set that the plan should be run with instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxTask:
    """One row's run. All but the strategy and the reference is the same for every row."""

    strategy: str
    """A row's name."""
    source: JaxModelSource
    """The model."""
    context: int
    """Tokens in a sequence."""
    batch: int
    """Sequences in a step."""
    num_counted_steps: int
    """Steps after warm-up."""
    num_warm_up_steps: int
    """Steps before the counted ones."""
    dtype: str
    """`bfloat16` or `float32`."""
    seed: int
    """Seed of random weights."""
    budget: str | None
    """Most device memory of a step, for `ebbtide`."""
    host: str | None
    """Most pinned host memory, for `ebbtide`."""
    xla_flags: str
    """The row's own flags, which the process was started with."""
    may_start_again: bool
    """Whether the parent can run a plan that moves nothing again, with command buffers."""
    tokens: str
    """File of numpy's with the windows `train` and `held_out`."""
    gradients: str | None
    """Folder of the reference's gradients; `None` if there is nothing to compare with."""
    is_reference: bool
    """Write the gradients to that folder instead of comparing with it."""
    result: str
    """JSON file that the outcome is written to."""


def write_task(task: JaxTask, path: Path) -> None:
    """Write the task as JSON."""
    path.write_text(json.dumps(asdict(task)), encoding="utf-8")


def read_task(path: Path) -> JaxTask:
    """Read what `write_task` wrote."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    record["source"] = JaxModelSource(**record["source"])
    return JaxTask(**record)
