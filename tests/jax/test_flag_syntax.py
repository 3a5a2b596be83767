"""`XLA_FLAGS` is read as XLA reads it, which the installed XLA itself confirms."""

import os
import subprocess
import sys

import pytest

from ebbtide.jax.flag_syntax import Argument, ParsedFlags, parse_xla_flags

DEVICES = "xla_force_host_platform_device_count"


def no_file(name: str) -> None:
    raise AssertionError(name)


def parse(text: str) -> ParsedFlags:
    return parse_xla_flags(text, no_file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("--a=1 --b=2", ["--a=1", "--b=2"]),
        ("  \t--a=1\r\n--b", ["--a=1", "--b"]),
        ("--a= --b=", ["--a=", "--b="]),
        ("--a='1 2' --b=\"x y\"", ["--a=1 2", "--b=x y"]),
        # A backslash counts in double quotes alone.
        (r'--a="1\"2" --b=' + r"'1\' --c=\3", ['--a=1"2', "--b=1\\", "--c=\\3"]),
        # A quote that begins later is a letter; what follows a closing one is the next argument.
        ("--a=x'y z'", ["--a=x'y"]),
        ("--a='open", ["--a=open"]),
        ("--a=1,--b=2", ["--a=1,--b=2"]),
        ("-a=1 --", ["-a=1", "--"]),
        ("--a.b=1", ["--a.b=1"]),
    ],
)
def test_arguments_are_split_as_xla_splits_them(text: str, expected: list[str]) -> None:
    assert [str(argument) for argument in parse(text).arguments] == expected


@pytest.mark.parametrize(
    ("text", "arguments", "ignored"),
    [
        ("--a=1 oops --b=2", ["--a=1"], "oops --b=2"),
        ("--a=1; --b=2", ["--a=1;", "--b=2"], ""),
        ("--a=1 ; --b=2", ["--a=1"], "; --b=2"),
        ("--a='1', --b=2", ["--a=1"], ", --b=2"),
        ("--a=x'y z'", ["--a=x'y"], "z'"),
    ],
)
def test_reading_stops_at_what_is_no_flag(text: str, arguments: list[str], ignored: str) -> None:
    parsed = parse(text)
    assert [str(argument) for argument in parsed.arguments] == arguments
    assert parsed.ignored == ignored


def test_another_first_letter_names_a_file() -> None:
    files = {"flags.txt": "--a=1\n--b=2\n"}
    assert parse_xla_flags("flags.txt", files.get).last("b") == Argument(name="b", value="2")
    assert parse_xla_flags("a=1", files.get) == ParsedFlags(missing_file="a=1")
    assert parse_xla_flags(" ", files.get) == ParsedFlags(missing_file=" ")


def test_the_last_of_a_name_counts() -> None:
    parsed = parse("--a=1 --b --a=2")
    assert parsed.last("a") == Argument(name="a", value="2")
    assert parsed.last("c") is None


@pytest.mark.parametrize(
    ("text", "is_true"),
    [("--a", True), ("--a=True", True), ("--a=1", True), ("--a=false", False), ("--a=0", False)],
)
def test_truth_values(text: str, is_true: bool) -> None:
    argument = parse(text).last("a")
    assert argument is not None
    assert argument.is_true is is_true


def run_xla(flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.device_count())"],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        f"--{DEVICES}=2 --{DEVICES}=3",
        f"--{DEVICES}='2' oops --{DEVICES}=3",
        f'\t--{DEVICES}="\\4"\r\n',
    ],
)
def test_the_installed_xla_reads_the_same(flags: str) -> None:
    argument = parse(flags).last(DEVICES)
    assert argument is not None
    finished = run_xla(flags)
    assert finished.stdout.split() == [argument.value], finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--xla_no_such_flag=1", "-xla_dump_to=x", "nowhere.txt", "--"])
def test_the_installed_xla_dies_of_the_same(flags: str) -> None:
    assert run_xla(flags).returncode != 0
