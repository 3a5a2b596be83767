"""`ebbtide trace --record` from the command line, mostly of programs with a torch of their own."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ebbtide
from ebbtide.cli import build_app
from ebbtide.errors import ExitCode
from tests.commands.test_trace import run

# As much of torch as is needed to make steps and to record them; torch itself takes seconds.
OPTIMIZER = """
hooks = []
class Handle:
    def remove(self):
        hooks.clear()
def register_optimizer_step_post_hook(hook):
    hooks.append(hook)
    return Handle()
class Optimizer:
    def step(self):
        for hook in list(hooks):
            hook(self, (), {})
"""
PROFILER = """
import gzip, json
class ProfilerActivity:
    CPU, CUDA = "cpu", "cuda"
def schedule(**given):
    return given
class profile:
    def __init__(self, *, activities, schedule, on_trace_ready, profile_memory):
        self.num_wanted, self.save, self.num_steps = schedule["active"], on_trace_ready, 0
        self.is_done = False
    def start(self):
        pass
    def step(self):
        self.num_steps += 1
        if self.num_steps == 1 + self.num_wanted:
            self.stop()
    def stop(self):
        if not self.is_done:
            self.is_done = True
            self.save(self)
    def export_chrome_trace(self, path):
        events = [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10 * i, "dur": 5, "pid": 0,
                   "tid": 7, "args": {"device": 0, "stream": 7}} for i in range(self.num_steps - 1)]
        with (gzip.open if path.endswith(".gz") else open)(path, "wt") as file:
            json.dump({"schemaVersion": 1, "traceEvents": events}, file)
"""
SCRIPT = """
import sys
from torch.optim.optimizer import Optimizer
optimizer = Optimizer()
for _ in range(int(sys.argv[1])):
    optimizer.step()
print("trained", *sys.argv[2:])
sys.exit(int(sys.argv[2]) if sys.argv[2:] and sys.argv[2].isdecimal() else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training that makes as many steps as it is told, beside a small torch."""
    package = tmp_path / "program/torch"
    (package / "optim").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: False)\n"
        "class distributed:\n    is_available = staticmethod(lambda: False)\n"
        "class autograd:\n    pass\n"
    )
    (package / "optim/__init__.py").touch()
    (package / "optim/optimizer.py").write_text(OPTIMIZER)
    (package / "profiler.py").write_text(PROFILER)
    path = tmp_path / "program/train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out/trace.json"


def num_kernels(out: Path) -> int:
    return len(json.loads(out.read_text())["traceEvents"])


def test_steps_in_the_middle_are_recorded_and_read(
    script: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finished = run("--record", out, "--", sys.executable, script, "20", "--lr", "-1")
    assert finished.exit_code == ExitCode.DONE
    assert f"ebbtide trace: recorded steps 6 to 8 of training in {out}\n" in finished.stderr
    assert finished.stdout.splitlines()[0] == f"{out}: PyTorch profiler, 3 events, 1 GPUs"
    assert capfd.readouterr().out == "trained --lr -1\n"  # the program's own, as it was
    assert num_kernels(out) == 3
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_steps_can_be_chosen_and_output_is_kept_apart_from_json(
    script: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ("--", sys.executable, script, "9")
    finished = run("--record", out, "--skip", "2", "--steps", "4", "--json", *command)
    assert finished.exit_code == ExitCode.DONE
    assert "recorded steps 3 to 6 of training" in finished.stderr
    assert json.loads(finished.stdout)["num_events"] == num_kernels(out) == 4
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "trained\n")


def test_a_training_that_ends_early_is_recorded_as_far_as_it_came(script: Path, out: Path) -> None:
    finished = run("--record", out, "--", sys.executable, script, "7")
    assert (
        f"recorded steps 6 to 7 of training in {out}; training ended before the 3 that were asked "
        "for"
    ) in finished.stderr


def test_a_name_that_ends_in_gz_is_compressed(script: Path, out: Path) -> None:
    packed = out.with_suffix(".json.gz")
    finished = run("--record", packed, "--", sys.executable, script, "20")
    assert finished.exit_code == ExitCode.DONE
    with gzip.open(packed, "rt") as file:
        assert len(json.load(file)["traceEvents"]) == 3


def test_the_commands_exit_status_is_passed_on(script: Path, out: Path) -> None:
    finished = run("--record", out, "--", sys.executable, script, "20", "7")
    assert finished.exit_code == 7
    assert finished.stdout.startswith(f"{out}: PyTorch profiler")  # what it recorded is read


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SCRIPT", "0"], "no optimizer of torch made a step in a process of rank 0"),
        (["SCRIPT", "4"], "training made 4 steps, and recording starts after 5; train longer"),
        (["-c", "print(1)"], "Python ran, and nothing imported torch's optimizers"),
        (["-I", "-c", "print(1)"], "started no Python, or one that ignores PYTHONPATH"),
    ],
)
def test_where_nothing_was_recorded_nothing_is_left_behind(
    arguments: list[str], message: str, script: Path, out: Path
) -> None:
    given = [str(script) if argument == "SCRIPT" else argument for argument in arguments]
    finished = run("--record", out, "--", sys.executable, *given)
    assert finished.exit_code == ExitCode.FAILED
    assert finished.stderr.startswith("ebbtide trace: nothing was recorded: ")
    assert message in finished.stderr
    assert finished.stdout == ""
    assert list(out.parent.iterdir()) == []


def test_a_command_that_is_no_python_and_fails(out: Path) -> None:
    finished = run("--record", out, "--", "sh", "-c", "exit 3")
    assert finished.exit_code == 3
    assert "`sh -c 'exit 3'` started no Python" in finished.stderr
    assert list(out.parent.iterdir()) == []


def test_a_command_that_is_killed_has_the_status_of_shells(script: Path, out: Path) -> None:
    text = script.read_text() + "\n"
    script.write_text(text.replace('print("trained"', "import os\nos.kill(os.getpid(), 9)\n#"))
    out.write_text("the last one")
    finished = run("--record", out, "--", sys.executable, script, "6")
    assert finished.exit_code == 128 + signal.SIGKILL
    assert "the process that trained was ended before it could write" in finished.stderr
    assert out.read_text() == "the last one"
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_module_that_the_user_has_for_the_start_of_python_runs_too(
    script: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (script.parent / "sitecustomize.py").write_text("print('mine')\n")
    given = [str(script.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(given))
    run("--record", out, "--", sys.executable, script, "20")
    assert capfd.readouterr().out == "mine\ntrained\n"
    assert num_kernels(out) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--record", "OUT"], "there is no command; give one after two dashes"),
        (["--record", "OUT", "--"], "there is no command; give one after two dashes"),
        (["t.json", "--record", "OUT", "--", "true"], "put the command after --"),
        (["--record", "OUT", "--skip", "1", "--", "true"], "--skip 1: it must be 2 or more"),
        (["--record", "OUT", "--steps", "0", "--", "true"], "--steps 0: it must be 1 or more"),
        (["--record", "OUT", "--", "no-such-command"], "there is no such command"),
        (["--record", "OUT/gone/t.json", "--", "true"], "there is no folder"),
        (["--steps", "2", "t.json"], "--steps 2: it goes with --record OUT -- COMMAND"),
        (["t.json", "--", "true"], "give one FILE, or --record OUT -- COMMAND"),
        ([], "give one FILE, or --record OUT -- COMMAND"),
    ],
)
def test_misuse(arguments: list[str], message: str, out: Path) -> None:
    finished = run(*(argument.replace("OUT", str(out)) for argument in arguments))
    assert finished.exit_code == ExitCode.MISUSE
    assert message in finished.stderr
    assert finished.stdout == ""
    assert list(out.parent.iterdir()) == []


def test_dashes_reach_the_command_through_the_top_level(script: Path, out: Path) -> None:
    arguments = ["trace", f"--record={out}", "--", sys.executable, str(script), "20", "--help"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == ExitCode.DONE
    assert num_kernels(out) == 3


def test_a_request_to_end_reaches_the_command(tmp_path: Path, out: Path) -> None:
    has_started = tmp_path / "pipe"
    os.mkfifo(has_started)
    program = "import sys, time\nopen(sys.argv[1], 'w').close()\ntime.sleep(3600)\n"
    main = "from ebbtide.cli import main\nmain()"
    command = ["-c", program, str(has_started)]
    process = subprocess.Popen(
        [sys.executable, "-c", main, "trace", "--record", str(out), "--", sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(Path(ebbtide.__file__).parents[1])},
        stderr=subprocess.PIPE,
        text=True,
    )
    has_started.open().close()  # waits for the command
    process.terminate()
    _, told = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "nothing was recorded: Python ran, and nothing imported torch's optimizers" in told
    assert list(out.parent.iterdir()) == []


@pytest.mark.slow
def test_a_real_training_on_the_cpu(tmp_path: Path, out: Path) -> None:
    """Its readers then say, rightly, that nothing ran on a GPU."""
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(10):\n"
        "    model(torch.randn(4, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    finished = run("--record", out, "--steps", "2", "--", sys.executable, path)
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert names.count("Optimizer.step#AdamW.step") == names.count("aten::addmm") == 2
    assert finished.exit_code == ExitCode.FAILED
    assert "ran on a GPU, so there is nothing to measure" in finished.stderr
