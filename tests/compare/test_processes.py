import json
import os
import signal
from pathlib import Path

import pytest

from ebbtide.compare.processes import Waiting, extract_reason, read_outcome, run_child
from ebbtide.compare.results import Row, Status, write_row

TRACEBACK = """a warning
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    first()
ValueError: not this one

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in <module>
    second()
RuntimeError: the message
goes on
"""


def test_the_reason_is_the_last_exception_on_one_line() -> None:
    assert extract_reason(TRACEBACK) == "RuntimeError: the message goes on"


def test_without_a_traceback_the_reason_is_the_last_line() -> None:
    assert extract_reason("loading\nSegmentation fault\n") == "Segmentation fault"
    assert extract_reason("") == ""


def test_a_long_reason_is_cut() -> None:
    assert len(extract_reason("Traceback (most recent call last):\nE: " + "x" * 1000)) == 300


def test_a_finished_child_leaves_its_row(tmp_path: Path) -> None:
    row = Row(strategy="keep", status=Status.OK, loss=1.5)
    (tmp_path / "row.json").write_text(json.dumps(write_row(row)))
    assert read_outcome("keep", tmp_path / "row.json", 0, "") == row


def test_a_kill_is_out_of_memory(tmp_path: Path) -> None:
    row = read_outcome("keep", tmp_path / "row.json", -signal.SIGKILL, "")
    assert row.status is Status.OOM
    assert "SIGKILL" in row.note


@pytest.mark.parametrize(
    ("exit_status", "last_words", "note"),
    [
        (1, TRACEBACK, "RuntimeError: the message goes on"),
        (3, "", "exit status 3"),
        (-signal.SIGSEGV, "", "ended by signal SIGSEGV"),
        (-signal.SIGABRT, "terminate called", "ended by signal SIGABRT: terminate called"),
    ],
)
def test_any_other_end_is_an_error(
    tmp_path: Path, exit_status: int, last_words: str, note: str
) -> None:
    row = read_outcome("trl", tmp_path / "row.json", exit_status, last_words)
    assert (row.status, row.note, row.step_ns) == (Status.ERROR, note, ())


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    # Opening a pipe for reading waits for one who writes, and nobody does.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(TimeoutError, match="it did not end within 0 s"):
        run_child("json.tool", pipe, tmp_path / "stderr", lambda step: None, {}, 0.1)


def test_a_limit_that_is_not_reached_changes_nothing(tmp_path: Path) -> None:
    arguments = (tmp_path / "no.json", tmp_path / "stderr", lambda step: None, {})
    assert run_child("json.tool", *arguments, 600.0) == run_child("json.tool", *arguments) != 0


def test_a_waiting_child_runs_the_task_that_it_is_given(tmp_path: Path) -> None:
    waiting = Waiting("ebbtide.compare.child", tmp_path / "stderr", {})
    # It fails as one that was started with this task: the file is not there.
    arguments = (tmp_path / "task.json", tmp_path / "unused", lambda step: None, {})
    assert run_child("ebbtide.compare.child", *arguments, waiting=waiting) == 1
    words = (tmp_path / "stderr").read_text()
    assert extract_reason(words).startswith("FileNotFoundError") and "task.json" in words
    assert not (tmp_path / "unused").exists()


def test_a_child_that_failed_while_it_waited_is_told_by_its_status(tmp_path: Path) -> None:
    waiting = Waiting("no_such_module", tmp_path / "stderr", {})
    waiting.process.wait()
    assert run_child("no_such_module", Path(), Path(), lambda step: None, {}, waiting=waiting) == 1
    assert "no_such_module" in (tmp_path / "stderr").read_text()


def test_a_waiting_child_without_a_task_ends(tmp_path: Path) -> None:
    waiting = Waiting("ebbtide.compare.child", tmp_path / "stderr", {})
    waiting.close()
    assert waiting.process.returncode == -signal.SIGKILL
