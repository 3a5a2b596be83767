"""How long `ebbtide estimate` takes for the largest model of the catalog.

    PYTHONPATH=src python3 benchmarks/estimate.py --out benchmarks/results/estimate-cpu.json

Each run is a process of its own, start and imports included: what a person waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

NUM_RUNS = 20
ARGUMENTS = (
    "estimate deepseek-v3-671b --machine gb200-nvl72 --context 4096 --batch 2 --fsdp 16 --ep 8 "
    "--json"
)


def run_once() -> float:
    """Return the seconds of one run."""
    program = "from ebbtide.cli import main; main()"
    start_s = time.perf_counter()
    finished = subprocess.run(
        [sys.executable, "-c", program, *ARGUMENTS.split()], capture_output=True, check=True
    )
    seconds = time.perf_counter() - start_s
    rows = json.loads(finished.stdout)["rows"]
    assert [row["status"] for row in rows] == ["oom", *["fits"] * 4], rows
    return seconds


def main(arguments: list[str]) -> None:
    """Time the command, print and write what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    run_once()  # reads the files of Python's modules from disk
    seconds = [run_once() for _ in range(NUM_RUNS)]
    found = {
        "command": " ".join(["PYTHONPATH=src python3 benchmarks/estimate.py", *arguments]),
        "measured": f"ebbtide {ARGUMENTS}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "median_s": round(statistics.median(seconds), 3),
        "longest_s": round(max(seconds), 3),
        "seconds": [round(one, 3) for one in seconds],
    }
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"median {found['median_s']} s, longest {found['longest_s']} s of {NUM_RUNS}")


if __name__ == "__main__":
    main(sys.argv[1:])
