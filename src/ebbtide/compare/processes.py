"""A row's process: how it is started, what it says meanwhile, and what its end means."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO, final

import ebbtide
from ebbtide.compare.results import Row, Status, read_row

PROGRESS_PREFIX = "ebbtide-step "
"""Starts each line on a child's stdout that says which step it takes."""

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
    return describe_end(strategy, exit_status, last_words)


def describe_end(strategy: str, exit_status: int, last_words: str) -> Row:
    """Return the row that the end of a process without one means; arguments as above."""
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


WAITS = "-"
"""In place of a task's file: its path comes as a line on stdin, once imports are done."""


@final
class Waiting:
    """A child that does its imports and waits for a task, which `run_child` may give it.

    Starting it while another one ends saves the seconds that imports take. Until it has a task it
    touches no device.

    Args:
        module: What is run.
        stderr_path: File for what it writes to stderr.
        variables: Of the environment, beside those that there are.
    """

    def __init__(self, module: str, stderr_path: Path, variables: Mapping[str, str]) -> None:
        self.stderr_path = stderr_path
        with stderr_path.open("w", encoding="utf-8") as stderr:
            self.process = _start(module, WAITS, stderr, variables, stdin=subprocess.PIPE)

    def give(self, task_path: Path) -> None:
        """Let it run a task."""
        assert self.process.stdin is not None, "bug in ebbtide: it was started without stdin"
        # One that failed at its imports hears nothing, and its exit status tells.
        with suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(f"{task_path}\n")

    def close(self) -> None:
        """End it, where it was given nothing."""
        with self.process as process:
            process.kill()


def run_child(
    module: str,
    task_path: Path,
    stderr_path: Path,
    say_step: Callable[[int], None],
    variables: Mapping[str, str],
    limit_s: float | None = None,
    waiting: Waiting | None = None,
) -> int:
    """Run one task to its end and return its exit status.

    Args:
        module: What is run, with the task's file as its argument.
        task_path: The task's file.
        stderr_path: File for what it writes to stderr.
        say_step: Called with the number of each step that it says it takes.
        variables: Of the environment, beside those that there are.
        limit_s: Seconds after which the process is killed; None: never.
        waiting: A child of this module that runs it; `stderr_path` and `variables` are then its
            own.

    Raises:
        TimeoutError: It was killed at its limit.
    """
    if waiting is not None:
        waiting.give(task_path)
        started = waiting.process
    else:
        with stderr_path.open("w", encoding="utf-8") as stderr:
            started = _start(module, str(task_path), stderr, variables)
    with started as process:
        is_over = threading.Event()

        def stop() -> None:
            is_over.set()
            process.kill()

        timer = None if limit_s is None else threading.Timer(limit_s, stop)
        try:
            if timer is not None:
                timer.start()
            for line in process.stdout or ():
                if line.startswith(PROGRESS_PREFIX):
                    say_step(int(line.removeprefix(PROGRESS_PREFIX)))
            exit_status = process.wait()
        finally:
            if timer is not None:
                timer.cancel()
            # Does nothing to a process that has ended.
            process.kill()
        if exit_status and is_over.is_set():
            raise TimeoutError(f"it did not end within {limit_s:.0f} s")
        return exit_status


def _start(
    module: str,
    argument: str,
    stderr: TextIO,
    variables: Mapping[str, str],
    stdin: int | None = None,
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        # -P: a folder of the user's called `torch` must not shadow the package.
        [sys.executable, "-P", "-m", module, argument],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**make_environment(), **variables},
    )


def make_environment() -> dict[str, str]:
    """Return the environment of a child that finds this package."""
    package_root = str(Path(ebbtide.__file__).parents[1])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        # OpenMP's threads spin while they wait. Where another program has one of the cores, a
        # step then takes several times as long, and never twice the same time.
        "OMP_WAIT_POLICY": "passive",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
    }
