"""Names out of foreign files on a terminal."""

from pathlib import Path

import pytest

from ebbtide.commands.output import echo, printable, write_file
from ebbtide.errors import ExitCode
from tests.commands.test_trace import run
from tests.trace.chrome import IN, copy, kernel, text_of


def test_what_steers_a_terminal_is_escaped_and_the_rest_is_left() -> None:
    assert printable("a\x1b[2Jb\x07\x9b\u202e\ud800\x7f") == r"a\x1b[2Jb\x07\x9b\u202e\ud800\x7f"
    assert printable("a\tb\nc \u00e9 \u6f6e") == "a\tb\nc \u00e9 \u6f6e"


def test_a_name_without_an_encoding_does_not_stop_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    echo("name \ud800")
    echo("name \x1b]0;title\x07", err=True)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("name \\ud800\n", "name \\x1b]0;title\\x07\n")


def test_a_trace_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    odd = "\x1b[2Jgemm\ud800"
    events = [kernel("x", 0, 10), copy(IN, 10, 9_000_000, 1000), kernel(odd, 9_000_000, 9_900_000)]
    events.append(copy(odd, 0, 1, 8))
    path.write_text(text_of(*events), encoding="utf-8")
    finished = run(path)
    assert finished.exit_code == ExitCode.DONE
    assert "\x1b" not in finished.stdout + finished.stderr
    # The note quotes the name.
    assert r"\x1b[2Jgemm\ud800" in finished.stderr


def test_a_file_that_cannot_be_written_is_named_with_its_option(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_file("--out", path, lambda: path.write_text("{}"))
    assert path.read_text() == "{}"
    missing = tmp_path / "none" / "out.json"
    with pytest.raises(ValueError) as caught:
        write_file("--out", missing, lambda: missing.write_text("{}"))
    assert str(caught.value) == (
        f"--out {missing}: the file cannot be written (No such file or directory); name another"
    )
