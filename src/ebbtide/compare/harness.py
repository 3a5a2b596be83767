"""Run every strategy in a process of its own, one after another, and collect the rows.

A process of its own gives each strategy clean memory, and turns a crash or a kill for
memory into a row.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import final

import ebbtide
from ebbtide.compare.names import REFERENCE_STRATEGIES, order_runs, runs_compiled
from ebbtide.compare.prepare import Setup
from ebbtide.compare.results import Comparison, Facts, Row, Status, read_row
from ebbtide.compare.strategies import make_strategy
from ebbtide.compare.task import PROGRESS_PREFIX, Task, write_task

MAX_NOTE_CHARS = 300
TRACEBACK_HEADER = "Traceback (most recent call last):"


class AbstractObserver(ABC):
    """Hears how far a comparison is."""

    @abstractmethod
    def start_strategy(self, strategy: str, num_steps: int) -> None:
        """A strategy's process starts."""

    @abstractmethod
    def start_step(self, strategy: str, step: int) -> None:
        """A strategy takes a step, numbered from 1."""

    @abstractmethod
    def finish_strategy(self, row: Row, last_words: str) -> None:
        """A strategy has its row; `last_words` is what a failed process left on stderr."""


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
    setup: Setup, strategy: str, references: References, observer: AbstractObserver
) -> Row:
    """Run one strategy of the setup in a process, and return its row.

    If it can be a reference and there is none of its kind, it becomes that once it is done.
    """
    budget, is_compiled = setup.request.budget, setup.request.is_compiled
    chosen = make_strategy(
        strategy, host=setup.request.host, disk=setup.disk, budget=budget, is_compiled=is_compiled
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
        disk=setup.disk,
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
    last_words_path = setup.folder / f"{stem}-stderr.txt"
    exit_status = _run_child(
        task_path, last_words_path, lambda step: observer.start_step(strategy, step)
    )
    last_words = last_words_path.read_text(encoding="utf-8", errors="replace")
    row = read_outcome(strategy, Path(task.result), exit_status, last_words)
    if task.is_reference and row.status is Status.OK:
        references.add(strategy, is_compiled=is_compiled)
    observer.finish_strategy(row, last_words=last_words)
    return row


def read_outcome(strategy: str, result: Path, exit_status: int, last_words: str) -> Row:
    """Return the row that a child process left, or the row that its end means.

    Args:
        strategy: The strategy that the child ran.
        result: The file that it was to write; it need not exist.
        exit_status: As `subprocess` gives it: negative is a signal.
        last_words: What the child wrote to stderr.
    """
    if exit_status == 0:
        return read_row(json.loads(result.read_text(encoding="utf-8")))
    if exit_status == -signal.SIGKILL:
        return Row(
            strategy=strategy,
            status=Status.OOM,
            note="killed by the system (SIGKILL), as it does when host memory runs out",
        )
    reason = extract_reason(last_words)
    if exit_status < 0:
        ended = f"ended by signal {signal.Signals(-exit_status).name}"
        reason = f"{ended}: {reason}" if reason else ended
    return Row(strategy=strategy, status=Status.ERROR, note=reason or f"exit status {exit_status}")


def extract_reason(last_words: str) -> str:
    """Return the message of the last traceback in a process's stderr, on one line."""
    _, header, after = last_words.rpartition(TRACEBACK_HEADER)
    if not header:
        return _shorten(last_words.strip().rpartition("\n")[2])
    lines = after.strip("\n").splitlines()
    # Frames are indented; the exception's own message starts at the margin.
    start = next((at for at, line in enumerate(lines) if line[:1].strip()), len(lines))
    return _shorten(" ".join(" ".join(lines[start:]).split()))


def _shorten(message: str) -> str:
    return message if len(message) <= MAX_NOTE_CHARS else message[: MAX_NOTE_CHARS - 3] + "..."


def _run_child(task_path: Path, stderr_path: Path, say_step: Callable[[int], None]) -> int:
    """Run one task to its end and return its exit status."""
    with (
        stderr_path.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(
            # -P: a folder of the user's called `torch` must not shadow the package.
            [sys.executable, "-P", "-m", "ebbtide.compare.child", str(task_path)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=_make_environment(),
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                if line.startswith(PROGRESS_PREFIX):
                    say_step(int(line.removeprefix(PROGRESS_PREFIX)))
            return process.wait()
        finally:
            # Does nothing to a process that has ended.
            process.kill()


def _make_environment() -> dict[str, str]:
    package_root = str(Path(ebbtide.__file__).parents[1])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        # OpenMP's threads spin while they wait. Where another program has one of the cores, a
        # step then takes several times as long, and never twice the same time.
        "OMP_WAIT_POLICY": "passive",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        # cuBLAS is deterministic only with a workspace of fixed size.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TOKENIZERS_PARALLELISM": "false",
    }
