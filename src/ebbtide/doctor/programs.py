"""Run a program that may hang: a driver or a network disk can hold a process for good.

What it wrote until then is kept, so that it may tell line by line what it has found.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

# A process within a call to a broken driver or disk is not ended by a kill. It is left then.
_LEAVE_AFTER_S: Final = 1.0

_MOST_WORDS: Final = 300
"""Letters of an error that are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a program wrote."""

    text: str
    error: str = ""
    """Why it did not end well; "" if it did."""
    status: int | None = 0
    """Its exit status; None: it was not started, or did not end."""

    @property
    def records(self) -> tuple[dict[str, object], ...]:
        """The lines that are JSON objects; a line that was cut off is none."""
        found: list[dict[str, object]] = []
        for line in self.text.splitlines():
            try:
                record: object = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                found.append(cast(dict[str, object], record))
        return tuple(found)


Run = Callable[[Sequence[str], float], Told]
"""Run a command line for at most so many seconds; never raises for what the program does."""


class Deadline:
    """Seconds that are left of a total.

    Args:
        total_s: From now on.
        clock: Seconds since some moment.
    """

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + total_s

    def left_s(self, at_most_s: float) -> float:
        """Return what is left, 0 or more and at most `at_most_s`."""
        return max(0.0, min(at_most_s, self._end_s - self._clock()))


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of this package in a new process."""
    # -P: a folder of the user's called `torch` must not shadow the package.
    return [sys.executable, "-P", "-m", module, *arguments]


def run(command: Sequence[str], seconds: float) -> Told:
    """Run a program; kill it when its time is over, and do not start it where that is so."""
    if seconds <= 0:
        return Told(text="", error="no time was left for it", status=None)
    return wait_for(start(command), seconds)


def start(command: Sequence[str]) -> "subprocess.Popen[str] | OSError":
    """Start a program whose output is kept; return the error where it cannot be started."""
    package_root = str(Path(__file__).parents[2])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    except OSError as error:
        return error


def wait_for(process: "subprocess.Popen[str] | OSError", seconds: float) -> Told:
    """Wait for what `start` gave, and kill it when its time is over."""
    if isinstance(process, OSError):
        error = f"it could not be started ({process.strerror})"
        return Told(text="", error=error, status=None)
    try:
        text, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        error = f"it did not end within {seconds:.0f} s"
        return Told(text=_rest_of(process), error=error, status=None)
    except BaseException:
        process.kill()
        raise
    if process.returncode == 0:
        return Told(text=text)
    last = (errors.strip().splitlines() or ["no message"])[-1][:_MOST_WORDS]
    error = f"it ended with {process.returncode}: {last}"
    return Told(text=text, error=error, status=process.returncode)


def _rest_of(process: "subprocess.Popen[str]") -> str:
    try:
        return process.communicate(timeout=_LEAVE_AFTER_S)[0]
    except subprocess.TimeoutExpired as expired:
        # Bytes even in text mode; the stubs say otherwise.
        raw: object = expired.stdout
        return raw.decode(errors="replace") if isinstance(raw, bytes) else ""
