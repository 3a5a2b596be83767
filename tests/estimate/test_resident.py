"""Weights, gradients, optimizer state and buffers of one device."""

import pytest

from ebbtide.catalog.models import MODELS
from ebbtide.estimate.resident import Resident, optimizer_bytes, resident_of, stages_of
from ebbtide.estimate.setup import Degrees, Dtype, Optimizer, Setup


def resident(name: str, *, stage: int = 0, **options: object) -> Resident:
    degrees = {k: options.pop(k) for k in list(options) if k in Degrees.__dataclass_fields__}
    setup = Setup(
        shape=MODELS[name],
        context=4096,
        batch=1,
        degrees=Degrees(**degrees),  # pyright: ignore[reportArgumentType]
        **options,  # pyright: ignore[reportArgumentType]
    )
    return resident_of(setup, stages_of(setup)[stage])


def test_adamw_is_16_bytes_a_parameter() -> None:
    # Rajbhandari et al., ZeRO, 1910.02054: 2 + 2 + 12 bytes in mixed precision.
    held = resident("llama-3-8b")
    assert held.total == 16 * 8_030_261_248
    assert (held.weights, held.gradients) == (2 * 8_030_261_248, 2 * 8_030_261_248)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "num_bytes"),
    [
        (Optimizer.NONE, Dtype.BF16, 0),
        (Optimizer.SGD, Dtype.BF16, 0),
        (Optimizer.ADAMW, Dtype.BF16, 12),
        (Optimizer.ADAMW, Dtype.FP8, 12),
        (Optimizer.ADAMW, Dtype.FP32, 8),
        (Optimizer.ADAMW_BF16, Dtype.BF16, 4),
        (Optimizer.ADAMW_8BIT, Dtype.BF16, 2),
    ],
)
def test_an_optimizer_keeps_so_many_bytes_a_parameter(
    optimizer: Optimizer, dtype: Dtype, num_bytes: int
) -> None:
    assert optimizer_bytes(optimizer, dtype) == num_bytes


def test_copies_of_the_model_share_nothing_out() -> None:
    assert resident("llama-3-8b", dp=8) == resident("llama-3-8b")


def test_fsdp_shares_everything_out_and_gathers_two_layers() -> None:
    held = resident("llama-3-8b", fsdp=8)
    shape = MODELS["llama-3-8b"]
    layer = shape.layer_parameters(0).total
    assert 8 * held.num_parameters == pytest.approx(shape.num_parameters, abs=8 * 33)
    assert held.optimizer == 12 * held.num_parameters
    # Two layers' weights and one layer's gradients.
    assert held.communication == 3 * 2 * layer


def test_tensor_parallel_ranks_copy_norms_alone() -> None:
    shape = MODELS["llama-3-8b"]
    norms = 32 * 2 * 4096 + 4096
    held = resident("llama-3-8b", tp=4)
    assert held.num_parameters == (shape.num_parameters - norms) // 4 + norms
    assert held.communication == 4096 * 4096 * 2


def test_expert_parallel_ranks_share_out_experts_alone() -> None:
    shape = MODELS["deepseek-v3-671b"]
    experts = sum(shape.layer_parameters(i).experts for i in range(61))
    held = resident("deepseek-v3-671b", ep=8)
    assert held.num_parameters == shape.num_parameters - experts + experts // 8
    with_fsdp = resident("deepseek-v3-671b", ep=8, fsdp=16)
    assert 128 * with_fsdp.num_parameters == pytest.approx(shape.num_parameters, abs=128 * 130)


def test_a_pipeline_has_the_embedding_first_and_the_head_last() -> None:
    shape = MODELS["llama-3-8b"]
    layers = 8 * shape.layer_parameters(0).total
    first, last = (resident("llama-3-8b", pp=4, stage=i) for i in (0, 1))
    assert first.num_parameters == layers + shape.embedding_parameters
    assert last.num_parameters == layers + shape.head_parameters + 4096
    # A tied head is there twice.
    tied = MODELS["gpt2"]
    last = resident("gpt2", pp=2, stage=1)
    assert last.num_parameters == 6 * tied.layer_parameters(0).total + 50_257 * 768 + 2 * 768


def test_lora_trains_adapters_alone() -> None:
    held = resident("llama-3-8b", lora_rank=16)
    h, kv, f = 4096, 1024, 14_336
    adapters = 32 * 16 * (4 * h + 2 * (h + kv) + 3 * (h + f))
    # 41,943,040 is what peft reports for r=16 on all linear layers of Llama 3 8B.
    assert held.num_trained == adapters == 41_943_040
    assert held.weights == 2 * (8_030_261_248 + adapters)
    assert (held.gradients, held.optimizer) == (2 * adapters, 12 * adapters)


def test_context_parallel_ranks_pass_keys_and_values_on() -> None:
    held = resident("llama-3-8b", cp=4)
    assert held.communication == 2 * (1024 * 2 * 8 * 128 * 2)
    assert held.weights == resident("llama-3-8b").weights
