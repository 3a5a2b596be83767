"""Programs that may hang, and the time that they have."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from ebbtide.doctor.programs import Deadline, Told, command_of, run, start, wait_for

ENDLESS = """\
import sys, time
print('{"gpu": 0}', flush=True)
open(sys.argv[1], "w").close()
time.sleep(3600)
"""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_what_a_program_writes_is_kept() -> None:
    told = run(python('print(\'{"a": 1}\\nwords\\n[2]\\n{"b": \')'), 60.0)
    assert told.error == ""
    assert told.records == ({"a": 1},)


def test_a_program_that_hangs_is_ended_and_what_it_wrote_is_kept(tmp_path: Path) -> None:
    has_written = tmp_path / "pipe"
    os.mkfifo(has_written)
    process = start([*python(ENDLESS), str(has_written)])
    has_written.open().close()  # waits for the other end
    told = wait_for(process, 0.1)
    assert isinstance(process, subprocess.Popen) and process.returncode == -signal.SIGKILL
    assert told.error == "it did not end within 0 s"
    assert told.records == ({"gpu": 0},)


def test_a_program_that_fails_tells_its_last_words() -> None:
    told = run(python("print('{}')\nraise RuntimeError('no driver')"), 60.0)
    assert told == Told(text="{}\n", error="it ended with 1: RuntimeError: no driver", status=1)
    assert run(["/no/such/program"], 60.0).error == (
        "it could not be started (No such file or directory)"
    )


def test_a_program_for_which_no_time_is_left_is_not_started() -> None:
    assert run(["/no/such/program"], 0.0).error == "no time was left for it"


def test_a_deadline_is_shared() -> None:
    now = [100.0]
    deadline = Deadline(10.0, clock=lambda: now[0])
    assert deadline.left_s(4.0) == 4.0
    now[0] = 107.5
    assert (deadline.left_s(4.0), deadline.left_s(1.0)) == (2.5, 1.0)
    now[0] = 200.0
    assert deadline.left_s(4.0) == 0.0


def test_a_module_is_run_by_this_python_and_not_by_one_in_the_users_folder() -> None:
    assert command_of("ebbtide.x", "y") == [sys.executable, "-P", "-m", "ebbtide.x", "y"]
