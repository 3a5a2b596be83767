"""Say on stderr which strategy runs, and which step it takes."""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ebbtide.compare.processes import AbstractObserver
from ebbtide.compare.results import Row, Status, take_median, to_gib, to_ms

MAX_LAST_LINES = 20


@final
class ConsoleObserver(AbstractObserver):
    """Writes one line a finished strategy; on a terminal a bar below follows the steps.

    Use it in `with`, or call `close`: the bar stays on the terminal otherwise.
    """

    def __init__(self, console: Console, num_strategies: int) -> None:
        self._console = console
        self._num_strategies = num_strategies
        self._num_finished = 0
        self._num_steps = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("", total=None)
        self._progress.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def start_strategy(self, strategy: str, num_steps: int) -> None:
        self._num_steps = num_steps
        self._progress.reset(
            self._bar, total=num_steps, description=f"{self._write_place()} {strategy}: loading"
        )

    def start_step(self, strategy: str, step: int) -> None:
        self._progress.update(
            self._bar,
            completed=step - 1,
            description=f"{self._write_place()} {strategy}: step {step} of {self._num_steps}",
        )

    def finish_strategy(self, row: Row, last_words: str) -> None:
        line = f"{self._write_place()} {row.strategy}: {_write_outcome(row)}"
        self._num_finished += 1
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if row.status is Status.ERROR:
            for words in last_words.strip().splitlines()[-MAX_LAST_LINES:]:
                self._console.print(f"    {words}", markup=False, highlight=False, soft_wrap=True)

    def _write_place(self) -> str:
        return f"[{self._num_finished + 1}/{self._num_strategies}]"


def _write_outcome(row: Row) -> str:
    if row.status is not Status.OK:
        return f"{row.status.value}: {row.note}"
    return f"{to_ms(take_median(row.step_ns)):.1f} ms a step, {to_gib(row.peak_bytes):.2f} GiB"
