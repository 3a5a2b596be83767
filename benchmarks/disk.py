"""The disk tier beside fio: the same folder, request size and depth, in turn, in one run.

    PYTHONPATH=src python3 benchmarks/disk.py FOLDER --out benchmarks/results

fio (https://fio.readthedocs.io) makes requests of 16 MiB, four in flight, as the tier's are. Where
it is not on the PATH, four dd's do, each on a quarter of the file. `aligned` copies from memory
that begins at a page, as pinned memory does; `unaligned` from memory that does not, as a CPU
tensor's, so that it passes through the tier's own. `io_uring` is fio with that engine instead of
libaio: what the tier would gain from it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from ebbtide.memory.disk import DiskStore
from ebbtide.memory.disk_rates import NUM_THREADS
from ebbtide.memory.file_calls import aligned_memory
from ebbtide.memory.stripes import STRIPE_BYTES
from ebbtide.units import DiskSpec

REGION_BYTES = 4 * STRIPE_BYTES
MB = 1e6
PROMISE = 0.85


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=2.0, help="written and read by each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="here", help="of the machine, in the file's name")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    num_bytes = int(options.gib * 2**30) // REGION_BYTES * REGION_BYTES
    other = "fio" if shutil.which("fio") else "dd"
    whos = [other, *(["io_uring"] if other == "fio" else []), "aligned", "unaligned"]
    rows: list[dict[str, Any]] = []
    for index in range(options.rounds):
        for who in whos:
            if who in ("fio", "io_uring"):
                engine = "libaio" if who == "fio" else who
                rates = fio(options.folder, num_bytes, engine)
            elif who == "dd":
                rates = dd(options.folder, num_bytes)
            else:
                rates = ours(options.folder, num_bytes, is_aligned=who == "aligned")
            rows.append({"round": index, "who": who, **rates})
            print(
                f"{index} {who:10} {rates['write_mb_s']:8.0f} {rates['read_mb_s']:8.0f}", flush=True
            )
    facts = {
        "command": f"benchmarks/disk.py FOLDER --gib {options.gib:g} --rounds {options.rounds}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "beside": subprocess.run(
            [other, "--version"], capture_output=True, text=True, check=True
        ).stdout.splitlines()[0],
        "cores": os.cpu_count(),
        "bytes": num_bytes,
    }
    found = medians(rows, whos)
    result = {"facts": facts, "rows": rows, "medians": found}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"disk-{options.name}.json").write_text(json.dumps(result, indent=1))
    return report(found, other)


def ours(folder: Path, num_bytes: int, *, is_aligned: bool) -> dict[str, float]:
    """Write and read all of `num_bytes`, as many requests in flight as the tier has threads."""
    with DiskStore([DiskSpec(path=str(folder), cap_bytes=num_bytes)]) as store:
        store.reserve(num_bytes)
        assert store.is_direct
        memory = aligned_memory(REGION_BYTES, skip_bytes=0 if is_aligned else 64)
        memory[:] = os.urandom(REGION_BYTES)
        regions = [store.take(REGION_BYTES) for _ in range(num_bytes // REGION_BYTES)]
        rates: dict[str, float] = {}
        for what, copy in (("write_mb_s", store.write), ("read_mb_s", store.read)):
            start = time.perf_counter()
            copies = [copy(region, memory) for region in regions if region is not None]
            wait(copies)
            rates[what] = num_bytes / (time.perf_counter() - start) / MB
            assert all(done.exception() is None for done in copies)
        return rates


def fio(folder: Path, num_bytes: int, engine: str) -> dict[str, float]:
    """Let fio write a file and read it."""
    path = folder / "fio-beside-ebbtide"
    rates: dict[str, float] = {}
    try:
        for what, mode in (("write_mb_s", "write"), ("read_mb_s", "read")):
            command = [
                "fio", "--name=x", f"--filename={path}", f"--rw={mode}", f"--bs={STRIPE_BYTES}",
                f"--iodepth={NUM_THREADS}", f"--ioengine={engine}", "--direct=1",
                "--fallocate=posix", f"--size={num_bytes}", "--output-format=json",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            job = json.loads(done.stdout)["jobs"][0][mode]
            rates[what] = job["bw_bytes"] / MB
    finally:
        path.unlink(missing_ok=True)
    return rates


def dd(folder: Path, num_bytes: int) -> dict[str, float]:
    """Let as many dd's as the tier has threads write a file and read it, each its own range."""
    path = folder / "dd-beside-ebbtide"
    count = num_bytes // STRIPE_BYTES // NUM_THREADS
    rates: dict[str, float] = {}
    try:
        # Other content than zeros, which some disks do not store.
        source = folder / "dd-source"
        source.write_bytes(os.urandom(count * STRIPE_BYTES))
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        ways = {
            "write_mb_s": ("if", source, "of", path, "seek", "oflag=direct"),
            "read_mb_s": ("of", "/dev/null", "if", path, "skip", "iflag=direct"),
        }
        for what, (other_end, other_path, end, own_path, place, flag) in ways.items():
            start = time.perf_counter()
            running = [
                subprocess.Popen(
                    [
                        "dd", f"{other_end}={other_path}", f"{end}={own_path}", f"{place}={first}",
                        f"bs={STRIPE_BYTES}", f"count={count}", flag, "conv=notrunc", "status=none",
                    ]
                )
                for first in range(0, count * NUM_THREADS, count)
            ]  # fmt: skip
            if any(process.wait() for process in running):
                raise RuntimeError(f"dd failed in {folder}; see what it said above")
            rates[what] = count * NUM_THREADS * STRIPE_BYTES / (time.perf_counter() - start) / MB
    finally:
        path.unlink(missing_ok=True)
        (folder / "dd-source").unlink(missing_ok=True)
    return rates


def medians(rows: list[dict[str, Any]], whos: list[str]) -> dict[str, dict[str, float]]:
    """Return who wrote and read how fast."""
    return {
        who: {
            what: statistics.median(row[what] for row in rows if row["who"] == who)
            for what in ("write_mb_s", "read_mb_s")
        }
        for who in whos
    }


def report(found: dict[str, dict[str, float]], other: str) -> int:
    """Print the medians beside those of fio or dd; 1 if a promise is broken."""
    is_kept = True
    for who in found:
        if who == other:
            continue
        for what, rate in found[who].items():
            share = rate / found[other][what]
            line = f"{who:10} {what:12} {rate:8.0f} MB/s  {share:.2f} of {other}'s"
            if who != "io_uring":
                is_kept = is_kept and share >= PROMISE
                line += f", at least {PROMISE}"
            print(line)
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
