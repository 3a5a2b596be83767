"""Write a large trace, as a profiler would have, to measure `ebbtide trace` on; or a small one.

    python3 benchmarks/make_trace.py kineto trace.json --size 200MB
    python3 benchmarks/make_trace.py nsys trace.sqlite --rows 2000000
    python3 benchmarks/make_trace.py steps trace.json

The traces are of made-up steps: CPU operators, launches, kernels on one stream and copies both ways
on two others, with the fields and in the proportions of real ones. No randomness.

`steps` has three steps of eight blocks. Forward evicts each block's input and backward fetches it;
the copies out of the last blocks, and the first ones back in, are not hidden.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebbtide.units import parse_bytes

KERNEL_US = 180
COPY_US = 300
COPY_BYTES = 16 * 2**20
KERNELS_PER_STEP = 2000
KERNELS_PER_COPY = 10
NUM_BLOCKS = 8
MOVED_BYTES = 64 * 2**20
MOVED_US = 1342.0
AHEAD_US = 6000
NAMES = [f"void cutlass::kernel_{i}<bf16, 128, 256, 64>(Params)" for i in range(40)]
# Since 1970, as torch writes them: the fraction of a nanosecond must not be lost.
START_US = 1_764_000_000_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("kineto", "nsys", "steps"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=parse_bytes, default=200 * 10**6)
    parser.add_argument("--rows", type=int, default=2_000_000)
    options = parser.parse_args()
    if options.kind == "kineto":
        write_kineto(options.out, options.size)
    elif options.kind == "nsys":
        write_nsys(options.out, options.rows)
    else:
        write_steps(options.out)
    print(f"wrote {options.out}: {options.out.stat().st_size / 1e6:.0f} MB", file=sys.stderr)
    return 0


def write_kineto(path: Path, num_bytes: int) -> None:
    """Write Chrome JSON of at least so many bytes."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{\n  "schemaVersion": 1,\n  "deviceProperties": [{"id": 0, "name": "GPU"}],\n')
        file.write('  "traceEvents": [\n')
        written, separator = 0, "  "
        for event in events():
            text = separator + json.dumps(event, indent=2)
            written += file.write(text)
            separator = ",\n  "
            if written >= num_bytes:
                break
        file.write("\n  ]\n}\n")


def events() -> Iterator[dict[str, Any]]:
    """Yield events without end: for each kernel two CPU operators, a launch and itself."""
    number = 0
    while True:
        at = START_US + number * KERNEL_US + 0.123
        if number % KERNELS_PER_STEP == 0:
            name = f"ProfilerStep#{number // KERNELS_PER_STEP}"
            took = KERNELS_PER_STEP * KERNEL_US
            yield event("user_annotation", name, at, took, {"External id": number})
        for depth in range(2):
            shape = {"Input Dims": [[1, 8192, 4096], [4096, 4096]], "Sequence number": number}
            yield event("cpu_op", f"aten::op_{depth}", at + depth, 20 - depth, shape)
        launch = {"correlation": number, "External id": number}
        yield event("cuda_runtime", "cudaLaunchKernel", at + 5, 3.5, launch)
        facts = {"stream": 7, "grid": [64, 32, 1], "block": [128, 1, 1]}
        yield event(
            "kernel",
            NAMES[number % len(NAMES)],
            at + 100,
            KERNEL_US - 5,
            {**launch, **facts},
            tid=7,
        )
        if number % KERNELS_PER_COPY == 0:
            is_out = number // KERNELS_PER_COPY % 2 == 0
            name = "DtoH (Device -> Pinned)" if is_out else "HtoD (Pinned -> Device)"
            facts = {"bytes": COPY_BYTES, "stream": 20 + is_out}
            asked = {"correlation": -number - 1}
            yield event("cuda_runtime", "cudaMemcpyAsync", at + 10, 3.5, asked)
            yield event("gpu_memcpy", f"Memcpy {name}", at + 120, COPY_US, facts, tid=20 + is_out)
        number += 1


def event(
    category: str, name: str, at: float, took: float, arguments: dict[str, Any], tid: int = 4242
) -> dict[str, Any]:
    if "stream" in arguments:
        arguments = {"device": 0, "context": 1, **arguments}
    return {
        **{"ph": "X", "cat": category, "name": name, "pid": 0 if tid < 100 else 4242, "tid": tid},
        **{"ts": at, "dur": took, "args": arguments},
    }


def write_steps(path: Path, num_gpus: int = 1) -> None:
    """Write a small trace in which part of the copying is exposed."""
    found = [e for gpu in range(num_gpus) for e in steps(gpu, with_allreduce=num_gpus > 1)]
    form = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": found}
    path.write_text(json.dumps(form, indent=1) + "\n", encoding="utf-8")


def steps(gpu: int, *, with_allreduce: bool) -> Iterator[dict[str, Any]]:
    """Yield three steps of eight blocks on one GPU; times in microseconds."""
    kernels = ("attention", "gemm_up", "gelu", "gemm_down")
    at, number = START_US + 0.5, gpu * 10**6
    for step in range(3, 6):
        start, out_free = at, at
        for block in range(NUM_BLOCKS):
            for kernel in kernels:
                number += 1
                yield from launched(gpu, number, kernel, at, 290)
                at += 300
            # Out at 50 GB/s: 1342 us for a block of 1200, so that the link falls behind.
            number += 1
            out_free = max(out_free, at)
            yield from moved(gpu, number, f"h.{block}.input", "out", at - AHEAD_US, out_free)
            out_free += MOVED_US
            yield memory(gpu, at, (2 + block % 3 + 0.4 * block) * 2**30)
        # Backward starts when the last copy out is done, and waits for the first one in.
        in_free = out_free
        for block in reversed(range(NUM_BLOCKS)):
            number += 1
            yield from moved(gpu, number, f"h.{block}.input", "in", in_free - AHEAD_US, in_free)
            in_free += MOVED_US
            at = max(at, in_free)
            for kernel in kernels:
                number += 1
                yield from launched(gpu, number, f"{kernel}_backward", at, 590)
                at += 600
            yield memory(gpu, at, (2 + 0.3 * block) * 2**30)
        if with_allreduce:
            number += 1
            yield from launched(gpu, number, "ncclDevKernel_AllReduce_Sum", at, 1500)
            at += 1500
        number += 1
        yield from launched(gpu, number, "adamw", at, 800)
        at += 1000
        name = f"ProfilerStep#{step}"
        if gpu == 0:
            yield event("user_annotation", name, start - AHEAD_US - 50, at - start, {})


def launched(gpu: int, number: int, name: str, at: float, took: float) -> Iterator[dict[str, Any]]:
    """Yield a kernel and the call that asked for it."""
    facts = {"correlation": number}
    yield event("cuda_runtime", "cudaLaunchKernel", at - AHEAD_US, 4, facts)
    yield event("kernel", name, at, took, {**facts, "stream": 7, "device": gpu}, tid=7)


def moved(
    gpu: int, number: int, name: str, way: str, asked: float, at: float
) -> Iterator[dict[str, Any]]:
    """Yield a copy of an activation, the call that asked for it, and the mark around that."""
    verb, copied, stream = {
        "out": ("evict", "Memcpy DtoH (Device -> Pinned)", 20),
        "in": ("fetch", "Memcpy HtoD (Pinned -> Device)", 21),
    }[way]
    facts = {"correlation": number}
    yield event("user_annotation", f"ebbtide: {verb} {name}", asked - 2, 8, {}, tid=4000 + gpu)
    yield event("cuda_runtime", "cudaMemcpyAsync", asked, 4, facts, tid=4000 + gpu)
    details = {**facts, "stream": stream, "device": gpu, "bytes": MOVED_BYTES}
    yield event("gpu_memcpy", copied, at, MOVED_US, details, tid=stream)


def memory(gpu: int, at: float, allocated: float) -> dict[str, Any]:
    """Return a moment of the allocator; device type 1 is a GPU."""
    held = {"Total Allocated": int(allocated), "Total Reserved": 8 * 2**30}
    return {
        **{"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 4242, "tid": 4242},
        **{"ts": at, "s": "t", "args": {"Device Type": 1, "Device Id": gpu, **held}},
    }


def write_nsys(path: Path, num_rows: int) -> None:
    """Write an SQLite export with so many rows: a launch and a kernel each, and copies."""
    path.unlink(missing_ok=True)
    database = sqlite3.connect(path)
    database.executescript(
        """
        CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
          deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
          correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
          shortName INTEGER NOT NULL, graphNodeId INTEGER, gridX INTEGER NOT NULL,
          gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL,
          blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL,
          deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
          correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
          copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL,
          globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER);
        CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL,
          text TEXT, textId INTEGER, globalTid INTEGER);
        """
    )
    launch, copy, pid = 100, 101, 4242 << 24
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(NAMES)))
    calls = [(launch, "cudaLaunchKernel_v7000"), (copy, "cudaMemcpyAsync_v3020")]
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", calls)
    num_kernels = num_rows * KERNELS_PER_COPY // (2 * KERNELS_PER_COPY + 2)
    period = KERNEL_US * 1000
    database.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL "
        "VALUES (?, ?, 0, 1, 7, ?, ?, ?, ?, NULL, 64, 32, 1, 128, 1, 1)",
        (
            (i * period + 10**5, (i + 1) * period + 95_000, i, pid, i % 40, i % 40)
            for i in range(num_kernels)
        ),
    )
    database.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, 0)",
        (
            (i * period // 2 + 5000, i * period // 2 + 8500, pid + 7, i, launch)
            for i in range(num_kernels)
        ),
    )
    copies = range(0, num_kernels, KERNELS_PER_COPY)
    database.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, 0, 1, ?, ?, ?, ?, ?, ?, ?)",
        (
            (
                *(i * period + 120_000, i * period + 420_000, 20 + n % 2, num_kernels + i, pid),
                *((COPY_BYTES, 2, 3, 2) if n % 2 else (COPY_BYTES, 1, 2, 3)),
            )
            for n, i in enumerate(copies)
        ),
    )
    database.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, 0)",
        (
            (i * period // 2 + 9000, i * period // 2 + 9900, pid + 7, num_kernels + i, copy)
            for i in copies
        ),
    )
    database.executemany(
        "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, ?)",
        (
            (i * period // 2, (i + KERNELS_PER_STEP) * period // 2, f"step {n}", pid + 7)
            for n, i in enumerate(range(0, num_kernels, KERNELS_PER_STEP))
        ),
    )
    database.commit()
    database.close()


if __name__ == "__main__":
    sys.exit(main())
