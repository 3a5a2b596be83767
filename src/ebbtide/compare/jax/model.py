"""A language model as pure functions of its parameters: stacks of equal blocks that are scanned.

flax's layers hold the mathematics; what is trained is a plain tree of arrays, each stack's with a
leading axis of layers. Which form of a block runs is the caller's choice: the block itself, or
one under `jax.checkpoint`.
"""

# B batch, T tokens, D model width, V token ids

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ebbtide.compare.jax.deepseek import DenseBlock, MoeBlock
from ebbtide.compare.jax.layers import AttentionKind, linear_options, make_attend, make_norm
from ebbtide.compare.jax.llama import LlamaBlock
from ebbtide.compare.jax.shapes import DeepseekShape, LlamaShape, Shape

ENDS = "ends"
"""The parameters outside of the stacks: embedding, last norm, head."""

SPREAD = 0.02
"""Standard deviation of random weights."""

MAX_LEAVES = 1000
"""More than any model here has: each leaf has a seed of its own."""

Params = dict[str, Any]
"""`ENDS` and each stack's name, with a tree of arrays each."""

Block = Callable[..., Any]
"""`block(params of one layer, x [B, T, D]) -> x`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Equal layers that run one after another."""

    name: str
    """`layers`, `dense` or `moe`."""
    layers: int
    """How many."""
    block: Block
    """One of them."""


class Ends(nnx.Module):
    """Embedding, last norm, and the head where it is not the embedding."""

    def __init__(self, shape: Shape, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(
            shape.vocab_size, shape.d_model, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.norm = make_norm(shape.d_model, shape.norm_epsilon, dtype, rngs)
        is_tied = isinstance(shape, LlamaShape) and shape.is_tied
        self.head = (
            None
            if is_tied
            else nnx.Linear(shape.d_model, shape.vocab_size, rngs=rngs, **linear_options(dtype))
        )

    def write_logits(self, x_BTD: Any) -> Any:
        """Return [B, T, V] in the model's type."""
        normed = self.norm(x_BTD)
        return self.embed.attend(normed) if self.head is None else self.head(normed)


class LanguageModel:
    """The functions of one model; it holds no arrays."""

    def __init__(self, shape: Shape, *, attention: AttentionKind, dtype: Any) -> None:
        """Make the functions.

        Args:
            shape: The dimensions.
            attention: The kernel.
            dtype: Of weights, activations and gradients.
        """
        attend = make_attend(attention)
        self.shape = shape
        self._makers: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
            ENDS: partial(Ends, shape, dtype)
        }
        layers: dict[str, int] = {}
        match shape:
            case LlamaShape():
                self._makers["layers"] = lambda rngs: LlamaBlock(shape, attend, dtype, rngs)
                layers["layers"] = shape.num_layers
            case DeepseekShape():
                self._makers["dense"] = lambda rngs: DenseBlock(shape, attend, dtype, rngs)
                self._makers["moe"] = lambda rngs: MoeBlock(shape, attend, dtype, rngs)
                layers |= {"dense": shape.num_dense_layers, "moe": shape.num_moe_layers}
            case _:
                assert_never(shape)
        self.stacks = tuple(
            Stack(
                name=name,
                layers=num,
                block=_as_function(self._makers[name], lambda block, x: block(x)),
            )
            for name, num in layers.items()
        )
        self._embed = _as_function(self._makers[ENDS], lambda ends, ids: ends.embed(ids))
        self._head = _as_function(self._makers[ENDS], lambda ends, x: ends.write_logits(x))

    @property
    def plain_blocks(self) -> dict[str, Block]:
        """Each stack's block as it is, by the stack's name."""
        return {stack.name: stack.block for stack in self.stacks}

    def draw_params(self, seed: int) -> Params:
        """Draw all weights on the device; the same seed gives the same bits.

        Norms are ones, all else is spread evenly, with a standard deviation of `SPREAD`.
        """
        return jax.jit(self._draw, static_argnums=0)(seed)

    def describe_params(self) -> Params:
        """Return shapes and dtypes of all weights; nothing is drawn."""
        layers = {stack.name: (stack.layers,) for stack in self.stacks}
        return {
            name: jax.tree.map(
                lambda leaf, name=name: jax.ShapeDtypeStruct(
                    (*layers.get(name, ()), *leaf.shape), leaf.dtype
                ),
                jax.eval_shape(lambda make=make: nnx.to_pure_dict(nnx.state(make(nnx.Rngs(0))))),
            )
            for name, make in self._makers.items()
        }

    def embed(self, params: Params, ids_BT: Any) -> Any:
        """Return what goes into the first block, [B, T, D]."""
        return self._embed(params[ENDS], ids_BT)

    def write_logits(self, blocks: Mapping[str, Block], params: Params, ids_BT: Any) -> Any:
        """Return [B, T, V].

        Args:
            blocks: The form of each stack's block to run.
            params: All weights.
            ids_BT: Token ids.
        """
        x_BTD = self.embed(params, ids_BT)
        for stack in self.stacks:
            x_BTD = _scan(blocks[stack.name], params[stack.name], x_BTD)
        return self._head(params[ENDS], x_BTD)

    def find_loss(self, blocks: Mapping[str, Block], params: Params, ids_BT: Any) -> Any:
        """Return the mean loss of the next token, in nats; arguments as of `write_logits`."""
        logits = self.write_logits(blocks, params, ids_BT)[:, :-1].astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids_BT[:, 1:])
        return losses.mean()

    def _draw(self, seed: int) -> Params:
        # flax's own initial values would be right too, and take XLA half a minute to compile.
        leaves, tree = jax.tree_util.tree_flatten_with_path(self.describe_params())
        drawn = [_draw_leaf(path, leaf, seed, i) for i, (path, leaf) in enumerate(leaves)]
        return jax.tree.unflatten(tree, drawn)


def count_params(params: Params) -> int:
    """Count the elements of all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def shapes_of_one(stacked: Any) -> Any:
    """Return shapes and dtypes of one layer of a stack's parameters."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)


def _draw_leaf(path: Any, leaf: Any, seed: int, number: int) -> Any:
    if path[-1].key == "scale":
        return jnp.ones(leaf.shape, leaf.dtype)
    key = jax.random.key(seed * MAX_LEAVES + number, impl="rbg")
    bound = SPREAD * 3**0.5
    return jax.random.uniform(key, leaf.shape, jnp.float32, -bound, bound).astype(leaf.dtype)


def _scan(block: Block, params: Any, x_BTD: Any) -> Any:
    return jax.lax.scan(lambda h, layer: (block(layer, h), None), x_BTD, params)[0]


def _as_function(
    make: Callable[[nnx.Rngs], nnx.Module], run: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """Return `(parameters, input) -> output` of a module, without making its weights."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def call(params: Any, given: Any) -> Any:
        return run(nnx.merge(graph, params), given)

    return call
