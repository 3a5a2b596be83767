"""What the disk tier costs a training step on a GPU, beside host memory and beside recomputation.

    PYTHONPATH=src python3 benchmarks/disk_gpu.py FOLDER --out benchmarks/results

Blocks of Llama-3-8B's shape, one model, one process, all rows of one run:

- `inputs, host` and `inputs, disk`: full checkpointing whose block inputs leave for pinned host
  memory, and for a file in FOLDER; they take turns. The figure is the second's time over the
  first's.
- `recompute alone`: what a budget's plan does without any tier. `host`: the same budget with 4 GiB
  of host memory; `host and disk`: with the disk too. The figure is the last's time over the
  first's.

The budget is what `inputs, host` took, and some more; `--inputs-only` leaves its rows out.
Gradients are compared bit for bit with those of the model without ebbtide. With `--tiny`, a dry run
on a CPU: there host memory is the device's, so that rows with a host tier are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from llama_shape import make_model
from torch import Tensor, nn

from ebbtide.memory.disk_rates import measure_rates
from ebbtide.torch import Tide, attach
from ebbtide.units import DiskSpec

GIB = 2**30

INPUTS = "offload-inputs"
NUM_WARM_UP = {True: 9, False: 3}
"""Steps before the counted ones, with a budget and without: one observes, one is checked, and a
budget's is measured in one and corrected after five."""

# Figure, and the most that it may be.
PROMISES = {
    ("inputs, disk", "inputs, host"): 1.05,
    ("host and disk", "recompute alone"): 1.0,
    ("host and disk", "host"): 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to train, and how it attaches."""

    name: str
    options: dict[str, Any]

    @property
    def has_budget(self) -> bool:
        return "budget" in self.options


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="counted in each turn")
    parser.add_argument("--turns", type=int, default=2, help="of the two rows of inputs")
    parser.add_argument("--above-gib", type=float, default=8.0, help="of the budget, above inputs'")
    parser.add_argument("--host", default="4GiB", help="of the rows with a budget")
    parser.add_argument("--disk", default="64GiB", help="most bytes in FOLDER")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU")
    parser.add_argument("--inputs-only", action="store_true", help="no rows with a budget")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    started = time.perf_counter()
    device = "cpu" if options.tiny else "cuda"
    scale = 32 if options.tiny else 1
    if options.tiny:
        options.context, options.disk = 256, "1GiB"
    model = make_model(options.layers, device, scale)
    torch.manual_seed(1)
    ids = torch.randint(0, 32000 // scale, (1, options.context), device=device)
    reference = gradients(model, ids)
    disk = f"{options.folder}:{options.disk}"
    rate = measure_rates([DiskSpec(path=str(options.folder), cap_bytes=2**30)])[0]
    inputs = [
        Way(name="inputs, host", options={"plan": INPUTS}),
        Way(name="inputs, disk", options={"plan": INPUTS, "disk": disk}),
    ]
    turns: list[list[dict[str, Any]]] = []
    for turn in range(options.turns):
        ways = inputs[1:] if options.tiny else inputs
        expected = None if turn else reference
        turns.append([measure(way, model, ids, options.steps, expected) for way in ways])
    rows = merged(turns)
    budget = "60MiB" if options.tiny else int((rows[0]["peak_gib"] + options.above_gib) * GIB)
    without: dict[str, Any] = {} if options.tiny else {"host": 0}
    with_host: dict[str, Any] = {} if options.tiny else {"host": options.host}
    ways = [
        Way(name="recompute alone", options={"budget": budget, **without}),
        Way(name="host", options={"budget": budget, **with_host}),
        Way(name="host and disk", options={"budget": budget, **with_host, "disk": disk}),
    ]
    for way in ways:
        if options.inputs_only or (options.tiny and way.name == "host"):
            continue
        expected = reference if way.name == "host and disk" else None
        rows.append(measure(way, model, ids, options.steps, expected))
    facts = {
        "command": "PYTHONPATH=src python3 benchmarks/disk_gpu.py FOLDER "
        + " ".join(sys.argv[2:]).replace(str(options.out), "OUT"),
        "device": "cpu" if options.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
        "context": options.context,
        "layers": options.layers,
        "budget": budget,
        "disk_write_gb_s": rate.write_bytes_per_s / 1e9,
        "disk_read_gb_s": rate.read_bytes_per_s / 1e9,
        "seconds": round(time.perf_counter() - started, 1),
    }
    text, is_kept = report(facts, rows)
    options.out.mkdir(parents=True, exist_ok=True)
    rows_of = "disk-gpu-inputs" if options.inputs_only else "disk-gpu"
    name = f"{rows_of}-tiny" if options.tiny else f"{rows_of}-{options.context}"
    result = {"facts": facts, "rows": rows, "table": text}
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1))
    print(text)
    return 0 if is_kept else 1


def measure(
    way: Way, model: nn.Module, ids: Tensor, num_steps: int, reference: list[Tensor] | None
) -> dict[str, Any]:
    """Attach, warm up, and time some steps."""
    gc.collect()
    is_gpu = ids.is_cuda
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    with attach(model, **way.options) as tide:
        first_peak_gib = 0.0
        for index in range(NUM_WARM_UP[way.has_budget]):
            step(model, ids)
            if index == 0 and is_gpu:
                first_peak_gib = torch.cuda.max_memory_allocated() / GIB
        tide.reset_statistics()
        read_before = read_by_disk(tide)
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = [step(model, ids) for _ in range(num_steps)]
        disk_read_gib = (read_by_disk(tide) - read_before) / GIB / num_steps
        peak_gib = torch.cuda.max_memory_allocated() / GIB if is_gpu else 0.0
        row = {"way": way.name, "step_ms_all": times, **counts(tide, num_steps)}
        row |= {"peak_gib": peak_gib, "first_peak_gib": first_peak_gib}
        row["disk_read_gib"] = disk_read_gib
        if reference is not None:
            found = gradients(model, ids)
            row["grad_equal"] = all(
                torch.equal(a, b) for a, b in zip(found, reference, strict=True)
            )
    row["seconds"] = round(time.perf_counter() - started, 1)
    print(f"{way.name:16} {[round(t) for t in times]} ms", file=sys.stderr, flush=True)
    return row


def read_by_disk(tide: Tide) -> int:
    """Return the bytes that were read from disk, without what pinned memory still held."""
    tiers = None if tide.runtime is None else tide.runtime.tiers
    disk = None if tiers is None else tiers.disk
    return 0 if disk is None else disk.statistics().read_bytes


def counts(tide: Tide, num_steps: int) -> dict[str, Any]:
    """Return what a step moved, and what the plan said."""
    found, plan = tide.statistics(), tide.plan
    assert plan is not None
    return {
        "written_gib": found.disk.moved_out_bytes / GIB / num_steps,
        "read_gib": found.disk.moved_in_bytes / GIB / num_steps,
        "to_host_gib": found.host.moved_out_bytes / GIB / num_steps,
        "recomputed_ops": found.num_recomputed_ops // num_steps,
        "host_taken_gib": tide.host_taken_bytes / GIB,
        "predicted_ms": plan.predicted_step_ns / 1e6,
        "bound_ms": plan.bound_step_ns / 1e6,
        "planned_disk_gib": plan.disk_bytes / GIB,
        "planned_host_gib": plan.host_bytes / GIB,
    }


def step(model: Any, ids: Tensor) -> float:
    """Return the milliseconds of forward and backward."""
    model.zero_grad(set_to_none=False)
    wait_for_device(ids)
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    wait_for_device(ids)
    return (time.perf_counter() - start) * 1e3


def wait_for_device(ids: Tensor) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize()


def gradients(model: Any, ids: Tensor) -> list[Tensor]:
    """Return the gradients of one step under deterministic kernels, on the host."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward is not deterministic
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def merged(turns: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Put the turns of each row together."""
    rows: list[dict[str, Any]] = []
    for found in zip(*turns, strict=True):
        rows.append({**found[0], "step_ms_all": [t for r in found for t in r["step_ms_all"]]})
    return rows


def report(facts: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return the table with its ratios, and whether every promise was kept."""
    for row in rows:
        row["step_ms"] = statistics.median(row["step_ms_all"])
    lines = [
        f"{facts['device']}, {facts['context']} tokens, {facts['layers']} blocks; the disk wrote "
        f"{facts['disk_write_gb_s']:.2f} and read {facts['disk_read_gb_s']:.2f} GB/s",
        f"{'way':16}"
        + "".join(
            f"{head:>10}" for head in ("step ms", "least", "most", "predicted", "bound", "peak GiB")
        )
        + "".join(f"{head:>10}" for head in ("host GiB", "disk GiB", "gradients")),
    ]
    keys = ("predicted_ms", "bound_ms", "peak_gib", "to_host_gib", "written_gib")
    for row in rows:
        times = row["step_ms"], min(row["step_ms_all"]), max(row["step_ms_all"])
        cells = [*times, *(row[key] for key in keys)]
        equal = {True: "equal", False: "differ", None: "-"}[row.get("grad_equal")]
        lines.append(
            f"{row['way']:16}" + "".join(f"{cell:10.2f}" for cell in cells) + f"{equal:>10}"
        )
    by_way = {row["way"]: row for row in rows}
    is_kept = all(row.get("grad_equal", True) for row in rows)
    for (way, other), most in PROMISES.items():
        if way in by_way and other in by_way:
            ratio = by_way[way]["step_ms"] / by_way[other]["step_ms"]
            is_kept = is_kept and ratio <= most
            lines.append(f"{way} / {other}: {ratio:.3f}, at most {most}")
    lines.append(f"{facts['seconds']} s in all")
    return "\n".join(lines), is_kept


# cuBLAS is deterministic only with a workspace of its own; read when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if __name__ == "__main__":
    sys.exit(main())
