"""Find out about a machine: read what the system says, and let programs measure the rest.

What may hang runs in programs of its own, each with a share of the time; what was not done by then
is said. Nothing is left behind: pinned memory goes with its process, and files have no names.
"""

import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from ebbtide.doctor import nvidia_smi
from ebbtide.doctor.facts import Disk, Facts, Gpu, Host, PciGpu, PciLink, Rates, Software
from ebbtide.doctor.programs import Deadline, Run, command_of, run
from ebbtide.doctor.system import read_gpus, read_host
from ebbtide.version import __version__

TOTAL_S: Final = 50.0
"""Of all programs together; with what starts and prints, less than a minute."""

GPUS_S: Final = 34.0
"""torch and eight GPUs start in about 15 s, and pinning 256 MiB for each takes less than 2."""

SMI_S: Final = 4.0
LOOK_S: Final = 4.0
DISKS_S: Final = 12.0
"""64 MiB in a folder take 12 s at 10 MB/s, each way by half."""

PACKAGES: Final = (
    *("torch", "triton", "jax", "jaxlib", "transformers", "accelerate", "trl", "lightning"),
    *("deepspeed", "liger-kernel", "numpy", "scipy", "psutil", "xxhash"),
)

VARIABLES: Final = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "EBBTIDE_DISABLE", "EBBTIDE_SANITIZE", "XLA_FLAGS"),
)

# Named and not imported: they run as programs.
LINK_SURVEY: Final = "ebbtide.torch.link_survey"
DISK_TRIAL: Final = "ebbtide.doctor.disk_trial"

Record = Mapping[str, object]
FindVersion = Callable[[str], str | None]
Made = TypeVar("Made", Rates, PciLink)


def survey(
    disks: Sequence[Disk] = (),
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    find_version: FindVersion | None = None,
    run: Run = run,
    deadline: Deadline | None = None,
) -> Facts:
    """Return what can be found out in less than a minute.

    Args:
        disks: Folders to look at and to measure, with the user's caps.
        root: The folder that holds `proc` and `sys`.
        environ: The environment variables.
        find_version: From a package to its installed version.
        run: Runs a program.
        deadline: Of all programs together. Default: `TOTAL_S`.
    """
    deadline = deadline or Deadline(TOTAL_S)
    versions = _read_versions(find_version or _installed_version)
    pci_gpus, host = read_gpus(root), read_host(root)
    unknown: list[str] = []
    if not (root / "sys/bus/pci/devices").is_dir():
        unknown.append("/sys/bus/pci is not there: how GPUs are linked, and to which NUMA node")
    build, gpus = "", ()
    if "torch" in versions:
        build, gpus = _measure_gpus(pci_gpus, run, deadline, unknown)
    else:
        unknown.append("torch is not installed: GPUs and their links were not measured")
    if any(gpu.vendor == "NVIDIA" for gpu in pci_gpus) and gpus:
        gpus = _add_links(gpus, run, deadline, unknown)
    return Facts(
        pci_gpus=pci_gpus,
        gpus=gpus,
        host=host,
        disks=_measure_disks(disks, run, deadline),
        software=Software(
            versions=versions,
            torch_build=build,
            variables={name: environ[name] for name in VARIABLES if name in environ},
        ),
        unknown=(*unknown, *_unknown_of(host)),
    )


def _unknown_of(host: Host) -> list[str]:
    found: list[str] = []
    if host.limit is None:
        found.append("neither /proc/meminfo nor a control group says how much memory is free")
    if not host.huge_pages:
        found.append("whether the system has transparent huge pages")
    return found


def _read_versions(find_version: FindVersion) -> dict[str, str]:
    versions = {"ebbtide": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        version = find_version(package)
        if version is not None:
            versions[package] = version
    return versions


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _measure_gpus(
    pci_gpus: Sequence[PciGpu], run: Run, deadline: Deadline, unknown: list[str]
) -> tuple[str, tuple[Gpu, ...]]:
    told = run(command_of(LINK_SURVEY), deadline.left_s(GPUS_S))
    if told.error:
        unknown.append(f"GPUs and their links, in full: the program that measures: {told.error}")
    build = ""
    by_index: dict[int, dict[str, object]] = {}
    for record in told.records:
        build = _text(record, "build") or build
        if "gpu" in record:
            by_index.setdefault(_int(record, "gpu"), {}).update(record)
    by_address = {gpu.address: gpu for gpu in pci_gpus}
    gpus = [_gpu(index, record, by_address) for index, record in sorted(by_index.items())]
    if len(gpus) == 1:  # nobody else copies
        gpus = [replace(gpu, together=gpu.alone) for gpu in gpus]
    for gpu in gpus:
        if gpu.alone is None and not gpu.refusal:
            unknown.append(f"the link of GPU {gpu.index}")
        elif gpu.together is None and gpu.alone is not None:
            unknown.append(f"the link of GPU {gpu.index} while all GPUs copy")
    return build, tuple(gpus)


def _gpu(index: int, record: Record, by_address: Mapping[str, PciGpu]) -> Gpu:
    address = _text(record, "pci_address")
    pci = by_address.get(address)
    link = _make(PciLink, record.get("link"))
    if pci is not None and link is not None:
        pci = replace(pci, link=link)
    return Gpu(
        index=index,
        name=_text(record, "name"),
        uuid=_text(record, "uuid"),
        pci_address=address,
        device_bytes=_int(record, "device_bytes"),
        free_bytes=_int(record, "free_bytes"),
        pci=pci,
        alone=_make(Rates, record.get("alone")),
        together=_make(Rates, record.get("together")),
        refusal=_text(record, "refusal"),
    )


def _add_links(
    gpus: tuple[Gpu, ...], run: Run, deadline: Deadline, unknown: list[str]
) -> tuple[Gpu, ...]:
    found: dict[str, dict[str, int]] = {}
    for what in ("c2c", "nvlink"):
        told = run(["nvidia-smi", what, "-s"], deadline.left_s(SMI_S))
        found[what] = nvidia_smi.read_speeds(told.text)
        if told.error and told.status != nvidia_smi.NOT_AVAILABLE:
            unknown.append(f"{what} links: nvidia-smi {what} -s: {told.error}")
    return tuple(
        replace(
            gpu,
            c2c_bytes_per_s=found["c2c"].get(gpu.uuid),
            nvlink_bytes_per_s=found["nvlink"].get(gpu.uuid),
        )
        for gpu in gpus
    )


def _measure_disks(disks: Sequence[Disk], run: Run, deadline: Deadline) -> tuple[Disk, ...]:
    looked = [_look(disk, run, deadline) for disk in disks]
    good = [disk.path for disk in looked if not disk.error]
    if not good:
        return tuple(looked)
    command = command_of(DISK_TRIAL, "measure", *good)
    told = run(command, deadline.left_s(DISKS_S))
    rates = {_text(record, "folder"): record for record in told.records}
    error = next((_text(r, "error") for r in told.records if "error" in r), told.error)
    return tuple(_with_rates(disk, rates.get(disk.path), error) for disk in looked)


def _with_rates(disk: Disk, rates: Record | None, error: str) -> Disk:
    if disk.error:
        return disk
    if rates is None:
        return replace(disk, error=error or "the program that measures said nothing of it")
    return replace(
        disk,
        write_bytes_per_s=_int(rates, "write_bytes_per_s"),
        read_bytes_per_s=_int(rates, "read_bytes_per_s"),
    )


def _look(disk: Disk, run: Run, deadline: Deadline) -> Disk:
    command = command_of(DISK_TRIAL, "look", disk.path)
    told = run(command, deadline.left_s(LOOK_S))
    record: dict[str, object] = {}
    for part in told.records:
        record.update(part)
    return replace(
        disk,
        file_system=_text(record, "file_system"),
        free_bytes=_int(record, "free_bytes") if "free_bytes" in record else None,
        is_direct=bool(record["is_direct"]) if "is_direct" in record else None,
        error=_text(record, "error") or told.error,
    )


def _make(kind: type[Made], form: object) -> Made | None:
    """Return a record of its fields in a JSON object; None if they are not all there."""
    if not isinstance(form, dict):
        return None
    known = cast(dict[str, Any], form)
    names = [field.name for field in fields(kind)]
    return kind(**{name: known[name] for name in names}) if known.keys() == set(names) else None


def _text(record: Record, name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""


def _int(record: Record, name: str) -> int:
    value = record.get(name)
    return value if isinstance(value, int) else 0
