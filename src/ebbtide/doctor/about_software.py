"""Findings about what is installed, and about variables that change how it copies and allocates."""

import re
from collections.abc import Iterator
from typing import Final

from ebbtide.doctor.facts import Facts, Software
from ebbtide.doctor.finding import Code, Finding, Severity

OLDEST_TORCH: Final = (2, 11)
NEWEST_TORCH: Final = (2, 13)
"""ebbtide's tests run with 2.11 to 2.13."""

ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*(true|1)\b", re.IGNORECASE)


def find_about_software(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with versions, with the allocator's settings and with other variables."""
    yield from _reach(facts)
    yield from _versions(facts.software)
    if facts.gpus and facts.software.torch_build.startswith("CUDA"):
        yield from _allocator(facts.software)
    yield from _variables(facts.software)


def _reach(facts: Facts) -> Iterator[Finding]:
    if facts.gpus:
        return
    build = facts.software.torch_build
    if not facts.pci_gpus:
        yield Finding(
            code=Code.NO_GPU,
            severity=Severity.NOTE,
            what="there is no GPU here that the system shows or torch can use",
            evidence=f"torch is built for {build}" if build else "torch was not asked",
            advice="On the CPU host memory is the device's own: plans move to disk= alone.",
        )
        return
    shown = ", ".join(gpu.name or f"{gpu.vendor} at {gpu.address}" for gpu in facts.pci_gpus)
    if build == "CPU":
        advice = "Install a torch that is built for this GPU: https://pytorch.org/get-started."
    elif not build:
        advice = "Install torch, or look above for why it could not be asked."
    else:
        advice = (
            "Look whether CUDA_VISIBLE_DEVICES is empty, whether the driver is loaded and new "
            "enough for this torch (`nvidia-smi`), and whether the container was given the GPU "
            "(`docker run --gpus all`)."
        )
    yield Finding(
        code=Code.GPU_OUT_OF_REACH,
        severity=Severity.SERIOUS,
        what="the system shows GPUs that torch cannot use",
        evidence=f"{shown}; torch is {f'built for {build}' if build else 'not there'}",
        advice=advice,
    )


def _versions(software: Software) -> Iterator[Finding]:
    told = software.versions.get("torch", "")
    numbers = re.match(r"(\d+)\.(\d+)", told)
    if numbers is None:
        return
    version = int(numbers[1]), int(numbers[2])
    if version < OLDEST_TORCH:
        yield Finding(
            code=Code.OLD_VERSION,
            severity=Severity.SERIOUS,
            what=f"torch {told} is older than ebbtide runs with",
            evidence=f"the oldest is {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}",
            advice="Install a newer torch for your GPU: https://pytorch.org/get-started.",
        )
    elif version > NEWEST_TORCH:
        yield Finding(
            code=Code.UNTRIED_VERSION,
            severity=Severity.NOTE,
            what=f"torch {told} is newer than what ebbtide was tested with",
            evidence=f"the newest is {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}",
            advice="Compare once: `print(tide.verify(batch))`, or `ebbtide verify`.",
        )


def _allocator(software: Software) -> Iterator[Finding]:
    values = {name: software.variables.get(name, "") for name in ALLOCATOR_VARIABLES}
    given = {name: value for name, value in values.items() if value}
    if len(set(given.values())) > 1:
        yield Finding(
            code=Code.TWO_ALLOCATOR_SETTINGS,
            severity=Severity.NOTE,
            what="torch's allocator is given two settings that differ",
            evidence="; ".join(f"{name}={value}" for name, value in given.items()),
            advice="Set PYTORCH_ALLOC_CONF alone: which of the two counts changed with versions.",
        )
    if not any(_EXPANDABLE.search(value) for value in given.values()):
        yield Finding(
            code=Code.FIXED_SEGMENTS,
            severity=Severity.NOTE,
            what="torch's allocator takes memory in segments that cannot grow",
            evidence="expandable_segments:True is in neither of " + ", ".join(ALLOCATOR_VARIABLES),
            advice=(
                "Set PYTORCH_ALLOC_CONF=expandable_segments:True. At 65,536 tokens on one H200 "
                "48 GiB were reserved for 35 in use without it. docs/memory.md says more."
            ),
        )


def _variables(software: Software) -> Iterator[Finding]:
    variables = software.variables
    for code, name, severity, what, advice in (
        (
            Code.NO_CACHE,
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
            Severity.SERIOUS,
            "torch asks the driver for each tensor, which waits for the device each time",
            "Unset it.",
        ),
        (
            Code.BLOCKING_LAUNCHES,
            "CUDA_LAUNCH_BLOCKING",
            Severity.SERIOUS,
            "each kernel is waited for, so that no copy runs beside compute",
            "Unset it; it is for finding errors.",
        ),
        (
            Code.SANITIZER,
            "EBBTIDE_SANITIZE",
            Severity.SERIOUS,
            "ebbtide compares all that comes back, and delays copies on purpose",
            "Unset it when gradients have been checked.",
        ),
        (
            Code.SWITCHED_OFF,
            "EBBTIDE_DISABLE",
            Severity.SERIOUS,
            "attach() does nothing",
            "Unset it to offload.",
        ),
    ):
        value = variables.get(name, "")
        if value not in ("", "0"):
            yield Finding(
                code=code,
                severity=severity,
                what=what,
                evidence=f"{name}={value}",
                advice=advice,
            )
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield Finding(
            code=Code.ONE_CONNECTION,
            severity=Severity.NOTE,
            what="all streams of a GPU share one queue, and copies may wait for kernels in it",
            evidence="CUDA_DEVICE_MAX_CONNECTIONS=1",
            advice=(
                "Keep it if your framework asks for it, and look at a trace: `ebbtide trace` says "
                "how much of the copies is hidden. Not measured."
            ),
        )
