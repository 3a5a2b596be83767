"""Names are readable and stable, and placing them changes nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from ebbtide.errors import PlanError
from ebbtide.jax import names_of, reference_attention, residuals_of, with_names
from ebbtide.trace.names import activation_in
from tests.jax import blocks
from tests.jax.blocks import Array


def one(block_params: tuple[str, ...], dtype: Any = jnp.float32) -> tuple[Any, Array]:
    params = blocks.shapes_of_one(blocks.make_params(dtype, block_params))
    return params, jax.ShapeDtypeStruct((blocks.B, blocks.T, blocks.D), dtype)


def names_in_text(block: Any, *arguments: Any) -> list[str]:
    """The names in the text of a jaxpr, in order."""
    text = str(jax.make_jaxpr(block)(*arguments))
    return [part.partition("]")[0] for part in text.split("name[name=")[1:]]


def test_names_come_from_scopes_primitives_and_places() -> None:
    names = names_of(blocks.llama_block, *one(tuple(blocks.SHAPES)))
    assert names[0] == "input"
    assert {*blocks.LLAMA_KEPT, *blocks.LLAMA_MOVED} <= set(names)
    products = [name for name in names if "dot_general" in name]
    assert products == [
        "attn.btd_dnh_btnh.dot_general.0",
        "attn.btd_dkh_btkh.dot_general.0",
        "attn.btd_dkh_btkh.dot_general.1",
        "attn.btnh_nhd_btd.dot_general.0",
        "mlp.dot_general.0",
        "mlp.dot_general.1",
        "mlp.dot_general.2",
    ]
    assert "mlp.silu.logistic.0" in names
    assert len(set(names)) == len(names)


def test_names_do_not_depend_on_where_the_block_is_called() -> None:
    arguments = one(blocks.MLP)
    names = names_of(blocks.nested_block, *arguments)
    found: list[str] = []

    def inside(params: Any, x: Array) -> Array:
        with jax.named_scope("decoder"):
            found.extend(names_of(blocks.nested_block, params, x))
            return x

    jax.make_jaxpr(jax.jit(inside))(*arguments)
    assert tuple(found) == names


def test_only_what_is_asked_for_gets_a_name() -> None:
    named = with_names(blocks.nested_block, ["input", "mlp.jitted_mlp.inside.tanh.1"])
    assert names_in_text(named, *one(blocks.MLP)) == ["input", "mlp.jitted_mlp.inside.tanh.1"]


def test_a_name_that_no_value_has_is_refused_with_the_nearest() -> None:
    named = with_names(blocks.nested_block, ["mlp.jitted_mlp.inside.tan.1"])
    with pytest.raises(PlanError, match=r"'mlp.jitted_mlp.inside.tan.1'; the nearest are") as told:
        jax.make_jaxpr(named)(*one(blocks.MLP))
    assert "mlp.jitted_mlp.inside.tanh.1" in str(told.value)


def test_what_does_not_depend_on_the_input_has_no_name() -> None:
    key = jax.eval_shape(lambda: jax.random.key(0))
    names = names_of(blocks.dropout_block, *one(blocks.MLP), key)
    assert not any("bits" in name or "lt" in name.split(".") for name in names)
    assert "dot_general.0" in names


def test_the_users_names_stay_and_stand_for_their_values() -> None:
    names = names_of(blocks.user_named_block, *one(blocks.MLP))
    assert {"decoder_layer_input", "wide", "act"} <= set(names)
    assert "input" not in names
    assert "dot_general.0" not in names


def test_a_users_name_on_a_value_that_nothing_reads_still_works() -> None:
    params, x = one(blocks.MLP)
    policy = jax.checkpoint_policies.save_only_these_names("wide")
    plain = jax.checkpoint(blocks.user_named_block, policy=policy)
    named = jax.checkpoint(with_names(blocks.user_named_block, ["wide"]), policy=policy)
    assert "wide" not in {r.name for r in residuals_of(plain, params, x)}
    assert "wide" in {r.name for r in residuals_of(named, params, x)}


def test_one_name_on_two_values_names_the_first() -> None:
    def twice(params: Any, x: Array) -> Array:
        a = checkpoint_name(jnp.sin(x), "context")
        b = checkpoint_name(jnp.cos(x), "context")
        return jnp.tanh(a * params) * jnp.tanh(b)

    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert {"context", "cos.0"} <= set(names_of(twice, x, x))
    assert names_in_text(with_names(twice, ["context", "cos.0"]), x, x) == ["context", "cos.0"]


def test_pytrees_go_in_and_come_out() -> None:
    def block(params: dict[str, Array], x: dict[str, Any]) -> dict[str, Any]:
        return {"hidden": jnp.sin(x["hidden"]) * params["w"], "aux": x["aux"] + 1, "at": x["at"]}

    params = {"w": jnp.full((4,), 2.0)}
    x = {"hidden": jnp.arange(4.0), "aux": jnp.ones(()), "at": jnp.arange(3)}
    assert names_of(block, params, x)[:1] == ("input.hidden",)
    result = with_names(block)(params, x)
    assert jax.tree.structure(result) == jax.tree.structure(block(params, x))
    assert blocks.differing(result, block(params, x)) == []


def test_it_works_under_vmap_and_scan() -> None:
    params = jnp.arange(1.0, 5.0)
    x = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)

    def block(params: Array, x: Array) -> Array:
        return x + jnp.tanh(x * params)

    named = with_names(block)
    mapped = jax.vmap(named, in_axes=(None, 0))(params, x)
    assert blocks.differing(mapped, jax.vmap(block, in_axes=(None, 0))(params, x)) == []
    grads = jax.grad(lambda p: jax.vmap(named, in_axes=(None, 0))(p, x).sum())(params)
    plain = jax.grad(lambda p: jax.vmap(block, in_axes=(None, 0))(p, x).sum())(params)
    assert blocks.differing(grads, plain) == []


def test_constants_and_closed_over_values_keep_their_gradients() -> None:
    def total(scale: Array) -> Array:
        named = with_names(lambda params, x: jnp.sin(x * params) * scale)
        return named(jnp.full((3,), 2.0), jnp.arange(3.0)).sum()

    expected = jnp.sin(jnp.arange(3.0) * 2.0).sum()
    assert float(jax.grad(total)(jnp.float32(1.5))) == pytest.approx(float(expected), rel=1e-6)


def test_a_librarys_custom_vjp_gets_names_on_all_that_it_keeps() -> None:
    def block(params: Array, x: Array) -> Array:
        q = x * params
        return x + reference_attention(q, jnp.sin(x), jnp.cos(x))[0]

    x = jax.ShapeDtypeStruct((1, 4, 2, 4), jnp.float32)
    names = names_of(block, x, x)
    assert {"custom_vjp.0.out.0", "custom_vjp.0.out.1"} <= set(names)
    named = with_names(block, ["custom_vjp.0.out.0", "custom_vjp.0.out.1"])
    policy = jax.checkpoint_policies.save_only_these_names(
        "custom_vjp.0.out.0", "custom_vjp.0.out.1"
    )
    kept = [r for r in residuals_of(jax.checkpoint(named, policy=policy), x, x) if r.name]
    assert {r.name: r.shape for r in kept} == {
        "custom_vjp.0.out.0": (1, 4, 2, 4),
        "custom_vjp.0.out.1": (1, 2, 4),
    }


def scopes_in_text(fun: Any, *arguments: Any) -> set[str]:
    """The activations of ebbtide's scopes in the text of what jax hands to XLA."""
    text = jax.jit(fun).lower(*arguments).as_text(debug_info=True)
    found = (activation_in(line) for line in text.splitlines())
    return {name for name in found if name is not None}


def test_what_is_asked_for_is_made_under_a_scope_with_its_name() -> None:
    """What a block returns is the next one's input."""
    arguments = one(tuple(blocks.SHAPES))
    wanted = {"input", "mlp.dot_general.0", "attn.btnh_nhd_btd.dot_general.0"}
    named = with_names(blocks.llama_block, wanted)
    assert scopes_in_text(named, *arguments) == wanted
    assert scopes_in_text(with_names(blocks.llama_block, wanted - {"input"}), *arguments) == (
        wanted - {"input"}
    )


def test_scopes_have_the_names_of_users_and_of_values_in_nested_jits() -> None:
    def block(params: Any, x: Array) -> Array:
        (up,) = params
        hidden = checkpoint_name(jnp.tanh(x @ up), "hidden")
        return x + jax.jit(lambda h: (h @ up.T) * 2)(hidden)

    arguments = ((jax.ShapeDtypeStruct((4, 8), jnp.float32),), jax.ShapeDtypeStruct((2, 4), "f4"))
    inner = next(n for n in names_of(block, *arguments) if n.endswith("dot_general.0") and "." in n)
    for wanted in ({"hidden"}, {"hidden", inner}):
        assert scopes_in_text(with_names(block, wanted), *arguments) == wanted


def test_without_a_choice_there_are_no_scopes() -> None:
    assert scopes_in_text(with_names(blocks.llama_block), *one(tuple(blocks.SHAPES))) == set()


def test_an_output_that_is_no_next_input_has_no_scope_of_one() -> None:
    def block(params: Any, x: Array) -> tuple[Array, Array]:
        return x * params, x + params

    value = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert scopes_in_text(with_names(block, {"input"}), value, value) == set()
