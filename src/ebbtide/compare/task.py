"""What a parent process asks one strategy's child process to run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, assert_never

from ebbtide.compare.loss import LossKind
from ebbtide.compare.workloads import ModelSource, Weights

# SmolLM2-135M fine-tuned for six AdamW steps at this rate on one 512-token window: its loss
# fell from 3.34 to 2.50 (CPU, fp32).
ADAMW_LEARNING_RATE = 2e-5
# Plain SGD on random weights: large enough to change bf16 weights, small enough to stay finite.
SGD_LEARNING_RATE = 1e-2


class Optimizer(StrEnum):
    """Which optimizer every strategy of a comparison uses."""

    ADAMW = "adamw"
    """Two moments a parameter, fused kernel."""
    SGD = "sgd"
    """No momentum, so no state: for models whose state would fill the device."""


def describe_optimizer(kind: Optimizer) -> str:
    """Return the optimizer's name with its learning rate."""
    match kind:
        case Optimizer.ADAMW:
            return f"AdamW, learning rate {ADAMW_LEARNING_RATE:g}, fused"
        case Optimizer.SGD:
            return f"SGD without momentum, learning rate {SGD_LEARNING_RATE:g}, fused"
        case _:
            assert_never(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One strategy's run. All but the strategy and the reference is the same for every row."""

    strategy: str
    """Canonical name."""
    source: ModelSource
    """The model."""
    num_parameters: int
    """Decides how many steps have their gradients compared."""
    context: int
    """Tokens in a sequence."""
    batch: int
    """Sequences in a step."""
    num_counted_steps: int
    """Steps after warm-up."""
    num_warm_up_steps: int
    """Steps before the counted ones."""
    num_passes: int
    """Passes to time under torch's default kernels; 0: the steps are timed."""
    dtype: str
    """Name of the torch type of the model."""
    device: str
    """Name of the torch device."""
    seed: int
    """Seed of random weights, and with the step's number of dropout."""
    optimizer: Optimizer
    """The optimizer."""
    host: str | None
    """Most host memory for ebbtide's plans."""
    disks: tuple[str, ...]
    """`PATH:CAP` of each disk for ebbtide's plans."""
    budget: str | None
    """Most device memory for the strategy `ebbtide`."""
    loss: LossKind
    """How the loss is computed."""
    is_compiled: bool
    """Compile each block, also under strategies that do not by themselves."""
    tokens: str
    """Safetensors file with the windows `train` and `held_out`."""
    gradients: str | None
    """Folder of the reference's gradients; `None` if there is nothing to compare with."""
    is_reference: bool
    """Write the gradients to that folder instead of comparing with it."""
    result: str
    """JSON file that the row is written to."""


def write_task(task: Task, path: Path) -> None:
    """Write the task as JSON."""
    path.write_text(json.dumps(asdict(task)), encoding="utf-8")


def read_task(path: Path) -> Task:
    """Read what `write_task` wrote."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    source: dict[str, Any] = record["source"]
    source["weights"] = Weights(source["weights"])
    record["source"] = ModelSource(**source)
    record["optimizer"] = Optimizer(record["optimizer"])
    record["loss"] = LossKind(record["loss"])
    record["disks"] = tuple(record["disks"])
    return Task(**record)
