"""What profilers' names mean: which lane a device event belongs to, which calls wait, what is ours.

The names are those that CUPTI gives, through torch's profiler, Nsight Systems and XLA alike.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from ebbtide.timeline import HostMemory, Lane

MARK = "ebbtide:"
"""Starts the annotations of ebbtide's runtimes; the rest is `evict NAME` or `fetch NAME`."""

_SCOPE = re.compile(r"\bebbtide\((?P<name>[^()]+)\)")
_COLLECTIVE = re.compile(r"nccl|rccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter", re.I)
_FUSION = re.compile(r"fusion", re.I)
_COPY = re.compile(
    r"(?<![a-z])(?:mem_?cpy|copy)[\s_:]*(?P<way>[HDP]\s?(?:to|2)\s?[HDP]|"
    r"(?:Host|Device|Peer)To(?:Host|Device|Peer))",
    re.I,
)
_MEMORY = re.compile(r"\b(?P<memory>pinned|pageable)\b", re.I)
_STEP = re.compile(
    r"(?:ProfilerStep|(?:train(?:ing)?[ _-]?)?(?:step|iteration|iter))[ _#:=-]*(?P<number>\d+)",
    re.I,
)
_NAMESPACE = re.compile(r"(?:(?:\b[a-zA-Z_]\w*|\(anonymous namespace\))::)+(?=\w)")
# CUPTI adds the version of the interface: cudaMemcpy_v3020, cuMemcpyDtoH_v2.
_VERSION = re.compile(r"_v\d+$|_ptsz$|_ptds$")

HOW_STEPS: Final = (
    "no steps are marked. To have figures of each step, give torch's profile() a schedule and call "
    'its step(), or put record_function("step 4"), an NVTX range or JAX\'s StepTraceAnnotation '
    "around each"
)

WAITING_CALLS: Final = frozenset(
    {
        *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
        *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"),
        *("cudaMemcpy", "cudaMemcpy2D", "cudaMemcpyToSymbol", "cudaMemcpyFromSymbol"),
        *("cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemcpy"),
        *("hipStreamSynchronize", "hipDeviceSynchronize", "hipEventSynchronize", "hipMemcpy"),
        "hipMemcpyWithStream",
    }
)
"""The CPU thread does nothing else until the device has got there."""

MEMORY_CALLS: Final = frozenset(
    {
        *("cudaMalloc", "cudaFree", "cuMemAlloc", "cuMemFree", "cuMemCreate", "cuMemRelease"),
        *("cuMemMap", "cuMemUnmap", "hipMalloc", "hipFree"),
        *("cudaHostAlloc", "cudaMallocHost", "cudaFreeHost", "cudaHostRegister"),
        *("cuMemHostAlloc", "cuMemHostRegister", "cuMemFreeHost"),
    }
)
"""Device or pinned host memory is asked of the driver, or given back."""

# A trace names few kernels very often.
_NUM_CACHED: Final = 65536

_WAYS: Final = {
    "dh": Lane.COPY_OUT,
    "hd": Lane.COPY_IN,
    "dd": Lane.COMPUTE,
    "pp": Lane.COLLECTIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A copy, as its name says."""

    lane: Lane
    """Copies within a device count as compute, and between devices as collectives."""
    host_memory: HostMemory


@lru_cache(maxsize=_NUM_CACHED)
def lane_of_copy(name: str) -> Copied | None:
    """Read a name such as `Memcpy DtoH (Device -> Pinned)` or `MemcpyD2H`; None: no such copy."""
    match = _COPY.search(name)
    if match is None:
        return None
    # Of `DtoH`, `D2H` and `DeviceToHost` the first and the last place remain.
    way = re.sub(r"to|2|ost|evice|eer|\s", "", match["way"].lower())
    lane = _WAYS.get(way)
    if lane is None:
        return None
    return Copied(lane=lane, host_memory=memory_of(name))


@lru_cache(maxsize=_NUM_CACHED)
def memory_of(text: str) -> HostMemory:
    """Return the kind of host memory that a text names."""
    match = _MEMORY.search(text)
    return HostMemory.UNKNOWN if match is None else HostMemory(match["memory"].lower())


@lru_cache(maxsize=_NUM_CACHED)
def lane_of_kernel(name: str) -> Lane:
    """Return whether a kernel computes, or communicates between devices."""
    # XLA may name a fusion after what it feeds: only the kernels of the libraries communicate.
    if _COLLECTIVE.search(name) and not _FUSION.search(name):
        return Lane.COLLECTIVE
    return Lane.COMPUTE


@lru_cache(maxsize=_NUM_CACHED)
def plain_call(name: str) -> str:
    """Return a runtime call's name without the version that CUPTI adds."""
    return _VERSION.sub("", name)


@lru_cache(maxsize=_NUM_CACHED)
def plain_kernel(name: str) -> str:
    """Return a name for people: C++ without the result, the namespaces and the last arguments.

    Of `void at::native::fill<float>(int, at::native::Fill<float>)` remains `fill<float>`.
    """
    text = _NAMESPACE.sub("", name)
    if not text.startswith("void "):
        return text
    text, depth = text.removeprefix("void "), 0
    if text.endswith(")"):
        for at in range(len(text) - 1, 0, -1):
            depth += (text[at] == ")") - (text[at] == "(")
            if not depth:
                return text[:at]
    return text


@lru_cache(maxsize=_NUM_CACHED)
def name_launch(grid: tuple[int, ...], block: tuple[int, ...]) -> str:
    """Return a text for the shape that a kernel was launched with, one object for equal shapes."""
    return f"{'x'.join(map(str, grid))} blocks of {'x'.join(map(str, block))}"


def step_of(name: str) -> str | None:
    """Return the name if an annotation marks a training step, such as `ProfilerStep#4`."""
    return name if _STEP.fullmatch(name.strip()) else None


def name_scope(name: str) -> str:
    """Return a named scope, around the operation that makes an activation, with its name."""
    return f"ebbtide({name.replace('(', '_').replace(')', '_')})"


def activation_in(scopes: str) -> str | None:
    """Return the activation of the innermost such scope, if there is one."""
    found = _SCOPE.findall(scopes)
    return found[-1] if found else None


def activation_of(name: str) -> str | None:
    """Return the activation whose copies an annotation of ours surrounds."""
    at = name.find(MARK)
    if at < 0:
        return None
    what = name[at + len(MARK) :].strip()
    for verb in ("evict ", "fetch "):
        if what.startswith(verb):
            return what[len(verb) :].strip() or None
    return None
