"""The command `ebbtide compare`: parse, run, print."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ebbtide.compare.jax.names import DEFAULT_STRATEGIES as IN_JAX
from ebbtide.compare.jax.names import is_ours as is_ours_in_jax
from ebbtide.compare.jax.names import parse_strategies as parse_in_jax
from ebbtide.compare.jax.request import JaxRequest, check_jax_request, refuse_options_of_torch
from ebbtide.compare.names import DEFAULT_STRATEGIES, is_ours, parse_strategies
from ebbtide.compare.options import (
    MODELS_HELP,
    BatchOption,
    ContextOption,
    DeviceOption,
    DiskOption,
    HostOption,
    JsonOption,
    LayersOption,
    SeedOption,
    TextOption,
)
from ebbtide.compare.request import CompareRequest, check_request
from ebbtide.compare.results import Comparison, Status
from ebbtide.errors import ExitCode, MissingExtraError

FRAMEWORKS = ("torch", "jax")

MOST_DIFFERENCE = 0.0625
"""Of a gradient's largest element. Correct programs differed by 0.015 on an H200 (bfloat16, cuDNN
attention), a stack that is read in the wrong order differs by about 1."""


def register(app: typer.Typer) -> None:
    """Add the command `compare` to `app`."""
    app.command("compare")(compare)


def compare(
    model: Annotated[
        str,
        typer.Option(
            help=f"{MODELS_HELP} With --framework jax: smollm2-135m, llama-8b-shape, "
            "deepseek-moe-shape, llama-tiny-shape, deepseek-tiny-shape, or a Llama's folder."
        ),
    ] = "smollm2",
    layers: LayersOption = None,
    context: ContextOption = None,
    batch: BatchOption = 1,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Counted steps, after 2 warm-up steps, or 4 with a budget (5 with --compile); jax "
            "has 1. Default: 5 on a GPU, 1 on a CPU."
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between; one row each. Default: "
            f"{','.join(DEFAULT_STRATEGIES)}; with --framework jax {','.join(IN_JAX)}."
        ),
    ] = None,
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
    framework: Annotated[
        str, typer.Option(help="torch or jax; each has models and strategies of its own.")
    ] = "torch",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="With --framework jax: bfloat16 or float32. Default: bfloat16 on a GPU, float32 "
            "on a CPU."
        ),
    ] = None,
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
        if framework not in FRAMEWORKS:
            raise ValueError(f"--framework {framework}: unknown; give {' or '.join(FRAMEWORKS)}")
        if framework == "jax":
            refuse_options_of_torch(
                {
                    "--disk": bool(disk),
                    "--compile": compile,
                    "--chunked-loss": chunked_loss,
                    "--passes": passes != 0,
                }
            )
            in_jax = JaxRequest(
                model=model,
                layers=layers,
                context=context,
                batch=batch,
                steps=steps,
                strategies=parse_in_jax(strategies or ",".join(IN_JAX), has_budget=bool(budget)),
                budget=budget,
                host=host,
                dtype=dtype,
                text=text,
                device=device,
                seed=seed,
            )
            check_jax_request(in_jax)
            _run_in_jax(in_jax, out=out, is_json=json)
            return
        if dtype is not None:
            raise ValueError(
                f"--dtype {dtype} has no meaning with --framework torch: bfloat16 on a GPU, "
                "float32 on a CPU; leave it out"
            )
        request = CompareRequest(
            model=model,
            layers=layers,
            context=context,
            batch=batch,
            steps=steps,
            strategies=parse_strategies(
                strategies or ",".join(DEFAULT_STRATEGIES), has_budget=budget is not None
            ),
            host=host,
            disks=tuple(disk or ()),
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


def has_failed_in_jax(comparison: Comparison) -> bool:
    """Whether a run in JAX failed: no row finished, or ebbtide's own is in error or far off.

    XLA fuses, and so rounds, each row in its own way on a GPU, where attention's backward also
    varies from run to run: gradients within `MOST_DIFFERENCE` are not taken for wrong.
    """
    ours = [row for row in comparison.rows if is_ours_in_jax(row.strategy)]
    return all(row.status is not Status.OK for row in comparison.rows) or any(
        row.status is Status.ERROR
        or (row.grad_equal is False and not _is_near(row.jax and row.jax.grad_relative_difference))
        for row in ours
    )


def _is_near(relative_difference: float | None) -> bool:
    return relative_difference is not None and relative_difference <= MOST_DIFFERENCE


def _run(request: CompareRequest, *, out: Path | None, is_json: bool) -> None:
    # Imported here: torch and transformers take seconds, and --help or a typing error none.
    from rich.console import Console

    from ebbtide.compare.harness import run_comparison
    from ebbtide.compare.prepare import choose_work_folder, prepare_setup
    from ebbtide.compare.progress import ConsoleObserver
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
        if not request.disks and setup.disks:
            messages.print(
                f"--disk was not given: activations go to {setup.facts.disk}, {setup.disks[0]}",
                highlight=False,
                soft_wrap=True,
            )
        with ConsoleObserver(messages, len(request.strategies)) as observer:
            comparison = run_comparison(setup, observer)
    _show(comparison, out=out, is_json=is_json)
    if has_failed(comparison):
        raise typer.Exit(ExitCode.FAILED)


def _run_in_jax(request: JaxRequest, *, out: Path | None, is_json: bool) -> None:
    from rich.console import Console

    try:
        from ebbtide.compare.jax.harness import run_jax_comparison
        from ebbtide.compare.jax.prepare import prepare_jax_setup
    except ModuleNotFoundError as error:
        raise MissingExtraError.for_extra(
            "jax,jax-demo", needed_by=f"ebbtide compare --framework jax ({error.name})"
        ) from error
    from ebbtide.compare.progress import ConsoleObserver

    messages = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="ebbtide-compare-") as folder:
        messages.print("preparing the model and the text", highlight=False)
        try:
            setup = prepare_jax_setup(request, Path(folder))
        except ValueError as error:
            _refuse(error)
        with ConsoleObserver(messages, len(request.strategies)) as observer:
            comparison = run_jax_comparison(setup, observer, lambda rows: _keep(rows, out))
    _show(comparison, out=out, is_json=is_json)
    if has_failed_in_jax(comparison):
        raise typer.Exit(ExitCode.FAILED)


def _keep(comparison: Comparison, out: Path | None) -> None:
    """Write the rows that there are; `_show` replaces the file."""
    from ebbtide.compare.table import write_record

    if out is not None:
        write_record(comparison, out)


def _show(comparison: Comparison, *, out: Path | None, is_json: bool) -> None:
    from rich.console import Console

    from ebbtide.compare.table import print_table, write_files, write_json

    if is_json:
        print(write_json(comparison))
    else:
        print_table(comparison, Console())
    messages = Console(stderr=True)
    for path in write_files(comparison, out) if out is not None else ():
        messages.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _refuse(error: ValueError) -> NoReturn:
    typer.echo(f"ebbtide compare: {error}", err=True)
    raise typer.Exit(ExitCode.MISUSE) from error
