"""The command `ebbtide doctor --jax`: are this environment's flags fit for offloading in JAX?"""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from ebbtide.commands.output import echo
from ebbtide.errors import ExitCode


def register(app: typer.Typer) -> None:
    """Add the command `doctor` to `app`."""
    app.command("doctor")(doctor)


def doctor(
    jax: Annotated[
        bool, typer.Option("--jax", help="Check the flags and variables that XLA and jax read.")
    ],
    unrolled: Annotated[
        bool, typer.Option("--unrolled", help="Layers are unrolled; a scan needs more flags.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to stdout instead.")
    ] = False,
) -> None:
    """Say which flags make offloading in JAX slow or unsafe, and what to set.

    Reads the environment and the installed jaxlib's files; imports no jax and needs no GPU.
    Ends with 1 if something found makes offloading slow or unsafe, or ends the process.
    """
    # Imported here: ebbtide.jax imports jax, which --help and a typing error need not wait for.
    from ebbtide.jax.flag_check import check_flags
    from ebbtide.jax.known_flags import (
        find_jaxlib_version,
        find_unknown_flags,
        find_xla_libraries,
    )

    version, libraries = find_jaxlib_version(), find_xla_libraries()
    findings = check_flags(
        os.environ,
        version,
        is_scanned=not unrolled,
        find_unknown=lambda names: find_unknown_flags(names, libraries),
    )
    num_serious = sum(finding.is_serious for finding in findings)
    if as_json:
        forms = [
            {
                "concern": finding.concern.value,
                "name": finding.name,
                "message": finding.message,
                "change": finding.change,
                "source": finding.source,
                "is_serious": finding.is_serious,
            }
            for finding in findings
        ]
        form = {"jaxlib": version, "is_fit": not num_serious, "findings": forms}
        echo(json.dumps(form, indent=2))
    else:
        echo(f"jaxlib {version or 'is not installed'}, XLA_FLAGS and variables of jax:")
        for finding in findings:
            mark = "!" if finding.is_serious else "-"
            echo(f"{mark} {finding.concern.value}: {finding.name}: {finding.message}.")
            source = f" ({finding.source})" if finding.source else ""
            echo(f"    {finding.change}{source}.")
        echo(_conclusion(len(findings), num_serious))
    if num_serious:
        raise typer.Exit(ExitCode.FAILED)


def _conclusion(num_findings: int, num_serious: int) -> str:
    if num_serious:
        return f"{num_serious} of {num_findings} (!) make offloading slow or unsafe."
    if num_findings:
        return "Nothing of this makes offloading slow or unsafe."
    return "Nothing found."
