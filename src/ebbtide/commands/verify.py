"""The command `ebbtide verify`: one model, one plan, and the same step without it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ebbtide.commands.arguments import read_named_plan
from ebbtide.commands.output import echo
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
from ebbtide.errors import BudgetError, ExitCode
from ebbtide.naming import unknown_name_message
from ebbtide.plan import Plan

REFERENCES = ("plain", "recompute")


def register(app: typer.Typer) -> None:
    """Add the command `verify` to `app`."""
    app.command("verify")(verify)


def verify(
    model: ModelOption = "smollm2",
    layers: LayersOption = None,
    context: ContextOption = None,
    batch: BatchOption = 1,
    plan: Annotated[
        str | None,
        typer.Option(help="A plan's name, or a plan file of this model. Default: balanced."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Instead of a plan: the fastest one within this much device memory, such as "
            "40GiB, 50% or auto."
        ),
    ] = None,
    host: HostOption = None,
    disk: DiskOption = None,
    steps: Annotated[int, typer.Option(help="Planned steps to compare.")] = 4,
    reference: Annotated[
        str | None,
        typer.Option(
            help="What runs without the plan: plain, or recompute (torch's own checkpoint around "
            "each block). Default: plain, and recompute if that runs out of memory."
        ),
    ] = None,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Also compare everything that comes back, at once.")
    ] = False,
    text: TextOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Run training steps with and without a plan; compare the loss and every gradient, bit for bit.

    The model and the text are those of `ebbtide compare`. Exit status 1: something differs by
    more than two runs without the plan do; 3: no plan keeps to the budget.
    """
    request = CompareRequest(
        model=model,
        layers=layers,
        context=context,
        batch=batch,
        steps=1,
        strategies=("keep",),
        host=host,
        disks=tuple(disk or ()),
        text=text,
        device=device,
        seed=seed,
        budget=budget,
    )
    try:
        check_request(request)
        if steps < 1:
            raise ValueError(f"--steps {steps}: it must be 1 or more; give a larger number")
        if reference is not None and reference not in REFERENCES:
            raise ValueError(
                f"--reference: {unknown_name_message('reference', reference, REFERENCES)}"
            )
        if plan is not None and budget is not None:
            raise ValueError(f"--plan {plan} and --budget {budget}: give one of them")
        wanted = None if plan is None else read_named_plan(plan)
    except ValueError as error:
        _refuse(error)
    options = {"steps": steps, "reference": reference}
    try:
        found = _verify(request, wanted, options, sanitize=sanitize)
    except BudgetError as error:
        _say(" ".join(str(error).split()))
        raise typer.Exit(ExitCode.NO_PLAN_FITS) from error
    echo(found.to_json() if json else str(found))
    if not found.equal:
        raise typer.Exit(ExitCode.FAILED)


def _verify(
    request: CompareRequest, plan: str | Plan | None, options: dict[str, Any], *, sanitize: bool
) -> Any:
    """Attach and verify; refuse a request that cannot be run."""
    # Before CUDA starts: else torch has no matrix product that is deterministic by its own rules.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Imported here: torch and transformers take seconds, and --help or a typing error none.
    import torch
    from safetensors.torch import load_file

    from ebbtide.compare.prepare import choose_work_folder, prepare_setup
    from ebbtide.compare.workloads import find_cache_folder, load_model
    from ebbtide.torch import attach

    cache = find_cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    base = choose_work_folder((Path(tempfile.gettempdir()), cache))
    _say("preparing the model and the text")
    with tempfile.TemporaryDirectory(prefix="ebbtide-verify-", dir=base) as folder:
        try:
            setup = prepare_setup(request, Path(folder))
        except ValueError as error:
            _refuse(error)
        ids_BT = load_file(setup.tokens)["train"][: request.batch].to(setup.device)
        model = load_model(
            setup.source,
            context=setup.facts.context,
            dtype=setup.dtype,
            device=setup.device,
            seed=request.seed,
        )
        model.train()
        _say(f"comparing: {setup.facts.model}, {setup.facts.context} tokens")
        torch.manual_seed(request.seed)
        with attach(
            model,
            plan,
            budget=request.budget,
            host=request.host,
            disk=setup.disks or None,
            sanitize=sanitize,
        ) as tide:
            found = tide.verify({"input_ids": ids_BT, "labels": ids_BT}, **options)
            if sanitize:
                _say(tide.report())
            return found


def _say(message: str) -> None:
    echo(f"ebbtide verify: {message}", err=True)


def _refuse(error: ValueError) -> NoReturn:
    _say(" ".join(str(error).split()))
    raise typer.Exit(ExitCode.MISUSE) from error
