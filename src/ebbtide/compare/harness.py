"""Run every strategy in a process of its own, one after another, and collect the rows.

A process of its own gives each strategy clean memory, and turns a crash or a kill for
memory into a row.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import final

from ebbtide.compare.names import REFERENCE_STRATEGIES, order_runs, runs_compiled
from ebbtide.compare.prepare import Setup
from ebbtide.compare.processes import AbstractObserver, Waiting, read_outcome, run_child
from ebbtide.compare.results import Comparison, Facts, Row, Status
from ebbtide.compare.strategies import make_strategy
from ebbtide.compare.task import Task, write_task

CHILD = "ebbtide.compare.child"
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""cuBLAS is deterministic only with a workspace of fixed size."""


def start_waiting(stderr_path: Path) -> Waiting:
    """Start the process of some row to come, of any strategy, which writes to this file."""
    return Waiting(CHILD, stderr_path, VARIABLES)


def run_comparison(setup: Setup, observer: AbstractObserver) -> Comparison:
    """Run every strategy of the setup and return the rows in the order they were asked for.

    The gradients' reference runs first: `keep`, or `checkpoint` if `keep` did not finish. Rows on
    compiled blocks have one of their own: `compile-keep`, or with `--compile` the same two.
    """
    rows: dict[str, Row] = {}
    references = References()
    for strategy in order_runs(setup.request.strategies):
        rows[strategy] = run_strategy(setup, strategy, references, observer)
    return Comparison(
        facts=references.write(setup),
        rows=tuple(rows[strategy] for strategy in setup.request.strategies),
    )


@final
class References:
    """Which strategies' gradients the others of a comparison are compared with."""

    def __init__(self) -> None:
        self._by_kind: dict[bool, str] = {}

    def find(self, strategy: str, *, is_compiled: bool) -> str | None:
        """Return the reference of a strategy, itself if it can become one, or `None`."""
        kind = runs_compiled(strategy, is_compiled=is_compiled)
        if kind not in self._by_kind and strategy in REFERENCE_STRATEGIES:
            return strategy
        return self._by_kind.get(kind)

    def add(self, strategy: str, *, is_compiled: bool) -> None:
        """Let a strategy whose gradients have been written be the reference of its kind."""
        self._by_kind[runs_compiled(strategy, is_compiled=is_compiled)] = strategy

    def write(self, setup: Setup) -> Facts:
        """Return the setup's facts with the references."""
        is_compiled = setup.request.is_compiled
        return replace(
            setup.facts,
            gradient_reference=self._by_kind.get(is_compiled),
            compiled_gradient_reference=None if is_compiled else self._by_kind.get(True),
        )


def run_strategy(
    setup: Setup,
    strategy: str,
    references: References,
    observer: AbstractObserver,
    limit_s: float | None = None,
    waiting: Waiting | None = None,
) -> Row:
    """Run one strategy of the setup in a process, and return its row.

    If it can be a reference and there is none of its kind, it becomes that once it is done. After
    `limit_s` its process is ended, and the row says so. `waiting` comes from `start_waiting`, and
    is used up unless the strategy is refused.
    """
    budget, is_compiled = setup.request.budget, setup.request.is_compiled
    chosen = make_strategy(
        strategy,
        host=setup.request.host,
        disk=setup.disks or None,
        budget=budget,
        is_compiled=is_compiled,
    )
    reference = references.find(strategy, is_compiled=is_compiled)
    observer.start_strategy(strategy, setup.facts.warm_up_steps + setup.facts.steps)
    refusal = chosen.find_refusal(setup.device)
    if refusal:
        row = Row(strategy=strategy, status=refusal.status, note=refusal.reason)
        observer.finish_strategy(row, last_words="")
        return row
    stem = strategy.replace(":", "-")
    task = Task(
        strategy=strategy,
        source=setup.source,
        num_parameters=setup.facts.parameters,
        context=setup.facts.context,
        batch=setup.facts.batch,
        num_counted_steps=setup.facts.steps,
        num_warm_up_steps=setup.facts.warm_up_steps,
        num_passes=setup.facts.passes,
        dtype=setup.facts.dtype,
        device=str(setup.device),
        seed=setup.facts.seed,
        optimizer=setup.optimizer,
        host=setup.request.host,
        disks=setup.disks,
        budget=budget,
        loss=setup.loss,
        is_compiled=is_compiled,
        tokens=str(setup.tokens),
        gradients=str(setup.folder / f"gradients-{reference}") if reference else None,
        is_reference=reference == strategy,
        result=str(setup.folder / f"{stem}-row.json"),
    )
    task_path = setup.folder / f"{stem}-task.json"
    write_task(task, task_path)
    own_path = setup.folder / f"{stem}-stderr.txt"
    last_words_path = own_path if waiting is None else waiting.stderr_path
    try:
        exit_status = run_child(
            CHILD,
            task_path,
            last_words_path,
            lambda step: observer.start_step(strategy, step),
            VARIABLES,
            limit_s,
            waiting,
        )
    except TimeoutError as error:
        row = Row(strategy=strategy, status=Status.ERROR, note=str(error))
        observer.finish_strategy(row, last_words="")
        return row
    last_words = last_words_path.read_text(encoding="utf-8", errors="replace")
    row = read_outcome(strategy, Path(task.result), exit_status, last_words)
    if task.is_reference and row.status is Status.OK:
        references.add(strategy, is_compiled=is_compiled)
    observer.finish_strategy(row, last_words=last_words)
    return row
