"""Every strategy and every peer side by side, on models of several shapes, eager and compiled.

    PYTHONPATH=src python3 benchmarks/peers.py --out benchmarks/results
    PYTHONPATH=src python3 benchmarks/peers.py --only moe-16384 --minutes 8 --out benchmarks/results

One process a row, by the machinery of `ebbtide compare`: the same seed, weights and text in all
rows of a workload. Each row is written to `peers-<workload>.json` as soon as it is there, and a
call goes on where the one before it ended: rows that are in the file are not run again, but for
`keep`, whose gradients and time the new ones are compared with. A call that writes elsewhere goes
on from the files of an earlier one with `--since`. The most telling rows run first. With
`--minutes` no row starts that would probably end later, and one that does not end is stopped and
left for the next call. Then the page and the picture are made from all files in the folder; with
`--only none`, those alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from peers_report import draw, write_page
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ebbtide.compare.harness import AbstractObserver, References, run_strategy, start_waiting
from ebbtide.compare.prepare import Setup, choose_work_folder, prepare_setup
from ebbtide.compare.processes import Waiting
from ebbtide.compare.request import CompareRequest
from ebbtide.compare.results import Comparison, Row, Status, describe_comparison, describe_row
from ebbtide.compare.strategies import make_strategy
from ebbtide.compare.workloads import find_cache_folder, find_model, read_config
from ebbtide.memory.limits import find_tightest_limit

GIB = 2**30

# In the order that they run in: `keep` is what others are compared with, a budget comes after the
# row whose peak it is a share of, and what tells most comes before what takes longest.
EAGER = (
    *("keep", "checkpoint", "ebbtide 1.10 x checkpoint", "ebbtide 0.50 x keep"),
    *("checkpoint-offload", "torch-sac:op", "ebbtide:balanced", "torch-sac:2", "trl"),
    *("ebbtide 1.05 x checkpoint", "torchtune", "deepspeed", "save-on-cpu"),
)
COMPILED = (
    *("keep", "compile-budget:0", "ebbtide 1.10 x compile-budget:0", "ebbtide 0.50 x keep"),
    *("compile-budget:0.5", "compile-budget:0.25", "torch-sac:op", "checkpoint"),
    *("ebbtide:balanced", "torch-sac:2", "ebbtide 1.05 x compile-budget:0", "ebbtide:offload"),
    "trl",
)
BUDGETS = {
    "ebbtide 1.05 x checkpoint": ("checkpoint", 1.05),
    "ebbtide 1.10 x checkpoint": ("checkpoint", 1.10),
    "ebbtide 0.50 x keep": ("keep", 0.50),
    "ebbtide 1.05 x compile-budget:0": ("compile-budget:0", 1.05),
    "ebbtide 1.10 x compile-budget:0": ("compile-budget:0", 1.10),
}
"""Row: whose peak the budget is taken from, and its share."""

COPIES_ALL = ("save-on-cpu", "trl", "torchtune")
"""These put all that autograd saves into torch's pinned memory."""
PINNED_SHARE = 0.7
"""Most of the host's free memory that they may need, each request rounded up to a power of two as
torch does it: a host without memory ends every process of it."""
# 4 GiB took 2.9 s to pin on the host of an H200 (docs/design.md).
PINNING_S_PER_GIB = 0.75

# What a row takes before the first one was timed: imports, weights, steps.
FIRST_ROW_S = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its batch, and the strategies that are set side by side on it."""

    model: str
    layers: int | None = None
    context: int
    batch: int = 1
    steps: int = 5
    is_compiled: bool = False
    has_chunked_loss: bool = False

    @property
    def rows(self) -> tuple[str, ...]:
        return COMPILED if self.is_compiled else EAGER


BASE = {
    "gpt2-8192x2": Workload(model="gpt2", context=8192, batch=2),
    "llama-8b-8192": Workload(model="llama-8b-shape", layers=8, context=8192),
    "llama-8b-32768": Workload(model="llama-8b-shape", layers=8, context=32_768),
    "llama-8b-65536": Workload(model="llama-8b-shape", layers=8, context=65_536, steps=3),
    "qwen3-14b-8192": Workload(model="qwen3-14b-shape", layers=12, context=8192),
    "moe-16384": Workload(model="moe-shape", layers=8, context=16_384),
}
WORKLOADS = {
    **BASE,
    "qwen3-14b-8192-chunked": replace(BASE["qwen3-14b-8192"], has_chunked_loss=True),
    **{f"{name}-compiled": replace(each, is_compiled=True) for name, each in BASE.items()},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, commas between")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time of this call")
    parser.add_argument("--again", default="", help="rows to run again, commas between, or all")
    parser.add_argument("--since", type=Path, help="folder with the files of an earlier call")
    parser.add_argument("--text", type=Path, help="UTF-8 text to train on, as for compare")
    parser.add_argument("--scale", type=int, default=1, help="divide the widths, for a dry run")
    parser.add_argument("--page", type=Path, help="default: docs/benchmarks.md; OUT if scaled")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = [name for name in options.only.split(",") if name not in ("", "none")]
    unknown = [name for name in wanted if name not in WORKLOADS]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: no such workload; give {', '.join(WORKLOADS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.since is not None:
        take_earlier(options.since, options.out)
    deadline_s = time.monotonic() + options.minutes * 60
    again = tuple(filter(None, options.again.split(",")))
    left = {
        name: run_workload(
            name, options.out, deadline_s, again, text=options.text, scale=options.scale
        )
        for name in wanted
    }
    page = options.page or (Path("docs") if options.scale == 1 else options.out) / "benchmarks.md"
    results = read_results(options.out)
    picture = draw(results, options.out / "peers.png")
    page.write_text(write_page(results, tuple(WORKLOADS), page, picture), encoding="utf-8")
    print(f"wrote {page}", flush=True)
    for name, rows in left.items():
        if rows:
            print(f"left of {name}: {', '.join(rows)}; the same command goes on", flush=True)
    return 0


def run_workload(
    name: str,
    out: Path,
    deadline_s: float,
    again: tuple[str, ...],
    *,
    text: Path | None,
    scale: int,
) -> list[str]:
    """Run the rows that are not in the workload's file yet; return those that are left."""
    workload = WORKLOADS[name]
    file = out / f"peers-{name}.json"
    old: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    rows = {row["row"]: row for row in old["rows"]}
    for label in workload.rows if "all" in again else again:
        rows.pop(label, None)
    pending = [label for label in workload.rows if label not in rows]
    if not pending or time.monotonic() + FIRST_ROW_S > deadline_s:
        return pending
    cache = find_cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    base = choose_work_folder((Path(tempfile.gettempdir()), cache))
    prefix = "ebbtide-peers-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=base) as folder, ExitStack() as stack:
        print(f"{name}: preparing", flush=True)
        spare = stack.enter_context(Spare(Path(folder)))
        request = replace(make_request(workload, scale, Path(folder)), text=text)
        setup = forget_held_out(prepare_setup(request, Path(folder)))
        references = References()
        longest_s = 0.0
        # The reference first, in each call: gradients are not kept from one to the next.
        for label in ("keep", *(label for label in pending if label != "keep")):
            started_s = time.monotonic()
            expected_s = longest_s * 1.2
            if label in COPIES_ALL and setup.device.type == "cuda":
                expected_s += PINNING_S_PER_GIB * (find_pinned_gib(setup, rows) or 0.0)
            if longest_s and started_s + expected_s > deadline_s:
                # One that takes less may still fit.
                continue
            row = run_row(label, setup, references, rows, deadline_s - started_s, spare)
            if row.status is not Status.OK and time.monotonic() >= deadline_s:
                break  # it was stopped for the call's end alone
            longest_s = max(longest_s, time.monotonic() - started_s)
            rows[label] = describe(label, row, rows, setup)
            if label in pending:
                pending.remove(label)
            facts = describe_comparison(Comparison(facts=references.write(setup), rows=()))
            facts["command"] = (
                f"PYTHONPATH=src:. python3 benchmarks/peers.py --only {name} --out FOLDER"
                + (" --text FILE" if text is not None else "")
                + (f" --scale {scale}" if scale > 1 else "")
            )
            ordered = [rows[each] for each in workload.rows if each in rows]
            record = {**facts, "workload": name, "rows": ordered}
            file.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    return pending


def take_earlier(since: Path, out: Path) -> None:
    """Copy the results of an earlier call, where this folder has none of that workload."""
    for name in WORKLOADS:
        file = f"peers-{name}.json"
        if (since / file).is_file() and not (out / file).exists():
            shutil.copy(since / file, out / file)


def forget_held_out(setup: Setup) -> Setup:
    """Return the setup without held-out text: perplexities are not published here."""
    tokens = load_file(setup.tokens)
    save_file({**tokens, "held_out": tokens["held_out"][:0].clone()}, setup.tokens)
    return replace(setup, facts=replace(setup.facts, held_out_tokens=0))


def find_pinned_gib(setup: Setup, rows: dict[str, Any]) -> float | None:
    """Return the most that torch may pin for all that autograd saves; `None`: `keep` has no peak.

    An activation is tokens x width, and torch rounds its bytes up to a power of two.
    """
    peak_gib = rows.get("keep", {}).get("peak_gib")
    if peak_gib is None:
        return None
    config = read_config(setup.source)
    names = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size")
    sizes = [
        getattr(config, name) * setup.facts.context * setup.facts.batch
        for name in names
        if getattr(config, name, None)
    ]
    rounding = max(2 ** (size - 1).bit_length() / size for size in sizes)
    return (peak_gib - setup.facts.state_bytes / GIB) * rounding


def run_row(
    label: str,
    setup: Setup,
    references: References,
    rows: dict[str, Any],
    limit_s: float,
    spare: Spare,
) -> Row:
    """Run one row within the time that is left, or say why it is not run."""
    observer = PrintingObserver(label, spare)
    most_s = None if limit_s == float("inf") else limit_s
    if label in BUDGETS:
        whose, share = BUDGETS[label]
        peak_gib = rows.get(whose, {}).get("peak_gib")
        if peak_gib is None:
            note = f"not run: the budget is a share of the peak of {whose}, which did not finish"
            return observer.refuse(note)
        budget = str(int(peak_gib * GIB * share))
        request = replace(setup.request, budget=budget)
        with_budget = replace(setup, request=request)
        return spare.run(with_budget, "ebbtide", references, observer, most_s)
    limit = find_tightest_limit()
    if label in COPIES_ALL and setup.device.type == "cuda" and limit is not None:
        pinned_gib = find_pinned_gib(setup, rows)
        if pinned_gib is None or pinned_gib * GIB > PINNED_SHARE * limit.room_bytes:
            amount = "more than the device holds" if pinned_gib is None else f"{pinned_gib:.0f} GiB"
            return observer.refuse(
                f"not run: it may pin {amount}, and {limit.room_bytes / GIB:.0f} GiB of this host "
                "are free"
            )
    return spare.run(setup, label, references, observer, most_s)


def describe(label: str, row: Row, rows: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """Return the row as it is published."""
    published = describe_row(row)
    keep_ms = published["step_ms"] if label == "keep" else rows.get("keep", {}).get("step_ms")
    step_ms = published["step_ms"]
    return {
        "row": label,
        **published,
        "x_keep": round(step_ms / keep_ms, 4) if step_ms and keep_ms else None,
        "step_ms_range": [min(row.step_ns) / 1e6, max(row.step_ns) / 1e6] if row.step_ns else None,
        "date": setup.facts.date,
    }


def make_request(workload: Workload, scale: int, folder: Path) -> CompareRequest:
    """Return the request for a workload; scaled down, its model is written under `folder`."""
    model, layers, context = workload.model, workload.layers, workload.context
    if scale > 1:
        model, layers, context = str(write_small(workload, scale, folder)), None, context // scale
    return CompareRequest(
        model=model,
        layers=layers,
        context=context,
        batch=workload.batch,
        steps=1,
        passes=workload.steps if scale == 1 else 1,
        strategies=workload.rows,
        host=None,
        disks=(),
        text=None,
        device=None,
        seed=0,
        # Any budget will do here: it decides that all rows warm up as long as one with a budget.
        budget="auto",
        is_compiled=workload.is_compiled,
        has_chunked_loss=workload.has_chunked_loss,
    )


def write_small(workload: Workload, scale: int, folder: Path) -> Path:
    """Write a model of the same class with narrow layers, and return its folder."""
    config = read_config(find_model(workload.model, workload.layers))
    config.update(
        {
            name: max(getattr(config, name) // scale // 8 * 8, 16)
            for name in ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size")
            if getattr(config, name, None) is not None
        }
    )
    small = {
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": config.hidden_size // 4},
        **{"num_experts": 8, "num_experts_per_tok": 2},
    }
    config.update({name: size for name, size in small.items() if hasattr(config, name)})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / workload.model)
    return folder / workload.model


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what lies in the folder, by workload."""
    files = {name: folder / f"peers-{name}.json" for name in WORKLOADS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


@final
class Spare:
    """Has the next row's process do its imports while the gradients of a row are compared.

    Not before: the passes of a row are timed with nothing beside them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_started = 0
        self._waiting: Waiting | None = None
        self.start()

    def __enter__(self) -> Spare:
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting is not None:
            self._waiting.close()

    def start(self) -> None:
        """Start a process, unless there is one."""
        if self._waiting is None:
            self._num_started += 1
            self._waiting = start_waiting(self._folder / f"stderr-{self._num_started}.txt")

    def run(
        self,
        setup: Setup,
        strategy: str,
        references: References,
        observer: AbstractObserver,
        limit_s: float | None,
    ) -> Row:
        """Run a strategy that this device does not refuse, in the process that waits."""
        chosen = make_strategy(strategy, host=None, disk=None, budget="auto")
        if chosen.find_refusal(setup.device) is not None:
            return run_strategy(setup, strategy, references, observer)
        waiting, self._waiting = self._waiting, None
        return run_strategy(setup, strategy, references, observer, limit_s, waiting)


@final
class PrintingObserver(AbstractObserver):
    """Prints a line when a row is there, and starts the next one's process once it was timed."""

    def __init__(self, label: str, spare: Spare) -> None:
        self._label = label
        self._spare = spare
        self._started_s = time.monotonic()

    def refuse(self, note: str) -> Row:
        """Return the row of a strategy that is not run."""
        row = Row(strategy=self._label, status=Status.NOT_APPLICABLE, note=note)
        self.finish_strategy(row, last_words="")
        return row

    def start_strategy(self, strategy: str, num_steps: int) -> None:
        self._started_s = time.monotonic()

    def start_step(self, strategy: str, step: int) -> None:
        self._spare.start()

    def finish_strategy(self, row: Row, last_words: str) -> None:
        published = describe_row(row)
        told = (
            f"{published['step_ms']:.1f} ms, {published['peak_gib']:.2f} GiB, gradients "
            f"{published['grad_equal']}"
            if row.status is Status.OK
            else f"{row.status.value}: {row.note}"
        )
        print(f"  {self._label}: {told} ({time.monotonic() - self._started_s:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
