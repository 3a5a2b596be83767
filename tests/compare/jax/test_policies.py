"""Blocks under each row's policy: what they keep, where, and the gradients of all of them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ebbtide.compare.jax.child import CPU_MACHINE, EXACT
from ebbtide.compare.jax.layers import AttentionKind
from ebbtide.compare.jax.model import LanguageModel, shapes_of_one
from ebbtide.compare.jax.policies import ChosenBlocks, choose_blocks
from ebbtide.compare.jax.shapes import DEEPSEEK_TINY, LLAMA_TINY, Shape
from ebbtide.jax import StepMemory, residuals_of

# B batch, T tokens, D model width, N query heads, K key heads, H head width
B, T = 2, 8
SMALL = replace(LLAMA_TINY, num_layers=3)
FLOAT_BYTES = 4


def make_model(shape: Shape) -> LanguageModel:
    return LanguageModel(shape, attention=AttentionKind.REFERENCE, dtype=jnp.float32)


def describe_input(shape: Shape) -> Any:
    return jax.ShapeDtypeStruct((B, T, shape.d_model), jnp.float32)


def choose(strategy: str, model: LanguageModel) -> ChosenBlocks:
    def step(*args: Any) -> Any:
        raise AssertionError("only a plan for a budget runs the step")

    return choose_blocks(
        strategy,
        model,
        model.describe_params(),
        describe_input(model.shape),
        step=step,
        args=(),
        donate=(),
        budget=None,
        machine=None,
        host=None,
    )


def kept_names(model: LanguageModel, chosen: ChosenBlocks, stack: str) -> dict[str, bool]:
    """Whether each named residual waits on the host."""
    one = shapes_of_one(model.describe_params()[stack])
    residuals = residuals_of(chosen.blocks[stack], one, describe_input(model.shape))
    return {r.name: r.is_on_host for r in residuals if r.name}


@pytest.mark.parametrize(
    ("strategy", "on_device", "on_host"),
    [
        ("full-remat", set(), set()),
        (
            "minimal",
            {"query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1"},
            set(),
        ),
        ("qkv_proj_offloaded", set(), {"query_proj", "key_proj", "value_proj"}),
        (
            "minimal_offloaded",
            set(),
            {"query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1"},
        ),
        ("offload@lhs", set(), {"query_proj", "key_proj", "value_proj"}),
        ("offload-attention", set(), {"decoder_layer_input", "context.out", "context.residual.0"}),
    ],
)
def test_a_llamas_backward_keeps_just_the_policys_names(
    strategy: str, on_device: set[str], on_host: set[str]
) -> None:
    model = make_model(SMALL)
    kept = kept_names(model, choose(strategy, model), "layers")
    assert {name for name, is_on_host in kept.items() if is_on_host} == on_host
    assert {name for name, is_on_host in kept.items() if not is_on_host} == on_device


def test_the_seeds_choice_takes_the_experts_products_too() -> None:
    model = make_model(DEEPSEEK_TINY)
    chosen = choose("offload", model)
    of_experts = {"moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"}
    attention = {"query_proj", "key_proj", "value_proj"}
    assert kept_names(model, chosen, "moe") == dict.fromkeys(attention | of_experts, True)
    assert kept_names(model, chosen, "dense") == dict.fromkeys(attention, True)


def test_host_bytes_are_those_of_all_layers() -> None:
    model = make_model(SMALL)
    widths = SMALL.num_heads * SMALL.head_dim + 2 * SMALL.num_kv_heads * SMALL.head_dim
    assert choose("offload", model).host_bytes == 3 * B * T * widths * FLOAT_BYTES
    assert choose("no-remat", model).host_bytes == 0


def test_names_that_do_nothing_are_told() -> None:
    (note,) = choose("minimal", make_model(SMALL)).notes
    assert note == (
        "layers: saved query_proj, key_proj, value_proj, out_proj, mlpwi_0, mlpwi_1; "
        "backward does without mlpwo"
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full-remat", "minimal_offloaded", "offload-attention"])
def test_gradients_have_the_bits_of_the_plain_blocks(strategy: str) -> None:
    model = make_model(SMALL)
    params = model.draw_params(0)
    ids = jax.random.randint(jax.random.key(1), (B, T), 0, SMALL.vocab_size)

    def gradients(chosen: ChosenBlocks) -> Any:
        def find_loss(params: Any) -> Any:
            return model.find_loss(chosen.blocks, params, ids)

        return jax.jit(jax.grad(find_loss), compiler_options=dict(EXACT))(params)

    plain, other = gradients(choose("no-remat", model)), gradients(choose(strategy, model))
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(plain))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, plain, other))


@pytest.mark.slow
def test_dense_and_expert_layers_are_planned_for_one_budget_and_have_the_plain_gradients() -> None:
    shape = replace(DEEPSEEK_TINY, num_moe_layers=1)
    model = make_model(shape)
    params = model.draw_params(0)
    ids = jax.random.randint(jax.random.key(1), (B, T), 0, shape.vocab_size)

    def step(blocks: Any, params: Any, ids: Any) -> Any:
        return jax.grad(lambda params: model.find_loss(blocks, params, ids))(params)

    def measure(blocks: Any) -> tuple[int, Any]:
        program = jax.jit(lambda *given: step(blocks, *given), compiler_options=dict(EXACT))
        compiled: Any = program.lower(params, ids).compile()
        return StepMemory.of(compiled).device_bytes, compiled(params, ids)

    full_bytes, _ = measure(choose("full-remat", model).blocks)
    plain_bytes, plain = measure(model.plain_blocks)
    budget = (full_bytes + plain_bytes) // 2
    assert full_bytes < budget < plain_bytes
    chosen = choose_blocks(
        "ebbtide",
        model,
        params,
        describe_input(shape),
        step=step,
        args=(params, ids),
        donate=(),
        budget=str(budget),
        machine=CPU_MACHINE,
        host=None,
        compiler_options=EXACT,
    )
    assert {note.partition(":")[0] for note in chosen.notes} == {"dense", "moe"}
    assert chosen.plans[-1].planned.device_bytes <= budget
    assert not all(plan.tide.keeps_everything for plan in chosen.plans)
    for found, leaf in zip(
        jax.tree.leaves(chosen.plans[-1].compiled(params, ids)),
        jax.tree.leaves(plain),
        strict=True,
    ):
        assert jnp.abs(found - leaf).max() <= 1e-6 * jnp.abs(leaf).max() > 0
