"""What a memory budget costs: the planner's promise beside what a GPU measures.

    PYTHONPATH=src python3 benchmarks/budget.py --contexts 8192,32768 --out benchmarks/results

For each context: keep, full checkpointing and the named plans, then budgets between checkpointing's
peak and keep's. One process, one model, so that all figures of a context are of one run. A step is
forward and backward; the plan predicts it with what lies around the blocks. Writes a JSON file for
each context, and a table and a picture of all that lie in the folder; without contexts, those
alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from llama_shape import BUDGET_PREFIX, GIB, gradients, make_model, measure, merge

PURE = ("keep", "checkpoint", "offload-inputs", "balanced")
SHARES = (0.02, 0.15, 0.35, 0.6, 0.85)
"""Of the way from checkpointing's peak to keep's."""
STEPS = {8192: 5, 32768: 3, 65536: 2}
ROUNDS = {8192: 5}
"""Short steps vary with the device's clock and with what others do on the link: there strategies
take turns."""

# Figure, and the most that it may be: of every budget, then of half of keep's peak.
PROMISES = {
    "peak / budget": 1.0,
    "step / bound": 1.10,
    "step / best pure strategy that fits": 1.0,
    "error of the prediction / step": 0.05,
}
HALF_PROMISE = 1.03


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="8192,32768")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--pure", default=",".join(PURE), help="named strategies beside it")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--scale", type=int, default=1, help="divide the widths, for a dry run")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [int(context) for context in options.contexts.split(",") if context]
    model = make_model(options.layers, "cuda", options.scale) if wanted else None
    for context in wanted:
        assert model is not None
        torch.manual_seed(1)
        ids = torch.randint(0, 32000 // options.scale, (1, context), device="cuda")
        reference = gradients(model, ids)
        steps = STEPS.get(context, 3)
        pure = options.pure.split(",")
        rows = [measure(name, model, ids, steps, None) for name in pure]
        low, high = (_row(rows, name)["peak_gib"] * GIB for name in ("checkpoint", "keep"))
        budgets = [
            low + share * (high - low) for share in map(float, options.shares.split(","))
        ] + [high / 2]
        budgets = sorted(map(int, budgets))
        names = [f"{BUDGET_PREFIX}{budget}" for budget in budgets]
        rows += [measure(name, model, ids, steps, reference) for name in names]
        rounds = [rows]
        for _ in range(ROUNDS.get(context, 1) - 1):
            rounds.append([measure(name, model, ids, steps, None) for name in (*pure, *names)])
        rows = merge(rounds)
        for budget, row in zip(budgets, rows[len(pure) :], strict=True):
            row["budget_gib"] = budget / GIB
        for row in rows:
            _finish(row)
            print(_line(row), flush=True)
        facts = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
            "date": time.strftime("%Y-%m-%d"),
            "layers": options.layers,
            "command": f"PYTHONPATH=src python3 benchmarks/budget.py --contexts {context} "
            f"--shares {options.shares} --pure {options.pure} --out benchmarks/results",
        }
        text = json.dumps({"facts": facts, "rows": rows}, indent=1)
        (options.out / f"budget-{context}.json").write_text(text)
    files = sorted(options.out.glob("budget-*.json"), key=lambda f: int(f.stem.split("-")[1]))
    results = {int(f.stem.split("-")[1]): json.loads(f.read_text()) for f in files}
    text = report(results)
    (options.out / "budget.md").write_text(text)
    print(text, flush=True)
    draw({context: result["rows"] for context, result in results.items()}, options.out)
    return 0 if "| no |" not in text else 1


def _finish(row: dict[str, Any]) -> None:
    times = sorted(row.get("step_ms_all", ()))
    if times:
        row["step_ms"] = times[len(times) // 2]


def _row(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(row for row in rows if row["strategy"] == name)


def report(results: dict[int, dict[str, Any]]) -> str:
    """Return the tables and the promises as markdown."""
    facts = next(iter(results.values()))["facts"]
    lines = [
        "# A memory budget: predicted and measured",
        "",
        f"Llama-3-8B shape x {facts['layers']} layers, random weights, vocabulary 32,000, batch 1, "
        f"bf16, eager. {facts['device']}, torch {facts['torch']}, transformers "
        f"{facts['transformers']}, Python {facts['python']}, {facts['date']}. A step is forward "
        "and backward; times are medians in ms, peaks GiB allocated with weights and gradients. "
        "`gradients`: equal bit for bit to keep's under deterministic kernels.",
        "",
    ]
    for context, result in results.items():
        rows = result["rows"]
        lines += [f"## {context} tokens", "", "```", f"$ {result['facts']['command']}", _line(None)]
        lines += [*(_line(row) for row in rows), "```", "", _spread(rows), ""]
        lines += ["| promise | most | measured | kept |", "| --- | --- | --- | --- |"]
        lines += [*_promises(rows), ""]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any] | None) -> str:
    heads = ("budget", "step", "predicted", "bound", "peak", "planned", "out", "first", "gradients")
    if row is None:
        return f"{'strategy':16}" + "".join(f"{head:>11}" for head in heads)
    keys = (
        "budget_gib", "step_ms", "predicted_ms", "bound_ms", "peak_gib", "predicted_peak_gib",
        "moved_out_gib", "first_step_peak_gib",
    )  # fmt: skip
    name = "ebbtide" if row["strategy"].startswith(BUDGET_PREFIX) else row["strategy"]
    if row.get("status") != "ok":
        return f"{name:16}{row.get('budget_gib', 0):11.2f}  {row.get('status')}"
    cells = [f"{row[key]:11.2f}" if row.get(key) else f"{'-':>11}" for key in keys]
    equal = {True: "equal", False: "differ", None: "-"}[row.get("grad_equal")]
    return f"{name:16}" + "".join(cells) + f"{equal:>11}"


def _spread(rows: list[dict[str, Any]]) -> str:
    """Say how far single steps lie from the median of their row."""
    largest = {
        row["strategy"]: max(abs(t / row["step_ms"] - 1) for t in row["step_ms_all"])
        for row in rows
        if row.get("status") == "ok"
    }
    text = (
        f"Single steps lie up to {largest['keep']:.1%} from the median of keep, and up to "
        f"{max(largest.values()):.1%} from that of any row."
    )
    speeds = [speed for row in rows for speed in row.get("link_gb_s_all", ())]
    if speeds:
        text += (
            f" Before and after the steps of each row the link was timed, {len(speeds)} times: "
            f"{min(speeds)} to {max(speeds)} GB/s out."
        )
    return text


def _promises(rows: list[dict[str, Any]]) -> list[str]:
    keep = _row(rows, "keep")
    pure = [row for row in rows if "budget_gib" not in row and row.get("status") == "ok"]
    planned = [row for row in rows if "budget_gib" in row and row.get("status") == "ok"]
    found: dict[str, list[float]] = {name: [] for name in PROMISES}
    for row in planned:
        step, budget = row["step_ms"], row["budget_gib"]
        fitting = [p["step_ms"] for p in pure if p["peak_gib"] <= budget]
        found["peak / budget"].append(row["peak_gib"] / budget)
        if row.get("bound_ms"):
            found["step / bound"].append(step / row["bound_ms"])
            found["error of the prediction / step"].append(abs(row["predicted_ms"] / step - 1))
        if fitting:
            found["step / best pure strategy that fits"].append(step / min(fitting))
    lines = [
        _promise(name, PROMISES[name], max(values)) for name, values in found.items() if values
    ]
    half = [r for r in planned if abs(r["budget_gib"] / keep["peak_gib"] - 0.5) < 0.001]
    for row in half:
        ratio = row["step_ms"] / keep["step_ms"]
        lines.append(_promise("step / keep, at half of keep's peak", HALF_PROMISE, ratio))
        if row.get("bound_ms"):
            least = row["bound_ms"] / keep["step_ms"]
            lines.append(f"| the same, as the bound allows it | | {least:.4f} | |")
    return lines


def _promise(name: str, most: float, value: float) -> str:
    return f"| {name} | {most} | {value:.4f} | {'yes' if value <= most else 'no'} |"


def draw(contexts: dict[int, list[dict[str, Any]]], folder: Path) -> None:
    """Draw step time against peak: budgets with their bound, and the named strategies."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure: Any
    figure, axes = pyplot.subplots(
        1, len(contexts), figsize=(6 * len(contexts), 4.5), squeeze=False
    )
    for plot, (context, rows) in zip(axes[0], contexts.items(), strict=True):
        planned = [r for r in rows if "budget_gib" in r and r.get("status") == "ok"]
        budgets = [r["budget_gib"] for r in planned]
        for key, label, style in (
            ("step_ms", "measured", "o-"), ("predicted_ms", "predicted", "x--"),
            ("bound_ms", "bound", ":"),
        ):  # fmt: skip
            plot.plot(budgets, [r.get(key, 0) for r in planned], style, label=label)
        for row in rows:
            if "budget_gib" not in row and row.get("status") == "ok":
                plot.plot(row["peak_gib"], row["step_ms"], "s", color="gray")
                plot.annotate(row["strategy"], (row["peak_gib"], row["step_ms"]), fontsize=8)
        plot.set_title(f"{context} tokens")
        plot.set_xlabel("budget, or peak of a named strategy (GiB)")
        plot.set_ylabel("step (ms)")
        plot.legend()
    figure.tight_layout()
    figure.savefig(folder / "budget.png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
