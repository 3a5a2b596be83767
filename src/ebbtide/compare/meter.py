"""Measure one step: its time, its peak memory, and what crossed between devices."""

from __future__ import annotations

import ctypes
import gc
import platform
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, ClassVar, final

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.compare.results import NS_PER_MS

SAMPLE_INTERVAL_S = 0.01

# The first glibc with mallinfo2, whose counters do not wrap at 4 GiB.
MALLINFO2_GLIBC = (2, 33)

ALLOCATED_MEANING = (
    "peak_gib is the most memory that malloc had handed out in the process (weights, gradients, "
    "optimizer state and activations); reserved_gib is the peak resident set, which also counts "
    "Python, libraries and freed blocks that malloc holds on to; both sampled every 10 ms over "
    "the counted steps; the page cache of a disk tier is in neither"
)
RESIDENT_MEANING = (
    "peak_gib is the peak resident set of the process, sampled every 10 ms over the counted steps "
    "(weights, gradients, optimizer state, activations, Python, libraries and freed blocks that "
    "malloc holds on to); reserved_gib is not known on this system"
)
CUDA_MEMORY_MEANING = (
    "peak_gib is torch.cuda.max_memory_allocated over the counted steps (weights, gradients, "
    "optimizer state and activations); reserved_gib is torch.cuda.max_memory_reserved, which "
    "also counts what the allocator holds beyond use"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak memory since the meter was reset."""

    peak_bytes: int
    reserved_bytes: int | None


class AbstractMemoryMeter(ABC):
    """Watches the memory that one device's training step takes."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every peak so far."""

    @abstractmethod
    def watch(self) -> AbstractContextManager[None]:
        """Count what is used inside the context."""

    @abstractmethod
    def read(self) -> Peak:
        """Return the peak of everything watched since the last reset."""


@final
class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]
    hblkhd: int
    uordblks: int


@final
class ProcessMeter(AbstractMemoryMeter):
    """Samples the process's own memory from a thread, every 10 ms.

    A peak shorter than the interval can be missed. What malloc has handed out is read where
    glibc can tell: the resident set alone hides what a strategy frees, since malloc keeps
    fragments of it.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._libc = ctypes.CDLL(None) if is_allocated_known() else None
        if self._libc:
            self._libc.mallinfo2.restype = _Mallinfo2
        self._allocated_bytes = 0
        self._resident_bytes = 0

    def reset(self) -> None:
        gc.collect()
        if self._libc:
            # What warm-up freed and malloc kept would count as the steps' own.
            self._libc.malloc_trim(0)
        self._allocated_bytes = self._resident_bytes = 0

    @contextmanager
    def watch(self) -> Generator[None]:
        is_over = threading.Event()
        sampler = threading.Thread(target=self._sample_until, args=(is_over,), daemon=True)
        sampler.start()
        try:
            yield
        finally:
            is_over.set()
            sampler.join()
            self._sample()

    def read(self) -> Peak:
        if self._libc is None:
            return Peak(peak_bytes=self._resident_bytes, reserved_bytes=None)
        return Peak(peak_bytes=self._allocated_bytes, reserved_bytes=self._resident_bytes)

    def _sample_until(self, is_over: threading.Event) -> None:
        while not is_over.wait(SAMPLE_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        self._resident_bytes = max(self._resident_bytes, self._process.memory_info().rss)
        if self._libc:
            counts: _Mallinfo2 = self._libc.mallinfo2()
            allocated_bytes = counts.uordblks + counts.hblkhd
            self._allocated_bytes = max(self._allocated_bytes, allocated_bytes)


@final
class CudaMeter(AbstractMemoryMeter):
    """Reads the peaks that torch's CUDA allocator keeps.

    The allocator counts without pause, so what happens outside `watch` counts as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        gc.collect()
        torch.cuda.reset_peak_memory_stats(self._device)

    def watch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self) -> Peak:
        return Peak(
            peak_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=torch.cuda.max_memory_reserved(self._device),
        )


def read_pinned_peak() -> int:
    """Return the most bytes that torch's pinned allocator held since the process began.

    It rounds each request up to a power of two, and what it holds is taken from the host.
    """
    return torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)


def make_meter(device: torch.device) -> AbstractMemoryMeter:
    """Return the meter for a device."""
    return CudaMeter(device) if device.type == "cuda" else ProcessMeter()


def describe_memory(device: torch.device) -> str:
    """Return what the peaks of this device's meter count."""
    if device.type == "cuda":
        return CUDA_MEMORY_MEANING
    return ALLOCATED_MEANING if is_allocated_known() else RESIDENT_MEANING


def is_allocated_known() -> bool:
    """Whether this system's malloc says how much it has handed out."""
    library, version = platform.libc_ver()
    return library == "glibc" and tuple(map(int, version.split(".")[:2])) >= MALLINFO2_GLIBC


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How long one step took."""

    step_ns: int
    """Forward, loss, backward and optimizer step."""
    forward_ns: int
    """Forward and loss."""


@final
class StepTimer:
    """Times one step; on CUDA it waits for the device at each end, and nowhere between.

    Call `begin`, `end_forward`, `pause`, `resume` and `finish` once each, in this order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin_ns = 0
        self._forward_ns = 0
        self._before_pause_ns = 0
        # Waiting for the device after the forward pass would drain its queue and slow the
        # step, so there the forward pass is timed by events.
        self._events = (
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            if device.type == "cuda"
            else None
        )

    def begin(self) -> None:
        """Start the step."""
        self._begin_ns = self._read_clock()
        if self._events:
            self._events[0].record()

    def end_forward(self) -> None:
        """Mark the end of forward and loss."""
        if self._events:
            self._events[1].record()
        else:
            self._forward_ns = self._read_clock() - self._begin_ns

    def pause(self) -> None:
        """Stop the clock after backward."""
        self._before_pause_ns = self._read_clock() - self._begin_ns
        if self._events:
            self._forward_ns = round(self._events[0].elapsed_time(self._events[1]) * NS_PER_MS)

    def resume(self) -> None:
        """Start the clock again for the optimizer."""
        self._begin_ns = self._read_clock()

    def finish(self) -> StepTimes:
        """End the step and return its times."""
        after_pause_ns = self._read_clock() - self._begin_ns
        return StepTimes(
            step_ns=self._before_pause_ns + after_pause_ns, forward_ns=self._forward_ns
        )

    def _read_clock(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Bytes copied from the device to the host, and back."""

    out_bytes: int
    in_bytes: int


@final
class TransferCounter(TorchDispatchMode):
    """Counts the bytes that ops inside it copy between the host and a device.

    It sees forward and backward, also copies that other hooks make. It slows the step down:
    count in a step that is not timed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._out_bytes = 0
        self._in_bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled; the copies that count are made outside of it."""
        return True

    def read(self) -> Transfers:
        """Return what was counted so far."""
        return Transfers(out_bytes=self._out_bytes, in_bytes=self._in_bytes)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._count(source=args[1], target=args[0])
        elif func is torch.ops.aten._to_copy.default:
            self._count(source=args[0], target=result)
        return result

    def _count(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.device.type == target.device.type:
            return
        if target.device.type == "cpu":
            self._out_bytes += source.nbytes
        else:
            self._in_bytes += target.nbytes


def is_counter_compiled_around() -> bool:
    """Whether compiled code stays compiled inside a `TransferCounter`, in this torch."""
    return "ignore_compile_internals" in vars(TorchDispatchMode)
