import json
from dataclasses import replace

from ebbtide.compare.results import (
    Comparison,
    Facts,
    JaxFigures,
    Row,
    Status,
    describe_comparison,
    describe_row,
    read_row,
    take_median,
    write_row,
)

GIB = 1 << 30

FACTS = Facts(
    model="a model",
    parameters=1000,
    context=64,
    batch=1,
    device="cpu (one)",
    dtype="float32",
    versions={"torch": "2"},
    memory_meaning="what the process holds",
    command="ebbtide compare",
    date="2026-01-01",
    steps=3,
    warm_up_steps=2,
    passes=0,
    optimizer="AdamW",
    seed=0,
    text="a text",
    tokenizer="bytes",
    held_out_tokens=64,
    state_bytes=GIB // 2,
    logits_bytes=GIB // 4,
    loss="the model's own",
    is_loss_chunked=False,
    is_compiled=False,
    gradient_reference="keep",
    compiled_gradient_reference=None,
    disturbance="",
    disk="",
)
KEEP = Row(
    strategy="keep",
    status=Status.OK,
    step_ns=(3_000_000, 1_000_000, 2_000_000),
    forward_ns=(1_000_000,) * 3,
    peak_bytes=2 * GIB,
    moved_out_bytes=0,
    moved_in_bytes=0,
    host_bytes=0,
    disk_bytes=0,
    loss=2.5,
    perplexity_before=20.0,
    perplexity_after=10.0,
)
BALANCED = replace(
    KEEP,
    strategy="ebbtide:balanced",
    peak_bytes=GIB,
    moved_out_bytes=GIB // 2,
    grad_equal=True,
    grad_largest_difference=0.0,
)
TRL = Row(strategy="trl", status=Status.NOT_INSTALLED, note="the package trl is not installed")
COMPARISON = Comparison(facts=FACTS, rows=(KEEP, BALANCED, TRL))

ROW_KEYS = [
    *("strategy", "status", "step_ms", "forward_ms", "peak_gib", "reserved_gib"),
    *("moved_out_gib", "moved_in_gib", "host_gib", "disk_gib", "loss", "perplexity_before"),
    *("perplexity_after", "grad_equal", "grad_largest_difference", "bound_ms", "note"),
]


def test_a_row_survives_json() -> None:
    for row in COMPARISON.rows:
        assert read_row(json.loads(json.dumps(write_row(row)))) == row


def test_a_published_row_has_these_keys_and_units() -> None:
    published = describe_row(BALANCED)
    assert list(published) == ROW_KEYS
    assert published["step_ms"] == 2.0
    assert published["peak_gib"] == 1.0
    assert published["moved_out_gib"] == 0.5
    assert published["reserved_gib"] is None


def test_a_row_that_did_not_run_has_nothing_instead_of_zero() -> None:
    published = describe_row(TRL)
    assert published["status"] == "not installed"
    assert [key for key in ROW_KEYS if published[key] is not None] == ["strategy", "status", "note"]


def test_a_row_in_jax_has_more_keys() -> None:
    figures = JaxFigures(
        micro_batch=2,
        global_batch=8,
        model_flops=3 * 10**9,
        compile_ns=5 * 10**8,
        xla_flags="--a=b",
        grad_relative_difference=0.25,
    )
    row = replace(KEEP, jax=figures)
    assert read_row(json.loads(json.dumps(write_row(row)))) == row
    published = describe_row(row)
    assert [key for key in published if key not in ROW_KEYS] == [
        *("micro_batch", "global_batch", "tflops_per_device", "compile_s", "xla_flags"),
        "grad_relative_difference",
    ]
    assert published["tflops_per_device"] == 1.5  # 3 x 10^9 in 2 ms
    assert (published["compile_s"], published["global_batch"]) == (0.5, 8)


def test_the_published_object_has_facts_rows_and_the_spread_of_times() -> None:
    published = describe_comparison(COMPARISON)
    assert published["state_gib"] == 0.5
    assert published["logits_gib"] == 0.25
    assert published["step_ms_ranges"] == {"keep": [1.0, 3.0], "ebbtide:balanced": [1.0, 3.0]}
    assert [row["strategy"] for row in published["rows"]] == ["keep", "ebbtide:balanced", "trl"]
    assert {"model", "parameters", "context", "batch", "device", "dtype", "versions"} <= set(
        published
    )


def test_the_median_of_an_even_count_is_the_middle() -> None:
    assert take_median((1, 2, 4, 100)) == 3
    assert take_median(()) is None
