"""Measure how long planning takes, and how far its plans are from the bound.

    PYTHONPATH=src:. python3 benchmarks/planning.py --out benchmarks/results

Planning times are for 80 blocks that save 12 activations each, Llama-3-70B with 8k tokens: medians
of 20 calls in one process, workload to plan. Gaps are (predicted - bound) / bound over the shapes
and lengths of `tests/corpus`, by number of blocks. Needs no GPU; takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ebbtide.planner.solve import plan_for_budget
from tests.corpus import CORPUS
from tests.corpus.machines import budget_of, machine_with

PLANNERS = ("lp", "greedy")
TIMED = "llama-70b/8k"
SHARES = (0.5, 0.25, 0.12, 0.05)
"""Of what autograd saves, beside what is always there."""
PROMISED_SHARE = 0.12
"""The least for which gaps are promised."""
LINKS_GB_PER_S = (25, 50, 180)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="write planning.json and planning.md here")
    parser.add_argument("--runs", type=int, default=20, help="calls of each planner")
    parser.add_argument("--names", default=",".join(CORPUS), help="workloads for the gaps")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "facts": facts(),
        "planning_ms": planning_times(options.runs),
        "gaps": gaps(options.names.split(",")),
    }
    text = report(results)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        form = json.dumps(results, indent=2, sort_keys=True) + "\n"
        (options.out / "planning.json").write_text(form)
        (options.out / "planning.md").write_text(text + "\n")
    return 0


def facts() -> dict[str, str]:
    return {
        "command": "PYTHONPATH=src:. python3 " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "num_cpus": str(os.cpu_count()),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "scipy": version("scipy"),
        "ebbtide": version("ebbtide"),
    }


def cpu_name() -> str:
    cpu_file = Path("/proc/cpuinfo")
    lines = cpu_file.read_text().splitlines() if cpu_file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def planning_times(num_runs: int) -> dict[str, dict[str, float]]:
    """Milliseconds from a workload to a plan, by planner."""
    workload, machine = CORPUS[TIMED], machine_with(50)
    budget_bytes = budget_of(workload, 0.25)
    times: dict[str, dict[str, float]] = {}
    for planner in PLANNERS:

        def plan(planner: str = planner) -> None:
            plan_for_budget(workload, machine, budget_bytes=budget_bytes, planner=planner)

        plan()  # imports scipy
        spent_ms = sorted(milliseconds(plan) for _ in range(num_runs))
        times[planner] = {
            "median": statistics.median(spent_ms),
            "least": spent_ms[0],
            "most": spent_ms[-1],
            "runs": num_runs,
        }
    return times


def milliseconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def gaps(names: list[str]) -> list[dict[str, Any]]:
    """One record for each planner and number of blocks."""
    seen: dict[tuple[str, int, bool], list[float]] = {}
    refused: dict[tuple[str, int, bool], int] = {}
    for name in names:
        workload = CORPUS[name]
        for planner in PLANNERS:
            for link_gb_per_s in LINKS_GB_PER_S:
                machine = machine_with(link_gb_per_s)
                for share in SHARES:
                    key = (planner, len(workload.blocks), share >= PROMISED_SHARE)
                    plan = plan_for_budget(
                        workload,
                        machine,
                        budget_bytes=budget_of(workload, share),
                        planner=planner,
                    ).plan
                    if plan is None:
                        refused[key] = refused.get(key, 0) + 1
                        continue
                    gap = plan.predicted_step_ns / plan.bound_step_ns - 1
                    seen.setdefault(key, []).append(gap)
    return [
        {
            "planner": planner,
            "num_blocks": num_blocks,
            "room": "12 to 50 %" if is_promised else "5 %",
            "num_plans": len(found),
            "num_refused": refused.get((planner, num_blocks, is_promised), 0),
            "median_gap": statistics.median(found),
            "most_gap": max(found),
        }
        for (planner, num_blocks, is_promised), found in sorted(seen.items())
    ]


def report(results: dict[str, Any]) -> str:
    """Return the tables as markdown."""
    known = results["facts"]
    lines = [
        "# Planning: how long it takes, and how far plans are from the bound",
        "",
        f"`{known['command']}`, {known['date']}.",
        f"{known['cpu']}, {known['num_cpus']} CPUs, Python {known['python']}, numpy "
        f"{known['numpy']}, scipy {known['scipy']}",
        "",
        f"Planning {TIMED}, 80 blocks that save 12 activations each, ms:",
        "",
        "| planner | median | least | most | runs |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {planner} | {t['median']:.1f} | {t['least']:.1f} | {t['most']:.1f} | {t['runs']} |"
            for planner, t in results["planning_ms"].items()
        ),
        "",
        "(predicted - bound) / bound:",
        "",
        "| planner | blocks | room | plans | refused | median | most |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {g['planner']} | {g['num_blocks']} | {g['room']} | {g['num_plans']} | "
            f"{g['num_refused']} | {g['median_gap']:.3%} | {g['most_gap']:.3%} |"
            for g in results["gaps"]
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
