"""The command `ebbtide trace`: read a profiler's file, analyse, print."""

from __future__ import annotations

import json as json_text
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ebbtide.commands.arguments import read_machine, read_plan, read_workload
from ebbtide.commands.output import echo, write_file
from ebbtide.commands.record import (
    AFTER_DASHES,
    CommandAfterDashes,
    Recorded,
    Recording,
    choose,
    run_recorded,
)
from ebbtide.commands.trace_json import describe_trace
from ebbtide.commands.trace_page import write_page
from ebbtide.commands.trace_plot import check_can_draw
from ebbtide.commands.trace_report import write_trace
from ebbtide.errors import ExitCode, PlanError
from ebbtide.trace.annotated import write_annotated
from ebbtide.trace.findings import find
from ebbtide.trace.overlap import analyse
from ebbtide.trace.predicted import Comparison, compare_with_plan
from ebbtide.trace.read import read_trace


def register(app: typer.Typer) -> None:
    """Add the command `trace` to `app`."""
    app.command("trace", cls=CommandAfterDashes)(trace)


def trace(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A trace of torch.profiler (JSON, plain or gzip), an SQLite export of Nsight "
            "Systems, or an xplane.pb of jax.profiler.",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            help="Run the command after -- under torch's profiler, write OUT, and read that.",
        ),
    ] = None,
    skip: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --record: training steps before it starts; 5."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="With --record: training steps to record; 3.")
    ] = None,
    command: Annotated[list[str] | None, typer.Option(AFTER_DASHES, hidden=True)] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN", help="Set this plan's predicted step beside the recorded one."
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(metavar="WORKLOAD", help="With --plan: the workload that it is for."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Hold the copies against this machine's link: one of the catalog, such as "
            "h200-pcie5, or a file.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.html",
            help="Write a page with the timeline, memory, tensors and findings; it opens offline.",
        ),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.json.gz",
            help="Write the trace for Perfetto, with lanes, exposed times and steps as tracks.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how much of the copies lay under compute, how much did not, and what to change.

    Exit status 1: the file is no trace, or nothing in it ran on a GPU, or nothing was recorded. 2:
    misuse. With --record, that of the command if it is not 0.
    """
    recorded: Recorded | None = None
    try:
        chosen = choose(file, record, command or [], skip=skip, steps=steps)
        file = chosen.out if isinstance(chosen, Recording) else chosen
        if not isinstance(chosen, Recording) and not file.exists():
            raise ValueError(f"FILE {file}: there is no such file; give an existing one")
        if plan is not None and (workload is None or machine is None):
            raise ValueError(
                f"--plan {plan}: a predicted step needs the workload that was planned and the "
                "machine; give --workload and --machine too"
            )
        if workload is not None and plan is None:
            raise ValueError(f"--workload {workload}: it says what a plan is for; give --plan too")
        for option, out in (("--html", html), ("--perfetto", perfetto)):
            if out is not None and out.resolve() == file.resolve():
                raise ValueError(f"{option} {out}: that is FILE itself; name another")
        on = None if machine is None else read_machine(machine)
        planned = None if plan is None else read_plan(plan, "--plan")
        for_workload = None if workload is None else read_workload(workload, "--workload")
        if planned is not None and for_workload is not None:
            try:
                planned.check_fits(for_workload)
            except PlanError as error:
                raise ValueError(f"--plan {plan}: {error}") from error
    except ValueError as error:
        _refuse(error)
    if html is not None:
        check_can_draw()
    if isinstance(chosen, Recording):
        recorded = run_recorded(chosen, is_quiet=json)
        _say(recorded.message)
        if not recorded.num_steps:
            raise typer.Exit(recorded.exit_code or ExitCode.FAILED)
    read = read_trace(file)
    analyses = [analyse(device.timeline, on) for device in read.devices]
    comparisons: list[Comparison] = []
    if planned is not None and for_workload is not None and on is not None:
        comparisons = [
            compare_with_plan(device.timeline, planned, for_workload, on) for device in read.devices
        ]
    findings = [
        finding
        for device, analysis in zip(read.devices, analyses, strict=True)
        for finding in find(device, analysis, machine=on, plan=planned, workload=for_workload)
    ]
    if json:
        echo(json_text.dumps(describe_trace(read, analyses, findings, comparisons), indent=2))
    else:
        for line in write_trace(read, analyses, findings, comparisons):
            echo(line)
    for note in read.notes:
        _say(f"{file}: {note}")
    if html is not None and read.devices:
        _write("--html", html, lambda: write_page(html, read, analyses, findings, comparisons))
    if perfetto is not None and read.devices:
        _write("--perfetto", perfetto, lambda: write_annotated(perfetto, read, analyses))
    for option, out in (("--html", html), ("--perfetto", perfetto)):
        if out is not None and not read.devices:
            _say(f"{option} {out}: it is not written: there is nothing to show")
    if recorded is not None and recorded.exit_code:
        raise typer.Exit(recorded.exit_code)
    if not read.devices:
        raise typer.Exit(ExitCode.FAILED)


def _write(option: str, path: Path, write: Callable[[], object]) -> None:
    try:
        write_file(option, path, write)
    except ValueError as error:
        _refuse(error)
    _say(f"wrote {path}")


def _say(message: str) -> None:
    echo(f"ebbtide trace: {message}", err=True)


def _refuse(error: ValueError) -> NoReturn:
    _say(" ".join(str(error).split()))
    raise typer.Exit(ExitCode.MISUSE) from error
