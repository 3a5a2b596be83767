"""Cut a part out of a trace of torch's profiler, so that it is small enough to keep.

    python3 benchmarks/cut_trace.py trace.json.gz cut.json.gz --from-ms 136.7 --to-ms 276.83

Times are those that `ebbtide trace` prints: from the first thing on a device. What starts on a
device in the part is kept, with the calls that asked for it, ebbtide's ranges around these calls,
calls that wait, marked ranges and memory events of the part. Events are kept as they were written;
operators, flows and the profiler's own are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

from ebbtide.trace.names import MARK, MEMORY_CALLS, WAITING_CALLS, plain_call

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")

Event = dict[str, Any]


def cut(events: list[Event], from_us: float, to_us: float) -> list[Event]:
    """Return the events of a part that begins and ends so long after the first on a device."""
    zero = min(event["ts"] for event in events if event.get("cat") in ON_DEVICE)
    start, end = zero + from_us, zero + to_us

    def is_in(event: Event) -> bool:
        return event["ts"] < end and event["ts"] + event.get("dur", 0) >= start

    asked = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in ON_DEVICE and start <= event["ts"] < end
    }
    calls = [
        event
        for event in events
        if event.get("cat") in CALLS and event["args"].get("correlation") in asked
    ]
    asking = {(call["tid"], call["ts"]) for call in calls}

    def surrounds_a_call(event: Event) -> bool:
        return any(
            tid == event["tid"] and event["ts"] <= ts < event["ts"] + event["dur"]
            for tid, ts in asking
        )

    kept: list[Event] = []
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        match category:
            case "kernel" | "gpu_memcpy" | "gpu_memset":
                is_kept = start <= event["ts"] < end
            case "cuda_runtime" | "cuda_driver":
                is_waiting = plain_call(name) in WAITING_CALLS | MEMORY_CALLS
                is_kept = event["args"].get("correlation") in asked or (is_waiting and is_in(event))
            case "cpu_op":
                is_kept = name.startswith(MARK) and surrounds_a_call(event)
            case "user_annotation":
                is_kept = is_in(event)
            case "cpu_instant_event":
                is_kept = name == "[memory]" and is_in(event)
            case _:
                is_kept = event.get("ph") == "M" and name == "process_name"
        if is_kept:
            kept.append(event)
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--from-ms", type=float, required=True)
    parser.add_argument("--to-ms", type=float, required=True)
    given = parser.parse_args()
    opened = gzip.open if given.file.suffix == ".gz" else open
    with opened(given.file, "rt", encoding="utf-8") as file:
        form = json.load(file)
    form["traceEvents"] = cut(form["traceEvents"], given.from_ms * 1000, given.to_ms * 1000)
    text = json.dumps(form, separators=(",", ":")).replace('},{"ph"', '},\n{"ph"')
    with given.out.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(text.encode())
    num_bytes = given.out.stat().st_size
    print(f"{given.out}: {len(form['traceEvents'])} events, {num_bytes} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
