"""What `ebbtide doctor` says of the flags and variables that XLA and jax read."""

from __future__ import annotations

import importlib.util
import json
import os

import typer

from ebbtide.commands.output import echo
from ebbtide.doctor.finding import Code, Finding, Severity
from ebbtide.errors import ExitCode


def find_in_flags(*, is_scanned: bool) -> tuple[Finding, ...]:
    """Return what is wrong with this environment's flags; nothing where jax is not installed.

    Flags that are missing are notes: who trains with torch needs none, and `--jax` asks for them.
    """
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("jaxlib") is None:
        return ()
    # Imported here: ebbtide.jax imports jax, which --help and a typing error need not wait for.
    from ebbtide.jax.environment_check import check_environment
    from ebbtide.jax.flag_check import Concern

    return tuple(
        Finding(
            code=Code.JAX,
            severity=(
                Severity.SERIOUS
                if finding.is_serious and finding.concern is not Concern.MISSING
                else Severity.NOTE
            ),
            what=f"JAX, {finding.concern.value}: {finding.name}",
            evidence=finding.message,
            advice=f"{finding.change}{f' ({finding.source})' if finding.source else ''}.",
        )
        for finding in check_environment(os.environ, is_scanned=is_scanned).findings
    )


def print_flags(*, is_scanned: bool, as_json: bool) -> None:
    """Print what is wrong with the flags; needs no GPU.

    Raises:
        typer.Exit: With 1, if something makes offloading slow or unsafe, or ends the process.
    """
    from ebbtide.jax.environment_check import check_environment

    checked = check_environment(os.environ, is_scanned=is_scanned)
    version, findings = checked.jaxlib_version, checked.findings
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
