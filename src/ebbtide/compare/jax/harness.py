"""Run every row in a process of its own, under its own flags, and collect the rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ebbtide.compare.jax.budget import describe_loss, is_relative, resolve_budget
from ebbtide.compare.jax.flags import choose_environment, describe_left_out
from ebbtide.compare.jax.names import FULL_REMAT, REFERENCES, flag_set_of, is_ours, order_runs
from ebbtide.compare.jax.prepare import JaxSetup
from ebbtide.compare.jax.shapes import count_model_flops, find_shape
from ebbtide.compare.jax.task import OUTCOME_AGAIN, OUTCOME_ROW, JaxTask, write_task
from ebbtide.compare.processes import AbstractObserver, describe_end, run_child
from ebbtide.compare.results import Comparison, JaxFigures, Row, Status, read_row
from ebbtide.errors import BudgetError

CHILD = "ebbtide.compare.jax.child"


def run_jax_comparison(
    setup: JaxSetup, observer: AbstractObserver, keep: Callable[[Comparison], None]
) -> Comparison:
    """Run every row of the setup and return them in the order they were asked for.

    The gradients' reference runs first: `no-remat`, or `full-remat` if that did not finish.

    Args:
        setup: The run.
        observer: Hears how far it is.
        keep: Called with the rows that there are after each: a run may be ended from outside.
    """
    rows: dict[str, Row] = {}
    reference: str | None = None

    def collect() -> Comparison:
        return Comparison(
            facts=replace(setup.facts, gradient_reference=reference),
            rows=tuple(rows[name] for name in setup.request.strategies if name in rows),
        )

    for strategy in order_runs(setup.request.strategies):
        can_be = reference is None and strategy in REFERENCES
        try:
            budget = _find_budget(setup.request.budget, strategy, rows)
        except BudgetError as error:
            row = Row(strategy=strategy, status=Status.ERROR, note=str(error))
            observer.start_strategy(strategy, 0)
            rows[strategy] = replace(row, jax=_describe_without_run(setup, ""))
            observer.finish_strategy(rows[strategy], last_words="")
        else:
            compared_with = strategy if can_be else reference
            row = _run_row(setup, strategy, compared_with, budget, observer)
            # On a CPU nothing moves, and times say nothing.
            may_lose = is_ours(strategy) and setup.device.is_gpu
            lost = describe_loss(row, rows.get(FULL_REMAT)) if may_lose else ""
            rows[strategy] = replace(row, note="; ".join(filter(None, (row.note, lost))))
        if can_be and rows[strategy].status is Status.OK:
            reference = strategy
        keep(collect())
    return collect()


def _find_budget(budget: str | None, strategy: str, rows: Mapping[str, Row]) -> str | None:
    if is_ours(strategy) and budget is not None and is_relative(budget):
        return resolve_budget(budget, rows[FULL_REMAT])
    return budget


def _run_row(
    setup: JaxSetup,
    strategy: str,
    reference: str | None,
    budget: str | None,
    observer: AbstractObserver,
) -> Row:
    facts = setup.facts
    observer.start_strategy(strategy, facts.warm_up_steps + facts.steps)
    flag_set, again = flag_set_of(strategy), ""
    row = _run_process(setup, strategy, reference, budget, flag_set, observer)
    if isinstance(row, str):
        flag_set, again = row, "its plan moves nothing, so command buffers stay on"
        row = _run_process(setup, strategy, reference, budget, flag_set, observer)
        assert isinstance(row, Row), "bug in ebbtide: a row that starts again twice"
    observer.finish_strategy(row, last_words=_read_last_words(setup, strategy))
    return replace(row, note="; ".join(filter(None, (again, row.note))))


def _run_process(
    setup: JaxSetup,
    strategy: str,
    reference: str | None,
    budget: str | None,
    flag_set: str,
    observer: AbstractObserver,
) -> Row | str:
    """Return the row, or the flag set to run it with instead."""
    request, facts = setup.request, setup.facts
    environment = choose_environment(
        flag_set,
        os.environ,
        host_bytes=setup.host_bytes,
        tuned=_make_tuned_folder(setup) if setup.device.is_gpu else None,
    )
    task = JaxTask(
        strategy=strategy,
        source=setup.source,
        context=facts.context,
        batch=facts.batch,
        num_counted_steps=facts.steps,
        num_warm_up_steps=facts.warm_up_steps,
        dtype=facts.dtype,
        seed=facts.seed,
        budget=budget,
        host=request.host,
        xla_flags=environment.xla_flags,
        # A flag set that was asked for stays.
        may_start_again=is_ours(strategy) and "@" not in strategy and flag_set == "overlap",
        tokens=str(setup.tokens),
        gradients=str(setup.folder / f"gradients-{reference}") if reference else None,
        is_reference=reference == strategy,
        result=str(setup.folder / f"{strategy}-outcome.json"),
    )
    task_path = setup.folder / f"{strategy}-task.json"
    write_task(task, task_path)
    exit_status = run_child(
        CHILD,
        task_path,
        _last_words_path(setup, strategy),
        lambda step: observer.start_step(strategy, step),
        {**setup.variables, **environment.variables},
    )
    if exit_status:
        row = describe_end(strategy, exit_status, _read_last_words(setup, strategy))
    else:
        outcome = json.loads(Path(task.result).read_text(encoding="utf-8"))
        if OUTCOME_AGAIN in outcome:
            return str(outcome[OUTCOME_AGAIN])
        row = read_row(outcome[OUTCOME_ROW])
    notes = (row.note, describe_left_out(environment.left_out))
    return replace(
        row,
        note="; ".join(filter(None, notes)),
        jax=row.jax or _describe_without_run(setup, environment.xla_flags),
    )


def _describe_without_run(setup: JaxSetup, xla_flags: str) -> JaxFigures:
    """Return what is known of a row that did not finish."""
    batch, context = setup.facts.batch, setup.facts.context
    return JaxFigures(
        micro_batch=batch,
        global_batch=batch,
        model_flops=count_model_flops(find_shape(setup.source), batch=batch, context=context),
        xla_flags=xla_flags,
    )


def _make_tuned_folder(setup: JaxSetup) -> Path:
    folder = setup.folder / "tuned"
    folder.mkdir(exist_ok=True)
    return folder


def _last_words_path(setup: JaxSetup, strategy: str) -> Path:
    return setup.folder / f"{strategy}-stderr.txt"


def _read_last_words(setup: JaxSetup, strategy: str) -> str:
    return _last_words_path(setup, strategy).read_text(encoding="utf-8", errors="replace")
