import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ebbtide.compare.results import Comparison, Row, Status
from ebbtide.compare.table import list_columns, list_meanings, print_table, write_files, write_page
from tests.compare.test_results import BALANCED, COMPARISON, FACTS, KEEP, TRL

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def cells(comparison: Comparison, title: str) -> tuple[str, ...]:
    return next(column.cells for column in list_columns(comparison) if column.title == title)


def test_columns_without_a_value_are_left_out() -> None:
    titles = [column.title for column in list_columns(COMPARISON)]
    assert "reserved GiB" not in titles
    assert titles[:5] == ["strategy", "status", "step ms", "forward ms", "peak GiB"]
    on_gpu = Comparison(facts=FACTS, rows=(replace(KEEP, reserved_bytes=1 << 30),))
    assert cells(on_gpu, "reserved GiB") == ("1.00",)


def test_cells_show_medians_gib_and_a_dash_for_nothing() -> None:
    assert cells(COMPARISON, "step ms") == ("2.0", "2.0", "-")
    assert cells(COMPARISON, "peak GiB") == ("2.00", "1.00", "-")
    assert cells(COMPARISON, "status") == ("ok", "ok", "not installed")


def test_gradients_are_the_reference_equal_or_a_difference() -> None:
    differing = replace(KEEP, strategy="bad", grad_equal=False, grad_largest_difference=0.00123)
    broken = replace(KEEP, strategy="worse", grad_equal=False)
    comparison = Comparison(facts=FACTS, rows=(*COMPARISON.rows, differing, broken))
    assert cells(comparison, "gradients") == (
        *("reference", "equal", "-", "differ: 1.2e-03", "differ: -"),
    )


def test_a_run_without_a_reference_says_that_nothing_was_compared() -> None:
    without = Comparison(facts=replace(FACTS, gradient_reference=None), rows=(TRL,))
    assert "gradients" not in [column.title for column in list_columns(without)]
    assert "gradients: not compared, since no run of keep or checkpoint finished." in (
        list_meanings(without)
    )


def test_rows_on_compiled_blocks_have_their_own_reference() -> None:
    facts = replace(FACTS, compiled_gradient_reference="compile-keep")
    rows = (KEEP, replace(KEEP, strategy="compile-keep"))
    comparison = Comparison(facts=facts, rows=rows)
    assert cells(comparison, "gradients") == ("reference", "reference")
    told = "rows on compiled blocks: compared with those of compile-keep, since compiling changes"
    assert any(line.startswith(told) for line in list_meanings(comparison))


def test_the_bound_of_a_plan_is_a_column() -> None:
    planned = replace(BALANCED, strategy="ebbtide", bound_ns=1_500_000)
    comparison = Comparison(facts=FACTS, rows=(KEEP, planned))
    assert cells(comparison, "bound ms") == ("-", "1.5")
    assert any(line.startswith("bound: no plan within") for line in list_meanings(comparison))
    assert "bound ms" not in [column.title for column in list_columns(COMPARISON)]


def test_a_chunked_loss_is_told_from_the_model_s_own() -> None:
    assert "the loss holds several" in list_meanings(COMPARISON)[1]
    assert "--chunked-loss computes it in chunks" in list_meanings(COMPARISON)[1]
    chunked = Comparison(facts=replace(FACTS, is_loss_chunked=True), rows=(KEEP,))
    assert "which the chunked loss never holds at once." in list_meanings(chunked)[1]
    assert "| loss | the model's own |" in write_page(COMPARISON)


def test_times_that_cannot_be_relied_on_are_marked() -> None:
    assert not any(line.startswith("times:") for line in list_meanings(COMPARISON))
    busy = Comparison(facts=replace(FACTS, disturbance="not to be relied on"), rows=(KEEP,))
    assert list_meanings(busy)[-1] == "times: not to be relied on."


def test_a_pipe_gets_every_cell_whole() -> None:
    file = io.StringIO()
    print_table(COMPARISON, Console(file=file, width=40))
    printed = file.getvalue()
    assert "…" not in printed
    for text in ("perplexity before", "ebbtide:balanced", "not installed"):
        assert text in printed
    assert "- trl: the package trl is not installed\n" in printed
    assert "Weights, gradients and optimizer state alone are 0.50 GiB" in printed


def test_the_page_explains_itself() -> None:
    page = write_page(COMPARISON)
    assert "| ebbtide:balanced | ok | 2.0 |" in page
    assert "| optimizer | AdamW |" in page
    assert "keep 1.0 to 3.0" in page
    assert "    ebbtide compare\n" in page


def test_a_pipe_in_a_note_does_not_break_the_page() -> None:
    facts = replace(FACTS, text="one | two")
    assert "| text | one \\| two |" in write_page(Comparison(facts=facts, rows=(KEEP,)))


def test_the_files_are_written(tmp_path: Path) -> None:
    paths = write_files(COMPARISON, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["results.md", "results.json", "memory-vs-step.png"]
    assert json.loads(paths[1].read_text())["rows"][1]["grad_equal"] is True
    assert paths[2].read_bytes().startswith(PNG_SIGNATURE)


def test_nothing_is_drawn_when_nothing_finished(tmp_path: Path) -> None:
    failed = Row(strategy="keep", status=Status.OOM, note="out of memory")
    paths = write_files(Comparison(facts=FACTS, rows=(failed, TRL)), tmp_path)
    assert [path.name for path in paths] == ["results.md", "results.json"]
