"""What is planned is what jax keeps; what cannot be is an error."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ebbtide.errors import PlanError, RuntimeStateError
from ebbtide.jax import NamedPolicy, check_policy, residuals_of, with_names
from ebbtide.jax.internals import look_up, saved_residuals
from ebbtide.jax.policy import refuse_unnamed
from tests.jax import blocks
from tests.jax.blocks import Array

POLICY = NamedPolicy(saved=blocks.LLAMA_KEPT, offloaded=blocks.LLAMA_MOVED)


def llama() -> tuple[Any, Array]:
    params = blocks.shapes_of_one(blocks.make_params(jnp.bfloat16))
    return params, jax.ShapeDtypeStruct((blocks.B, blocks.T, blocks.D), jnp.bfloat16)


def mlp() -> tuple[Any, Array]:
    params = blocks.shapes_of_one(blocks.make_params(jnp.float32, blocks.MLP))
    return params, jax.ShapeDtypeStruct((blocks.B, blocks.T, blocks.D), jnp.float32)


def test_exactly_the_planned_names_are_kept_where_they_should_be() -> None:
    residuals = check_policy(POLICY, blocks.llama_block, *llama())
    assert {r.name for r in residuals if r.is_on_host} == set(blocks.LLAMA_MOVED)
    assert {r.name for r in residuals if r.name and not r.is_on_host} == set(blocks.LLAMA_KEPT)
    unnamed = [r for r in residuals if not r.name]
    assert len(unnamed) == len(blocks.SHAPES)
    assert all(r.is_argument for r in unnamed)
    assert (blocks.B, blocks.T, blocks.D) not in {r.shape for r in unnamed}


def test_jax_says_the_same_of_them() -> None:
    params, x = llama()
    named = with_names(blocks.llama_block, POLICY.names)
    rematted = jax.checkpoint(named, policy=POLICY.to_jax(), prevent_cse=False)
    ours = sorted((r.shape, r.dtype, r.is_on_host) for r in residuals_of(rematted, params, x))
    theirs = sorted((r.shape, r.dtype, r.is_on_host) for r in saved_residuals(rematted, params, x))
    assert ours == theirs


def test_a_jax_that_lacks_what_is_relied_on_is_refused_by_name() -> None:
    with pytest.raises(RuntimeStateError, match=r"has no jax\._src\.ad_checkpoint\.gone, which"):
        look_up("jax._src.ad_checkpoint", "gone")


def test_both_residuals_of_attention_are_needed() -> None:
    """With its output alone the scores are computed again; of a fused kernel it is all of it."""
    params, x = llama()

    def products(offloaded: tuple[str, ...]) -> int:
        policy = NamedPolicy(saved=(), offloaded=offloaded)
        named = with_names(blocks.llama_block, offloaded)
        rematted = jax.checkpoint(named, policy=policy.to_jax(), prevent_cse=False)

        def loss(params: Any, x: Array) -> Array:
            return rematted(params, x).astype(jnp.float32).sum()

        return str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, x)).count("dot_general[")

    whole = ("input", "attention.out", "attention.residual.0")
    assert products(whole[:2]) - products(whole) == 1


def test_the_name_of_a_value_that_no_backward_needs_is_refused() -> None:
    policy = NamedPolicy(saved=("mlp.dot_general.2",), offloaded=())
    with pytest.raises(PlanError, match=r"'mlp.dot_general.2' is a value .* no residual carries"):
        check_policy(policy, blocks.llama_block, *llama())


def test_a_name_that_no_value_has_is_refused() -> None:
    policy = NamedPolicy(saved=(), offloaded=("atention.out",))
    with pytest.raises(PlanError, match=r"no value .* 'atention.out'; the nearest are attention"):
        check_policy(policy, blocks.llama_block, *llama())


def test_a_name_in_two_places_is_refused() -> None:
    with pytest.raises(PlanError, match="to be saved and to be offloaded"):
        NamedPolicy(saved=("a", "b"), offloaded=("b",))


@pytest.mark.parametrize("kind", ["pinned-host", "unpinned_host", "host"])
def test_a_mistyped_memory_kind_is_refused(kind: str) -> None:
    with pytest.raises(PlanError, match=f"unknown memory kind '{kind}'.*pinned_host"):
        POLICY.to_jax(kind)


def test_policies_are_data_and_not_functions() -> None:
    policy = NamedPolicy(saved=("mlp.dot_general.0",), offloaded=("input",)).to_jax()
    ours = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["mlp.dot_general.0"],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    assert type(policy) is type(ours)


def test_the_remat_that_ignores_names_is_refused() -> None:
    jax.config.update("jax_remat3", True)
    try:
        with pytest.raises(RuntimeStateError, match=r"ignored: JAX_REMAT3 \(jax_remat3\) is on"):
            POLICY.to_jax()
    finally:
        jax.config.update("jax_remat3", False)
    assert POLICY.to_jax() is not None


def test_a_large_residual_that_nothing_names_is_refused() -> None:
    wide = jax.ShapeDtypeStruct((256, 256), jnp.float32)

    def block(params: Array, x: Array) -> Array:
        return jnp.sin(x * params) * jnp.sin(jnp.ones((256, 256)) * params.sum())

    residuals = residuals_of(block, wide, wide)
    assert {r.name for r in residuals if not r.is_argument} == {""}
    with pytest.raises(PlanError, match=r"no name stands for: float32\[256, 256\] of 256.0 KiB"):
        refuse_unnamed(residuals)
    refuse_unnamed(check_policy(NamedPolicy(saved=("mul.0",), offloaded=()), block, wide, wide))


def loss_of(stack: blocks.Block) -> blocks.Block:
    return lambda params, x: stack(params, x).astype(jnp.float32).sum()


def test_the_cuda_lowering_places_each_offloaded_residual_out_and_back() -> None:
    params = jax.eval_shape(lambda: blocks.make_params(jnp.bfloat16))
    x = llama()[1]
    for is_scanned in (True, False):
        named = with_names(blocks.llama_block, POLICY.names)
        rematted = jax.checkpoint(named, policy=POLICY.to_jax(), prevent_cse=not is_scanned)
        stack = blocks.scan_stack if is_scanned else blocks.unrolled_stack

        traced = jax.jit(jax.grad(loss_of(stack(rematted)))).trace(params, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        # A scan's body is there once; the loop runs it for each layer.
        num_bodies = 1 if is_scanned else blocks.LAYERS
        assert text.count("@annotate_device_placement") == 2 * num_bodies * len(POLICY.offloaded)
        assert text.count("pinned_host") == num_bodies * len(POLICY.offloaded)
