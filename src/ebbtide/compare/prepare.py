"""Resolve a request into what every strategy shares: model, windows of text, and facts."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from transformers.utils import logging as transformers_logging

from ebbtide.compare.gradients import LARGE_MODEL_PARAMETERS
from ebbtide.compare.loss import LossKind, describe_loss, find_chunked_loss
from ebbtide.compare.meter import describe_memory
from ebbtide.compare.request import CompareRequest, write_command
from ebbtide.compare.results import Facts
from ebbtide.compare.task import Optimizer, describe_optimizer
from ebbtide.compare.texts import cut_windows, read_text
from ebbtide.compare.workloads import (
    SHAPES,
    ModelSource,
    count_parameters,
    describe_model,
    find_encoder,
    find_longest_context,
    find_model,
    read_config,
)
from ebbtide.memory.mounts import MOUNTS_PATH, is_memory_backed
from ebbtide.units import format_bytes
from ebbtide.version import __version__

# Starting the command itself loads one core for some seconds of the minute that is averaged.
BUSY_LOAD_FRACTION = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefaults:
    """What a kind of device runs unless it is told otherwise."""

    context: int
    num_counted_steps: int
    num_held_out: int
    """Windows of held-out text behind a perplexity."""
    dtype: torch.dtype


# 512 tokens and three steps take two CPU cores about 30 s a strategy with SmolLM2-135M.
CPU_DEFAULTS = DeviceDefaults(context=512, num_counted_steps=1, num_held_out=1, dtype=torch.float32)
CUDA_DEFAULTS = DeviceDefaults(
    context=8192, num_counted_steps=5, num_held_out=2, dtype=torch.bfloat16
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run, ready to start."""

    request: CompareRequest
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    optimizer: Optimizer
    loss: LossKind
    disks: tuple[str, ...]
    """`PATH:CAP` of each disk for ebbtide's plans, the temporary folder on a CPU included."""
    tokens: Path
    """Safetensors file with the windows `train` and `held_out`."""
    folder: Path
    """Where the run keeps its files until it ends."""
    facts: Facts


def prepare_setup(request: CompareRequest, folder: Path) -> Setup:
    """Find the model and the text, and write the windows under `folder`.

    Raises:
        ValueError: The request cannot be run; the message says what to change.
    """
    transformers_logging.disable_progress_bar()
    device = find_device(request.device)
    disturbance = find_disturbance(device)
    if request.host is not None and device.type != "cuda":
        raise ValueError(
            f"--host {request.host}: on a CPU the host's memory is the device's memory; leave "
            "--host out, and give --disk PATH:CAP to choose where activations go"
        )
    loss = find_chunked_loss(device) if request.has_chunked_loss else LossKind.PLAIN
    defaults = CUDA_DEFAULTS if device.type == "cuda" else CPU_DEFAULTS
    source = find_model(request.model, request.layers)
    config = read_config(source)
    longest = find_longest_context(config)
    context = min(defaults.context, longest) if request.context is None else request.context
    if context > longest:
        raise ValueError(
            f"--context {context}: the model {request.model} has {longest} positions; give "
            f"--context {longest} or less"
        )
    num_counted_steps = request.steps or defaults.num_counted_steps
    text = read_text(request.text)
    encoder = find_encoder(source, config.vocab_size)
    windows = cut_windows(
        text.content,
        encoder.encode,
        context=context,
        num_train=request.batch * (request.num_warm_up_steps + num_counted_steps),
        num_held_out=defaults.num_held_out,
    )
    tokens = folder / "tokens.safetensors"
    save_file(
        {"train": torch.tensor(windows.train), "held_out": torch.tensor(windows.held_out)}, tokens
    )
    num_parameters = count_parameters(config)
    optimizer = choose_optimizer(request.model, num_parameters)
    disks = request.disks
    if not disks and device.type != "cuda":
        disks = (_make_default_disk(folder),)
    return Setup(
        request=request,
        source=source,
        device=device,
        dtype=defaults.dtype,
        optimizer=optimizer,
        loss=loss,
        disks=disks,
        tokens=tokens,
        folder=folder,
        facts=Facts(
            model=describe_model(source, config, context),
            parameters=num_parameters,
            context=context,
            batch=request.batch,
            device=describe_device(device),
            dtype=str(defaults.dtype).removeprefix("torch."),
            versions=list_versions(device),
            memory_meaning=describe_memory(device),
            command=write_command(
                request, context=context, steps=num_counted_steps, device=str(device)
            ),
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            steps=num_counted_steps,
            warm_up_steps=request.num_warm_up_steps,
            passes=request.passes,
            optimizer=describe_optimizer(optimizer),
            seed=request.seed,
            text=text.name,
            tokenizer=encoder.title,
            held_out_tokens=defaults.num_held_out * context,
            state_bytes=num_parameters * defaults.dtype.itemsize * _count_copies(optimizer),
            logits_bytes=request.batch * context * config.vocab_size * defaults.dtype.itemsize,
            loss=describe_loss(loss),
            is_loss_chunked=loss is not LossKind.PLAIN,
            is_compiled=request.is_compiled,
            gradient_reference=None,
            compiled_gradient_reference=None,
            disturbance=disturbance,
            disk=_describe_disks(request.disks, disks),
        ),
    )


def find_device(name: str | None) -> torch.device:
    """Return the device called `name`, or the best there is.

    Raises:
        ValueError: There is no such device here.
    """
    num_gpus = torch.cuda.device_count()
    if name is None:
        return torch.device("cuda:0" if num_gpus else "cpu")
    kind, colon, index = name.partition(":")
    if name == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or (colon and not index.isdecimal()):
        raise ValueError(f"--device {name}: unknown device; give cpu, cuda or cuda:N")
    if int(index or 0) >= num_gpus:
        raise ValueError(
            f"--device {name}: torch sees {num_gpus} CUDA devices here; give "
            + (f"cuda:0 to cuda:{num_gpus - 1}" if num_gpus else "--device cpu")
        )
    return torch.device("cuda", int(index or 0))


def choose_optimizer(model: str, num_parameters: int) -> Optimizer:
    """Return AdamW, or SGD where AdamW's state would crowd out the activations."""
    is_large = model in SHAPES or num_parameters > LARGE_MODEL_PARAMETERS
    return Optimizer.SGD if is_large else Optimizer.ADAMW


def choose_work_folder(candidates: tuple[Path, ...], mounts_path: Path = MOUNTS_PATH) -> Path:
    """Return the first folder whose files are not in memory, or else the first of all.

    On a CPU, activations evicted to a file system in memory would not have left it.
    """
    on_disk = (path for path in candidates if not is_memory_backed(path, mounts_path))
    return next(on_disk, candidates[0])


def describe_device(device: torch.device) -> str:
    """Return the device's name, and of a CPU the threads that torch uses."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({_read_cpu_name()}, {torch.get_num_threads()} threads)"


def find_disturbance(device: torch.device) -> str:
    """Return why a CPU run's times are worthless before it starts; empty if they are not."""
    if device.type == "cuda":
        return ""
    load, num_cores = psutil.getloadavg()[0], psutil.cpu_count() or 1
    if load < num_cores * BUSY_LOAD_FRACTION:
        return ""
    return (
        f"not to be relied on, since the load average of {num_cores} cores was {load:.1f} in the "
        "minute before the run: other programs slow the steps down"
    )


def list_versions(device: torch.device) -> dict[str, str]:
    """Return the versions of what decides the numbers."""
    versions = {"python": platform.python_version(), "ebbtide": __version__}
    for package in ("torch", "transformers", "trl"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
    return versions


def _read_cpu_name() -> str:
    # platform.processor() is empty on most Linux systems.
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _count_copies(optimizer: Optimizer) -> int:
    """Weights and gradients, and the optimizer's state."""
    return {Optimizer.ADAMW: 4, Optimizer.SGD: 2}[optimizer]


def _make_default_disk(folder: Path) -> str:
    disk = folder / "disk"
    disk.mkdir()
    return f"{disk}:{shutil.disk_usage(disk).free // 2}"


def _describe_disks(requested: tuple[str, ...], used: tuple[str, ...]) -> str:
    if requested or not used:
        return " and ".join(requested)
    path, _, cap_bytes = used[0].rpartition(":")
    kind = ", in memory" if is_memory_backed(path) else ""
    return f"a temporary folder ({format_bytes(int(cap_bytes))} at most{kind})"
