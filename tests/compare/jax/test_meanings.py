"""The table of a run in JAX: its columns, its cells, and what stands below them."""

from dataclasses import replace

from ebbtide.compare.jax.meanings import list_flag_notes, list_jax_meanings
from ebbtide.compare.results import Comparison, JaxFigures, Row, Status
from ebbtide.compare.table import list_columns, list_meanings, list_notes, write_page
from tests.compare.test_results import FACTS, KEEP

FIGURES = JaxFigures(
    micro_batch=2, global_batch=8, model_flops=4 * 10**9, compile_ns=2 * 10**9, xla_flags="--a=b"
)
PLAIN = replace(KEEP, strategy="no-remat", jax=FIGURES)
OFFLOADED = replace(
    PLAIN,
    strategy="offload",
    grad_equal=False,
    grad_largest_difference=0.5,
    jax=replace(FIGURES, xla_flags="--c=d", grad_relative_difference=0.01),
)
FULL = Row(strategy="minimal", status=Status.OOM, jax=replace(FIGURES, compile_ns=None))
COMPARISON = Comparison(
    facts=replace(FACTS, framework="jax", gradient_reference="no-remat"),
    rows=(PLAIN, OFFLOADED, FULL),
)


def cells(title: str) -> tuple[str, ...]:
    return next(column.cells for column in list_columns(COMPARISON) if column.title == title)


def test_rows_in_jax_have_columns_of_their_own() -> None:
    assert cells("micro-batch") == ("2", "2", "2")
    assert cells("global batch") == ("8", "8", "8")
    assert cells("TFLOP/s") == ("2", "2", "-")  # 4 x 10^9 in 2 ms
    assert cells("compile s") == ("2.0", "2.0", "-")
    assert cells("status") == ("ok", "ok", "OOM")
    assert cells("gradients") == (*("reference", "differ: 5.0e-01, 1.0e-02 of the largest", "-"),)


def test_each_flag_set_is_told_once() -> None:
    assert list_flag_notes(COMPARISON) == ("no-remat, minimal: --a=b", "offload: --c=d")
    assert set(list_flag_notes(COMPARISON)) <= set(list_notes(COMPARISON))


def test_meanings_are_those_of_jax() -> None:
    meanings = list_meanings(COMPARISON)
    assert meanings == list_jax_meanings(COMPARISON)
    assert any(line.startswith("gradients: those of the first step") for line in meanings)
    assert not any("torch" in line for line in meanings)
    assert "| offload | ok | 2 | 8 |" in write_page(COMPARISON)


def test_a_run_without_a_reference_says_so() -> None:
    without = replace(COMPARISON, facts=replace(COMPARISON.facts, gradient_reference=None))
    told = "gradients: not compared, since no run of no-remat or full-remat finished."
    assert told in list_jax_meanings(without)
