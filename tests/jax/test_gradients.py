"""Gradients under a policy have the bits of the plain block's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ebbtide.jax import NamedPolicy, check_policy, names_of, with_names
from tests.jax import blocks
from tests.jax.blocks import Array, Block

POLICY = NamedPolicy(saved=blocks.LLAMA_KEPT, offloaded=blocks.LLAMA_MOVED)


def rematted(block: Block, policy: NamedPolicy, *, is_scanned: bool = True) -> Block:
    return jax.checkpoint(
        with_names(block, policy.names), policy=policy.to_jax(), prevent_cse=not is_scanned
    )


@pytest.mark.parametrize(
    ("dtype", "is_scanned"),
    [
        pytest.param(jnp.float32, True, id="f32-scan"),
        pytest.param(jnp.bfloat16, True, id="bf16-scan", marks=pytest.mark.slow),
        pytest.param(jnp.float32, False, id="f32-unrolled", marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, False, id="bf16-unrolled", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_llama_stack_have_the_same_bits(dtype: Any, is_scanned: bool) -> None:
    params, x = blocks.make_params(dtype), blocks.make_input(dtype)
    stack = blocks.scan_stack if is_scanned else blocks.unrolled_stack
    plain = blocks.gradients(stack(blocks.llama_block), params, x)
    moved = rematted(blocks.llama_block, POLICY, is_scanned=is_scanned)
    assert blocks.differing(blocks.gradients(stack(moved), params, x), plain) == []
    assert all(np.abs(np.asarray(g, np.float32)).max() > 0 for g in jax.tree.leaves(plain))


def test_gradients_through_a_nested_jit_have_the_same_bits() -> None:
    params, x = blocks.make_params(jnp.float32, blocks.MLP), blocks.make_input(jnp.float32)
    policy = NamedPolicy(
        saved=("mlp.jitted_mlp.inside.tanh.0",),
        offloaded=("input", "mlp.jitted_mlp.inside.tanh.1"),
    )
    plain = blocks.gradients(blocks.scan_stack(blocks.nested_block), params, x)
    moved = rematted(blocks.nested_block, policy)
    assert blocks.differing(blocks.gradients(blocks.scan_stack(moved), params, x), plain) == []


def test_a_dropout_mask_is_made_again_from_its_key() -> None:
    params, x = blocks.make_params(jnp.float32, blocks.MLP), blocks.make_input(jnp.float32)
    keys = jax.random.split(jax.random.key(3), blocks.LAYERS)
    policy = NamedPolicy(saved=(), offloaded=("input", "tanh.0"))
    plain = blocks.gradients(blocks.scan_stack(blocks.dropout_block), params, x, keys)
    moved = rematted(blocks.dropout_block, policy)
    assert (
        blocks.differing(blocks.gradients(blocks.scan_stack(moved), params, x, keys), plain) == []
    )
    one = blocks.shapes_of_one(params)
    residuals = check_policy(policy, blocks.dropout_block, one, x, keys[0])
    assert [r.shape for r in residuals if r.dtype == "bool"] == []
    assert [r.shape for r in residuals if r.dtype.startswith("key")] == [()]


def test_accumulated_gradients_have_the_same_bits() -> None:
    params = blocks.make_params(jnp.float32, blocks.MLP)
    batches = jnp.stack([blocks.make_input(jnp.float32), -blocks.make_input(jnp.float32) / 2])
    policy = NamedPolicy(saved=(), offloaded=("input", "mlp.jitted_mlp.inside.tanh.0"))

    def accumulate(block: Block) -> Any:
        def loss(params: Any, x: Array) -> Array:
            return jnp.sum(blocks.scan_stack(block)(params, x) ** 2)

        def add(total: Any, x: Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        step = jax.jit(lambda x: jax.lax.scan(add, zeros, x)[0], compiler_options=blocks.EXACT)
        return step(batches)

    plain = accumulate(blocks.nested_block)
    assert blocks.differing(accumulate(rematted(blocks.nested_block, policy)), plain) == []


def odd_block(params: Array, x: Array) -> Array:
    """Everything that has equations inside: shardings, a checkpoint, a scan, a cond, a vmap."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.jit(lambda a: jnp.sin(a) * 2, in_shardings=here, out_shardings=here)(x)
    y = jax.checkpoint(lambda a: jnp.sin(jnp.cos(a)))(x * params)
    z, _ = jax.lax.scan(lambda carry, _: (jnp.tanh(carry), None), y, None, length=3)
    w = jax.lax.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, jax.nn.relu(z))
    order = jnp.argsort(w, axis=-1)
    return jnp.take_along_axis(w, order, -1) + jax.vmap(jnp.cumsum)(w)


def test_equations_that_hold_others_keep_their_bits() -> None:
    x = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
    params = x + 0.5
    names = names_of(odd_block, params, x)
    inner = next(name for name in names if name in ("remat2.0", "remat.0", "checkpoint.0"))
    policy = NamedPolicy(
        saved=(inner, "take_along_axis.select_n.0"),
        offloaded=("input", "lambda.mul.0", "scan.0"),
    )
    residuals = check_policy(policy, odd_block, params, x)
    assert {r.name for r in residuals if r.is_on_host} == set(policy.offloaded)

    def run(block: Block) -> Any:
        loss = jax.value_and_grad(lambda p, x: block(p, x).sum(), (0, 1))
        return jax.jit(loss, compiler_options=blocks.EXACT)(params, x)

    plain = run(odd_block)
    assert blocks.differing(run(with_names(odd_block)), plain) == []
    assert blocks.differing(run(rematted(odd_block, policy)), plain) == []
