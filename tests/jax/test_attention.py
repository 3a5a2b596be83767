"""The attention whose residuals have names: the same mathematics, and no kernel run twice."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ebbtide.block import OpKind
from ebbtide.jax import (
    NamedPolicy,
    check_policy,
    nameable,
    names_of,
    observe,
    reference_attention,
    residuals_of,
    with_names,
)
from tests.jax import blocks
from tests.jax.blocks import Array

CUDNN = "jax._src.cudnn.fused_attention_stablehlo"


def heads(num: int, seed: int, dtype: Any = jnp.float32) -> Array:
    values = np.random.default_rng(seed).standard_normal((2, 8, num, 4))
    return jnp.asarray(values, dtype)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_reference_is_attention(is_causal: bool) -> None:
    q, k, v = heads(4, 0), heads(2, 1), heads(2, 2)

    def ours(q: Array, k: Array, v: Array) -> Array:
        return reference_attention(q, k, v, is_causal=is_causal)[0]

    def theirs(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="xla")

    given = heads(4, 3)

    def all_of(attend: blocks.Block) -> Any:
        output, pull_back = jax.vjp(attend, q, k, v)
        return output, pull_back(given)

    pairs = zip(
        jax.tree.leaves(jax.jit(lambda: all_of(ours))()),
        jax.tree.leaves(jax.jit(lambda: all_of(theirs))()),
        strict=True,
    )
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_reference_keeps_what_a_kernel_keeps() -> None:
    q, k = heads(4, 0, jnp.bfloat16), heads(2, 1, jnp.bfloat16)
    kept = residuals_of(lambda q, k, v: reference_attention(q, k, v)[0], q, k, k + 1)
    assert [(r.shape, r.dtype) for r in kept if not r.is_argument] == [
        ((2, 8, 4, 4), "bfloat16"),
        ((2, 4, 8), "float32"),
    ]


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="query has 3 heads and key 2"):
        reference_attention(heads(3, 0), heads(2, 1), heads(2, 2))


def test_names_change_no_bit_and_are_given_once() -> None:
    def kernel(q: Array, k: Array) -> Array:
        return reference_attention(q, k, k)[0]  # k is kept twice

    q, k, given = heads(4, 0), heads(2, 1), heads(4, 3)
    named = nameable(kernel, "flash")

    def all_of(attend: blocks.Block) -> Any:
        output, pull_back = jax.vjp(attend, q, k)
        return output, pull_back(given)

    with_and_without = [
        jax.jit(lambda attend=attend: all_of(attend), compiler_options=blocks.EXACT)()
        for attend in (named, kernel)
    ]
    assert blocks.differing(*with_and_without) == []
    kept = residuals_of(named, q, k)
    assert [r.name for r in kept if not r.is_argument] == ["flash.out", "flash.residual.0"]
    assert sum(r.is_argument for r in kept) == 2


def test_several_outputs_have_numbers() -> None:
    named = nameable(lambda x: (jnp.sin(x), jnp.exp(x)), "pair")
    policy = jax.checkpoint_policies.save_only_these_names("pair.out.1")
    kept = residuals_of(jax.checkpoint(named, policy=policy), jnp.arange(3.0))
    assert [r.name for r in kept if r.name] == ["pair.out.1"]


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jax trace and lower its cuDNN attention on a machine without cuDNN."""
    module = importlib.import_module(CUDNN)
    for name in ("check_cudnn_version", "check_compute_capability"):
        if name not in vars(module):
            pytest.skip(f"jax {jax.__version__} asks for cuDNN in another way")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91500)
    monkeypatch.setattr(module, "check_compute_capability", lambda _: None)
    monkeypatch.setattr(module, "is_cuda_compute_capability_equal", lambda _: False, raising=False)


def cudnn_block(params: dict[str, Array], x: Array) -> Array:
    """A block that calls jax's own attention, with nothing of ebbtide in it."""
    with jax.named_scope("attn"):
        q = jnp.einsum("btd,dnh->btnh", x, params["q"])
        k = jnp.einsum("btd,dkh->btkh", x, params["k"])
        v = jnp.einsum("btd,dkh->btkh", x, params["v"])
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return x + jnp.einsum("btnh,nhd->btd", mixed, params["o"])


@pytest.mark.usefixtures("cudnn")
def test_the_cudnn_kernel_is_planned_whole_and_not_run_twice() -> None:
    def shape(*lengths: int) -> Any:
        return jax.ShapeDtypeStruct(lengths, jnp.bfloat16)

    one = {
        "q": shape(512, 8, 64),
        "k": shape(512, 2, 64),
        "v": shape(512, 2, 64),
        "o": shape(8, 64, 512),
    }
    x = shape(2, 256, 512)
    moved = ("input", "attn.custom_vjp.0.out", "attn.custom_vjp.0.residual.0")
    assert set(moved) <= set(names_of(cudnn_block, one, x))
    values = {value.name: value for value in observe(cudnn_block, one, x).values}
    out, lse = (values[name] for name in moved[1:])
    assert (out.kind, out.num_bytes) == (OpKind.ATTENTION, 2 * 256 * 8 * 64 * 2)
    assert (lse.group, lse.num_bytes) == (out.group, 2 * 8 * 256 * 4)
    assert out.cost.flops == 4 * 2 * 256 * 256 * 8 * 64 // 2  # the mask hides a half
    policy = NamedPolicy(saved=(), offloaded=moved)
    assert {r.name for r in check_policy(policy, cudnn_block, one, x) if r.name} == set(moved)

    def kernels(offloaded: tuple[str, ...]) -> tuple[int, int, int]:
        """Calls of the kernel forward and backward, and placements, in the CUDA program."""
        some = NamedPolicy(saved=(), offloaded=offloaded)
        named = with_names(cudnn_block, offloaded)
        stack = blocks.scan_stack(jax.checkpoint(named, policy=some.to_jax(), prevent_cse=False))
        loss = jax.grad(lambda params, x: stack(params, x).astype(jnp.float32).sum())
        stacked = jax.tree.map(lambda s: shape(4, *s.shape), one)
        text = jax.jit(loss).trace(stacked, x).lower(lowering_platforms=("cuda",)).as_text()
        backward = text.count("__cudnn$fmhaSoftmaxBackward")
        forward = text.count("__cudnn$fmhaSoftmax") - backward
        return forward, backward, text.count("@annotate_device_placement")

    assert kernels(moved) == (1, 1, 6)
    assert kernels(moved[:2]) == (2, 1, 4)  # without the log-sum-exp it runs again
