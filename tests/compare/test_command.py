"""`ebbtide compare` from the command line: what it prints, writes and refuses."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ebbtide.compare.command import has_failed, has_failed_in_jax, register
from ebbtide.compare.results import Comparison, JaxFigures, Row, Status
from tests.compare.test_results import BALANCED, FACTS, KEEP, ROW_KEYS, TRL

OFFLOAD = "ebbtide:offload-inputs"
TOO_MANY_BLOCKS = "ebbtide:offload-last:9"

# The one real run starts a process a strategy, each of which imports torch and transformers.
slow = pytest.mark.slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command line ended."""

    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: str) -> Finished:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["compare", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Finished(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path, text_file: Path) -> list[str]:
    return ["--model", str(tiny_model), "--device", "cpu", "--text", str(text_file)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out") / "results"


@pytest.fixture(scope="module")
def finished(tiny: list[str], out: Path) -> Finished:
    """One real run: two peers, one that does not apply, one plan, and one that must fail."""
    strategies = f"{TOO_MANY_BLOCKS},{OFFLOAD},keep,trl,checkpoint"
    return run(
        *tiny,
        "--context",
        "512",
        "--steps",
        "2",
        "--strategies",
        strategies,
        "--json",
        "--out",
        str(out),
    )


@pytest.fixture(scope="module")
def published(finished: Finished) -> dict[str, Any]:
    return json.loads(finished.stdout)


def row(published: dict[str, Any], strategy: str) -> dict[str, Any]:
    return next(row for row in published["rows"] if row["strategy"] == strategy)


@slow
def test_rows_come_in_the_order_asked_for_with_their_keys(published: dict[str, Any]) -> None:
    assert [row["strategy"] for row in published["rows"]] == [
        *(TOO_MANY_BLOCKS, OFFLOAD, "keep", "trl", "checkpoint"),
    ]
    assert all(list(row) == ROW_KEYS for row in published["rows"])


@slow
def test_the_run_says_what_it_ran(published: dict[str, Any]) -> None:
    assert published["model"] == "tiny-llama"
    assert (published["context"], published["batch"], published["steps"]) == (512, 1, 2)
    assert (published["dtype"], published["gradient_reference"]) == ("float32", "keep")
    assert published["device"].startswith("cpu (")
    assert published["memory_meaning"].startswith("peak_gib is ")
    assert "--steps 2 --strategies" in published["command"]
    assert set(published["versions"]) >= {"python", "torch", "transformers", "ebbtide"}


@slow
def test_keep_moves_nothing_and_is_the_reference(published: dict[str, Any]) -> None:
    keep = row(published, "keep")
    assert keep["status"] == "ok"
    assert (keep["moved_out_gib"], keep["moved_in_gib"]) == (0.0, 0.0)
    assert keep["grad_equal"] is None
    assert 0 < keep["forward_ms"] < keep["step_ms"]
    assert 0 < keep["peak_gib"] < keep["reserved_gib"]


@slow
@pytest.mark.parametrize("strategy", ["checkpoint", OFFLOAD])
def test_other_strategies_have_the_gradients_of_keep(
    published: dict[str, Any], strategy: str
) -> None:
    keep, other = row(published, "keep"), row(published, strategy)
    assert (other["grad_equal"], other["grad_largest_difference"]) == (True, 0.0)
    for key in ("loss", "perplexity_before", "perplexity_after"):
        assert other[key] == keep[key]
    assert keep["perplexity_before"] != keep["perplexity_after"]


@slow
def test_an_offloading_plan_reports_what_it_moved(published: dict[str, Any]) -> None:
    offload = row(published, OFFLOAD)
    # At least three of four block inputs of 512 tokens x 64 channels x 4 bytes.
    inputs_gib = 3 * 512 * 64 * 4 / (1 << 30)
    assert offload["moved_out_gib"] >= round(inputs_gib, 6)
    assert offload["disk_gib"] > 0.0


@slow
def test_a_strategy_that_does_not_apply_is_a_row(published: dict[str, Any]) -> None:
    assert row(published, "trl")["status"] == "not applicable"


@slow
def test_a_strategy_that_raises_is_a_row_and_the_others_still_run(
    finished: Finished, published: dict[str, Any]
) -> None:
    failed = row(published, TOO_MANY_BLOCKS)
    assert failed["status"] == "error"
    assert "PlanError: plan 'offload-last:9'" in failed["note"]
    assert failed["step_ms"] is None
    assert f"{TOO_MANY_BLOCKS}: error: " in finished.stderr
    assert "    ebbtide.errors.PlanError: plan 'offload-last:9'" in finished.stderr
    assert finished.exit_code == 1  # one of ebbtide's own plans failed


@slow
def test_progress_and_the_choice_of_disk_go_to_stderr(finished: Finished) -> None:
    assert "--disk was not given: activations go to a temporary folder" in finished.stderr
    assert "[1/5] keep: " in finished.stderr


@slow
def test_the_results_are_written(finished: Finished, out: Path) -> None:
    assert json.loads((out / "results.json").read_text()) == json.loads(finished.stdout)
    assert "| checkpoint | ok |" in (out / "results.md").read_text()
    assert (out / "memory-vs-step.png").stat().st_size > 1000


@slow
def test_a_budget_is_the_last_row_with_what_its_plan_foretold(
    tiny: list[str], tmp_path: Path
) -> None:
    disk = f"{tmp_path}:1GiB"
    finished = run(
        *(*tiny, "--context", "512", "--strategies", "keep", "--budget", "1GiB", "--disk", disk),
        *("--json", "--out", str(tmp_path / "out")),
    )
    published = json.loads(finished.stdout)
    assert finished.exit_code == 0
    assert [row["strategy"] for row in published["rows"]] == ["keep", "ebbtide"]
    assert (published["warm_up_steps"], published["steps"]) == (4, 1)
    planned = row(published, "ebbtide")
    assert (planned["status"], planned["grad_equal"]) == ("ok", True)
    assert planned["note"].startswith("planned for 1.0 GiB: forward and backward ")
    page = (tmp_path / "out" / "results.md").read_text()
    assert "| ebbtide | ok |" in page
    assert "- ebbtide: planned for 1.0 GiB: " in page


@slow
def test_too_small_a_budget_is_a_row_that_names_the_smallest(tiny: list[str]) -> None:
    finished = run(
        *(*tiny, "--context", "512", "--strategies", "keep,ebbtide", "--budget", "1KiB", "--json")
    )
    rows = json.loads(finished.stdout)["rows"]
    assert [(row["strategy"], row["status"]) for row in rows] == [
        *(("keep", "ok"), ("ebbtide", "error")),
    ]
    assert "fits a budget of 1.0 KiB; the smallest that fits is " in rows[1]["note"]
    assert finished.exit_code == 1


def test_without_json_a_table_is_printed_and_a_run_without_a_result_fails(
    tiny: list[str],
) -> None:
    finished = run(*tiny, "--context", "64", "--strategies", "trl,checkpoint-offload")
    assert finished.exit_code == 1
    assert "checkpoint-offload │ not applicable" in finished.stdout
    assert "step and forward: 1 step after 2 warm-up steps" in finished.stdout
    assert "gradients: not compared" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "lots"), "--budget lots: cannot read 'lots' as a budget: "),
        (("--strategies", "ebbtide"), "--strategies names ebbtide, which is the plan for a budget"),
        (("--batch", "0"), "--batch 0: it must be 1 or more"),
        (("--text", "/no/such.txt"), "--text /no/such.txt: there is no such file"),
        (("--disk", "/scratch"), "--disk /scratch: disk '/scratch' has no cap"),
        (("--strategies", "kep"), "unknown strategy 'kep'; valid names, nearest first: keep,"),
        (("--context", "1000"), "--context 1000: the model"),
        (("--device", "tpu"), "--device tpu: unknown device; give cpu, cuda or cuda:N"),
        (("--layers", "2"), "--layers 2 was given with --model"),
        (("--steps", "500"), "the first (training) half of the text has"),
        (("--out", __file__), f"--out {__file__}: it is a file; give a folder"),
    ],
)
def test_misuse_exits_2_with_one_sentence(
    tiny: list[str], arguments: tuple[str, ...], message: str
) -> None:
    finished = run(*tiny, *arguments)
    assert finished.exit_code == 2
    assert finished.stdout == ""
    assert f"ebbtide compare: {message}" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--disk", "/scratch:1GiB"), "--disk has no meaning with --framework jax"),
        (("--compile",), "--compile has no meaning with --framework jax"),
        (("--chunked-loss",), "--chunked-loss has no meaning with --framework jax"),
        (("--passes", "2"), "--passes has no meaning with --framework jax"),
        (("--dtype", "float16"), "--dtype float16: unknown type"),
        (("--strategies", "keep"), "unknown strategy of jax 'keep'; valid names, nearest first"),
        (("--model", "llama-9b-shape"), "unknown model 'llama-9b-shape'; valid names"),
        (("--device", "tpu"), "--device tpu: unknown device; give cpu, cuda or cuda:N"),
        (("--layers", "3"), "--layers 3: the first 3 layers of deepseek-tiny-shape are dense"),
    ],
)
def test_misuse_in_jax_exits_2_with_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    finished = run("--framework", "jax", "--model", "deepseek-tiny-shape", *arguments)
    assert finished.exit_code == 2
    assert finished.stdout == ""
    assert f"ebbtide compare: {message}" in finished.stderr


def test_what_only_jax_has_and_other_frameworks_are_refused(tiny: list[str]) -> None:
    dtype = run(*tiny, "--dtype", "float32")
    assert "--dtype float32 has no meaning with --framework torch" in dtype.stderr
    other = run(*tiny, "--framework", "tensorflow")
    assert "--framework tensorflow: unknown; give torch or jax" in other.stderr
    assert (dtype.exit_code, other.exit_code) == (2, 2)


def test_a_run_in_jax_fails_for_our_errors_and_for_gradients_that_are_far_off() -> None:
    def fails(*rows: Row) -> bool:
        return has_failed_in_jax(Comparison(facts=FACTS, rows=rows))

    def planned(relative: float | None) -> Row:
        figures = JaxFigures(
            micro_batch=1, global_batch=1, model_flops=1, grad_relative_difference=relative
        )
        return Row(strategy="ebbtide", status=Status.OK, grad_equal=False, jax=figures)

    plain = Row(strategy="no-remat", status=Status.OK)
    assert not fails(plain, Row(strategy="offload", status=Status.ERROR))
    assert not fails(plain, planned(0.015))
    assert fails(plain, planned(0.5))
    assert fails(plain, planned(None))
    assert fails(plain, Row(strategy="ebbtide@lhs", status=Status.ERROR))
    assert fails(Row(strategy="no-remat", status=Status.OOM))


def test_only_our_own_failures_or_nothing_at_all_fail_the_run() -> None:
    def fails(*rows: Row) -> bool:
        return has_failed(Comparison(facts=FACTS, rows=rows))

    peer_error = Row(strategy="trl", status=Status.ERROR)
    our_oom = Row(strategy="ebbtide:offload", status=Status.OOM)
    our_error = Row(strategy="ebbtide:offload", status=Status.ERROR)
    unequal = Row(strategy="ebbtide:offload", status=Status.OK, grad_equal=False)
    assert not fails(KEEP, BALANCED, TRL, peer_error, our_oom)
    assert fails(KEEP, our_error)
    assert fails(KEEP, Row(strategy="ebbtide", status=Status.ERROR))
    assert not fails(KEEP, Row(strategy="ebbtide", status=Status.OOM))
    assert fails(KEEP, unequal)
    compiled = Comparison(facts=replace(FACTS, is_compiled=True), rows=(KEEP, unequal))
    assert not has_failed(compiled), "code that is compiled to recompute rounds elsewhere"
    assert has_failed(replace(compiled, rows=(KEEP, our_error)))
    assert fails(TRL, peer_error)
