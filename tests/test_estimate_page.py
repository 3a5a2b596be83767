"""docs/estimate.md: its tables are what is computed, its flags are those of the command."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ebbtide.catalog.config import FIELDS
from ebbtide.catalog.machines import MACHINES
from ebbtide.commands.estimate import register
from tests.estimate.deepseek import calibrated_rates
from tests.estimate.tables import TABLES

PAGE = (Path(__file__).parents[1] / "docs" / "estimate.md").read_text(encoding="utf-8")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


SLOW = {"shares", "llama_405b"}
"""Tables with several plans for 126 layers."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in TABLES],
)
def test_the_table_is_what_is_computed(name: str) -> None:
    # Written by printing these rows.
    rows = list(TABLES[name]())
    assert rows
    assert "\n".join(rows) in PAGE


def test_the_constant_is_the_one_that_is_calibrated() -> None:
    whole = 0.66 * 2500e3
    assert f"all rates times {calibrated_rates().flops_per_ns / whole:.2f}" in PAGE


def test_the_documented_flags_are_those_of_the_command() -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    text = CliRunner().invoke(app, ["estimate", "--help"], env={"COLUMNS": "200"}).stdout
    known = set(FLAG.findall(text))
    assert {"--machine", "--what-if", "--json"} <= known
    documented = PAGE.partition("\n## Options\n")[2].partition("\n## ")[0]
    assert set(FLAG.findall(documented)) == known


def test_every_machine_and_family_is_documented() -> None:
    for name in (*MACHINES, *FIELDS):
        assert f"`{name}`" in PAGE
