"""Record three steps of a Llama-shaped model under torch's profiler, and hold them against counts.

    PYTHONPATH=src:. python3 benchmarks/trace_gpu.py --out FOLDER --strategy balanced

The trace must show the bytes that ebbtide counted itself, all of them in pinned memory, and each
copy of a mebibyte and more under its activation's name. Ends with 1 where it does not. `--tiny`
tries the program itself where there is no GPU, and then finds no device and ends with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.llama_shape import make_model, strategy
from ebbtide.trace import analyse, read_trace
from ebbtide.trace.findings import LARGE_BYTES, find

NUM_STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", default="balanced")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if options.tiny else "cuda"
    model = make_model(2 if options.tiny else 8, device, 32 if options.tiny else 1)
    context = 64 if options.tiny else options.context
    ids_BT = torch.randint(0, model.config.vocab_size, (1, context), device=device)

    def step() -> None:
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()

    path = options.out / f"torch-{options.strategy}.json.gz"
    activities = [ProfilerActivity.CPU] + ([] if options.tiny else [ProfilerActivity.CUDA])
    with strategy(options.strategy, model) as tide:
        for _ in range(4):
            step()
        before = None if tide is None else tide.statistics()
        with profile(activities=activities, profile_memory=True) as recorded:
            for number in range(NUM_STEPS):
                with record_function(f"step {number}"):
                    step()
            if not options.tiny:
                torch.cuda.synchronize()
        after = None if tide is None else tide.statistics()
    recorded.export_chrome_trace(str(path))
    trace = read_trace(path)
    print(f"{path}: {trace.num_events} events, notes {trace.notes}", file=sys.stderr)
    if not trace.devices:
        return 1
    seen = analyse(trace.devices[0].timeline)
    copied = [s for s in trace.devices[0].timeline.spans if s.num_bytes >= LARGE_BYTES]
    unnamed = [s.name for s in copied if s.name.startswith(("Memcpy DtoH", "Memcpy HtoD"))]
    result: dict[str, Any] = {
        "steps": [(s.name, (s.end_ns - s.start_ns) / 1e6) for s in seen.steps],
        "compute_busy_ms": seen.compute_busy_ns / 1e6,
        "idle_ms": {reason.value: ns / 1e6 for reason, ns in seen.idle_by_reason_ns.items()},
        "compute_lost_ms": seen.compute_lost_ns / 1e6,
        "num_large_unnamed": len(unnamed),
        "findings": [f.evidence for f in find(trace.devices[0], seen)],
    }
    is_right = True
    for word, figures in (("out", seen.copy_out), ("in", seen.copy_in)):
        counted = 0
        if before is not None and after is not None:
            counted = getattr(after.host, f"moved_{word}_bytes")
            counted -= getattr(before.host, f"moved_{word}_bytes")
        result[f"copy_{word}"] = {
            "bytes": figures.num_bytes,
            "counted_bytes": counted,
            "pinned_bytes": figures.pinned_bytes,
            "gb_per_s": figures.gb_per_s,
            "hidden_ms": figures.hidden_ns / 1e6,
            "exposed_ms": figures.exposed_ns / 1e6,
        }
        # Beside what ebbtide moves there are losses and masks, of some bytes each.
        is_right &= 0 <= figures.num_bytes - counted < LARGE_BYTES
        is_right &= figures.pinned_bytes >= counted
    print(json.dumps(result, indent=2))
    return 0 if is_right and not unnamed else 1


if __name__ == "__main__":
    sys.exit(main())
