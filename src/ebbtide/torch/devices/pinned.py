"""Pinned host memory: pages of our own, registered with the driver, or a reason why not.

torch's own pinned allocator rounds to powers of two; here a region has exactly the size that was
asked for. A refusal is a `PinnedMemoryError` that names host memory: drivers answer with the same
"out of memory" that they have for the GPU's.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import torch

from ebbtide.errors import PinnedMemoryError
from ebbtide.memory.limits import HostLimit, find_tightest_limit, read_process_limits
from ebbtide.memory.numa import find_node
from ebbtide.memory.pages import HostPages, read_mapping
from ebbtide.torch.internals import pause_dispatch
from ebbtide.torch.tiers import HostRegion
from ebbtide.units import format_bytes

log = logging.getLogger("ebbtide")

# cudaError_t of the CUDA runtime API; HIP has the same numbers for the first two.
ERROR_NAMES: Final = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    304: "cudaErrorOperatingSystem",
    712: "cudaErrorHostMemoryAlreadyRegistered",
    801: "cudaErrorNotSupported",
}


class AbstractDriver(ABC):
    """What pins pages for one device; a test can make it refuse."""

    @abstractmethod
    def register(self, address: int, num_bytes: int) -> int:
        """Pin pages; returns 0, or the driver's error, which nobody else meets afterwards."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Wait for the copies of the device, and unpin what was registered at `address`."""


@final
class CudaDriver(AbstractDriver):
    """The driver of NVIDIA's GPUs, or of AMD's under torch's names."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> int:
        """Pin pages for all GPUs of the process."""
        runtime: Any = torch.cuda.cudart()
        # On the device: else the first GPU gets a context, which takes memory there.
        with torch.cuda.device(self._device):
            status = int(runtime.cudaHostRegister(address, num_bytes, 0))
            if status != 0:
                self._take_error()
        return status

    def unregister(self, address: int) -> None:
        """Unpin once the device is idle."""
        runtime: Any = torch.cuda.cudart()
        torch.cuda.synchronize(self._device)
        runtime.cudaHostUnregister(address)

    def _take_error(self) -> None:
        """Take the error from the runtime, which keeps it for whoever asks next in this thread.

        torch asks after each kernel that it starts, and would report that an innocent operator ran
        out of the GPU's memory. So one starts here, and its report is dropped.
        """
        with suppress(RuntimeError), pause_dispatch():
            torch.ones(1, dtype=torch.uint8, device=self._device)


@final
class PinnedMemory:
    """Takes regions of pinned host memory from the system.

    Args:
        driver: Pins the pages.
        numa_node: Where the pages shall come from; None: no node is preferred.
        root: The folder that holds `proc` and `sys`, where limits are read.
    """

    def __init__(
        self, driver: AbstractDriver, *, numa_node: int | None = None, root: Path = Path("/")
    ) -> None:
        self._driver = driver
        self._numa_node = numa_node
        self._root = root

    def pin(self, num_bytes: int) -> HostRegion:
        """Return one region of exactly `num_bytes`.

        Raises:
            PinnedMemoryError: The system or the driver refuses, or would kill the process later.
        """
        limit = find_tightest_limit(self._root)
        if limit is not None and num_bytes > limit.room_bytes:
            raise _too_much(num_bytes, limit)
        try:
            pages = HostPages(num_bytes, numa_node=self._numa_node)
        except OSError as error:
            raise _not_mapped(num_bytes, error) from error
        buffer = torch.frombuffer(pages.memory, dtype=torch.uint8)
        status = self._driver.register(pages.address, num_bytes)
        if status != 0:
            pages.discard()
            raise _not_registered(num_bytes, status, self._is_wsl())
        _note(pages)
        driver, owner = self._driver, os.getpid()

        def unpin() -> None:
            if os.getpid() == owner:  # a forked process has neither the pages nor the device
                driver.unregister(pages.address)
                pages.discard()

        return HostRegion(buffer, unpin, pages.wishes)

    def _is_wsl(self) -> bool:
        try:
            version = (self._root / "proc/version").read_text(encoding="utf-8")
        except OSError:
            return False
        return "microsoft" in version.lower()


def pinned_memory_of(device: torch.device) -> PinnedMemory:
    """Return the way to pinned memory for a GPU, from the node that the GPU is on."""
    return PinnedMemory(CudaDriver(device), numa_node=find_node(pci_address_of(device)))


def pci_address_of(device: torch.device) -> str:
    """Return where a GPU is on the PCI bus, such as `0000:17:00.0`."""
    properties: Any = torch.cuda.get_device_properties(device)
    return (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )


def _note(pages: HostPages) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return  # asking Linux walks all pages of the process
    mapping = read_mapping(pages.address)
    huge = "an unknown part" if mapping is None else format_bytes(mapping.huge_bytes)
    log.debug(
        "pinned %s of host memory: %s of it in huge pages, %s, NUMA node %s",
        format_bytes(pages.num_bytes),
        huge,
        "hidden from forks" if pages.wishes.is_hidden_from_forks else "shared with forks",
        "any" if pages.wishes.numa_node is None else pages.wishes.numa_node,
    )


def _refused(num_bytes: int, reason: str, room_bytes: int | None = None) -> PinnedMemoryError:
    return PinnedMemoryError(
        f"{format_bytes(num_bytes)} of pinned host memory was refused: {reason}", room_bytes
    )


def _too_much(num_bytes: int, limit: HostLimit) -> PinnedMemoryError:
    num_mib = limit.room_bytes >> 20
    cap = f", or cap it with host='{num_mib}MiB'" if num_mib else ""
    return _refused(num_bytes, f"{limit.text}. {limit.advice}{cap}.", limit.room_bytes)


def _not_mapped(num_bytes: int, error: OSError) -> PinnedMemoryError:
    limit = read_process_limits().address_bytes
    if limit is not None:
        return _refused(
            num_bytes,
            f"mmap failed ({error.strerror or error}), and RLIMIT_AS (`ulimit -v`) is "
            f"{format_bytes(limit)}. Raise it: `ulimit -v unlimited`, or cap it with "
            "host='1GiB', say.",
        )
    return _refused(
        num_bytes,
        f"mmap failed ({error.strerror or error}). The host has not that much memory, or "
        "vm.overcommit_memory forbids to promise it: see CommitLimit in /proc/meminfo. Cap it "
        "with host='1GiB', say.",
    )


def _not_registered(num_bytes: int, status: int, is_wsl: bool) -> PinnedMemoryError:
    name = ERROR_NAMES.get(status, "see cudaError_t")
    answer = f"cudaHostRegister answered {status} ({name})"
    limit = read_process_limits().memlock_bytes
    if is_wsl:
        return _refused(
            num_bytes,
            f"{answer}, and WSL lets programs pin only a part of its memory. Raise `memory=` in "
            ".wslconfig, or cap it with host='1GiB', say.",
        )
    if limit is not None and num_bytes > limit:
        return _refused(
            num_bytes,
            f"{answer}, and RLIMIT_MEMLOCK (`ulimit -l`) is {format_bytes(limit)}. Raise it: "
            "`ulimit -l unlimited`, `docker run --ulimit memlock=-1`, or LimitMEMLOCK=infinity "
            "in a systemd unit; or cap it with host='1GiB', say.",
        )
    return _refused(
        num_bytes,
        f"{answer}, and no limit of the system says why: RLIMIT_MEMLOCK (`ulimit -l`) is "
        f"{'unlimited' if limit is None else format_bytes(limit)}. Look for the driver's own "
        "words in the kernel's log (`dmesg`), or cap it with host='1GiB', say.",
    )
