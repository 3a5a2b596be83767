"""Build Chrome traces as torch's profiler writes them."""

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]

START_US = 1_764_000_000_000_000
"""Since 1970: a float of so many microseconds has steps of 0.25."""

OUT = "Memcpy DtoH (Device -> Pinned)"
IN = "Memcpy HtoD (Pinned -> Device)"


def complete(category: str, name: str, start_ns: int, end_ns: int, **arguments: Any) -> Event:
    """An event that started so many nanoseconds after the start of all."""
    stream = arguments.get("stream")
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 4242 if stream is None else arguments.get("device", 0),
        "tid": arguments.pop("tid", 1) if stream is None else stream,
        "ts": Microseconds(START_US * 1000 + start_ns),
        "dur": Microseconds(end_ns - start_ns),
        "args": arguments,
    }


class Microseconds(float):
    """Nanoseconds, written as torch does: in microseconds with three decimals."""

    def __new__(cls, ns: int) -> "Microseconds":
        made = super().__new__(cls, ns / 1000)
        made.ns = ns
        return made

    ns: int

    def __repr__(self) -> str:
        sign, ns = ("-", -self.ns) if self.ns < 0 else ("", self.ns)
        return f"{sign}{ns // 1000}.{ns % 1000:03}"


def kernel(name: str, start: int, end: int, **more: Any) -> Event:
    return complete("kernel", name, start, end, **{"device": 0, "stream": 7, **more})


def copy(name: str, start: int, end: int, num_bytes: int, **more: Any) -> Event:
    facts = {"device": 0, "stream": 20, "bytes": num_bytes, **more}
    return complete("gpu_memcpy", name, start, end, **facts)


def call(name: str, start: int, end: int, correlation: int, tid: int = 1) -> Event:
    return complete("cuda_runtime", name, start, end, correlation=correlation, tid=tid)


def mark(name: str, start: int, end: int, tid: int = 1) -> Event:
    return complete("user_annotation", name, start, end, tid=tid)


def moment(at: int, allocated: int, reserved: int, kind: int = 1) -> Event:
    """What the allocator held; a device of kind 1 is a GPU."""
    facts = {"Device Type": kind, "Device Id": 0, "Total Allocated": allocated}
    return {
        **{"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 4242, "tid": 1},
        **{"ts": Microseconds(START_US * 1000 + at)},
        "args": {**facts, "Total Reserved": reserved},
    }


def text_of(*events: Event, **fields: Any) -> str:
    """The file, an event a few lines as torch writes it."""
    return _Encoder(indent=2).encode(
        {"schemaVersion": 1, "deviceProperties": [], "traceEvents": list(events), **fields}
    )


class _Encoder(json.JSONEncoder):
    """Writes `Microseconds` by its own form, which the usual encoder does not ask for."""

    def iterencode(self, o: Any, _one_shot: bool = False) -> Any:
        return _encode(o)


def _encode(value: Any) -> Any:
    if isinstance(value, Microseconds):
        yield repr(value)
    elif isinstance(value, dict):
        yield "\n  {"
        for number, (key, part) in enumerate(value.items()):
            yield f"{', ' if number else ''}{json.dumps(key)}: "
            yield from _encode(part)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for number, part in enumerate(value):
            yield ", " if number else ""
            yield from _encode(part)
        yield "]"
    else:
        yield json.dumps(value)


def write(path: Path, *events: Event, **fields: Any) -> Path:
    path.write_text(text_of(*events, **fields), encoding="utf-8")
    return path


def a_step() -> list[Event]:
    """The worked example of docs/overlap.md in microseconds, with launches and names.

    Forward computes in [0, 40), a copy out runs in [30, 60), a copy in in [50, 70), and backward
    computes in [70, 100).
    """
    us = 1000
    return [
        mark("ProfilerStep#3", -10 * us, 90 * us),
        call("cudaLaunchKernel", -5 * us, -4 * us, 1),
        mark("ebbtide: evict h.0.input", -3 * us, -1 * us),
        call("cudaMemcpyAsync", -2 * us, -1 * us, 2),
        mark("ebbtide: fetch h.0.input", 0, 3 * us),
        call("cudaMemcpyAsync", 1 * us, 2 * us, 3),
        call("cudaLaunchKernel", 4 * us, 5 * us, 4),
        complete("cpu_op", "aten::mm", -6 * us, -3 * us),
        complete("gpu_user_annotation", "ProfilerStep#3", 0, 100 * us, stream=7),
        kernel("gemm", 0, 40 * us, correlation=1),
        copy(OUT, 30 * us, 60 * us, 1_200_000, correlation=2),
        copy(IN, 50 * us, 70 * us, 1_000_000, correlation=3, stream=21),
        kernel("gemm_backward", 70 * us, 100 * us, correlation=4),
    ]
