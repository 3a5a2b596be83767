import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from ebbtide.cli import LazyCommand, build_app, main
from ebbtide.errors import ExitCode, ModelError
from ebbtide.version import __version__

SOURCE = Path(__file__).parents[1] / "src"


def _register(app: typer.Typer) -> None:
    """A command that ends in each of the ways a command can end."""

    @app.command()
    def compare(
        out: Annotated[str, typer.Option(help="Where results go.")] = "results",
        is_json: Annotated[bool, typer.Option("--json")] = False,
        model: Annotated[str, typer.Argument()] = "small",
    ) -> None:
        match out:
            case "model-error":
                raise ModelError("model has no blocks:\n  name them with blocks=...")
            case "no-plan":
                raise typer.Exit(ExitCode.NO_PLAN_FITS)
            case "no-package":
                raise ModuleNotFoundError("No module named 'gguf'", name="gguf")
            case "own-bug":
                raise ModuleNotFoundError("No module named 'ebbtide.x'", name="ebbtide.x")
            case _:
                print(f"wrote {out} {is_json} {model}")


@pytest.fixture
def fake_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "ebbtide.compare.command", _register)


def _pretend(
    monkeypatch: pytest.MonkeyPatch, name: str, register: Callable[[typer.Typer], None]
) -> None:
    """Put a module with `register` where `import_module(name)` finds it."""
    module = types.ModuleType(name)
    vars(module)["register"] = register
    monkeypatch.setitem(sys.modules, name, module)


def _run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ebbtide", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_version_goes_to_stdout() -> None:
    result = CliRunner().invoke(build_app(), ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"ebbtide {__version__}\n")


def test_help_lists_the_commands_without_importing_them() -> None:
    command = LazyCommand(name="tally", module="no_such_module", extras="x", summary="Count it.")
    result = CliRunner().invoke(build_app((command,)), ["--help"])
    assert result.exit_code == 0
    assert "tally" in result.stdout
    assert "Count it." in result.stdout


def test_version_imports_no_framework_and_no_command() -> None:
    program = (
        "import sys\n"
        "from ebbtide.cli import main\n"
        "sys.argv = ['ebbtide', '--version']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    names = {'torch', 'jax', 'transformers', 'ebbtide.compare'}\n"
        "    print(sorted(names & set(sys.modules)))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout == f"ebbtide {__version__}\n[]\n"


@pytest.mark.usefixtures("fake_compare")
@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ([], "wrote results False small\n"),
        (["--out", "here"], "wrote here False small\n"),
        (["large", "--json", "--out=here"], "wrote here True large\n"),
        (["--json", "--out", "here", "large"], "wrote here True large\n"),
    ],
)
def test_a_command_gets_its_own_arguments(arguments: list[str], printed: str) -> None:
    result = CliRunner().invoke(build_app(), ["compare", *arguments])
    assert (result.exit_code, result.stdout) == (0, printed)


@pytest.mark.usefixtures("fake_compare")
def test_help_of_a_command_is_its_own() -> None:
    result = CliRunner().invoke(build_app(), ["compare", "--help"])
    assert result.exit_code == 0
    assert "Usage: ebbtide compare [OPTIONS]" in result.stdout
    assert "Where results go." in result.stdout


@pytest.mark.usefixtures("fake_compare")
@pytest.mark.parametrize("arguments", [["compare", "--nonsense"], ["compar"], ["--nonsense"]])
def test_misuse_exits_with_two_and_says_so_on_stderr(arguments: list[str]) -> None:
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == ExitCode.MISUSE
    assert result.stdout == ""
    assert "Usage: ebbtide" in result.stderr


@pytest.mark.usefixtures("fake_compare")
def test_no_plan_exits_with_three(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run_main(monkeypatch, "compare", "--out", "no-plan") == ExitCode.NO_PLAN_FITS


@pytest.mark.usefixtures("fake_compare")
def test_an_error_of_ours_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run_main(monkeypatch, "compare", "--out", "model-error") == ExitCode.FAILED
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "ebbtide: model has no blocks: name them with blocks=...\n"


@pytest.mark.usefixtures("fake_compare")
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run_main(monkeypatch, "compare", "--out", "no-package") == ExitCode.FAILED
    assert capsys.readouterr().err == (
        "ebbtide: ebbtide compare (gguf) needs packages that are not installed. "
        "Install them with: pip install 'ebbtide[torch,demo]'\n"
    )


@pytest.mark.usefixtures("fake_compare")
def test_a_module_of_ours_that_is_missing_is_not_blamed_on_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["ebbtide", "compare", "--out", "own-bug"])
    with pytest.raises(ModuleNotFoundError, match=r"ebbtide\.x"):
        main()
