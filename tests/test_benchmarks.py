"""The page that the benchmarks write."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.host_work import MOMENTS, attached_in_memory
from benchmarks.peers_report import draw, find_front, write_page
from tests.torch.models import gpt2
from tests.torch.training import differences, language_step, seeded, train

NOTHING: dict[str, Any] = {
    **{"step_ms": None, "step_ms_range": None, "x_keep": None, "peak_gib": None, "host_gib": None},
    **{"moved_out_gib": None, "moved_in_gib": None, "grad_equal": None, "bound_ms": None},
    **{"grad_largest_difference": None, "note": ""},
}
KEEP = {
    **NOTHING,
    **{"row": "keep", "status": "ok", "step_ms": 100.0, "step_ms_range": [99.0, 102.0]},
    **{"x_keep": 1.0, "peak_gib": 8.0, "host_gib": 0.0, "moved_out_gib": 0.0, "moved_in_gib": 0.0},
}
OURS = {
    **KEEP,
    **{"row": "ebbtide 0.50 x keep", "step_ms": 103.0, "x_keep": 1.03, "peak_gib": 4.0},
    **{"host_gib": 2.0, "moved_out_gib": 2.0, "moved_in_gib": 1.5, "grad_equal": True},
    "bound_ms": 101.25,
}
TRL = {
    **NOTHING,
    **{"row": "trl", "status": "not installed", "note": "the package trl is not installed"},
}
RESULT: dict[str, Any] = {
    **{"model": "a model", "parameters": 2_000_000, "dtype": "bfloat16", "context": 64, "batch": 2},
    **{"device": "one GPU", "versions": {"torch": "2"}, "date": "2026-01-01", "is_compiled": True},
    **{"optimizer": "SGD", "loss": "the model's own", "steps": 1, "warm_up_steps": 1, "passes": 5},
    **{"state_gib": 1.0, "logits_gib": 0.5, "command": "python3 benchmarks/peers.py"},
    "rows": [KEEP, OURS, TRL],
}


def test_the_page_has_a_row_for_each_strategy_and_says_what_was_not_run(tmp_path: Path) -> None:
    picture = tmp_path / "results" / "peers.png"
    page = write_page({"one": RESULT}, ("one", "two"), tmp_path / "docs" / "page.md", picture)
    assert (
        "| ebbtide 0.50 x keep | ok | 103.0 | 99.0 to 102.0 | 1.030 | 4.00 | 2.00 | 3.50 | equal | "
        "101.2 |" in page
    )
    assert "| keep | ok | 100.0 | 99.0 to 102.0 | 1.000 | 8.00 | 0.00 | 0.00 | reference | - |" in (
        page
    )
    assert "| trl | not installed | - | - | - | - | - | - | - | - |" in page
    assert "- trl: the package trl is not installed" in page
    assert "a model: 2 M parameters, bfloat16, 64 tokens x 2, compiled blocks. one GPU; " in page
    assert page.endswith("## Not run\n\n- `two`\n")
    assert "](../results/peers.png)" in page


def test_gradients_that_differ_are_told_with_the_difference() -> None:
    differing = {**OURS, "grad_equal": False, "grad_largest_difference": 0.00012}
    result = {**RESULT, "rows": [differing]}
    assert "| differ: 1.2e-04 |" in write_page({"one": result}, ("one",), Path("p.md"), None)


def test_only_what_no_other_row_beats_is_on_the_front() -> None:
    points = [(4.0, 103.0), (8.0, 100.0), (5.0, 120.0), (4.0, 110.0), (9.0, 100.0)]
    assert find_front(points) == [(4.0, 103.0), (8.0, 100.0)]


def test_a_panel_is_drawn_for_each_workload_with_a_finished_row(tmp_path: Path) -> None:
    assert draw({"one": {**RESULT, "rows": [TRL]}}, tmp_path / "none.png") is None
    path = draw({"one": RESULT, "two": RESULT}, tmp_path / "two.png")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.own_scripts
def test_the_stand_in_for_a_gpu_moves_bytes_follows_scripts_and_changes_no_gradient() -> None:
    wanted = train(seeded(lambda: gpt2(dropout=0.0)), language_step, num_steps=6)
    model = seeded(lambda: gpt2(dropout=0.0))
    torch.manual_seed(0)
    with attached_in_memory(model, MOMENTS) as runtime:
        got = train(model, language_step, num_steps=6)
        assert runtime.plan is not None
        assert runtime.plan.release_at and runtime.plan.fetch_at
        assert runtime.ledger.snapshot().host.moved_out_bytes == 5 * runtime.plan.host_bytes > 0
        assert runtime.num_followed > 0
        assert runtime.ledger.snapshot().num_kept_not_understood == ()
    assert differences(got, wanted) == []
