"""The command `ebbtide plan`: parse, plan or check, print."""

from __future__ import annotations

import importlib
import json as json_text
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ebbtide.check import check_plan
from ebbtide.commands.arguments import (
    check_folder,
    check_planner,
    describe_large_budget,
    read_budget,
    read_decisions,
    read_disks,
    read_host,
    read_machine,
    read_plan,
    read_workload,
)
from ebbtide.commands.check_report import write_check
from ebbtide.commands.output import echo, write_file
from ebbtide.commands.plan_json import describe_check, describe_outcome, describe_sweep
from ebbtide.commands.plan_report import write_report
from ebbtide.commands.sweep_report import write_sweep
from ebbtide.drawing import check_picture
from ebbtide.errors import ExitCode, PlanError
from ebbtide.machine import Machine
from ebbtide.plan import Plan
from ebbtide.planner.pins import resolve_pins
from ebbtide.planner.result import Code
from ebbtide.planner.solve import BUDGET_PLANNERS, plan_for_budget
from ebbtide.sweep import sweep_budgets
from ebbtide.sweep_plot import NEEDED_BY, draw_sweep
from ebbtide.workload import Workload

DEFAULT_PLANNER = "lp"


def register(app: typer.Typer) -> None:
    """Add the command `plan` to `app`."""
    app.command("plan")(plan)


def plan(
    workload: Annotated[
        Path,
        typer.Argument(metavar="WORKLOAD", help="File that `ebbtide observe` wrote."),
    ],
    machine: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="A machine of the catalog, such as h200-pcie5, or a file."
        ),
    ],
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most device memory: 40GiB, 50% of the machine's, or auto (the machine's less "
            "6 % and at least 1 GiB).",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most pinned host memory. Default: the rank's share of it."
        ),
    ] = None,
    disk: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[PATH:]SIZE",
            help="Most bytes on disk; may be repeated, and sizes add up. Default: the machine's.",
        ),
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(BUDGET_PLANNERS)}. Default: {DEFAULT_PLANNER}."),
    ] = None,
    decide: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=DECISION",
            help="Decide yourself: keep, host, disk or recompute. May be repeated; later ones win.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[
        Path | None,
        typer.Option(metavar="PLAN", help="Check this plan in place of making one."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the plan there.")
    ] = None,
    sweep: Annotated[
        int | None,
        typer.Option(metavar="N", help="Plan for N budgets in place of one."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="With --sweep: draw step time against budget."),
    ] = None,
) -> None:
    """Plan a workload for a budget of device memory: the fastest step that keeps to it.

    Exit status 1: a checked plan has faults. 2: misuse. 3: no plan fits the budget.
    """
    options = _Options(
        budget=budget, planner=planner, decide=decide, check=check, out=out, sweep=sweep, plot=plot
    )
    try:
        _refuse_combinations(options)
        check_planner(planner or DEFAULT_PLANNER)
        for option, path in (("--out", out), ("--plot", plot)):
            if path is not None:
                check_folder(option, path)
        on = read_machine(machine)
        task = _Task(
            workload=read_workload(workload),
            machine=on,
            budget_bytes=None if budget is None else read_budget(budget, on),
            host_bytes=read_host(host, on),
            disk_bytes=read_disks(disk or (), on),
            planner=planner or DEFAULT_PLANNER,
            decide=read_decisions(decide or ()),
            is_json=json,
        )
        _check_decisions(task)
        checked = None if check is None else read_plan(check)
    except ValueError as error:
        _refuse(error)
    if task.budget_bytes is not None:
        warning = describe_large_budget(task.budget_bytes, on)
        if warning:
            _say(warning)
    if checked is not None:
        _check(task, checked)
    elif sweep is not None:
        _sweep(task, sweep, plot)
    else:
        _plan(task, out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What decides which of the three things the command does."""

    budget: str | None
    planner: str | None
    decide: list[str] | None
    check: Path | None
    out: Path | None
    sweep: int | None
    plot: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """The arguments, read."""

    workload: Workload
    machine: Machine
    budget_bytes: int | None
    host_bytes: int | None
    disk_bytes: int | None
    planner: str
    decide: dict[str, str]
    is_json: bool


def _refuse_combinations(options: _Options) -> None:
    """Refuse options that would have no effect together."""
    made = {
        "--planner": options.planner,
        "--decide": options.decide,
        "--out": options.out,
        "--sweep": options.sweep,
    }
    if options.check is not None:
        for option, given in made.items():
            if given:
                raise ValueError(
                    f"{option} was given with --check {options.check}: a plan that is checked is "
                    "not made; leave one of them out"
                )
    elif options.sweep is not None:
        if options.sweep < 2:
            raise ValueError(
                f"--sweep {options.sweep}: it must be 2 or more, the smallest budget that fits "
                "and the one that keeps everything; give a larger number"
            )
        for option, given in (("--budget", options.budget), ("--out", options.out)):
            if given is not None:
                raise ValueError(
                    f"{option} {given} was given with --sweep {options.sweep}: a sweep chooses its "
                    "budgets and makes many plans; leave one of them out"
                )
    elif options.budget is None:
        raise ValueError(
            "no --budget was given, and a plan is for one; give --budget 40GiB, --budget 50% or "
            "--budget auto"
        )
    if options.plot is None:
        return
    if options.sweep is None:
        raise ValueError(
            f"--plot {options.plot} was given without --sweep: one budget makes no curve; give "
            "--sweep 8"
        )
    check_picture("--plot", options.plot, NEEDED_BY)


def _check_decisions(task: _Task) -> None:
    try:
        resolve_pins(task.decide, task.workload)
    except PlanError as error:
        raise ValueError(f"--{error}") from error


def _plan(task: _Task, out: Path | None) -> None:
    assert task.budget_bytes is not None, "bug in ebbtide: no budget"
    _load_solver()
    start_ns = time.perf_counter_ns()
    outcome = plan_for_budget(
        task.workload,
        task.machine,
        budget_bytes=task.budget_bytes,
        host_bytes=task.host_bytes,
        disk_bytes=task.disk_bytes,
        planner=task.planner,
        decide=task.decide,
    )
    planning_ns = time.perf_counter_ns() - start_ns
    if task.is_json:
        _print_json(
            describe_outcome(outcome, budget_bytes=task.budget_bytes, planning_ns=planning_ns)
        )
    if outcome.plan is None:
        assert outcome.code is Code.NOTHING_FITS, "bug in ebbtide: no plan, and no reason"
        _say(outcome.message)
        raise typer.Exit(ExitCode.NO_PLAN_FITS)
    if not task.is_json:
        _print(write_report(outcome, task.workload, task.machine, planning_ns=planning_ns))
    if out is not None:
        text = outcome.plan.to_json()
        _write("--out", out, lambda: out.write_text(text, encoding="utf-8"))


def _load_solver() -> None:
    """Import what planners import late: that takes longer than planning does."""
    if find_spec("scipy") is not None:
        importlib.import_module("ebbtide.planner.lp")


def _check(task: _Task, checked: Plan) -> None:
    report = check_plan(
        checked,
        task.workload,
        task.machine,
        budget_bytes=task.budget_bytes,
        host_bytes=task.host_bytes,
        disk_bytes=task.disk_bytes,
    )
    if task.is_json:
        _print_json(describe_check(report))
    else:
        _print(write_check(report))
    if not report.is_sound:
        raise typer.Exit(ExitCode.FAILED)


def _sweep(task: _Task, num: int, plot: Path | None) -> None:
    points = sweep_budgets(
        task.workload,
        task.machine,
        num,
        task.planner,
        host_bytes=task.host_bytes,
        disk_bytes=task.disk_bytes,
        decide=task.decide,
    )
    if task.is_json:
        _print_json(describe_sweep(points))
    else:
        _print(write_sweep(points))
    if all(point.outcome.plan is None for point in points):
        _say(points[-1].outcome.message)
        raise typer.Exit(ExitCode.NO_PLAN_FITS)
    if plot is not None:
        planner = points[0].outcome.planner
        title = f"{task.workload.model}, {task.machine.name}, planned by {planner}"
        _write("--plot", plot, lambda: draw_sweep(points, plot, title=title))


def _write(option: str, path: Path, write: Callable[[], object]) -> None:
    try:
        write_file(option, path, write)
    except ValueError as error:
        _refuse(error)
    _say(f"wrote {path}")


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        echo(line)


def _print_json(value: dict[str, object]) -> None:
    echo(json_text.dumps(value, indent=2, allow_nan=False))


def _say(message: str) -> None:
    echo(f"ebbtide plan: {message}", err=True)


def _refuse(error: ValueError) -> NoReturn:
    _say(" ".join(str(error).split()))
    raise typer.Exit(ExitCode.MISUSE) from error
