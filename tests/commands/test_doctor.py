"""`ebbtide doctor --jax` from the command line: what it prints, and its exit status."""

import json

import pytest
import typer
from typer.testing import CliRunner

from ebbtide.commands.doctor import register
from ebbtide.errors import ExitCode
from ebbtide.jax.flags import xla_flags
from tests.commands.test_plan import Finished
from tests.jax.test_flags import MACHINE, PLAN

VARIABLES = (
    "XLA_FLAGS",
    "JAX_REMAT3",
    "JAX_OPTIMIZATION_LEVEL",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> Finished:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["doctor", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Finished(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)


def test_missing_flags_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = run("--jax")
    assert finished.exit_code == ExitCode.FAILED
    lines = finished.stdout.splitlines()
    assert lines[0].startswith("jaxlib 0.")
    assert lines[1].startswith("! missing: xla_gpu_enable_latency_hiding_scheduler: ")
    assert lines[2] == (
        "    Set --xla_gpu_enable_latency_hiding_scheduler=true (openxla/xla#18139)."
    )
    assert lines[-1].endswith("(!) make offloading slow or unsafe.")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler")
    assert "latency_hiding_scheduler: " not in run("--jax").stdout
    assert run("--jax", "--unrolled").exit_code == ExitCode.DONE


def test_the_flags_of_a_plan_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", xla_flags(MACHINE, PLAN).xla_flags)
    finished = run("--jax", "--json")
    assert finished.exit_code == ExitCode.DONE
    form = json.loads(finished.stdout)
    assert set(form) == {"jaxlib", "is_fit", "findings"}
    assert form["is_fit"] is True
    assert all(not finding["is_serious"] for finding in form["findings"])


def test_json_has_every_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1 --xla_gpu_enable_command_buffer=")
    finished = run("--jax", "--json")
    assert finished.exit_code == ExitCode.FAILED
    form = json.loads(finished.stdout)
    assert form["is_fit"] is False
    assert form["findings"][0] == {
        "concern": "unknown",
        "name": "xla_no_such_flag",
        "message": "XLA does not know the flag 'xla_no_such_flag' and ends the process",
        "change": "Leave it out, or look for its present name",
        "source": "xla/parse_flags_from_env.cc",
        "is_serious": True,
    }
    assert "xla_gpu_enable_command_buffer" not in [f["name"] for f in form["findings"]]


def test_without_its_option_it_is_misuse() -> None:
    finished = run()
    assert finished.exit_code == ExitCode.MISUSE
    assert "Missing option '--jax'" in finished.stderr
    assert finished.stdout == ""
