"""Resolve a request into what every row shares: model, windows of text, device and facts."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ebbtide.compare.jax.probe import JaxDevice, probe_device, select_device
from ebbtide.compare.jax.request import WARM_UP_STEPS, JaxRequest, write_jax_command
from ebbtide.compare.jax.shapes import (
    SHAPES,
    SMOLLM2,
    TITLES,
    TORCH_SMOLLM2,
    JaxModelSource,
    choose_shape,
    count_parameters,
    find_shape,
)
from ebbtide.compare.jax.task import LEARNING_RATE
from ebbtide.compare.results import Facts
from ebbtide.compare.texts import cut_windows, read_text
from ebbtide.errors import MissingExtraError
from ebbtide.memory.limits import find_tightest_limit
from ebbtide.version import __version__

PACKAGES = ("jax", "flax", "optax", "safetensors")
EXTRAS = "jax,jax-demo"

PLANNED_MEANING = (
    "peak_gib is what XLA plans for the compiled step on one device: arguments, results and "
    "temporary memory (weights, gradients, optimizer state, activations, buffers of copies)"
)
MEASURED_MEANING = (
    "; reserved_gib is the most that the process had allocated on the device, planning and "
    "evaluation included"
)
ON_CPU_MEANING = (
    "; on a CPU what is offloaded stays in the same memory, so offloading saves nothing here"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefaults:
    """What a kind of device runs unless it is told otherwise."""

    context: int
    num_counted_steps: int
    num_held_out: int
    dtype: str


CPU_DEFAULTS = DeviceDefaults(context=128, num_counted_steps=1, num_held_out=1, dtype="float32")
GPU_DEFAULTS = DeviceDefaults(context=8192, num_counted_steps=5, num_held_out=2, dtype="bfloat16")

# The rest is for the system, the data and what jax stages.
HOST_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxSetup:
    """A run, ready to start."""

    request: JaxRequest
    source: JaxModelSource
    device: JaxDevice
    variables: dict[str, str]
    """Of the environment, which let jax see the device."""
    host_bytes: int | None
    """Most pinned host memory of a row; `None` on a CPU."""
    tokens: Path
    """File of numpy's with the windows `train` and `held_out`."""
    folder: Path
    """Where the run keeps its files until it ends."""
    facts: Facts


def prepare_jax_setup(request: JaxRequest, folder: Path) -> JaxSetup:
    """Find the device, the model and the text, and write the windows under `folder`.

    Raises:
        MissingExtraError: A package is not installed.
        ValueError: The request cannot be run; the message says what to change.
    """
    _require_packages()
    source = find_jax_model(request.model, request.layers)
    shape = find_shape(source)
    variables = select_device(request.device)
    device = probe_device(request.device, variables)
    defaults = GPU_DEFAULTS if device.is_gpu else CPU_DEFAULTS
    if request.host is not None and not device.is_gpu:
        raise ValueError(
            f"--host {request.host}: on a CPU the host's memory is the device's memory; leave "
            "--host out"
        )
    longest = shape.max_positions
    context = min(defaults.context, longest) if request.context is None else request.context
    if context > longest:
        raise ValueError(
            f"--context {context}: the model {request.model} has {longest} positions; give "
            f"--context {longest} or less"
        )
    num_counted_steps = request.steps or defaults.num_counted_steps
    dtype = request.dtype or defaults.dtype
    text = read_text(request.text)
    encode, tokenizer = find_jax_encoder(source, shape.vocab_size)
    windows = cut_windows(
        text.content,
        encode,
        context=context,
        num_train=request.batch * (WARM_UP_STEPS + num_counted_steps),
        num_held_out=defaults.num_held_out,
    )
    tokens = folder / "tokens.npz"
    np.savez(
        tokens,
        train=np.asarray(windows.train, np.int32),
        held_out=np.asarray(windows.held_out, np.int32),
    )
    num_parameters = count_parameters(shape)
    item_bytes = {"bfloat16": 2, "float32": 4}[dtype]
    return JaxSetup(
        request=request,
        source=source,
        device=device,
        variables=variables,
        host_bytes=find_host_bytes() if device.is_gpu else None,
        tokens=tokens,
        folder=folder,
        facts=Facts(
            framework="jax",
            model=source.title,
            parameters=num_parameters,
            context=context,
            batch=request.batch,
            device=f"{device.platform} ({device.kind})",
            dtype=dtype,
            versions=list_versions(device),
            memory_meaning=PLANNED_MEANING
            + (MEASURED_MEANING if device.is_gpu else ON_CPU_MEANING),
            command=write_jax_command(
                request,
                context=context,
                steps=num_counted_steps,
                device=request.device or ("cuda" if device.is_gpu else "cpu"),
                dtype=dtype,
            ),
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            steps=num_counted_steps,
            warm_up_steps=WARM_UP_STEPS,
            passes=0,
            optimizer=f"optax's AdamW, learning rate {LEARNING_RATE:g}",
            seed=request.seed,
            text=text.name,
            tokenizer=tokenizer,
            held_out_tokens=defaults.num_held_out * context,
            # Weights, gradients and two moments.
            state_bytes=4 * num_parameters * item_bytes,
            logits_bytes=request.batch * context * shape.vocab_size * item_bytes,
            loss="optax's cross-entropy of the next token, in float32",
            is_loss_chunked=False,
            is_compiled=True,
            gradient_reference=None,
            compiled_gradient_reference=None,
            disturbance="" if device.is_gpu else "on a CPU they say nothing about a GPU",
            disk="",
        ),
    )


def find_jax_model(name: str, layers: int | None) -> JaxModelSource:
    """Find what `--model` names.

    Raises:
        ValueError: There is no such model, or `layers` was given for pre-trained weights.
    """
    is_pretrained = name in (SMOLLM2, TORCH_SMOLLM2) or Path(name).is_dir()
    if not is_pretrained:
        shape = choose_shape(name, layers)
        title = f"{TITLES[name]}, {shape.num_layers} layers, random weights"
        return JaxModelSource(name=name, layers=layers, folder="", title=title)
    if layers is not None:
        raise ValueError(
            f"--layers {layers} was given with --model {name}: only {', '.join(SHAPES)} have a "
            "number of layers to choose; leave --layers out"
        )
    if Path(name).is_dir():
        folder = Path(name).resolve()
        return JaxModelSource(name="", layers=None, folder=str(folder), title=folder.name)
    # The same weights as in a run with torch, which converts and caches them.
    try:
        from ebbtide.compare.workloads import find_model
    except ModuleNotFoundError as error:
        raise MissingExtraError.for_extra(
            "torch,demo", needed_by=f"--model {SMOLLM2} ({error.name})"
        ) from error
    found = find_model(TORCH_SMOLLM2, None)
    return JaxModelSource(name="", layers=None, folder=found.location, title=found.title)


def find_jax_encoder(
    source: JaxModelSource, vocab_size: int
) -> tuple[Callable[[str], list[int]], str]:
    """Return the model's own tokenizer or bytes as ids, and what to call it."""
    path = Path(source.folder) / "tokenizer.json"
    if source.folder and path.is_file():
        from tokenizers import Tokenizer

        tokenizer: Any = Tokenizer.from_file(str(path))
        title = f"the model's own ({tokenizer.get_vocab_size()} tokens)"
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, title
    more = f" modulo {vocab_size})" if vocab_size < 256 else ")"
    return (
        lambda text: [byte % vocab_size for byte in text.encode()],
        f"byte level (ids are UTF-8 bytes{more}",
    )


def find_host_bytes() -> int:
    """Return the most host memory that a row may pin."""
    limit = find_tightest_limit()
    free = psutil.virtual_memory().available if limit is None else limit.room_bytes
    return int(free * HOST_SHARE)


def list_versions(device: JaxDevice) -> dict[str, str]:
    """Return the versions of what decides the numbers."""
    packages = {package: version(package) for package in ("flax", "optax")}
    return {
        "python": platform.python_version(),
        "ebbtide": __version__,
        **device.versions,
        **packages,
    }


def _require_packages() -> None:
    for package in PACKAGES:
        if find_spec(package) is None:
            needed_by = f"ebbtide compare --framework jax ({package})"
            raise MissingExtraError.for_extra(EXTRAS, needed_by=needed_by)
