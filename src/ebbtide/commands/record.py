"""`ebbtide trace --record OUT -- COMMAND`: record a few steps of a training."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

import typer.core

from ebbtide.commands.arguments import check_folder

DEFAULT_SKIP: Final = 5
"""ebbtide observes the first step, measures the second, plans in the third; the rest settles."""

DEFAULT_STEPS: Final = 3

LEAST_SKIP: Final = 2
"""Steps are told by their ends, and the profiler warms up in one of them."""

_RECORDER: Final = Path(__file__).parents[1] / "torch" / "recorder"
_VARIABLE: Final = "EBBTIDE_RECORD"
# The number of the file, whatever Python's own stream is at the time.
_STANDARD_ERROR: Final = 2

AFTER_DASHES: Final = "--after-dashes"
"""A hidden option: one word after the two dashes."""

HOW_BY_HAND: Final = "record by hand instead: docs/overlap.md says how"


class CommandAfterDashes(typer.core.TyperCommand):
    """A command that takes all after the first `--` as it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Make each word after the dashes the value of a hidden option, and parse that."""
        if "--" in args:
            at = args.index("--")
            args = [*args[:at], *(f"{AFTER_DASHES}={word}" for word in args[at + 1 :])]
        return super().parse_args(ctx, args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What is to be recorded."""

    out: Path
    command: tuple[str, ...]
    num_skipped: int
    """Training steps before the recorded ones."""
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """How a command ended, and what was recorded of it."""

    exit_code: int
    """Of the command; of one that a signal ended 128 and the signal's number, as in shells."""
    num_steps: int
    """Recorded; 0: there is no file."""
    message: str
    """Sentences for people."""


def choose(
    file: Path | None,
    record: Path | None,
    command: Sequence[str],
    *,
    skip: int | None,
    steps: int | None,
) -> Path | Recording:
    """Return the file to read, or what to record first; `command` is what was after the dashes.

    Raises:
        ValueError: There is neither, or both, or something that goes with the other.
    """
    if record is None:
        for name, value in {"--skip": skip, "--steps": steps}.items():
            if value is not None:
                raise ValueError(f"{name} {value}: it goes with --record OUT -- COMMAND")
        if file is None and len(command) == 1:
            return Path(command[0])  # dashes before a name, as for one that starts with a dash
        if file is None or command:
            raise ValueError("give one FILE, or --record OUT -- COMMAND")
        return file
    if file is not None:
        raise ValueError(
            f"FILE {file}: --record {record} reads what it writes; put the command after --"
        )
    if not command:
        raise ValueError(
            f"--record {record}: there is no command; give one after two dashes: -- python train.py"
        )
    check_folder("--record", record)
    recording = Recording(
        out=record,
        command=tuple(command),
        num_skipped=DEFAULT_SKIP if skip is None else skip,
        num_steps=DEFAULT_STEPS if steps is None else steps,
    )
    if recording.num_skipped < LEAST_SKIP:
        raise ValueError(
            f"--skip {skip}: it must be {LEAST_SKIP} or more, since steps are told by their ends "
            "and the profiler warms up in one"
        )
    if recording.num_steps < 1:
        raise ValueError(f"--steps {steps}: it must be 1 or more")
    if shutil.which(command[0]) is None:
        raise ValueError(f"-- {command[0]}: there is no such command; give one that can be run")
    return recording


def run_recorded(recording: Recording, *, is_quiet: bool) -> Recorded:
    """Run the command to its end, and put what was recorded in place.

    Its input and output are this process's. Interrupts go to the command too, and it is waited for.

    Args:
        recording: The command and its steps.
        is_quiet: The command's standard output goes to standard error.
    """
    # Beside the file, so that putting it in place is one step; gone whatever happens.
    with tempfile.TemporaryDirectory(prefix=".ebbtide-", dir=recording.out.absolute().parent) as at:
        folder = Path(at)
        exit_code = _run(recording, folder, is_quiet=is_quiet)
        status = _read_status(folder)
        num_steps = int(status.get("num_recorded", 0))
        trace = folder / _file_name(recording.out)
        if num_steps and trace.exists():
            os.replace(trace, recording.out)
            return Recorded(
                exit_code=exit_code,
                num_steps=num_steps,
                message=_describe(recording, num_steps),
            )
        return Recorded(
            exit_code=exit_code, num_steps=0, message=_why_nothing(recording, folder, status)
        )


def _run(recording: Recording, folder: Path, *, is_quiet: bool) -> int:
    settings = {
        "folder": str(folder),
        "file": _file_name(recording.out),
        "skip": recording.num_skipped,
        "steps": recording.num_steps,
    }
    paths = [str(_RECORDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        _VARIABLE: json.dumps(settings),
    }
    output = _STANDARD_ERROR if is_quiet else None
    passed_on = _PassedOn()
    previous = signal.signal(signal.SIGTERM, passed_on)
    try:
        with subprocess.Popen(recording.command, env=environment, stdout=output) as process:
            passed_on.start(process)
            while True:
                # The terminal interrupts the command as well; how it ends is its own affair.
                with contextlib.suppress(KeyboardInterrupt):
                    exit_code = process.wait()
                    break
    finally:
        signal.signal(signal.SIGTERM, previous)
    return exit_code if exit_code >= 0 else 128 - exit_code


class _PassedOn:
    """Passes signals on to a command, so that it does not outlive this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)

    def start(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what came before the command was there, and all that comes."""
        self._process = process
        for number in self._early:
            process.send_signal(number)


def _file_name(out: Path) -> str:
    return "trace.json.gz" if out.suffix == ".gz" else "trace.json"


def _read_status(folder: Path) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], json.loads((folder / "status.json").read_text("utf-8")))
    except (OSError, ValueError):
        return {}


def _describe(recording: Recording, num_steps: int) -> str:
    first = recording.num_skipped + 1
    which = f"step {first}" if num_steps == 1 else f"steps {first} to {first + num_steps - 1}"
    fewer = ""
    if num_steps < recording.num_steps:
        fewer = f"; training ended before the {recording.num_steps} that were asked for"
    return f"recorded {which} of training in {recording.out}{fewer}"


def _why_nothing(recording: Recording, folder: Path, status: dict[str, Any]) -> str:
    """Say why there is no recording; the nearest reason that the recorder's marks tell."""
    command = shlex.join(recording.command[:3])
    error = status.get("error", "")
    num_counted = int(status.get("num_counted", 0))
    if error:
        reason = f"torch's profiler did not record: {error}; {HOW_BY_HAND}"
    elif num_counted:
        reason = (
            f"training made {num_counted} steps, and recording starts after "
            f"{recording.num_skipped}; train longer, or give a smaller --skip"
        )
    elif (folder / "began").exists():
        reason = "the process that trained was ended before it could write what it had recorded"
    elif (folder / "torch").exists():
        reason = (
            "no optimizer of torch made a step in a process of rank 0, and steps are told by that; "
            f"{HOW_BY_HAND}"
        )
    elif (folder / "python").exists():
        reason = f"Python ran, and nothing imported torch's optimizers; {HOW_BY_HAND}"
    else:
        reason = (
            f"`{command}` started no Python, or one that ignores PYTHONPATH (python -I or -E, a "
            f"container); {HOW_BY_HAND}"
        )
    return f"nothing was recorded: {reason}"
