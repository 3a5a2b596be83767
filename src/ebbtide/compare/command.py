"""The command `ebbtide compare`: parse, run, print."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ebbtide.compare.names import DEFAULT_STRATEGIES, is_ours, parse_strategies
from ebbtide.compare.options import (
    BatchOption,
    ContextOption,
    DeviceOption,
    DiskOption,
    HostOption,
    JsonOption,
    LayersOption,
    ModelOption,
    SeedOption,
    TextOption,
)
from ebbtide.compare.request import CompareRequest, check_request
from ebbtide.compare.results import Comparison, Status
from ebbtide.errors import ExitCode


def register(app: typer.Typer) -> None:
    """Add the command `compare` to `app`."""
    app.command("compare")(compare)


def compare(
    model: ModelOption = "smollm2",
    layers: LayersOption = None,
    context: ContextOption = None,
    batch: BatchOption = 1,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Counted steps, after 2 warm-up steps, or 4 with a budget (5 with --compile). "
            "Default: 5 on a GPU, 1 on a CPU."
        ),
    ] = None,
    strategies: Annotated[
        str, typer.Option(help="Names with commas between; one row each.")
    ] = ",".join(DEFAULT_STRATEGIES),
    budget: Annotated[
        str | None,
        typer.Option(
            help="Adds the strategy ebbtide: the fastest plan within this much device memory, "
            "such as 40GiB, 50% or auto."
        ),
    ] = None,
    host: HostOption = None,
    disk: DiskOption = None,
    compile: Annotated[
        bool,
        typer.Option("--compile", help="Compile each block, where the strategy supports that."),
    ] = False,
    chunked_loss: Annotated[
        bool,
        typer.Option(
            "--chunked-loss",
            help="Compute the loss in chunks: Liger's on a GPU where liger_kernel is installed, "
            "else torch's own, from 2.13 on.",
        ),
    ] = False,
    passes: Annotated[
        int,
        typer.Option(
            help="Forward and backward passes to time under torch's default kernels, before the "
            "training steps. 0: the training steps are timed, under deterministic kernels, which "
            "may take longer."
        ),
    ] = 0,
    text: TextOption = None,
    device: DeviceOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write results.md, results.json and memory-vs-step.png there."
        ),
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Train one model under every strategy and put time, memory, loss and gradients in one table.

    Each strategy runs in a process of its own, on the same weights and the same text. A strategy
    that fails is a row, and the others still run. Exit status 1: no strategy finished, or a plan
    of ebbtide failed or gave other gradients.
    """
    try:
        if out is not None and out.exists() and not out.is_dir():
            raise ValueError(f"--out {out}: it is a file; give a folder")
        request = CompareRequest(
            model=model,
            layers=layers,
            context=context,
            batch=batch,
            steps=steps,
            strategies=parse_strategies(strategies, has_budget=budget is not None),
            host=host,
            disk=disk,
            text=text,
            device=device,
            seed=seed,
            budget=budget,
            is_compiled=compile,
            has_chunked_loss=chunked_loss,
            passes=passes,
        )
        check_request(request)
    except ValueError as error:
        _refuse(error)
    _run(request, out=out, is_json=json)


def has_failed(comparison: Comparison) -> bool:
    """Whether the run as a whole failed; a peer's failure is only a row.

    Code that is compiled to recompute rounds elsewhere: there, other gradients are only a row too.
    """
    must_be_equal = not comparison.facts.is_compiled
    ours = [row for row in comparison.rows if is_ours(row.strategy)]
    return all(row.status is not Status.OK for row in comparison.rows) or any(
        row.status is Status.ERROR or (must_be_equal and row.grad_equal is False) for row in ours
    )


def _run(request: CompareRequest, *, out: Path | None, is_json: bool) -> None:
    # Imported here: torch and transformers take seconds, and --help or a typing error none.
    from rich.console import Console

    from ebbtide.compare.harness import run_comparison
    from ebbtide.compare.prepare import choose_work_folder, prepare_setup
    from ebbtide.compare.progress import ConsoleObserver
    from ebbtide.compare.table import print_table, write_files, write_json
    from ebbtide.compare.workloads import find_cache_folder

    messages = Console(stderr=True)
    cache = find_cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    base = choose_work_folder((Path(tempfile.gettempdir()), cache))
    with tempfile.TemporaryDirectory(prefix="ebbtide-compare-", dir=base) as folder:
        messages.print("preparing the model and the text", highlight=False)
        try:
            setup = prepare_setup(request, Path(folder))
        except ValueError as error:
            _refuse(error)
        if request.disk is None and setup.disk is not None:
            messages.print(
                f"--disk was not given: activations go to {setup.facts.disk}, {setup.disk}",
                highlight=False,
                soft_wrap=True,
            )
        with ConsoleObserver(messages, len(request.strategies)) as observer:
            comparison = run_comparison(setup, observer)
    if is_json:
        print(write_json(comparison))
    else:
        print_table(comparison, Console())
    for path in write_files(comparison, out) if out is not None else ():
        messages.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if has_failed(comparison):
        raise typer.Exit(ExitCode.FAILED)


def _refuse(error: ValueError) -> NoReturn:
    typer.echo(f"ebbtide compare: {error}", err=True)
    raise typer.Exit(ExitCode.MISUSE) from error
