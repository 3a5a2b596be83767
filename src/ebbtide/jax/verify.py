"""Whether a rematted stack has the gradients of the plain one, on the backend in use.

A released compiler read the host stack of a scan's residuals forwards instead of backwards, with
no error and the right memory figures (openxla/xla#46231, jaxlib 0.11.0). Only gradients show it,
and only where layers differ: with equal layers a reversed stack has the same sum. So the stack
that is verified has three layers or more, their weights differ, and gradients are compared layer
by layer and element by element.

Bits are asked for. Where they differ, what is allowed is a multiple of what correct programs
differ by (the plain stack against itself recomputed in full: run-to-run noise, and the rounding of
other fusions) and a few roundings. The fault itself is then tried on purpose (`late.py`), and
where it would not stand out from that, the check fails.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from ebbtide.errors import PlanError
from ebbtide.jax.late import (
    exact_leaves,
    inexact_leaves,
    is_inexact,
    join_leaves,
    late_stack,
)

# B batch, D width, L layers; a leaf of a stack has L in front.

Tree = Any
"""A pytree of arrays."""

Block = Callable[[Tree, Tree], tuple[Tree, Tree]]
"""What `jax.lax.scan` takes: `(carry, layer's parameters) -> (carry, output)`."""

Stack = Callable[[Tree, Tree], Tree]
"""All layers: `(parameters with a leading axis of layers, x) -> outputs`."""

MIN_LAYERS = 3
"""With two layers a stack that is shifted by one in a circle is a reversed one."""

ALLOWED_NOISES = 4.0
"""Two samples of noise say its size to a factor; faults are some hundred times larger: on an
H200 noise was 0.015 of the largest element (bf16, cuDNN attention), a reversed stack differs by
about 1."""

ROUNDINGS = {2: 4, 4: 64, 8: 64}
"""Bytes of a type to how many of its epsilons of the largest element are always allowed. A program
that saves other values is fused and rounded otherwise, also where the same program run twice has
the same bits: offloading one name moved float32 gradients by 8 epsilons on a CPU. Sums are in
float32, so that a 16-bit result is rounded a few times, and a float32 one with each addition."""

MOST_NOISE = 0.0625
"""Relative. `ALLOWED_NOISES` of it are a quarter of the largest element: what is noisier shows
nothing, and each layer must have a gradient that is not."""

CASTS_KEPT = {"xla_allow_excess_precision": False}
"""Of XLA, for what is compared. By default a fusion keeps 16-bit results in float32, so that
programs which save other values round otherwise. Then a token near the border of two experts goes
to the other one, and gradients of whole rows differ where nothing is wrong."""

# By how much the layers that are made from one layer's parameters differ, in standard deviations.
SPREAD = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two stacks differ."""

    leaf: str
    """`params['mlp']['up']` or `x` for a gradient, `output[0]` for what the stack returns."""
    layer: int | None
    """Counted from 0; None: the leaf has no axis of layers."""
    difference: float
    """Largest absolute difference of an element; infinite where one of the two is no number."""
    scale: float
    """Largest absolute element of the plain stack there."""
    num_elements: int
    """How many elements have other bits."""
    rounding: float
    """Which `relative` difference is allowed for the leaf's type; see `ROUNDINGS`."""

    @property
    def relative(self) -> float:
        """`difference` as a fraction of `scale`."""
        if not self.difference:
            return 0.0
        return self.difference / self.scale if self.scale else math.inf

    def __str__(self) -> str:
        where = self.leaf if self.layer is None else f"{self.leaf} of layer {self.layer}"
        return (
            f"{where}: {self.num_elements} elements differ, the worst by {self.difference:.3g} "
            f"where the largest is {self.scale:.3g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What comparing two stacks showed."""

    equal: bool
    """Bit for bit, or within `ALLOWED_NOISES` times the noise, or within `ROUNDINGS`."""
    is_bit_equal: bool
    """Every bit of every gradient and output."""
    largest_difference: float
    """Largest difference of an element, as a fraction of the largest one of its leaf and layer."""
    is_too_noisy: bool
    """Bits differ, and a layer that reads the next one's input would not stand out from noise;
    for `verify_stacks`: correct programs agree too little in all gradients of some layer."""
    noise: float
    """The same between correct programs: the plain stack and itself recomputed in full; 0 where
    they have the same bits, and where `is_bit_equal` leaves nothing to measure. Gradients that are
    noise alone (a bias of keys, which softmax ignores) are left out."""
    first_difference: Difference | None
    """The first leaf and layer that differ by more than is allowed, or, where none does, that
    have other bits; in the order of the parameters. None: all bits are equal."""
    layers: int
    """How many layers the stack had."""
    platform: str
    """`cpu` or `gpu`: what was shown holds there only."""

    def refuse_if_different(self) -> None:
        """Raise unless the gradients are equal.

        Raises:
            PlanError: They are not, or the backend is too noisy to tell.
        """
        if self.equal:
            return
        if self.is_too_noisy:
            raise PlanError(
                f"gradients cannot be verified on {self.platform} with jax {jax.__version__}: "
                f"correct programs differ by {self.noise:.2g} of the largest element there, so "
                "that a layer's input read for another's would not stand out. Use a deterministic "
                "attention kernel, float32, a larger x or fewer tokens for the check."
            )
        raise PlanError(
            f"the rematted stack has wrong gradients on {self.platform} with jax "
            f"{jax.__version__}: {self.first_difference}; correct programs differ by "
            f"{self.noise:.2g} of the largest element, and {ALLOWED_NOISES:g} times that is "
            "allowed. Do not train with it. If the block is the same function, this is the "
            "compiler's fault (jaxlib 0.11.0 reads offloaded scan residuals in the wrong order: "
            "openxla/xla#46231): use another jaxlib, recompute instead of offloading, or unroll "
            "the layers."
        )


def verify(
    block: Block, rematted: Block, params: Tree, x: Tree, *, layers: int | None = None
) -> Verification:
    """Compare the gradients of a scanned stack of `rematted` with those of `block`.

    Both stacks are compiled and run once on the backend in use and, where bits differ, `block`
    twice more: recomputed in full, and with the fault on purpose. Gradients are with respect to
    `params` and `x`, for fixed random cotangents. Deterministic but for the backend's own noise.

    Args:
        block: `(carry, layer's parameters) -> (carry, output)`, as `jax.lax.scan` takes it.
        rematted: The same function under `jax.checkpoint`.
        params: With `layers`, the parameters of one layer, from which as many different ones are
            made: floating leaves are shifted by a tenth of their spread, typed random keys are
            folded, all else is repeated. Without `layers`, the parameters of all layers, each leaf
            with a leading axis of layers; use this form to verify a model's own weights and
            sharding, or raw random keys, which look like any integers.
        x: The first carry. Not zeros, and large enough for the tokens of a real step to matter.
        layers: How many layers to stack, at least 3; None: `params` are stacked.

    Returns:
        What differs; `.refuse_if_different()` raises.

    Raises:
        ValueError: Fewer than three layers, layers that do not differ, leaves of different
            lengths, or gradients that are zero, not finite or alike, so that they show nothing.
    """
    stacked = params if layers is None else stack_layers(params, layers)

    def plain(params: Tree, x: Tree) -> Tree:
        return jax.lax.scan(block, x, params)

    def recomputed(params: Tree, x: Tree) -> Tree:
        return jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, params)

    def other(params: Tree, x: Tree) -> Tree:
        return jax.lax.scan(rematted, x, params)

    return _verify(_Stacks(plain, other, recomputed, late_stack(block)), stacked, x)


def scan_body(block: Callable[..., Tree], *rest: Any) -> Block:
    """Return a block as `plan_for` takes it, `block(params, x, *rest) -> x`, as a scan's body.

    So one definition serves both: `jax.lax.scan(scan_body(tide.checkpoint(block)), x, params)`.

    Args:
        block: The block, plain or under a plan.
        rest: What else it takes; the same for all layers.
    """
    return lambda carry, params: (block(params, carry, *rest), None)


def verify_stacks(
    plain: Stack, other: Stack, params: Tree, x: Tree, *, reordered: Stack | None = None
) -> Verification:
    """Compare the gradients of two functions of all layers; `verify` says more.

    For stacks that are not a plain scan: unrolled layers, a scan with other arguments, a model.

    Args:
        plain: `(params, x) -> outputs` without offloading or rematerialisation.
        other: What should be the same function.
        params: Each leaf with a leading axis of layers, of which there are three or more.
        x: The other argument.
        reordered: A third program for the same function that does not offload, from which noise
            is measured; None: `plain` is run twice.

    Raises:
        ValueError: As `verify`.
    """
    return _verify(_Stacks(plain, other, reordered, None), params, x)


@dataclass(frozen=True, slots=True)
class _Stacks:
    plain: Stack
    other: Stack
    reordered: Stack | None
    # With the fault on purpose, to see whether it would show.
    late: Stack | None


def _verify(stacks: _Stacks, params: Tree, x: Tree) -> Verification:
    layers = _count_layers(params)
    inputs = _split(params, x)
    names = _leaf_names(stacks.plain, params, x)
    run_plain = _gradients_of(stacks.plain, params, x)
    expected = run_plain(inputs)
    _check_tells_layers_apart(expected, names, layers)

    def compare(stack: Stack) -> list[Difference]:
        return _compare(expected, _gradients_of(stack, params, x)(inputs), names)

    found = compare(stacks.other)
    differing = [d for d in found if d.num_elements]
    noises: list[Difference] = []
    wrong: list[Difference] = []
    telling: set[int | None] = set(range(layers))
    if differing:
        again = _compare(expected, run_plain(inputs), names) if stacks.reordered is None else None
        noises = again or compare(stacks.reordered or stacks.plain)
        wrong = _beyond_noise(found, noises)
        if stacks.late is None:
            telling = {noise.layer for noise in noises if noise.relative <= MOST_NOISE}
        else:
            # The last layer reads its own input there.
            telling = {d.layer for d in _beyond_noise(compare(stacks.late), noises)} | {layers - 1}
    is_too_noisy = not telling >= set(range(layers))
    noise = _largest(noises) if is_too_noisy else _largest(_quiet(noises))
    return Verification(
        equal=not (wrong or is_too_noisy),
        is_bit_equal=not differing,
        is_too_noisy=is_too_noisy,
        largest_difference=_largest(found),
        noise=noise,
        first_difference=next(iter(wrong or differing), None),
        layers=layers,
        platform=jax.default_backend(),
    )


def _quiet(noises: Sequence[Difference]) -> list[Difference]:
    """Without gradients that are noise alone."""
    return [noise for noise in noises if noise.relative <= MOST_NOISE]


def _beyond_noise(found: Sequence[Difference], noises: Sequence[Difference]) -> list[Difference]:
    """Return what differs by more than correct programs do, and by more than rounding."""
    noise = _largest(_quiet(noises))
    return [
        difference
        for difference, own in zip(found, noises, strict=True)
        if difference.difference > ALLOWED_NOISES * max(own.difference, noise * difference.scale)
        and difference.relative > difference.rounding
    ]


def stack_layers(params: Tree, layers: int) -> Tree:
    """Make the parameters of `layers` different layers from those of one.

    Args:
        params: One layer's parameters.
        layers: How many to make, at least 3.

    Returns:
        The same tree, each leaf with a leading axis of length `layers`. Layer 0 is shifted as
        well. The same arguments give the same bits.

    Raises:
        ValueError: Fewer than three layers, or no floating leaf that could differ.
    """
    if layers < MIN_LAYERS:
        raise ValueError(
            f"layers={layers}: at least {MIN_LAYERS} are needed, because a stack of fewer looks "
            f"the same reversed and shifted. Pass layers={MIN_LAYERS} or more."
        )
    if not any(is_inexact(leaf) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "params has no floating leaf, so no gradient could show the order of layers. Pass the "
            "parameters of one layer."
        )
    return _stack_layers(params, layers)


@jax.jit(static_argnums=1)
def _stack_layers(params: Tree, layers: int) -> Tree:
    leaves, tree = jax.tree.flatten(params)
    stacked = [_stack_leaf(leaf, i, layers) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, stacked)


def _stack_leaf(leaf: jax.Array, index: int, layers: int) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        fold = jax.random.fold_in
        for _ in range(leaf.ndim):
            fold = jax.vmap(fold, in_axes=(0, None))
        return jax.vmap(fold, in_axes=(None, 0))(leaf, jnp.arange(layers))
    repeated = jnp.broadcast_to(leaf, (layers, *leaf.shape))
    if not is_inexact(leaf):
        return repeated
    # Ones of a norm and zeros of a bias have no spread of their own.
    spread = jnp.maximum(SPREAD * jnp.std(leaf), SPREAD * SPREAD)
    return (repeated + spread * _scatter(repeated.shape, index)).astype(leaf.dtype)


def _scatter(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Return fixed numbers between -1 and 1, a hash of their positions.

    jax's own generator would do; it compiles for seconds, and this is no place for quality.
    """
    bits = jnp.full(shape, (seed + 1) * 0x9E3779B9 % 2**32, jnp.uint32)
    for axis in range(len(shape)):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        bits = (bits ^ place) * jnp.uint32(0x85EBCA6B)
        bits = bits ^ (bits >> 13)
    bits = bits * jnp.uint32(0xC2B2AE35)
    bits = bits ^ (bits >> 16)
    return bits.astype(jnp.float32) * 2.0**-31 - 1


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Arguments in two parts: only floating leaves have gradients."""

    inexact: list[jax.Array]
    exact: list[jax.Array]


def _split(params: Tree, x: Tree) -> _Inputs:
    arrays = jax.tree.map(jnp.asarray, (params, x))
    return _Inputs(inexact_leaves(arrays), exact_leaves(arrays))


def _gradients_of(
    stack: Stack, params: Tree, x: Tree
) -> Callable[[_Inputs], list[list[jax.Array]]]:
    """Return what computes [gradients of floating leaves, floating outputs]."""
    leaves, tree = jax.tree.flatten((params, x))
    are_inexact = [is_inexact(leaf) for leaf in leaves]

    @jax.jit(compiler_options=dict(CASTS_KEPT))
    def gradients(inexact: list[jax.Array], exact: list[jax.Array]) -> list[list[jax.Array]]:
        def outputs(inexact: list[jax.Array]) -> list[jax.Array]:
            params, x = jax.tree.unflatten(tree, join_leaves(are_inexact, inexact, exact))
            return inexact_leaves(stack(params, x))

        made, pull = jax.vjp(outputs, inexact)
        # Ones would hide an error that cancels in the sum.
        cotangents = [_scatter(leaf.shape, i).astype(leaf.dtype) for i, leaf in enumerate(made)]
        return [pull(cotangents)[0], made]

    return lambda inputs: jax.block_until_ready(gradients(inputs.inexact, inputs.exact))


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One gradient or output."""

    name: str
    is_stacked: bool


def _leaf_names(stack: Stack, params: Tree, x: Tree) -> list[_Leaf]:
    def named(tree: Tree, root: str) -> list[str]:
        return [
            root + jax.tree_util.keystr(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if is_inexact(leaf)
        ]

    outputs = jax.eval_shape(stack, params, x)
    return [
        *(_Leaf(name, True) for name in named(params, "params")),
        *(_Leaf(name, False) for name in named(x, "x")),
        *(_Leaf(name, False) for name in named(outputs, "output")),
    ]


def _compare(
    expected: list[list[jax.Array]], found: list[list[jax.Array]], leaves: Sequence[_Leaf]
) -> list[Difference]:
    """Compare on the device, so that only a few numbers a layer come to the host."""
    ours, others = [*chain(*expected)], [*chain(*found)]
    for one, other, leaf in zip(ours, others, leaves, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            _refuse_shapes(leaf.name, one, other)
    compared = _compare_leaves(ours, others, tuple(leaf.is_stacked for leaf in leaves))
    return [
        Difference(
            leaf=leaf.name,
            layer=layer if leaf.is_stacked else None,
            difference=float(worst),
            scale=float(scale),
            num_elements=int(num),
            rounding=_rounding(ours[i].dtype),
        )
        for i, (leaf, rows) in enumerate(zip(leaves, jax.device_get(compared), strict=True))
        for layer, (worst, scale, num) in enumerate(zip(*rows, strict=True))
    ]


@jax.jit(static_argnums=2)
def _compare_leaves(
    ours: list[jax.Array], others: list[jax.Array], are_stacked: tuple[bool, ...]
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    return [_compare_leaf(*triple) for triple in zip(ours, others, are_stacked, strict=True)]


def _compare_leaf(
    one: jax.Array, other: jax.Array, is_stacked: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Largest absolute difference, largest absolute element, number of other bits; per layer."""
    is_other = _bits_differ(one, other)
    wide = jnp.promote_types(one.dtype, jnp.float32)
    gap = jnp.abs(one.astype(wide) - other.astype(wide))
    # The same bits never differ, even if they are no number; a lone NaN differs by all there is.
    gap = jnp.where(is_other, jnp.where(jnp.isnan(gap), jnp.inf, gap), 0)
    scale = jnp.nan_to_num(jnp.abs(one.astype(wide)), posinf=0)
    axes = _axes(one, is_stacked)
    return (
        jnp.atleast_1d(jnp.max(gap, axis=axes, initial=0)),
        jnp.atleast_1d(jnp.max(scale, axis=axes, initial=0)),
        jnp.atleast_1d(jnp.sum(is_other, axis=axes)),
    )


def _axes(leaf: jax.Array, is_stacked: bool) -> tuple[int, ...]:
    """All axes but that of layers; reshaping would gather a leaf that is sharded."""
    return tuple(range(1 if is_stacked else 0, leaf.ndim))


def _rounding(dtype: jnp.dtype) -> float:
    kind = jnp.finfo(dtype)
    return ROUNDINGS.get(kind.bits // 8, 1) * float(kind.eps)


def _bits_differ(one: jax.Array, other: jax.Array) -> jax.Array:
    if jnp.issubdtype(one.dtype, jnp.complexfloating):
        return _bits_differ(one.real, other.real) | _bits_differ(one.imag, other.imag)
    bits = jnp.dtype(f"uint{8 * one.dtype.itemsize}")
    as_bits = jax.lax.bitcast_convert_type
    return as_bits(one, bits) != as_bits(other, bits)


def _check_tells_layers_apart(
    expected: list[list[jax.Array]], leaves: Sequence[_Leaf], layers: int
) -> None:
    """Refuse gradients that a reversed stack would have as well."""
    gradients = leaves[: len(expected[0])]
    are_stacked = tuple(leaf.is_stacked for leaf in gradients)
    described = jax.device_get(_describe_leaves(expected[0], are_stacked))
    for leaf, (is_finite, _) in zip(gradients, described, strict=True):
        if not is_finite:
            raise ValueError(
                f"the gradient of {leaf.name} is not finite even without offloading, so nothing "
                "can be compared. Pass weights and x of the scale that they have in training."
            )
    for leaf, (_, sizes) in zip(gradients, described, strict=True):
        if leaf.is_stacked and sizes.all() and len(set(sizes.tolist())) == layers:
            return
    raise ValueError(
        "no gradient differs between all layers, so a reversed stack would not show. Pass params "
        "whose layers differ (or layers=, which makes them so) and an x that is not zero."
    )


@jax.jit(static_argnums=1)
def _describe_leaves(
    gradients: list[jax.Array], are_stacked: tuple[bool, ...]
) -> list[tuple[jax.Array, jax.Array]]:
    """Whether all elements are finite, and the sum of absolute elements per layer."""
    return [
        (
            jnp.all(jnp.isfinite(gradient)),
            jnp.sum(jnp.abs(gradient), _axes(gradient, is_stacked), jnp.float32),
        )
        for gradient, is_stacked in zip(gradients, are_stacked, strict=True)
    ]


def _count_layers(params: Tree) -> int:
    lengths: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        shape = jnp.shape(leaf)
        lengths["params" + jax.tree_util.keystr(path)] = shape[0] if shape else 0
    if len(set(lengths.values())) > 1:
        shortest, longest = (
            min(lengths, key=lengths.__getitem__),
            max(lengths, key=lengths.__getitem__),
        )
        raise ValueError(
            f"{shortest} has {lengths[shortest]} layers and {longest} has {lengths[longest]}; each "
            "leaf of params has the layers as its first axis. Pass layers= if these are the "
            "parameters of one layer."
        )
    layers = next(iter(lengths.values()), 0)
    if layers < MIN_LAYERS:
        raise ValueError(
            f"params has {layers} layers; at least {MIN_LAYERS} are needed, because a stack of "
            "fewer looks the same reversed and shifted. Pass one layer's parameters and layers=3."
        )
    return layers


def _largest(differences: Sequence[Difference]) -> float:
    return max((difference.relative for difference in differences), default=0.0)


def _refuse_shapes(name: str, one: jax.Array, other: jax.Array) -> NoReturn:
    raise ValueError(
        f"{name} is {one.dtype}{list(one.shape)} in the plain stack and "
        f"{other.dtype}{list(other.shape)} in the other; they must be the same function. Pass the "
        "block and its rematted form."
    )
