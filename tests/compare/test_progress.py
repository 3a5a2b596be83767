import io
from dataclasses import replace

from rich.console import Console

from ebbtide.compare.progress import ConsoleObserver
from ebbtide.compare.results import Row, Status
from tests.compare.test_results import KEEP, TRL


def test_each_finished_strategy_gets_a_line() -> None:
    file = io.StringIO()
    with ConsoleObserver(Console(file=file), 2) as observer:
        for row in (KEEP, TRL):
            observer.start_strategy(row.strategy, 3)
            observer.start_step(row.strategy, 1)
            observer.finish_strategy(row, "")
    assert file.getvalue().splitlines() == [
        "[1/2] keep: 2.0 ms a step, 2.00 GiB",
        "[2/2] trl: not installed: the package trl is not installed",
    ]


def test_an_error_shows_the_last_words_of_its_process() -> None:
    file = io.StringIO()
    failed = Row(strategy="keep", status=Status.ERROR, note="ValueError: no")
    with ConsoleObserver(Console(file=file), 1) as observer:
        observer.start_strategy("keep", 3)
        observer.finish_strategy(failed, "\n".join(f"line {number}" for number in range(30)))
    lines = file.getvalue().splitlines()
    assert lines[0] == "[1/1] keep: error: ValueError: no"
    assert lines[1:] == [f"    line {number}" for number in range(10, 30)]


def test_a_terminal_shows_the_step() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    with ConsoleObserver(console, 1) as observer:
        observer.start_strategy("keep", 3)
        observer.start_step("keep", 2)
        observer.finish_strategy(replace(KEEP, strategy="keep"), "")
    assert "[1/1] keep: step 2 of 3" in file.getvalue()
