from dataclasses import replace

import pytest

from ebbtide.catalog.models import MODELS
from ebbtide.estimate.setup import Degrees, Dtype, Setup

SETUP = Setup(shape=MODELS["llama-3-8b"], context=4096, batch=2)


def test_degrees_say_how_many_devices_batches_and_shares_there_are() -> None:
    degrees = Degrees(dp=2, fsdp=3, tp=4, cp=5, ep=6, pp=7)
    assert degrees.num_devices == 2 * 3 * 4 * 5 * 6 * 7
    # Ranks of tensor, context and pipeline parallelism work on one batch.
    assert degrees.num_batches == 2 * 3 * 6
    assert (degrees.num_shards, degrees.num_expert_shards) == (18, 18)
    # Without FSDP expert parallelism shares out experts alone.
    assert (Degrees(ep=6).num_shards, Degrees(ep=6).num_expert_shards) == (1, 6)


def test_context_parallel_ranks_have_a_part_of_the_tokens() -> None:
    assert SETUP.tokens == 8192
    split = replace(SETUP, degrees=Degrees(cp=4))
    assert split.tokens == 2048
    form = split.form(is_rerun=True)
    assert (form.tokens, form.context, form.context_parallel, form.is_rerun) == (
        2048, 4096, 4, True,
    )  # fmt: skip


def test_fp8_is_of_products_alone() -> None:
    assert [d.width_bytes for d in (Dtype.BF16, Dtype.FP8, Dtype.FP32)] == [2, 2, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": 2_000_000}, "--accumulate makes 2000000 micro-batches"),
        ({"loss_chunk": 2**28}, "--loss-chunk gives 268435456 tokens"),
        ({"context": 2**28}, "--context 268435456 by --batch 2 is 536870912 tokens a device"),
        (
            {"shape": replace(SETUP.shape, num_layers=1001)},
            "llama-3-8b has 1001 layers; more than 1000",
        ),
        (
            {"shape": replace(SETUP.shape, hidden=2**30, heads=32)},
            "parameters; more than 1000000000000000 are taken for a typing error",
        ),
    ],
)
def test_absurd_sizes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="taken for a typing error") as caught:
        replace(SETUP, **change)  # pyright: ignore[reportArgumentType]
    assert message in str(caught.value)


def test_what_does_not_divide_is_said_with_degrees_that_do() -> None:
    with pytest.raises(ValueError) as caught:
        replace(SETUP, degrees=Degrees(tp=3))
    assert str(caught.value) == (
        "--tp 3 does not divide the 32 heads of llama-3-8b; degrees that do: 1, 2, 4"
    )
