"""FSDP2 on the GPUs of one host: full checkpointing beside ebbtide, with one plan for all ranks.

    PYTHONPATH=src:. torchrun --nproc_per_node 2 benchmarks/fsdp.py --out FOLDER

Llama-3-8B-shaped blocks in groups of `fully_shard`, one a block, random weights, bf16, one sequence
a rank. A step is forward and backward. The rows: torch's checkpointing of each block; a budget of
that one's peak and a tenth, planned by all ranks together; `balanced`; and nothing. Each rank gives
its own figures. The budget's plan is set beside the one that the same measurements would give on a
GPU that has the link for itself. Gradients are compared on a short run of two blocks, and the
examples for several GPUs are run. Rank 0 writes `fsdp.json` after each row, and prints the table
last; what is not done after `--seconds` is left out, and said.

`--tiny` tries the program itself on a CPU, where nothing is measured that a GPU would show.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.llama_shape import GIB, make_model
from ebbtide.planner.solve import plan_for_budget
from ebbtide.torch import Tide, attach
from ebbtide.torch.probe import probe_machine
from ebbtide.trace import analyse, read_trace
from ebbtide.units import parse_bytes, parse_path_and_cap

# cuBLAS is deterministic only with a workspace of its own; read when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

STARTED_S = time.monotonic() - time.process_time()
"""Roughly when this process started: importing takes some seconds."""

ROOT = Path(__file__).parents[1]

MARGIN = 1.1
"""The budget, as a multiple of checkpointing's peak."""

NUM_FRUGAL = 2
"""The first step observes, the second is measured."""

NUM_WARM_UP = 4
"""Under the plan: the first is checked, and from two equal ones the scripts are learned."""

FILL = 1.15
"""Of the pinned memory: less than a fifteenth must be left over when it is asked for."""

EXAMPLES = ("train_ddp.py", "train_fsdp2.py")

EXAMPLES_S = 75
"""For both together; they start at once."""

MOST_SECONDS = 225


class Run:
    """What this rank is, and what all of them found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.is_tiny: bool = options.tiny
        self.rank = distributed.get_rank()
        self.num_ranks = distributed.get_world_size()
        self.device = torch.device("cpu")
        if not self.is_tiny:
            self.device = torch.device("cuda", distributed.get_node_local_rank())
        self.host = None if self.is_tiny else options.host
        # Host memory is a CPU's own memory: there, activations go to a file.
        self.tier: dict[str, Any] = {"host": self.host}
        if self.is_tiny:
            self.tier = {"disk": f"{tempfile.gettempdir()}:1GiB", "min_bytes": 1024}
        self.rows: list[dict[str, Any]] = []
        self.found: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._filling = threading.Thread(target=self._fill_host, daemon=True)
        self._filling.start()

    def _fill_host(self) -> None:
        """Touch as much memory as this rank will pin, and let go of it.

        A virtual machine may get its memory only as it is used, and tells of less until then.
        """
        if self.host is not None:
            share_bytes = parse_bytes(self.host) // self.num_ranks
            chunks: list[Tensor] = []
            for _ in range(int(FILL * share_bytes) // GIB):
                chunks.append(torch.ones(GIB, dtype=torch.uint8))

    def wait_for_host(self) -> None:
        """Wait until the memory to be pinned was touched."""
        self._filling.join()
        distributed.barrier()

    def build(self, num_layers: int) -> nn.Module:
        """Return a sharded model, with the same weights on every rank."""
        model = make_model(num_layers, str(self.device), 64 if self.is_tiny else 1)
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        model.train()
        return model

    def tokens(self, num_tokens: int) -> Tensor:
        """Return one sequence, another one on each rank."""
        torch.manual_seed(1 + self.rank)
        return torch.randint(0, 32000 // (64 if self.is_tiny else 1), (1, num_tokens)).to(
            self.device
        )

    def gathered(self, mine: Any) -> list[Any]:
        """Return what each rank gave."""
        everybody: list[Any] = [None] * self.num_ranks
        distributed.all_gather_object(everybody, mine)
        return everybody

    def synchronize(self) -> None:
        if not self.is_tiny:
            torch.cuda.synchronize()

    def start_peak(self) -> None:
        gc.collect()
        if not self.is_tiny:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Return the most that was allocated since `start_peak`; 0 on a CPU, which counts none."""
        return 0 if self.is_tiny else torch.cuda.max_memory_allocated()

    def write(self, left_out: str = "") -> None:
        """Write what was found so far, on the first rank."""
        if self.rank:
            return
        with self._lock:
            form = {"facts": self._facts(), "rows": self.rows, **self.found}
            if left_out:
                form["left_out"] = left_out
            self.options.out.mkdir(parents=True, exist_ok=True)
            (self.options.out / "fsdp.json").write_text(json.dumps(form, indent=1))

    def _facts(self) -> dict[str, Any]:
        return {
            "device": "cpu" if self.is_tiny else torch.cuda.get_device_name(),
            "num_ranks": self.num_ranks,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
            "date": time.strftime("%Y-%m-%d"),
            "layers": self.options.layers,
            "context": self.options.context,
            "host": self.host,
            "command": f"PYTHONPATH=src:. torchrun --nproc_per_node {self.num_ranks} "
            "benchmarks/fsdp.py --out FOLDER"
            + "".join(f" {word}" for word in self.options.given if word != "--out"),
        }


def one_step(run: Run, model: nn.Module, ids: Tensor) -> float:
    """Return the milliseconds of a step."""
    model.zero_grad(set_to_none=False)
    run.synchronize()
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    run.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(
    run: Run, name: str, model: nn.Module, ids: Tensor, tide: Tide | None = None, **more: Any
) -> None:
    """Run steps under what the model has now, and add the row of all ranks."""
    mine: dict[str, Any] = {"status": "ok"}
    num_steps = run.options.steps
    try:
        run.start_peak()
        for _ in range(NUM_FRUGAL if tide is not None else 1):
            one_step(run, model, ids)
        mine["first_peak_gib"] = run.peak_bytes() / GIB
        run.start_peak()
        for _ in range(NUM_WARM_UP if tide is not None else 1):
            one_step(run, model, ids)
        if tide is not None:
            tide.reset_statistics()
        times = [one_step(run, model, ids) for _ in range(num_steps)]
        mine["step_ms_all"] = [round(each, 1) for each in times]
        mine["step_ms"] = statistics.median(times)
        # With the warm-up: the budget is kept from the first planned step on.
        mine["peak_gib"] = run.peak_bytes() / GIB
        if not run.is_tiny:
            mine["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        if tide is not None:
            mine |= _figures(tide, num_steps) | _hidden(run, model, ids)
    except torch.OutOfMemoryError as error:
        mine = {"status": "OOM", "error": str(error).splitlines()[0]}
    everybody = run.gathered(mine)
    run.rows.append({"strategy": name, "ranks": everybody, **more})
    run.write()
    if run.rank == 0:
        print(f"{time.monotonic() - STARTED_S:.0f} s: {name} done", file=sys.stderr, flush=True)


def _figures(tide: Tide, num_steps: int) -> dict[str, Any]:
    counts, plan = tide.statistics(), tide.plan
    assert plan is not None
    return {
        "moved_out_gib": counts.moved_out_bytes / GIB / num_steps,
        "moved_in_gib": counts.moved_in_bytes / GIB / num_steps,
        "planned_out_gib": (plan.host_bytes + plan.disk_bytes) / GIB,
        "host_taken_gib": tide.host_taken_bytes / GIB,
        "recomputed_ops": counts.num_recomputed_ops // num_steps,
        "not_understood": counts.num_kept_not_understood,
        "predicted_ms": plan.predicted_step_ns / 1e6,
        "bound_ms": plan.bound_step_ns / 1e6,
        "predicted_peak_gib": plan.peak_bytes / GIB,
        "report": tide.report(),
    }


def _hidden(run: Run, model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Return how much of the copying lay under compute, from a trace of one step."""
    activities = [ProfilerActivity.CPU] + ([] if run.is_tiny else [ProfilerActivity.CUDA])
    with profile(activities=activities) as recorded:
        one_step(run, model, ids)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace = read_trace(path)
    if not trace.devices:
        return {}
    seen = analyse(trace.devices[0].timeline)
    busy_ns = seen.copy_out.busy_ns + seen.copy_in.busy_ns
    return {
        "hidden_share": (seen.copy_out.hidden_ns + seen.copy_in.hidden_ns) / max(busy_ns, 1),
        "copy_out_gb_per_s": seen.copy_out.gb_per_s,
        "copy_in_gb_per_s": seen.copy_in.gb_per_s,
        "exposed_out_ms": seen.copy_out.exposed_ns / 1e6,
        "exposed_in_ms": seen.copy_in.exposed_ns / 1e6,
        "collective_ms": seen.collective_busy_ns / 1e6,
        "collective_exposed_ms": seen.collective_exposed_ns / 1e6,
        "beside_collectives_ms": [
            figures.beside_collectives_ns / 1e6 for figures in (seen.copy_out, seen.copy_in)
        ],
        "idle_ms": {reason.value: ns / 1e6 for reason, ns in seen.idle_by_reason_ns.items()},
    }


def checkpointed(model: Any, *, is_on: bool) -> None:
    """Put torch's own checkpoint around each block, or take it off."""
    if is_on:
        kwargs = {"use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_disable()


def budget_for(run: Run, model: nn.Module, ids: Tensor, checkpoint_bytes: int) -> int:
    """Return the budget that all ranks get."""
    if run.is_tiny:  # a CPU counts no peak: a tenth above the smallest there is
        with attach(model, budget=2**40, **run.tier) as tide:
            for _ in range(NUM_FRUGAL + 1):
                one_step(run, model, ids)
            assert tide.workload is not None and tide.machine is not None
            nothing = plan_for_budget(tide.workload, tide.machine, budget_bytes=0, min_bytes=1024)
            checkpoint_bytes = nothing.smallest_budget_bytes
    return int(MARGIN * max(run.gathered(checkpoint_bytes)))


def compare_links(run: Run, tide: Tide, budget_bytes: int) -> None:
    """Plan once more, for a GPU that has its link for itself."""
    alone = None
    for rank in range(run.num_ranks):
        if rank == run.rank:
            disks = tide.machine.disk_bytes if tide.machine is not None else 0
            alone = probe_machine(run.device, disks=() if not disks else _disks(run))
        distributed.barrier()
    machines = run.gathered(alone)
    if run.rank == 0:
        assert tide.workload is not None and tide.machine is not None and tide.plan is not None
        links: dict[str, Any] = {}
        for name, machine in (("all at once", tide.machine), ("alone", machines[0])):
            caps = {"host_bytes": tide.machine.host_bytes, "disk_bytes": tide.machine.disk_bytes}
            outcome = plan_for_budget(
                tide.workload,
                dataclasses.replace(machine, **caps),
                budget_bytes=budget_bytes,
                min_bytes=run.tier.get("min_bytes", 65536),
            )
            plan = outcome.plan
            links[name] = {
                "out_gb_per_s": machine.out_bytes_per_s / 1e9,
                "in_gb_per_s": machine.in_bytes_per_s / 1e9,
                "both_gb_per_s": machine.both_bytes_per_s / 1e9,
                "planned_out_gib": 0 if plan is None else (plan.host_bytes + plan.disk_bytes) / GIB,
                "predicted_ms": 0 if plan is None else plan.predicted_step_ns / 1e6,
                "source": machine.source,
            }
        run.found["links"] = links
    distributed.barrier()


def _disks(run: Run) -> Any:
    return (parse_path_and_cap(run.tier["disk"]),)


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Return this rank's part of each gradient."""
    found: list[Tensor] = []
    for parameter in model.parameters():
        grad = parameter.grad
        assert grad is not None
        found.append((grad.to_local() if isinstance(grad, DTensor) else grad).clone())
    return found


def compare_gradients(run: Run) -> None:
    """Compare each step's gradients with plain training's, bit for bit, on two blocks."""
    model, ids = run.build(2), run.tokens(64 if run.is_tiny else 4096)
    torch.use_deterministic_algorithms(True)
    if not run.is_tiny:
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward is not deterministic

    def gradients() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
        return local_gradients(model)

    gradients()
    checkpointed(model, is_on=True)
    run.start_peak()
    gradients()
    peak_bytes = run.peak_bytes()
    checkpointed(model, is_on=False)
    wanted = gradients()
    budget = budget_for(run, model, ids, peak_bytes)
    ways: dict[str, dict[str, Any]] = {
        "balanced": {"plan": "balanced"},
        "budget": {"budget": budget, "ranks": distributed.group.WORLD},
    }
    result: dict[str, Any] = {}
    for name, how in ways.items():
        with attach(model, **how, **run.tier) as tide:
            is_equal: list[bool] = []
            for _ in range(NUM_FRUGAL + NUM_WARM_UP):
                found = gradients()
                is_equal.append(all(map(torch.equal, found, wanted)))
            moved = tide.statistics().moved_out_bytes
        everybody = run.gathered((is_equal, moved))
        result[name] = {
            "equal_steps": [steps for steps, _ in everybody],
            "moved_out_bytes": [num_bytes for _, num_bytes in everybody],
            "num_gradients": len(wanted),
        }
    if not run.is_tiny:
        torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    run.found["gradients"] = result
    run.write()


def run_examples(run: Run) -> None:
    """Run the examples for several ranks, in processes of their own, all at once."""
    if run.rank == 0:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
            environment.pop(name, None)
        started: dict[str, subprocess.Popen[str]] = {}
        for name in EXAMPLES:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc_per_node", str(run.num_ranks), str(ROOT / "examples" / name)]
            started[name] = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        said: dict[str, Any] = {}
        for name, process in started.items():
            try:
                printed, _ = process.communicate(timeout=EXAMPLES_S)
            except subprocess.TimeoutExpired:
                process.kill()
                printed = process.communicate()[0]
            said[name] = {"code": process.returncode, "printed": printed[-3000:]}
        run.found["examples"] = said
        run.write()
    distributed.barrier()


def table(run: Run) -> str:
    """Return the rows as text, and what was wanted of them."""
    lines = [
        f"{'strategy':12}{'rank':>5}{'step ms':>9}{'x ckpt':>8}{'peak':>8}{'budget':>8}{'out':>7}"
        f"{'in':>7}{'pinned':>8}{'hidden':>8}{'predicted':>10}"
    ]
    base = _step_ms(run, "checkpoint")
    for row in run.rows:
        for rank, mine in enumerate(row["ranks"]):
            head = f"{row['strategy']:12}{rank:>5}"
            if mine["status"] != "ok":
                lines.append(f"{head}  {mine['status']}: {mine['error']}")
                continue
            cells = (
                (mine["step_ms"], 9, 1), (base / mine["step_ms"] if base else None, 8, 3),
                (mine["peak_gib"], 8, 2), (row.get("budget_gib"), 8, 2),
                (mine.get("moved_out_gib"), 7, 2), (mine.get("moved_in_gib"), 7, 2),
                (mine.get("host_taken_gib"), 8, 2), (mine.get("hidden_share"), 8, 3),
                (mine.get("predicted_ms"), 10, 1),
            )  # fmt: skip
            lines.append(head + "".join(_cell(*cell) for cell in cells))
    for name, link in run.found.get("links", {}).items():
        lines.append(
            f"link {name}: out {link['out_gb_per_s']:.1f}, in {link['in_gb_per_s']:.1f}, both "
            f"{link['both_gb_per_s']:.1f} GB/s; its plan moves {link['planned_out_gib']:.2f} GiB"
        )
    for name, found in run.found.get("gradients", {}).items():
        is_equal = all(step for steps in found["equal_steps"] for step in steps)
        num_steps = sum(map(len, found["equal_steps"]))
        lines.append(
            f"gradients under {name}: {'equal' if is_equal else 'DIFFER'} in {num_steps} steps of "
            f"all ranks, {found['num_gradients']} tensors each, moved {found['moved_out_bytes']}"
        )
    for name, said in run.found.get("examples", {}).items():
        lines.append(f"{name}: exit {said['code']}")
    return "\n".join([*lines, *_wanted(run)])


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def _step_ms(run: Run, strategy: str) -> float:
    for row in run.rows:
        if row["strategy"] == strategy and all(r["status"] == "ok" for r in row["ranks"]):
            return max(each["step_ms"] for each in row["ranks"])
    return 0.0


def _wanted(run: Run) -> list[str]:
    """Say of each figure that was wanted whether it was reached."""
    row = next((r for r in run.rows if r["strategy"] == "budget"), None)
    base = _step_ms(run, "checkpoint")
    if run.is_tiny or row is None or not base or not _step_ms(run, "budget"):
        return []
    ranks = row["ranks"]
    pinned_gib = sum(each["host_taken_gib"] for each in ranks)
    peak_gib = max(each["peak_gib"] for each in ranks)
    checks = {
        "throughput / checkpointing >= 1.08": (
            base / _step_ms(run, "budget"), base / _step_ms(run, "budget") >= 1.08
        ),
        "peak / budget <= 1": (peak_gib / row["budget_gib"], peak_gib <= row["budget_gib"]),
        "pinned by all ranks, GiB <= host": (pinned_gib, pinned_gib <= row["host_gib"]),
    }  # fmt: skip
    if all("hidden_share" in each for each in ranks):
        hidden = min(each["hidden_share"] for each in ranks)
        checks["hidden share of copies >= 0.9"] = (hidden, hidden >= 0.9)
    links = run.found.get("links")
    if links:
        ratio = links["all at once"]["planned_out_gib"] / (links["alone"]["planned_out_gib"] or 1)
        checks["moves / what one GPU alone would < 1"] = (ratio, ratio < 1)
    return [f"{name}: {value:.3f} {'yes' if ok else 'NO'}" for name, (value, ok) in checks.items()]


def measure_all(run: Run) -> None:
    """Make every row, the surest first."""
    compare_gradients(run)
    model, ids = run.build(run.options.layers), run.tokens(run.options.context)
    checkpointed(model, is_on=True)
    measure(run, "checkpoint", model, ids)
    checkpointed(model, is_on=False)
    mine = run.rows[-1]["ranks"][run.rank]
    budget = budget_for(run, model, ids, int(mine["peak_gib"] * GIB))
    run.wait_for_host()
    host_gib = 0.0 if run.host is None else parse_bytes(run.host) / GIB
    with attach(model, budget=budget, ranks=distributed.group.WORLD, **run.tier) as tide:
        more = {"budget_gib": budget / GIB, "host_gib": host_gib}
        measure(run, "budget", model, ids, tide, **more)
        compare_links(run, tide, budget)
    with attach(model, "balanced", **run.tier) as tide:
        measure(run, "balanced", model, ids, tide, host_gib=host_gib)
    if time.monotonic() - STARTED_S < run.options.seconds - EXAMPLES_S:
        run_examples(run)
    # Last, as ranks of which only one runs out of memory wait for each other.
    measure(run, "keep", model, ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--host", default="96GiB", help="pinned memory of all ranks together")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=MOST_SECONDS, help="ends then, in any case")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    given = sys.argv[1:]
    options.given = [w for i, w in enumerate(given) if w != "--out" and given[i - 1] != "--out"]
    if options.tiny:
        options.layers, options.context, options.steps = 4, 128, 2
        distributed.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device)
    run = Run(options)

    def end_early() -> None:
        run.write(f"what was not done within {options.seconds} s")
        if run.rank == 0:
            print(f"{table(run)}\nended after {options.seconds} s", flush=True)
        os._exit(3)

    watchdog = threading.Timer(options.seconds, end_early)
    watchdog.daemon = True
    watchdog.start()
    measure_all(run)
    run.write()
    distributed.barrier()
    distributed.destroy_process_group()
    watchdog.cancel()
    if run.rank == 0:
        print(table(run), flush=True)


if __name__ == "__main__":
    main()
