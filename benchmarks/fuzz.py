"""Give every reader of foreign files very many broken ones.

    PYTHONPATH=src:. python3 benchmarks/fuzz.py --out benchmarks/results/fuzz.json

A reader must take a file or refuse it with a sentence of its own. Anything else is a failure and
is printed with the number that makes the file again: another exception, more than `LIMIT_S` for
one file, or more than `ROOM_BYTES` of address space beyond what the process had at the start. The
files are those of `tests/fuzz`, of which `make test` tries some hundred a reader. Needs no GPU;
about half an hour on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tests.fuzz.readers import READERS, Reader

NUM_FILES = 100_000
LIMIT_S = 20
ROOM_BYTES = 2**30
PROGRESS_FILES = 10_000


class TooLongError(Exception):
    """One file took more than `LIMIT_S`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--files", type=int, default=NUM_FILES, help="files for each reader")
    parser.add_argument("--readers", default="", help="names, with commas between; all, if empty")
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--out", type=Path, help="write the counts here, beside those of others")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _stop)
    bound_memory()
    wanted = set(filter(None, options.readers.split(",")))
    rows = [
        try_reader(reader, range(options.first, options.first + options.files))
        for reader in READERS
        if not wanted or reader.name in wanted
    ]
    if options.out is not None:
        write(options.out, rows)
    return 1 if any(row["num_failed"] for row in rows) else 0


def bound_memory() -> None:
    """Let the process have `ROOM_BYTES` more than it has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most_bytes = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


def try_reader(reader: Reader, numbers: range) -> dict[str, Any]:
    """Return how many files the reader took, refused and failed at."""
    num_read = num_failed = 0
    slowest_s = 0.0
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        for number in numbers:
            content = reader.make(Random(number))
            before_s = time.process_time()
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
            try:
                num_read += reader.is_read(content, Path(folder))
            except Exception:
                num_failed += 1
                print(f"{reader.name}: file {number}\n{traceback.format_exc(limit=-3)}", flush=True)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            slowest_s = max(slowest_s, time.process_time() - before_s)
            if (number + 1) % PROGRESS_FILES == 0:
                print(f"{reader.name}: {number + 1 - numbers.start}", file=sys.stderr, flush=True)
    row = {
        "reader": reader.name,
        "num_files": len(numbers),
        "num_read": num_read,
        "num_refused": len(numbers) - num_read - num_failed,
        "num_failed": num_failed,
        "slowest_cpu_ms": round(slowest_s * 1000),
        "wall_s": round(time.perf_counter() - start_s),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(row), flush=True)
    return row


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows in place of those of the same readers."""
    known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {"rows": []}
    tried = {row["reader"]: row for row in (*known["rows"], *rows)}
    facts = {
        "command": "PYTHONPATH=src:. python3 benchmarks/fuzz.py --out benchmarks/results/fuzz.json",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "limit_s": LIMIT_S,
        "room_bytes": ROOM_BYTES,
    }
    ordered = [tried[reader.name] for reader in READERS if reader.name in tried]
    text = json.dumps({"facts": facts, "rows": ordered}, indent=1) + "\n"
    path.write_text(text, encoding="utf-8")


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooLongError(f"one file took more than {LIMIT_S} s")


if __name__ == "__main__":
    sys.exit(main())
