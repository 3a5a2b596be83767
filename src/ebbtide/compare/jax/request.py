"""What one run in JAX was asked to do, and the checks that need no jax."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ebbtide.compare.jax.budget import check_jax_budget
from ebbtide.compare.request import check_at_least, check_size

WARM_UP_STEPS = 1
"""The step is compiled before; its first run loads kernels and fills the allocator."""

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxRequest:
    """The arguments of `ebbtide compare --framework jax`, as given."""

    model: str
    """`smollm2-135m`, a shape such as `deepseek-moe-shape`, or a folder."""
    layers: int | None
    """Layers of a shape; `None` for its default."""
    context: int | None
    """Tokens in a sequence; `None` for the device's default."""
    batch: int
    """Sequences in a step."""
    steps: int | None
    """Counted steps; `None` for the device's default."""
    strategies: tuple[str, ...]
    """Names, one row each."""
    budget: str | None
    """Most device memory of a step, for the row `ebbtide`: also `full-remat+10%`."""
    host: str | None
    """Most pinned host memory for that plan; `None` for its share of the machine's."""
    dtype: str | None
    """`bfloat16` or `float32`; `None` for the device's default."""
    text: Path | None
    """UTF-8 file to train on; `None` for the packaged text."""
    device: str | None
    """`cpu`, `cuda` or `cuda:N`; `None` for a GPU where there is one."""
    seed: int
    """Seed of random weights."""


def refuse_options_of_torch(given: Mapping[str, bool]) -> None:
    """Raise for the first option that a run in JAX has no use for.

    Args:
        given: By option, whether it was given.

    Raises:
        ValueError: One was.
    """
    for option, is_given in given.items():
        if is_given:
            raise ValueError(
                f"{option} has no meaning with --framework jax: {OPTIONS_OF_TORCH[option]}; "
                "leave it out"
            )


OPTIONS_OF_TORCH = {
    "--disk": "jax moves activations to host memory only",
    "--compile": "XLA compiles the whole step in every row",
    "--chunked-loss": "the loss is that of optax in every row",
    "--passes": "the training steps are timed",
}
"""Options with the reason why a run in JAX refuses them."""


def check_jax_request(request: JaxRequest) -> None:
    """Check what can be checked before jax is loaded.

    Raises:
        ValueError: An argument is malformed or out of range; the message says which.
    """
    check_at_least("--layers", request.layers, 1)
    check_at_least("--context", request.context, 2)
    check_at_least("--batch", request.batch, 1)
    check_at_least("--steps", request.steps, 1)
    check_at_least("--seed", request.seed, 0)
    if request.budget is not None:
        check_jax_budget(request.budget, request.strategies)
    if request.host is not None:
        check_size("--host", request.host)
    if request.dtype is not None and request.dtype not in DTYPES:
        raise ValueError(f"--dtype {request.dtype}: unknown type; give {' or '.join(DTYPES)}")
    if request.text is not None and not request.text.is_file():
        raise ValueError(f"--text {request.text}: there is no such file; give an existing one")


def write_jax_command(
    request: JaxRequest, *, context: int, steps: int, device: str, dtype: str
) -> str:
    """Return the command line that makes the same run again, with defaults spelled out."""
    arguments = ["ebbtide", "compare", "--framework", "jax", "--model", request.model]
    arguments += [] if request.layers is None else ["--layers", str(request.layers)]
    arguments += ["--context", str(context), "--batch", str(request.batch)]
    arguments += ["--steps", str(steps), "--strategies", ",".join(request.strategies)]
    arguments += [] if request.budget is None else ["--budget", request.budget]
    arguments += [] if request.host is None else ["--host", request.host]
    arguments += [] if request.text is None else ["--text", str(request.text)]
    arguments += ["--dtype", dtype, "--device", device, "--seed", str(request.seed)]
    return shlex.join(arguments)
