"""Collectives of a step, worked out by hand."""

from dataclasses import replace

import pytest

from ebbtide.catalog.models import MODELS
from ebbtide.catalog.networks import INNER_SHARE, NETWORKS, OUTER_SHARE, Axis, Dimension
from ebbtide.estimate.collectives import Between, between_layers, dimensions_of
from ebbtide.estimate.resident import resident_of, stages_of
from ebbtide.estimate.setup import Degrees, Optimizer, Setup
from ebbtide.estimate.strategies import Strategy
from tests.estimate.asking import ask

NETWORK = NETWORKS["h200-pcie5"]
INNER = 450e9 * INNER_SHARE
OUTER = 50e9 * OUTER_SHARE
LLAMA = MODELS["llama-3-8b"]


def setup_of(degrees: Degrees, model: str = "llama-3-8b", lora: int = 0) -> Setup:
    return Setup(
        shape=MODELS[model],
        context=4096,
        batch=1,
        degrees=degrees,
        lora_rank=lora,
        accumulate=4,
    )


def between(setup: Setup) -> Between:
    stage = stages_of(setup)[0]
    return between_layers(setup, stage, resident_of(setup, stage), NETWORK)


def test_ranks_are_laid_out_with_tensor_parallel_ones_next_to_each_other() -> None:
    at = dimensions_of(Degrees(tp=4, cp=2, ep=1, fsdp=8, dp=3, pp=2))
    assert at[Axis.TENSOR] == Dimension(stride=1, size=4)
    assert at[Axis.CONTEXT] == Dimension(stride=4, size=2)
    assert at[Axis.SHARDS] == Dimension(stride=8, size=8)
    assert at[Axis.COPIES] == Dimension(stride=64, size=3)
    assert at[Axis.STAGES] == Dimension(stride=192, size=2)


def test_one_device_has_no_collectives() -> None:
    assert between(setup_of(Degrees())) == Between(shards_ns=0, copies_ns=0, stages_ns=0)


def test_fsdp_gathers_twice_and_sums_once_a_micro_batch() -> None:
    found = between(setup_of(Degrees(fsdp=8)))
    # ZeRO-3: 3 x 7/8 of the parameters, in bf16.
    seconds = 3 * 2 * LLAMA.num_parameters * 7 / 8 / INNER
    assert found.shards_ns == pytest.approx(seconds * 1e9)
    assert (found.copies_ns, found.stages_ns) == (0, 0)


def test_lora_sums_adapters_alone() -> None:
    found = between(setup_of(Degrees(fsdp=8), lora=16))
    # 41,943,040 of them; what is frozen is gathered without them.
    seconds = 2 * (2 * LLAMA.num_parameters + 41_943_040) * 7 / 8 / INNER
    assert found.shards_ns == pytest.approx(seconds * 1e9, rel=1e-6)


def test_copies_sum_gradients_once_a_step() -> None:
    found = between(setup_of(Degrees(dp=8)))
    seconds = 2 * 2 * LLAMA.num_parameters * 7 / 8 / INNER
    assert found.copies_ns == pytest.approx(seconds * 1e9)
    # Each in a domain of its own: through one card, with a share of the gradients each.
    sharded = between(setup_of(Degrees(fsdp=8, dp=2)))
    seconds = 2 * 2 * LLAMA.num_parameters / 8 / 2 / OUTER
    assert sharded.copies_ns == pytest.approx(seconds * 1e9, rel=1e-6)


def test_experts_are_gathered_among_fewer_ranks_than_all_else() -> None:
    shape = MODELS["mixtral-8x7b"]
    experts = 32 * shape.layer_parameters(0).experts
    found = between(setup_of(Degrees(ep=8, fsdp=2), "mixtral-8x7b"))
    dense_s = 3 * 2 * (shape.num_parameters - experts) * 15 / 16 / INNER
    # The 2 ranks with the same experts are in two domains.
    experts_s = 3 * 2 * experts / 8 / 2 / OUTER
    assert found.shards_ns == pytest.approx((dense_s + experts_s) * 1e9)
    # Without FSDP there is a copy of all else on each, whose gradients are summed up.
    copied = between(setup_of(Degrees(ep=8), "mixtral-8x7b"))
    seconds = 2 * 2 * (shape.num_parameters - experts) * 7 / 8 / INNER
    assert copied.copies_ns == pytest.approx(seconds * 1e9)


def test_stages_pass_an_input_and_a_gradient_on() -> None:
    stream = 4096 * 4096 * 2
    assert between(setup_of(Degrees(pp=4))).stages_ns == pytest.approx(
        2 * stream / INNER * 1e9, abs=1
    )
    far = between(setup_of(Degrees(tp=8, pp=4)))
    assert far.stages_ns == pytest.approx(2 * stream / OUTER * 1e9, abs=1)


def test_what_runs_beside_compute_counts_where_it_takes_longer() -> None:
    found = Between(shards_ns=70, copies_ns=250, stages_ns=5)
    # Compute of 100 hides the gathers of 70, and 100 of the 250 of the last sum.
    assert found.step_ns(100, 4, 1) == 4 * 105 + 150
    assert found.step_ns(60, 4, 1) == 4 * 75 + 190
    assert found.step_ns(100, 4, 3) == 6 * 105 + 150


def test_checkpointing_pays_for_sums_again_and_a_plan_of_ebbtide_does_not() -> None:
    setup = replace(setup_of(Degrees(tp=8)), optimizer=Optimizer.NONE, accumulate=1)
    # A budget that makes it run again what it may.
    estimator = ask(setup, budget="12GiB")
    rows = {s: estimator.row(s) for s in (Strategy.KEEP, Strategy.REMAT, Strategy.EBBTIDE)}
    # 4 sums a layer, of 2 x 7/8 of the stream.
    sum_ns = 2 * 7 / 8 * 4096 * 4096 * 2 / INNER * 1e9
    keep = rows[Strategy.KEEP].collectives[Axis.TENSOR]
    assert keep == pytest.approx(32 * 4 * sum_ns, rel=1e-4)
    # The sum after attention once more; what comes after it ends the layer.
    assert rows[Strategy.REMAT].collectives[Axis.TENSOR] == pytest.approx(32 * 5 * sum_ns, rel=1e-4)
    assert rows[Strategy.EBBTIDE].collectives[Axis.TENSOR] == keep
    assert list(rows[Strategy.KEEP].collectives) == [Axis.TENSOR]


def test_the_step_is_longer_by_what_is_waited_for() -> None:
    setup = replace(setup_of(Degrees(tp=8)), accumulate=1)
    estimator = ask(setup)
    rates = replace(estimator.rates, sent_bytes_per_ns={})
    free = ask(setup, rates=rates, is_networked=False).row(Strategy.KEEP)
    row = estimator.row(Strategy.KEEP)
    assert free.collectives == {}
    assert row.step_ns - free.step_ns == pytest.approx(row.collectives[Axis.TENSOR], rel=1e-3)
    assert row.peak_bytes == free.peak_bytes
