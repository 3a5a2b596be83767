"""`ebbtide.jax.verify`: what has the same gradients passes, and each fault is caught by name."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from ebbtide.errors import PlanError
from ebbtide.jax.late import late_stack
from ebbtide.jax.verify import (
    ALLOWED_NOISES,
    Verification,
    scan_body,
    stack_layers,
    verify,
    verify_stacks,
)

# B batch, D width, L layers
B, D, L = 4, 8, 4

Tree = Any
Block = Callable[[Tree, Tree], tuple[Tree, Tree]]


def shaped(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def make_layer() -> Tree:
    return {
        "up": shaped(D, 2 * D) / D**0.5,
        "down": shaped(2 * D, D, seed=1) / D**0.5,
        "scale": jnp.ones(D),
    }


def mlp(x_BD: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
    h = checkpoint_name(jnp.tanh(x_BD @ layer["up"]), "h")
    return x_BD + layer["scale"] * (h @ layer["down"]), None


def dropout_mlp(x_BD: jax.Array, layer: Tree) -> tuple[jax.Array, jax.Array]:
    y, _ = mlp(x_BD, layer["mlp"])
    mask = jax.random.bernoulli(layer["key"], 0.5, y.shape)
    return jnp.where(mask, 2 * y, 0), y.mean()


X = shaped(B, D, seed=2)
OFFLOAD_H = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
)


def stack_that_reads(order: Callable[[jax.Array], jax.Array]) -> Callable[[Tree, Tree], Tree]:
    """A scan whose backward finds its stack of saved layer inputs in another order.

    With `order` the identity it is `scan` over `mlp`; with a reversal it is the compiler's fault:
    layer L-1 is differentiated at the input of layer 0.
    """

    @jax.custom_vjp
    def run(params: Tree, x: Tree) -> Tree:
        return jax.lax.scan(mlp, x, params)[0]

    def forward(params: Tree, x: Tree) -> tuple[Tree, Tree]:
        def body(x: Tree, layer: Tree) -> tuple[Tree, Tree]:
            return mlp(x, layer)[0], x

        y, saved = jax.lax.scan(body, x, params)
        return y, (params, order(saved))

    def backward(residuals: Tree, cotangent: Tree) -> Tree:
        def body(cotangent: Tree, layer: Tree) -> tuple[Tree, Tree]:
            params, x = layer
            pull = jax.vjp(lambda params, x: mlp(x, params)[0], params, x)[1]
            to_params, to_x = pull(cotangent)
            return to_x, to_params

        to_x, to_params = jax.lax.scan(body, cotangent, residuals, reverse=True)
        return to_params, to_x

    run.defvjp(forward, backward)
    return run


def plain_stack(params: Tree, x: Tree) -> Tree:
    return jax.lax.scan(mlp, x, params)[0]


PARAMS = stack_layers(make_layer(), L)


@pytest.fixture(autouse=True)
def compile_fast(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without optimisations, which take most of the time here, where nothing is asked of them."""
    is_fast = "optimised" not in request.node.name
    jax.config.update("jax_disable_most_optimizations", is_fast)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def compare(order: Callable[[jax.Array], jax.Array]) -> Verification:
    return verify_stacks(plain_stack, stack_that_reads(order), PARAMS, X)


@pytest.mark.parametrize("policy", [None, OFFLOAD_H], ids=["recompute", "offload"])
def test_a_rematted_block_is_bit_equal_when_optimised(policy: Any) -> None:
    report = verify(mlp, jax.checkpoint(mlp, policy=policy), make_layer(), X, layers=3)
    assert report == Verification(
        equal=True,
        is_bit_equal=True,
        is_too_noisy=False,
        largest_difference=0.0,
        noise=0.0,
        first_difference=None,
        layers=3,
        platform="cpu",
    )
    report.refuse_if_different()


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_dropout_keys_and_masks_are_equal(dtype: Any) -> None:
    params = {
        "mlp": jax.tree.map(lambda leaf: leaf.astype(dtype), make_layer()),
        "key": jax.random.key(3),
    }
    rematted = jax.checkpoint(dropout_mlp, policy=OFFLOAD_H, prevent_cse=False)
    report = verify(dropout_mlp, rematted, params, X.astype(dtype), layers=3)
    assert report.equal
    # A rounding or two of values up to 10: how sums are split depends on the machine.
    assert report.largest_difference <= 64 * jnp.finfo(dtype).eps


def test_the_simulated_scan_is_equal_without_its_fault() -> None:
    report = compare(lambda saved: saved)
    assert report.equal
    assert report.largest_difference < 1e-5


@pytest.mark.parametrize(
    ("order", "first_layer"),
    [
        (lambda saved: saved[::-1], 0),
        pytest.param(lambda saved: jnp.roll(saved, 1, axis=0), 0, marks=pytest.mark.slow),
        # Read one late: all but the last layer see the next one's input.
        (lambda saved: jnp.concatenate([saved[1:], saved[-1:]]), 0),
        pytest.param(lambda saved: saved.at[2].set(saved[1]), 0, marks=pytest.mark.slow),
        pytest.param(lambda saved: saved.at[2].set(0), 0, marks=pytest.mark.slow),
    ],
    ids=["reversed", "rolled", "shifted", "one twice", "one lost"],
)
def test_a_stack_that_is_read_in_another_order_is_caught(
    order: Callable[[jax.Array], jax.Array], first_layer: int
) -> None:
    report = compare(order)
    assert not report.equal
    assert report.first_difference is not None
    assert (report.first_difference.leaf, report.first_difference.layer) == (
        "params['down']",
        first_layer,
    )
    assert report.largest_difference > 100 * max(report.noise, 1e-6)
    with pytest.raises(PlanError, match=r"wrong gradients on cpu.*params\['down'\] of layer 0"):
        report.refuse_if_different()


def test_a_wrong_input_of_the_first_layer_alone_is_named_there() -> None:
    # Layer 0's input reaches its own parameters and x, and nothing above it.
    report = compare(lambda saved: saved.at[0].mul(1.5))
    assert report.first_difference is not None
    assert (report.first_difference.leaf, report.first_difference.layer) == ("params['down']", 0)
    assert not report.equal


def test_a_dropped_layer_is_caught() -> None:
    def drops_the_second(params: Tree, x: Tree) -> Tree:
        kept = jax.tree.map(lambda leaf: jnp.concatenate([leaf[:1], leaf[2:]]), params)
        return jax.lax.scan(mlp, x, kept)[0]

    report = verify_stacks(plain_stack, drops_the_second, PARAMS, X)
    assert not report.equal
    assert report.largest_difference > 0.5
    with pytest.raises(PlanError, match="of layer 0"):
        report.refuse_if_different()


def test_a_mask_of_another_key_in_backward_is_caught() -> None:
    @jax.custom_vjp
    def block(x: Tree, layer: Tree) -> tuple[Tree, Tree]:
        return dropout_mlp(x, layer)

    def forward(x: Tree, layer: Tree) -> tuple[Tree, Tree]:
        return dropout_mlp(x, layer), (x, layer)

    def backward(residuals: Tree, cotangents: Tree) -> Tree:
        x, layer = residuals
        other_key = jax.random.fold_in(layer["key"], 1)

        def run(x: Tree, mlp_params: Tree) -> Tree:
            return dropout_mlp(x, {"mlp": mlp_params, "key": other_key})

        to_x, to_mlp = jax.vjp(run, x, layer["mlp"])[1](cotangents)
        return to_x, {"mlp": to_mlp, "key": None}

    block.defvjp(forward, backward)
    params = {"mlp": make_layer(), "key": jax.random.key(3)}
    report = verify(dropout_mlp, block, params, X, layers=3)
    assert not report.equal
    assert report.first_difference is not None
    assert report.first_difference.leaf == "params['mlp']['down']"
    assert report.largest_difference > 0.1


def test_one_wrong_element_is_enough() -> None:
    def spoiled(params: Tree, x: Tree) -> Tree:
        @jax.custom_vjp
        def touch(leaf: jax.Array) -> jax.Array:
            return leaf

        touch.defvjp(lambda leaf: (leaf, None), lambda _, g: (g.at[2, 3, 5].add(0.5),))
        return plain_stack({**params, "up": touch(params["up"])}, x)

    report = verify_stacks(plain_stack, spoiled, PARAMS, X)
    assert not report.equal
    assert report.first_difference is not None
    assert report.first_difference.leaf == "params['up']"
    assert report.first_difference.layer == 2
    assert report.first_difference.num_elements == 1
    assert report.first_difference.difference == pytest.approx(0.5)
    assert str(report.first_difference).startswith("params['up'] of layer 2: 1 elements differ")


def test_a_lone_nan_is_an_infinite_difference() -> None:
    def spoiled(params: Tree, x: Tree) -> Tree:
        y = plain_stack(params, x)
        return y.at[0, 0].set(jnp.nan)

    report = verify_stacks(plain_stack, spoiled, PARAMS, X)
    assert not report.equal
    assert report.largest_difference == float("inf")


def off_by(factor: float) -> Callable[[Tree, Tree], Tree]:
    return lambda params, x: plain_stack(params, x) * factor


def test_a_few_roundings_are_no_fault_and_more_are() -> None:
    few = verify_stacks(plain_stack, off_by(1 + 2**-20), PARAMS, X)
    assert few.equal and not few.is_bit_equal
    assert 2**-21 < few.largest_difference < 2**-19
    assert few.first_difference is not None
    more = verify_stacks(plain_stack, off_by(1 + 2**-15), PARAMS, X)
    assert not more.equal
    assert more.noise == 0.0


@pytest.mark.slow
def test_what_correct_programs_differ_by_is_no_fault() -> None:
    report = verify_stacks(plain_stack, off_by(1.003), PARAMS, X, reordered=off_by(0.999))
    assert report.equal and not report.is_bit_equal
    assert report.noise == pytest.approx(0.001, rel=0.01)
    assert report.largest_difference <= ALLOWED_NOISES * report.noise
    assert not verify_stacks(plain_stack, off_by(1.005), PARAMS, X, reordered=off_by(0.999)).equal


def test_where_correct_programs_differ_too_much_nothing_is_shown() -> None:
    report = verify_stacks(plain_stack, off_by(1.01), PARAMS, X, reordered=off_by(1.2))
    assert not report.equal
    assert report.is_too_noisy
    assert report.noise == pytest.approx(0.2, rel=0.01)
    with pytest.raises(PlanError, match="cannot be verified on cpu"):
        report.refuse_if_different()


def nearly_the_identity(x_BD: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
    return x_BD + 1e-7 * mlp(x_BD, layer)[0], None


def test_a_fault_that_would_not_show_is_no_pass() -> None:
    def rounded(x_BD: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        return nearly_the_identity(x_BD * (1 + 2**-20), layer)

    # Each layer's input is the next one's but for rounding, so reading another one would pass.
    report = verify(nearly_the_identity, rounded, PARAMS, X)
    assert (report.equal, report.is_bit_equal, report.is_too_noisy) == (False, False, True)
    with pytest.raises(PlanError, match="would not stand out"):
        report.refuse_if_different()
    # Where bits are equal there is nothing to tell apart.
    assert verify(nearly_the_identity, jax.checkpoint(nearly_the_identity), PARAMS, X).is_bit_equal


def test_a_fault_that_would_show_lets_roundings_pass() -> None:
    def rounded(x_BD: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        y_BD, _ = mlp(x_BD, layer)
        return y_BD * (1 + 2**-21), None

    report = verify(mlp, rounded, PARAMS, X)
    assert (report.equal, report.is_bit_equal, report.is_too_noisy) == (True, False, False)


def test_the_fault_on_purpose_is_the_one_that_is_simulated() -> None:
    def shift(saved: jax.Array) -> jax.Array:
        return jnp.concatenate([saved[1:], saved[-1:]])

    report = verify_stacks(stack_that_reads(shift), late_stack(mlp), PARAMS, X)
    assert report.equal
    assert report.largest_difference < 1e-6


def test_a_gradient_that_is_noise_alone_says_nothing_about_the_others() -> None:
    # A bias of the keys: softmax does not see it, and its gradient is rounding.
    def attention(x_BD: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        keys = x_BD @ layer["k"] + layer["bias"]
        weights = jax.nn.softmax((x_BD @ layer["q"]) @ keys.T, axis=-1)
        return x_BD + weights @ x_BD, None

    def again(x_BD: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        keys = x_BD @ layer["k"] + layer["bias"]
        scores = (x_BD @ layer["q"]) @ keys.T
        weights = jnp.exp(scores - scores.max(-1, keepdims=True) - 1.0)
        return x_BD + (weights / weights.sum(-1, keepdims=True)) @ x_BD, None

    def run(block: Block) -> Callable[[Tree, Tree], Tree]:
        return lambda params, x: jax.lax.scan(block, x, params)[0]

    layer = {"q": shaped(D, D) / D, "k": shaped(D, D, seed=1) / D, "bias": shaped(D, seed=3)}
    params = stack_layers(layer, L)
    report = verify_stacks(run(attention), run(again), params, X, reordered=run(again))
    assert report.equal and not report.is_bit_equal
    assert report.largest_difference > 0.1  # of the bias, whose gradient is nothing else
    assert report.noise < 1e-4


def test_layers_made_from_one_differ_everywhere_and_every_time_alike() -> None:
    layer = {**make_layer(), "bias": jnp.zeros(D), "key": jax.random.key(5), "num": jnp.arange(3)}
    stacked = stack_layers(layer, 3)
    for name in ("up", "down", "scale", "bias"):
        assert stacked[name].shape == (3, *layer[name].shape)
        assert all(
            not jnp.any(stacked[name][i] == stacked[name][k]) for i, k in ((0, 1), (1, 2), (0, 2))
        )
        assert float(jnp.abs(stacked[name] - layer[name]).max()) < 1
    assert len({tuple(bits) for bits in jax.random.key_data(stacked["key"]).tolist()}) == 3
    assert stacked["num"].tolist() == [[0, 1, 2]] * 3
    again = stack_layers(layer, 3)
    assert jnp.array_equal(again["up"], stacked["up"])


def test_stacked_parameters_are_taken_as_they_are() -> None:
    params = stack_layers(make_layer(), 5)
    report = verify(mlp, jax.checkpoint(mlp), params, X)
    assert (report.equal, report.layers) == (True, 5)


def test_what_shows_nothing_is_refused() -> None:
    layer = make_layer()
    equal_layers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), layer)
    with pytest.raises(ValueError, match="a reversed stack would not show"):
        verify(mlp, mlp, layer, jnp.zeros((B, D)), layers=3)
    with pytest.raises(ValueError, match="at least 3 are needed"):
        verify(mlp, mlp, layer, X, layers=2)
    with pytest.raises(ValueError, match="params has 2 layers; at least 3"):
        verify(mlp, mlp, jax.tree.map(lambda leaf: leaf[:2], equal_layers), X)
    with pytest.raises(
        ValueError, match=r"params\['scale'\] has 8 layers and params\['down'\] has 16"
    ):
        verify(mlp, mlp, layer, X)
    with pytest.raises(ValueError, match="is not finite even without offloading"):
        verify(mlp, mlp, layer, X * jnp.nan, layers=3)
    with pytest.raises(ValueError, match="no floating leaf"):
        verify(mlp, mlp, {"num": jnp.arange(3)}, X, layers=3)


def test_another_output_is_refused() -> None:
    def narrower(params: Tree, x: Tree) -> Tree:
        return plain_stack(params, x)[:2]

    with pytest.raises(ValueError, match=r"output is float32\[4, 8\] .* float32\[2, 8\]"):
        verify_stacks(plain_stack, narrower, stack_layers(make_layer(), 3), X)


def plain_mlp(params: Tree, x_BD: jax.Array, shift: jax.Array) -> jax.Array:
    h = checkpoint_name(jnp.tanh(x_BD @ params["up"] + shift), "h")
    return x_BD + params["scale"] * (h @ params["down"])


def test_a_block_as_plan_for_takes_it_is_a_scans_body() -> None:
    shift = shaped(2 * D, seed=4)
    body = scan_body(plain_mlp, shift)
    params = stack_layers(make_layer(), L)
    y, _ = jax.lax.scan(body, X, params)
    expected = X
    for layer in range(L):
        one = jax.tree.map(lambda leaf: leaf[layer], params)  # noqa: B023
        expected = plain_mlp(one, expected, shift)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    offloaded = scan_body(jax.checkpoint(plain_mlp, policy=OFFLOAD_H), shift)
    assert verify(body, offloaded, make_layer(), X, layers=3).equal
