"""Read the arguments of `ebbtide estimate`: names of the catalog, files, axes."""

import enum
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ebbtide.catalog.accelerators import ACCELERATORS, Accelerator
from ebbtide.catalog.config import read_config
from ebbtide.catalog.machines import with_disk
from ebbtide.catalog.models import MODELS
from ebbtide.catalog.shapes import Shape
from ebbtide.commands.arguments import add_up_disks, is_there
from ebbtide.machine import Machine
from ebbtide.naming import plain_name, unknown_name_message

Choice = TypeVar("Choice", bound=enum.Enum)

AXES = ("context", "batch", "bandwidth")
"""What `--what-if` sweeps."""

MOST_VALUES = 50
"""Of a sweep; each is a whole answer."""

LEAST_TFLOPS, MOST_TFLOPS = 0.001, 1e6

_FACTORS: Mapping[str, tuple[float, ...]] = {
    "context": (0.25, 0.5, 1.0, 2.0, 4.0),
    "batch": (1.0, 2.0, 4.0, 8.0),
    "bandwidth": (0.25, 0.5, 1.0, 2.0, 4.0),
}


def read_model(given: str) -> Shape:
    """Return the model of the catalog with this name, or else that of the `config.json`."""
    if given in MODELS:
        return MODELS[given]
    path = Path(given)
    if is_there(path) and path.is_dir():
        path = path / "config.json"
    if is_there(path):
        return read_config(path)
    name = plain_name(given)
    unknown = unknown_name_message("model", name, MODELS)
    raise ValueError(f"MODEL {name}: there is no such file, and in the catalog, {unknown}")


def read_choice(option: str, given: str, kind: type[Choice]) -> Choice:
    """Return the member of an enum with this value."""
    values = tuple(str(member.value) for member in kind)
    if given not in values:
        raise ValueError(f"{option} {given}: {unknown_name_message('value', given, values)}")
    return kind(given)


def read_accelerator(machine: Machine, tflops: float | None) -> Accelerator:
    """Return what computes on this machine, with `--tflops` in place of its bf16 peak."""
    known = ACCELERATORS.get(machine.name)
    if tflops is not None and not LEAST_TFLOPS <= tflops < MOST_TFLOPS:
        raise ValueError(
            f"--tflops {tflops:g}: a peak in TFLOP/s is above 0, such as 989; from "
            f"{LEAST_TFLOPS:g} to {MOST_TFLOPS:g} are taken"
        )
    if known is None:
        if tflops is None:
            raise ValueError(
                f"--machine {machine.name}: the catalog does not know how fast it computes; give "
                "--tflops, its peak in bf16 without sparsity, such as 989"
            )
        return Accelerator(
            bf16_flops_per_s=int(tflops * 1e12),
            fp8_flops_per_s=int(2 * tflops * 1e12),
            # As on an H200: 989.4 TFLOP/s beside 4.8 TB/s.
            memory_bytes_per_s=int(tflops * 1e12 / 206),
            source="--tflops; fp8 at twice that, and memory as fast beside it as an H200's.",
        )
    if tflops is None:
        return known
    factor = tflops * 1e12 / known.bf16_flops_per_s
    return replace(
        known,
        bf16_flops_per_s=int(tflops * 1e12),
        fp8_flops_per_s=int(known.fp8_flops_per_s * factor),
        source=f"{known.source} Peaks as by --tflops.",
    )


def read_disk_sizes(given: list[str] | None, machine: Machine) -> Machine:
    """Return the machine with the `--disk` that was given, on an NVMe disk if it has none."""
    return with_disk(machine, add_up_disks(given)) if given else machine


def read_names(given: list[str] | None) -> list[str] | None:
    """Return the names of `--offload`, which may be repeated or have commas."""
    if not given:
        return None
    names = [name.strip() for text in given for name in text.split(",")]
    if not all(names):
        raise ValueError(
            f"--offload {','.join(given)}: a name is empty; give for example "
            "--offload query_proj,key_proj,value_proj"
        )
    return names


def read_sweep(given: str, current: Mapping[str, int]) -> tuple[str, tuple[float, ...]]:
    """Return the axis of `--what-if` and its values; for bandwidth these are factors.

    Args:
        given: An axis, or an axis, '=' and values with commas between them.
        current: What was asked, by axis.
    """
    axis, mark, text = given.partition("=")
    if axis not in AXES:
        raise ValueError(f"--what-if {given}: {unknown_name_message('axis', axis, AXES)}")
    if not mark:
        values = _FACTORS[axis]
        if axis == "bandwidth":
            return axis, values
        return axis, tuple(float(max(1, int(f * current[axis]))) for f in values)
    try:
        values = tuple(float(value) for value in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"--what-if {given}: values are numbers with commas between them; give for example "
            "--what-if context=8192,32768"
        ) from error
    if len(values) > MOST_VALUES:
        raise ValueError(
            f"--what-if {axis}: {len(values)} values were given; {MOST_VALUES} at most are swept"
        )
    is_whole = axis != "bandwidth"
    if any(not 0 < v < 2**31 or (is_whole and v != int(v)) for v in values):
        rule = "whole numbers of 1 or more" if is_whole else "factors above 0"
        raise ValueError(f"--what-if {given}: values of {axis} are {rule}")
    return axis, values


def scale_link(machine: Machine, factor: float) -> Machine:
    """Return the machine with its link so many times as fast."""
    return replace(
        machine,
        out_bytes_per_s=max(1, int(machine.out_bytes_per_s * factor)),
        in_bytes_per_s=max(1, int(machine.in_bytes_per_s * factor)),
        both_bytes_per_s=max(1, int(machine.both_bytes_per_s * factor)),
    )
