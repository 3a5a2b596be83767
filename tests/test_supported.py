"""Which versions were tried, and what is said of others."""

import platform
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from ebbtide.supported import PYTHON, SUPPORTED, check_versions, warn_if_untried

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    warn_if_untried.cache_clear()
    yield
    warn_if_untried.cache_clear()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("given", ["2.14.0", "2.14.0a0+gitabc", "3.0.1", "2.10.9", "1.99.0"])
def test_a_version_that_was_not_tried_is_told_once(
    given: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        warn_if_untried("torch", given)
    assert said(caplog) == [
        f"torch {given} was not tried with this ebbtide: 2.11 to 2.13 were. If something fails, "
        "install one of those; ebbtide's verify says whether gradients are right."
    ]


@pytest.mark.parametrize("given", ["2.11.0", "2.12.1+cu130", "2.13.5", "unknown", "2", ""])
def test_of_versions_that_were_tried_or_say_nothing_nothing_is_said(
    given: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_untried("torch", given)
    assert said(caplog) == []


def test_a_python_that_was_not_tried_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.1")
    check_versions("jax", "0.10.2")
    (message,) = said(caplog)
    assert message.startswith("Python 3.99.1 was not tried with this ebbtide: 3.11 to 3.12 were.")


def test_the_versions_that_the_tests_run_with_were_tried() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    )
    for package in ("torch", "jax", "transformers"):
        major, minor = map(int, pinned[package].split(".")[:2])
        assert SUPPORTED[package].oldest <= (major, minor) <= SUPPORTED[package].newest
        assert version(package).split(".")[0] == str(major)


def test_the_oldest_are_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = {
        PYTHON: project["requires-python"],
        "torch": next(p for p in extras["torch"] if p.startswith("torch>")),
        "jax": next(p for p in extras["jax"] if p.startswith("jax>")),
        "transformers": next(p for p in extras["demo"] if p.startswith("transformers>")),
    }
    for package, text in asked.items():
        found = re.search(r">=(\d+)\.(\d+)", text)
        assert found is not None
        assert SUPPORTED[package].oldest == (int(found[1]), int(found[2]))


def test_the_page_has_the_same_table() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d+\.\d+) \| (\d+\.\d+) \|", page, re.MULTILINE)
    assert rows == [
        (name, *(f"{major}.{minor}" for major, minor in (known.oldest, known.newest)))
        for name, known in SUPPORTED.items()
    ]
