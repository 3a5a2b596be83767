"""The command `ebbtide doctor`: what can this machine do, and what of it is set up badly?"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ebbtide.commands import doctor_jax
from ebbtide.commands.arguments import check_folder
from ebbtide.commands.doctor_json import describe_facts
from ebbtide.commands.doctor_report import write_facts
from ebbtide.commands.output import echo, write_file
from ebbtide.doctor import Disk, Facts, Refusal, Severity, find, make_machine, survey
from ebbtide.doctor.findings import in_order
from ebbtide.errors import ExitCode
from ebbtide.machine import Machine
from ebbtide.units import parse_path_and_cap


def register(app: typer.Typer) -> None:
    """Add the command `doctor` to `app`."""
    app.command("doctor")(doctor)


def doctor(
    disk: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER[:SIZE]",
            help="Measure this folder too, with 64 MiB; may be given several times.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="MACHINE.json", help="Write what planners need of this machine."),
    ] = None,
    jax: Annotated[
        bool,
        typer.Option("--jax", help="Only check the flags and variables that XLA and jax read."),
    ] = False,
    unrolled: Annotated[
        bool, typer.Option("--unrolled", help="JAX: layers are unrolled; a scan needs more flags.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to stdout instead.")
    ] = False,
) -> None:
    """Say what this machine can do, and what makes offloading slow on it. Takes under a minute.

    Without a GPU it says what it can. Ends with 1 if something found makes offloading slow,
    unsafe or impossible, or MACHINE.json could not be written; with 2 for misuse.
    """
    if jax:
        if disk or out is not None:
            _refuse(
                ValueError("--jax looks at flags alone; leave it out, or --disk and --out instead")
            )
        doctor_jax.print_flags(is_scanned=not unrolled, as_json=as_json)
        return
    start_s = time.monotonic()
    try:
        disks = [_read_disk(text) for text in disk or ()]
        if out is not None:
            check_folder("--out", out)
    except ValueError as error:
        _refuse(error)
    facts = survey(disks)
    findings = in_order([*find(facts), *doctor_jax.find_in_flags(is_scanned=not unrolled)])
    machine = make_machine(facts)
    if as_json:
        seconds = time.monotonic() - start_s
        echo(json.dumps(describe_facts(facts, findings, machine, seconds), indent=2))
    else:
        for line in write_facts(facts, findings, machine):
            echo(line)
    is_fit = all(finding.severity is not Severity.SERIOUS for finding in findings)
    is_written = out is None or _write(out, facts, machine)
    if not (is_fit and is_written):
        raise typer.Exit(ExitCode.FAILED)


def _read_disk(text: str) -> Disk:
    # Not asked of the system here: a folder on a dead network disk never answers.
    path, colon, cap = text.rpartition(":")
    if colon and path and cap[:1].isdecimal():
        spec = parse_path_and_cap(text)
        return Disk(path=spec.path, cap_bytes=spec.cap_bytes)
    if not text:
        raise ValueError("--disk was given without a folder; give for example --disk /nvme/scratch")
    return Disk(path=text)


def _write(out: Path, facts: Facts, machine: Machine | Refusal) -> bool:
    """Write MACHINE.json, and say what it is of."""
    if isinstance(machine, Refusal):
        _say(f"--out {out}: {machine.reason}.")
        return False
    try:
        write_file("--out", out, lambda: out.write_text(machine.to_json(), encoding="utf-8"))
    except ValueError as error:
        _say(str(error))
        return False
    of = (
        ""
        if facts.gpus
        else ", of the CPU alone: free memory is the device's, and there is no host tier"
    )
    _say(f"wrote {out}{of}")
    return True


def _say(message: str) -> None:
    echo(f"ebbtide doctor: {message}", err=True)


def _refuse(error: ValueError) -> NoReturn:
    _say(" ".join(str(error).split()))
    raise typer.Exit(ExitCode.MISUSE) from error
