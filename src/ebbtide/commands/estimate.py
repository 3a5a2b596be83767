"""The command `ebbtide estimate`: what a model takes on a machine that one does not have yet."""

from __future__ import annotations

import gc
import json as json_text
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ebbtide.catalog.form import Attention, Implementation
from ebbtide.catalog.networks import NETWORKS
from ebbtide.commands.arguments import (
    check_folder,
    check_planner,
    read_budget,
    read_host,
    read_machine,
)
from ebbtide.commands.arguments import read_workload as read_measured
from ebbtide.commands.estimate_arguments import (
    read_accelerator,
    read_choice,
    read_disk_sizes,
    read_model,
    read_names,
    read_sweep,
    scale_link,
)
from ebbtide.commands.estimate_json import describe_answer, describe_largest, describe_sweep
from ebbtide.commands.estimate_report import write_answer, write_largest, write_sweep
from ebbtide.commands.output import echo, write_file
from ebbtide.drawing import check_picture
from ebbtide.errors import ExitCode
from ebbtide.estimate.answer import Answer, make_answer
from ebbtide.estimate.picture import NEEDED_BY, draw_answer, draw_swept
from ebbtide.estimate.search import CONTEXT_STEP, Largest, find_largest
from ebbtide.estimate.setup import Degrees, Dtype, Optimizer, Setup
from ebbtide.estimate.strategies import DEFAULT_PLANNER, Estimator, Limits
from ebbtide.estimate.verdict import Advice
from ebbtide.machine import Machine
from ebbtide.workload import Workload


def register(app: typer.Typer) -> None:
    """Add the command `estimate` to `app`."""
    app.command("estimate")(estimate)


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model of the catalog, such as llama-3.1-8b, or a config.json."
        ),
    ],
    machine: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="A machine of the catalog, such as h200-pcie5, or a file."
        ),
    ],
    context: Annotated[
        int, typer.Option("--context", "--tokens", help="Tokens of a sequence.")
    ] = 4096,
    batch: Annotated[
        int, typer.Option(help="Sequences in a micro-batch, of each rank that has its own.")
    ] = 1,
    dp: Annotated[int, typer.Option(help="Copies of the model.")] = 1,
    fsdp: Annotated[
        int, typer.Option(help="Ranks that share out weights, gradients and optimizer state.")
    ] = 1,
    tp: Annotated[int, typer.Option(help="Ranks that split matrices and heads.")] = 1,
    sp: Annotated[
        bool, typer.Option("--sp", help="With --tp: split tokens too where all would be held.")
    ] = False,
    cp: Annotated[int, typer.Option(help="Ranks that split the tokens of a sequence.")] = 1,
    ep: Annotated[int, typer.Option(help="Ranks that share out routed experts.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages, run 1F1B.")] = 1,
    accumulate: Annotated[int, typer.Option(help="Micro-batches in a step.")] = 1,
    optimizer: Annotated[
        str, typer.Option(help=f"One of {', '.join(o.value for o in Optimizer)}.")
    ] = Optimizer.ADAMW.value,
    dtype: Annotated[
        str, typer.Option(help=f"One of {', '.join(d.value for d in Dtype)}.")
    ] = Dtype.BF16.value,
    lora: Annotated[
        int, typer.Option(metavar="RANK", help="Train adapters of this rank alone; 0: everything.")
    ] = 0,
    implementation: Annotated[
        str, typer.Option(help=f"Who runs a layer: {', '.join(i.value for i in Implementation)}.")
    ] = Implementation.FUSED.value,
    attention: Annotated[
        str, typer.Option(help="flash, or matrix: scores in full.")
    ] = Attention.FLASH.value,
    loss_chunk: Annotated[
        int, typer.Option(metavar="TOKENS", help="Tokens whose logits are there at once; 0: all.")
    ] = 0,
    offload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="What the rows `offload` move, in MaxText's names or ours, with commas. Default: "
            "queries, keys and values, and experts' products.",
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Most device memory: 40GiB, 50%, or auto."),
    ] = "auto",
    host: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most pinned host memory of a rank."),
    ] = None,
    disk: Annotated[
        list[str] | None,
        typer.Option(metavar="[PATH:]SIZE", help="Also use so much of an NVMe disk."),
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(help="Of ebbtide's plan: greedy by default; lp takes longer for a little."),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(metavar="PEAK", help="Peak of the device in bf16, for a machine file."),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured blocks in place of the catalog's."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Layers of the model. Default: its own.")
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option("--max", metavar="AXIS", help="Find the largest context or batch that fits."),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS[=VALUES]", help="Sweep context, batch or bandwidth (factors of it)."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", help="Also draw peaks by holder, or with --what-if step times."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate what training takes: step time, memory by holder, and what should be moved.

    Memory is arithmetic; time is a model. Exit status 2: misuse. 3: no strategy fits.
    """
    try:
        unused = {"--offload": offload, "--planner": planner, "--disk": disk, "--picture": picture}
        _refuse_combinations(largest, what_if, unused)
        measured_too = {
            "--implementation": implementation != Implementation.FUSED.value,
            "--attention": attention != Attention.FLASH.value,
            "--loss-chunk": loss_chunk,
            "--max": largest,
        }
        _refuse_beside_workload(workload, what_if, measured_too)
        check_planner(planner or DEFAULT_PLANNER)
        if picture is not None:
            check_folder("--picture", picture)
            check_picture("--picture", picture, NEEDED_BY)
        shape = read_model(model)
        if layers is not None:
            if layers < 1:
                raise ValueError(f"--layers {layers}: it must be 1 or more")
            shape = replace(shape, num_layers=layers)
        on = read_disk_sizes(disk, read_machine(machine))
        if largest == "context":
            # The one that is sought; what was given or not need not divide by the degrees.
            context = CONTEXT_STEP * max(1, cp) * max(1, tp)
        setup = Setup(
            shape=shape,
            context=context,
            batch=batch,
            degrees=Degrees(dp=dp, fsdp=fsdp, tp=tp, cp=cp, ep=ep, pp=pp, sp=sp),
            accumulate=accumulate,
            optimizer=read_choice("--optimizer", optimizer, Optimizer),
            dtype=read_choice("--dtype", dtype, Dtype),
            lora_rank=lora,
            implementation=read_choice("--implementation", implementation, Implementation),
            attention=read_choice("--attention", attention, Attention),
            loss_chunk=loss_chunk,
        )
        host_bytes = read_host(host, on)
        task = _Task(
            setup=setup,
            machine=on,
            limits=Limits(
                budget_bytes=read_budget(budget, on),
                host_bytes=on.host_bytes_per_rank if host_bytes is None else host_bytes,
                disk_bytes=on.disk_bytes,
            ),
            tflops=tflops,
            names=read_names(offload),
            planner=planner or DEFAULT_PLANNER,
            measured=None if workload is None else read_measured(workload, "--workload"),
            picture=picture,
        )
        with _no_collection():
            _run(task, largest, what_if, is_json=json)
    except ValueError as error:
        _refuse(error)


@contextmanager
def _no_collection() -> Generator[None]:
    """Spare the search for cycles: there are none among some 100,000 small records."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """The arguments, read."""

    setup: Setup
    machine: Machine
    limits: Limits
    tflops: float | None
    names: list[str] | None
    planner: str
    measured: Workload | None
    picture: Path | None

    def estimator(self, setup: Setup, machine: Machine) -> Estimator:
        return Estimator(
            setup,
            machine,
            read_accelerator(self.machine, self.tflops),
            self.limits,
            network=NETWORKS.get(self.machine.name),
            names=self.names,
            planner=self.planner,
            measured=self.measured,
        )


def _refuse_combinations(
    largest: str | None, what_if: str | None, unused: Mapping[str, object]
) -> None:
    if largest is None:
        return
    if what_if is not None:
        raise ValueError(
            f"--max {largest} was given with --what-if {what_if}: one question at a time; leave "
            "one of them out"
        )
    if largest not in ("context", "batch"):
        raise ValueError(f"--max {largest}: it finds the largest context or batch; give one")
    for option, given in unused.items():
        if given:
            raise ValueError(
                f"{option} was given with --max {largest}, which needs none: it tries keeping, "
                "checkpointing, and checkpointing with inputs on the host; leave one of them out"
            )


def _refuse_beside_workload(
    workload: Path | None, what_if: str | None, given: Mapping[str, object]
) -> None:
    if workload is None:
        return
    for option, value in given.items():
        if value:
            raise ValueError(
                f"{option} was given with --workload {workload}: a run is of one context and "
                "batch and one implementation; leave one of them out"
            )
    if what_if is not None and what_if.partition("=")[0] != "bandwidth":
        raise ValueError(
            f"--what-if {what_if} was given with --workload {workload}: a run is of one context "
            "and batch; sweep bandwidth, or leave one of them out"
        )


def _run(task: _Task, largest: str | None, what_if: str | None, *, is_json: bool) -> None:
    estimator = task.estimator(task.setup, task.machine)
    if largest is not None:
        found = find_largest(largest, task.setup, task.machine, estimator.rates, task.limits)
        if is_json:
            _print_json(describe_largest(largest, found))
        else:
            _print(write_largest(largest, found, task.setup, task.machine))
        _end_if(not _any(found))
    elif what_if is not None:
        current = {"context": task.setup.context, "batch": task.setup.batch}
        axis, values = read_sweep(what_if, current)
        points = [(value, _answer_at(task, axis, value)) for value in values]
        if is_json:
            _print_json(describe_sweep(axis, points))
        else:
            _print(write_sweep(axis, points))
        _draw(task.picture, lambda path: draw_swept(axis, points, path))
        _end_if(all(a.verdict.advice is Advice.TOO_LARGE for _, a in points))
    else:
        answer = make_answer(estimator)
        if is_json:
            _print_json(describe_answer(answer))
        else:
            _print(write_answer(answer))
        _draw(task.picture, lambda path: draw_answer(answer, path))
        _end_if(answer.verdict.advice is Advice.TOO_LARGE)


def _draw(path: Path | None, draw: Callable[[Path], None]) -> None:
    if path is None:
        return
    write_file("--picture", path, lambda: draw(path))
    echo(f"ebbtide estimate: wrote {path}", err=True)


def _any(found: Largest) -> bool:
    return bool(found.keep or found.remat or found.offload)


def _answer_at(task: _Task, axis: str, value: float) -> Answer:
    if axis == "bandwidth":
        return make_answer(task.estimator(task.setup, scale_link(task.machine, value)))
    return make_answer(task.estimator(replace(task.setup, **{axis: int(value)}), task.machine))


def _end_if(nothing_fits: bool) -> None:
    if nothing_fits:
        raise typer.Exit(ExitCode.NO_PLAN_FITS)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        echo(line)


def _print_json(value: dict[str, object]) -> None:
    echo(json_text.dumps(value, indent=2, allow_nan=False))


def _refuse(error: ValueError) -> NoReturn:
    echo(f"ebbtide estimate: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(ExitCode.MISUSE) from error
