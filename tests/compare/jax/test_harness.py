"""One run in JAX from the command line: a process for each row, on a CPU."""

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ebbtide.compare.command import register

STRATEGIES = "offload@pipelined,no-remat,ebbtide"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two rows, and a plan for less than no-remat takes; on a CPU nothing is moved."""
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    out = tmp_path_factory.mktemp("jax") / "results"
    text = tmp_path_factory.mktemp("texts") / "tide.txt"
    text.write_text("the tide goes out and comes back. " * 100, encoding="utf-8")
    arguments = [
        *("compare", "--framework", "jax", "--model", "llama-tiny-shape", "--layers", "3"),
        *("--device", "cpu", "--context", "32", "--batch", "2", "--text", str(text)),
        *("--strategies", STRATEGIES, "--budget", "3MiB", "--json", "--out", str(out)),
    ]
    finished = CliRunner().invoke(app, arguments)
    assert finished.exit_code == 0, finished.stderr
    assert json.loads((out / "results.json").read_text()) == json.loads(finished.stdout)
    assert "| ebbtide | ok |" in (out / "results.md").read_text()
    return json.loads(finished.stdout)


def row(published: dict[str, Any], strategy: str) -> dict[str, Any]:
    return next(row for row in published["rows"] if row["strategy"] == strategy)


def test_the_run_says_what_it_ran(published: dict[str, Any]) -> None:
    assert (published["framework"], published["gradient_reference"]) == ("jax", "no-remat")
    assert (published["context"], published["batch"], published["steps"]) == (32, 2, 1)
    assert published["dtype"] == "float32"
    assert set(published["versions"]) >= {"jax", "jaxlib", "flax", "optax"}


def test_rows_come_in_the_order_asked_for_and_are_alike(published: dict[str, Any]) -> None:
    assert [row["strategy"] for row in published["rows"]] == STRATEGIES.split(",")
    plain = row(published, "no-remat")
    for other in published["rows"]:
        assert (other["status"], other["micro_batch"], other["global_batch"]) == ("ok", 2, 2)
        assert other["compile_s"] > 0 < other["tflops_per_device"]
        for key in ("loss", "perplexity_before", "perplexity_after"):
            assert other[key] == pytest.approx(plain[key], rel=1e-5)
        if other is not plain:
            assert 0 <= other["grad_relative_difference"] < 1e-5  # XLA for CPUs rounds a little
    assert plain["perplexity_after"] < plain["perplexity_before"]
    assert "the same step taken again has the same gradients, bit for bit" in plain["note"]


def test_each_row_has_its_flags(published: dict[str, Any]) -> None:
    assert "scheduler=true" in row(published, "no-remat")["xla_flags"]
    assert "pipelined_host_offloading=true" in row(published, "offload@pipelined")["xla_flags"]


def test_a_cpu_says_that_nothing_moves(published: dict[str, Any]) -> None:
    offloaded = row(published, "offload@pipelined")
    assert "offloaded query_proj, key_proj, value_proj" in offloaded["note"]
    assert "on a CPU nothing moves" in offloaded["note"]
    assert offloaded["host_gib"] == 0.0


def test_the_plan_keeps_to_its_budget_and_is_verified(published: dict[str, Any]) -> None:
    planned = row(published, "ebbtide")
    assert planned["peak_gib"] < 3 / 1024 < row(published, "no-remat")["peak_gib"]
    assert "layers: not verified, since nothing of it is moved" in planned["note"]
    assert "its plan moves nothing, so command buffers stay on" in planned["note"]
