"""The table of waits is true to the source, to the tests and to `docs/lifetimes.md`."""

from __future__ import annotations

import re

import pytest

from tests.torch.mutations import ROOT, Mutation, mutated
from tests.torch.waits import WAITS, Wait, row_of


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: f"{wait.where}: {wait.what}")
def test_a_wait_is_in_the_source_and_has_a_test_and_a_line(wait: Wait) -> None:
    changed = mutated(ROOT, Mutation(wait.rule, wait.what, wait.file, wait.old, wait.new))
    compile(changed, wait.file, "exec")
    path, _, test = wait.dies.partition("::")
    source = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"^def {test}\(", source, flags=re.MULTILINE)
    lines = (ROOT / "docs" / "lifetimes.md").read_text(encoding="utf-8").splitlines()
    assert lines.count(row_of(wait)) == 1


def test_the_document_has_no_line_for_a_wait_that_is_gone() -> None:
    lines = (ROOT / "docs" / "lifetimes.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if re.match(r"\| \d", line)]
    assert rows == [row_of(wait) for wait in WAITS]
