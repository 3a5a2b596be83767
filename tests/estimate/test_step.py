"""Peaks and step times beside what was measured: benchmarks/results/llama-8b-shape.md, compiled.md.

8 layers of Llama 3 8B's shape, vocabulary 32,000, batch 1, bf16, forward and backward, one H200.
Peaks are GiB above weights and gradients.
"""

from dataclasses import replace

import pytest

from ebbtide.catalog.accelerators import ACCELERATORS
from ebbtide.catalog.form import Implementation
from ebbtide.catalog.models import MODELS
from ebbtide.estimate.resident import resident_of, stages_of
from ebbtide.estimate.setup import Degrees, Optimizer, Setup
from ebbtide.estimate.step import logits_bytes, make_workload, model_flops
from ebbtide.estimate.strategies import Strategy
from tests.estimate.asking import ask

EAGER, COMPILED = Implementation.EAGER, Implementation.COMPILED
KEEP, REMAT = Strategy.KEEP, Strategy.REMAT
GIB = 2**30

SHAPE = replace(MODELS["llama-3-8b"], num_layers=8, vocab=32_000)

# Implementation, tokens, strategy, ms, GiB.
MEASURED = [
    (EAGER, 8192, KEEP, 211.4, 15.50),
    (EAGER, 8192, REMAT, 269.0, 3.75),
    (EAGER, 32_768, KEEP, 1183.7, 61.83),
    (EAGER, 32_768, REMAT, 1488.5, 14.80),
    (EAGER, 65_536, KEEP, 3262.9, 123.60),
    (EAGER, 65_536, REMAT, 4085.2, 29.53),
    (COMPILED, 8192, KEEP, 180.9, 11.75),
    (COMPILED, 8192, REMAT, 224.9, 3.68),
    (COMPILED, 32_768, KEEP, 1062.5, 46.77),
    (COMPILED, 32_768, REMAT, 1315.8, 14.73),
]


@pytest.mark.parametrize(("implementation", "tokens", "strategy", "ms", "gib"), MEASURED)
def test_an_h200_takes_what_was_measured(
    implementation: Implementation, tokens: int, strategy: Strategy, ms: float, gib: float
) -> None:
    setup = Setup(
        shape=SHAPE,
        context=tokens,
        batch=1,
        optimizer=Optimizer.NONE,
        implementation=implementation,
    )
    estimator = ask(setup)
    row = estimator.row(strategy)
    above_gib = (row.peak_bytes - estimator.residents[0].total) / GIB
    # The issue asks for 3 % and 10 %; answer.MEASURED_ERROR says 2 % and 6 %.
    assert above_gib == pytest.approx(gib, rel=0.02)
    assert row.step_ns / 1e6 == pytest.approx(ms, rel=0.06)


def test_eager_peaks_are_those_measured_to_a_part_in_a_thousand() -> None:
    for implementation, tokens, strategy, _, gib in MEASURED:
        if implementation is EAGER:
            setup = Setup(
                shape=SHAPE,
                context=tokens,
                batch=1,
                optimizer=Optimizer.NONE,
                implementation=EAGER,
            )
            estimator = ask(setup)
            above = estimator.row(strategy).peak_bytes - estimator.residents[0].total
            assert above / GIB == pytest.approx(gib, rel=0.0012)


def test_model_flops_are_six_a_parameter_and_token_and_half_of_attention() -> None:
    setup = Setup(shape=MODELS["llama-3.1-405b"], context=8192, batch=2)
    shape = setup.shape
    # Norms and the embedding's lookup are not products.
    norms = shape.num_layers * 2 * shape.hidden + shape.norm_parameters
    products = shape.num_parameters - shape.embedding_parameters - norms
    # Causal: 2sh a token and layer forward.
    attention = 2 * 8192 * shape.hidden * shape.num_layers
    assert model_flops(setup) == 3 * setup.tokens * (2 * products + attention)


def test_queries_keys_and_values_of_405b_are_3_percent_of_model_flops() -> None:
    setup = Setup(shape=MODELS["llama-3.1-405b"], context=8192, batch=2)
    again = 2 * setup.tokens * 16_384 * 18_432 * 126
    assert again / (6 * setup.tokens * setup.shape.num_parameters) == pytest.approx(0.031, abs=5e-4)


def test_model_flops_of_a_device_fall_with_its_share() -> None:
    shape = MODELS["llama-3-70b"]
    whole = model_flops(Setup(shape=shape, context=8192, batch=1))
    for degrees in (Degrees(tp=8), Degrees(pp=8)):
        assert model_flops(Setup(shape=shape, context=8192, batch=1, degrees=degrees)) == whole // 8
    in_context = Setup(shape=shape, context=8192, batch=1, degrees=Degrees(cp=8))
    assert model_flops(in_context) == whole // 8


def test_logits_are_ten_bytes_fused_and_twelve_with_hugging_face() -> None:
    for implementation, num_bytes in ((Implementation.FUSED, 10), (EAGER, 12), (COMPILED, 12)):
        setup = Setup(
            shape=MODELS["llama-3-8b"], context=1024, batch=3, implementation=implementation
        )
        assert logits_bytes(setup) == num_bytes * 3 * 1024 * 128_256
        assert logits_bytes(replace(setup, loss_chunk=100)) == num_bytes * 100 * 128_256


def test_a_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    setup = Setup(
        shape=MODELS["llama-3-8b"],
        context=1024,
        batch=1,
        degrees=Degrees(pp=4),
        accumulate=8,
    )
    first, last = stages_of(setup)
    assert (first.num_layers, first.num_in_flight) == (8, 4)
    assert (last.first_layer, last.num_layers, last.num_in_flight) == (24, 8, 1)
    rates = ACCELERATORS["h200-pcie5"].rates("bf16")
    blocks = make_workload(setup, first, resident_of(setup, first), rates, is_rerun=False).blocks
    assert len(blocks) == 32
    assert blocks[8].name == "micro_batch_1.model.layers.0"
    assert stages_of(replace(setup, accumulate=2))[0].num_in_flight == 2
