"""What one run was asked to do, and the checks that need no framework."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ebbtide.budget import parse_budget
from ebbtide.units import parse_bytes, parse_path_and_cap

# The first step under one of ebbtide's plans observes and the second is checked bit for bit.
# Every strategy takes the same number of optimizer steps, so all of them warm up for two.
WARM_UP_STEPS = 2
# With a budget the second step is measured, and the third is the first under the plan.
BUDGET_WARM_UP_STEPS = 4
# Of compiled blocks the third step is measured.
COMPILED_BUDGET_WARM_UP_STEPS = 5

# No device has more; only whether a budget can be read is checked before the device is known.
MAX_DEVICE_BYTES = 2**50


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """The arguments of `ebbtide compare`, as given."""

    model: str
    """`smollm2`, `gpt2`, a shape such as `moe-shape`, a folder, or a name on the hub."""
    layers: int | None
    """Blocks of a shape; `None` for its default."""
    context: int | None
    """Tokens in a sequence; `None` for the device's default."""
    batch: int
    """Sequences in a step."""
    steps: int | None
    """Counted steps; `None` for the device's default. Cost: one step's time each."""
    strategies: tuple[str, ...]
    """Canonical names, one row each."""
    host: str | None
    """Most pinned host memory for ebbtide's plans; `None` for their default."""
    disks: tuple[str, ...]
    """`PATH:CAP` of each disk for ebbtide's plans; without any none (on a CPU: a temporary
    folder)."""
    text: Path | None
    """UTF-8 file to train on; `None` for the packaged text."""
    device: str | None
    """`cpu`, `cuda` or `cuda:N`; `None` for a GPU where there is one."""
    seed: int
    """Seed of random weights and of dropout."""
    budget: str | None = None
    """Most device memory for the strategy `ebbtide`; `None` without that strategy."""
    is_compiled: bool = False
    """Compile each block, where the strategy supports that. Cost: a minute of the first step."""
    has_chunked_loss: bool = False
    """Compute the loss in chunks, under every strategy alike."""
    passes: int = 0
    """Forward and backward passes to time under torch's default kernels; 0: the training steps
    are timed. Cost: one pass each, and twelve before them."""

    @property
    def num_warm_up_steps(self) -> int:
        """Optimizer steps before the counted ones; the same for every strategy."""
        if self.passes:
            return 0  # nothing of the steps is timed, and the passes have warmed up
        if self.budget is None:
            return WARM_UP_STEPS
        return COMPILED_BUDGET_WARM_UP_STEPS if self.is_compiled else BUDGET_WARM_UP_STEPS


def check_request(request: CompareRequest) -> None:
    """Check what can be checked before the model is known.

    Raises:
        ValueError: An argument is malformed or out of range; the message says which.
    """
    check_at_least("--layers", request.layers, 1)
    check_at_least("--context", request.context, 2)
    check_at_least("--batch", request.batch, 1)
    check_at_least("--steps", request.steps, 1)
    check_at_least("--passes", request.passes, 0)
    check_at_least("--seed", request.seed, 0)
    if request.budget is not None:
        check_budget(request.budget)
    if request.host is not None:
        check_size("--host", request.host)
    for disk in request.disks:
        _check_disk(disk)
    if request.text is not None and not request.text.is_file():
        raise ValueError(f"--text {request.text}: there is no such file; give an existing one")


def write_command(request: CompareRequest, *, context: int, steps: int, device: str) -> str:
    """Return the command line that makes the same run again, with defaults spelled out."""
    arguments = ["ebbtide", "compare", "--model", request.model]
    arguments += [] if request.layers is None else ["--layers", str(request.layers)]
    arguments += ["--context", str(context), "--batch", str(request.batch)]
    arguments += ["--steps", str(steps), "--strategies", ",".join(request.strategies)]
    arguments += [] if request.budget is None else ["--budget", request.budget]
    arguments += [] if request.host is None else ["--host", request.host]
    arguments += [word for disk in request.disks for word in ("--disk", disk)]
    arguments += [] if request.text is None else ["--text", str(request.text)]
    arguments += ["--compile"] if request.is_compiled else []
    arguments += ["--passes", str(request.passes)] if request.passes else []
    arguments += ["--chunked-loss"] if request.has_chunked_loss else []
    return shlex.join([*arguments, "--device", device, "--seed", str(request.seed)])


def check_at_least(option: str, given: int | None, least: int) -> None:
    """Raise `ValueError` if a number was given and is less than `least`."""
    if given is not None and given < least:
        raise ValueError(f"{option} {given}: it must be {least} or more; give a larger number")


def check_budget(given: str) -> None:
    """Raise `ValueError` if `--budget` cannot be read."""
    try:
        parse_budget(given, MAX_DEVICE_BYTES)
    except ValueError as error:
        raise ValueError(f"--budget {given}: {error}") from error


def check_size(option: str, given: str) -> None:
    """Raise `ValueError` if an option's size cannot be read."""
    try:
        parse_bytes(given)
    except ValueError as error:
        raise ValueError(f"{option} {given}: {error}") from error


def _check_disk(given: str) -> None:
    try:
        folder = Path(parse_path_and_cap(given).path)
    except ValueError as error:
        raise ValueError(f"--disk {given}: {error}") from error
    if not folder.is_dir():
        raise ValueError(
            f"--disk {given}: {folder} is not a folder; give an existing one, as PATH:CAP"
        )
