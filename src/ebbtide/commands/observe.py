"""The command `ebbtide observe`: train two steps of a model, write what was measured."""

from __future__ import annotations

import tempfile
from itertools import cycle
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ebbtide.commands.arguments import check_folder
from ebbtide.commands.observe_report import write_workload_summary
from ebbtide.commands.output import echo, write_file
from ebbtide.compare.options import (
    BatchOption,
    ContextOption,
    DeviceOption,
    LayersOption,
    ModelOption,
    TextOption,
)
from ebbtide.compare.request import CompareRequest, check_request
from ebbtide.errors import ExitCode
from ebbtide.workload import Workload


def register(app: typer.Typer) -> None:
    """Add the command `observe` to `app`."""
    app.command("observe")(observe)


def observe(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the workload is written.")],
    model: ModelOption = "smollm2",
    layers: LayersOption = None,
    context: ContextOption = None,
    batch: BatchOption = 1,
    text: TextOption = None,
    device: DeviceOption = None,
) -> None:
    """Measure one training step of a model: what it stores for backward, and how long it takes.

    The model and the text are those of `ebbtide compare`. `ebbtide plan` reads the file.
    """
    request = CompareRequest(
        model=model,
        layers=layers,
        context=context,
        batch=batch,
        steps=1,
        strategies=("keep",),
        host=None,
        disks=(),
        text=text,
        device=device,
        seed=0,
    )
    try:
        check_folder("--out", out)
        check_request(request)
    except ValueError as error:
        _refuse(error)
    workload = _observe(request)
    try:
        write_file("--out", out, lambda: out.write_text(workload.to_json(), encoding="utf-8"))
    except ValueError as error:
        _refuse(error)
    for line in write_workload_summary(workload):
        echo(line)
    _say(f"wrote {out}")


def _observe(request: CompareRequest) -> Workload:
    """Train under observation; refuse a request that cannot be run."""
    # Imported here: torch and transformers take seconds, and --help or a typing error none.
    from safetensors.torch import load_file

    from ebbtide.compare.child import make_optimizer
    from ebbtide.compare.prepare import prepare_setup
    from ebbtide.compare.workloads import find_cache_folder, load_model
    from ebbtide.torch.observe import observe

    find_cache_folder().mkdir(parents=True, exist_ok=True)
    _say("preparing the model and the text")
    with tempfile.TemporaryDirectory(prefix="ebbtide-observe-") as folder:
        try:
            setup = prepare_setup(request, Path(folder))
        except ValueError as error:
            _refuse(error)
        windows = load_file(setup.tokens)["train"]
    model = load_model(
        setup.source,
        context=setup.facts.context,
        dtype=setup.dtype,
        device=setup.device,
        seed=request.seed,
    )
    optimizer = make_optimizer(model, setup.optimizer)
    batches = cycle(windows.to(setup.device).split(request.batch))

    def step() -> None:
        ids_BT = next(batches)
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    _say(f"training under observation: {setup.facts.model}, {setup.facts.context} tokens")
    return observe(model, step)


def _say(message: str) -> None:
    echo(f"ebbtide observe: {message}", err=True)


def _refuse(error: ValueError) -> NoReturn:
    _say(" ".join(str(error).split()))
    raise typer.Exit(ExitCode.MISUSE) from error
