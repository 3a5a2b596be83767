"""The dimensions of published models: their parameters, and ebbtide's plans on small ones."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ebbtide.compare.routing import describe_routing
from ebbtide.compare.strategies import make_strategy
from ebbtide.compare.workloads import count_parameters, find_model, read_config
from ebbtide.torch import attach

MOE_DIMENSIONS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def make_small(name: str, *, experts: str | None = None) -> PreTrainedModel:
    """The shape's own class and configuration, with narrow layers."""
    config = read_config(find_model(name, 3))
    config.update(
        {
            **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "head_dim": 16},
            **{"num_attention_heads": 4, "num_key_value_heads": 2},
            **(MOE_DIMENSIONS if name == "moe-shape" else {}),
        }
    )
    torch.manual_seed(0)
    kwargs = {} if experts is None else {"experts_implementation": experts}
    model = AutoModelForCausalLM.from_config(config, **kwargs)
    model.config.use_cache = False
    return model.train()


def take_gradients(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_qwen3_14b_shape_has_the_parameters_of_its_dimensions() -> None:
    config = read_config(find_model("qwen3-14b-shape", 2))
    attention = 2 * 5120 * 5120 + 2 * 5120 * 1024 + 2 * 128
    block = attention + 3 * 5120 * 17_408 + 2 * 5120
    assert count_parameters(config) == 2 * block + 2 * 151_936 * 5120 + 5120


def test_moe_shape_has_the_parameters_of_its_dimensions() -> None:
    config = read_config(find_model("moe-shape", 2))
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128
    experts = 128 * 3 * 2048 * 768 + 128 * 2048
    block = attention + experts + 2 * 2048
    assert count_parameters(config) == 2 * block + 2 * 32_000 * 2048 + 2048


@pytest.mark.parametrize(
    ("name", "experts"),
    [("qwen3-14b-shape", None), ("moe-shape", "grouped_mm"), ("moe-shape", "eager")],
)
@pytest.mark.parametrize("plan", ["recompute", "balanced"])
def test_plans_keep_the_bits_of_new_shapes(
    name: str, experts: str | None, plan: str, tmp_path: Path
) -> None:
    model = make_small(name, experts=experts)
    generator = torch.Generator().manual_seed(1)
    # Other tokens each step, so that experts get other numbers of them.
    batches = [torch.randint(256, (1, 96), generator=generator) for _ in range(4)]
    expected = [take_gradients(model, ids) for ids in batches]
    disk = None if plan == "recompute" else f"{tmp_path}:1GiB"
    with attach(model, plan=plan, disk=disk, min_bytes=1024) as tide:
        found = [take_gradients(model, ids) for ids in batches]
        moved_bytes = tide.statistics().moved_out_bytes
    assert (moved_bytes > 0) == (plan == "balanced")
    for step, gradients in enumerate(expected):
        assert found[step].keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            assert torch.equal(found[step][parameter], gradient), (step, parameter)


@pytest.mark.parametrize("strategy", ["checkpoint", "torch-sac:op", "torch-sac:2"])
def test_peers_keep_the_bits_where_routers_write_into_their_results(strategy: str) -> None:
    model = make_small("moe-shape")
    ids = torch.arange(96).view(1, 96)
    expected = take_gradients(model, ids)
    with make_strategy(strategy, host=None, disk=None).apply(model, torch.device("cpu")):
        found = take_gradients(model, ids)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_routing_is_told_as_shares_of_the_mean_load() -> None:
    model = make_small("moe-shape")
    ids = torch.arange(64).view(1, 64)
    chosen: list[torch.Tensor] = []
    handles = [
        model.get_submodule(f"model.layers.{layer}.mlp.gate").register_forward_hook(
            lambda router, arguments, output: chosen.append(output[2])
        )
        for layer in range(3)
    ]
    told = describe_routing(model, ids)
    for handle in handles:
        handle.remove()
    # 64 tokens choose two of eight experts: 16 choices each on average.
    counts = torch.stack([torch.bincount(c.flatten(), minlength=8) for c in chosen])
    busiest, idlest = counts.max().item() / 16, counts.min().item() / 16
    assert busiest > 1.2 > 0.8 > idlest
    assert told.startswith(
        f"routing of random weights, no bias: the busiest expert of a block gets {busiest:.1f} "
        f"times the mean load, the idlest {idlest:.2f} times"
    )


def test_a_model_without_routers_has_no_routing() -> None:
    assert describe_routing(make_small("qwen3-14b-shape"), torch.arange(8).view(1, 8)) == ""
