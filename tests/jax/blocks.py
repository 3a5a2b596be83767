"""Small blocks that the tests of ebbtide.jax share."""

# B batch, T tokens, D model width, F feed-forward width, N query heads, K key heads, H head width

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ebbtide.jax import nameable, reference_attention

Array = Any
Block = Callable[..., Any]

B, T, D, F, N, K, H = 2, 4, 16, 32, 4, 2, 4
LAYERS = 3

SHAPES = {
    "q": (D, N, H),
    "k": (D, K, H),
    "v": (D, K, H),
    "o": (N, H, D),
    "gate": (D, F),
    "up": (D, F),
    "down": (F, D),
    "attention_norm": (D,),
    "mlp_norm": (D,),
}

# XLA for CPUs leaves out pairs of casts, and contracts other products and sums, when it fuses
# other operations; both change last bits, also with plain jax.checkpoint.
EXACT = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


def make_params(dtype: Any, names: tuple[str, ...] = tuple(SHAPES)) -> dict[str, Array]:
    """Weights that differ from layer to layer, stacked."""
    random = np.random.default_rng(1)
    return {
        name: jnp.asarray(0.3 * random.standard_normal((LAYERS, *SHAPES[name])), dtype)
        for name in names
    }


def make_input(dtype: Any) -> Array:
    return jnp.asarray(np.random.default_rng(2).standard_normal((B, T, D)), dtype)


def shapes_of_one(params: Any) -> Any:
    """Shapes and dtypes of one layer of stacked parameters."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params)


def rms_norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return normed.astype(x.dtype) * scale


def attend(q: Array, k: Array, v: Array) -> Array:
    return nameable(lambda q, k, v: reference_attention(q, k, v)[0])(q, k, v)


def llama_block(params: dict[str, Array], x_BTD: Array) -> Array:
    """Grouped-query attention and SwiGLU."""
    with jax.named_scope("attn"):
        h = rms_norm(x_BTD, params["attention_norm"])
        q = jnp.einsum("btd,dnh->btnh", h, params["q"])
        k = jnp.einsum("btd,dkh->btkh", h, params["k"])
        v = jnp.einsum("btd,dkh->btkh", h, params["v"])
        mixed = attend(q, k, v)
        x_BTD = x_BTD + jnp.einsum("btnh,nhd->btd", mixed, params["o"])
    with jax.named_scope("mlp"):
        h = rms_norm(x_BTD, params["mlp_norm"])
        gate, up = h @ params["gate"], h @ params["up"]
        return x_BTD + (jax.nn.silu(gate) * up) @ params["down"]


LLAMA_KEPT = ("attn.add.1", "mlp.dot_general.0")
LLAMA_MOVED = (
    "input",
    "attn.btd_dnh_btnh.dot_general.0",
    "attention.out",
    "attention.residual.0",
)

MLP = ("gate", "down")


@jax.jit
def jitted_mlp(gate: Array, down: Array, x: Array) -> Array:
    with jax.named_scope("inside"):
        return jnp.tanh(x @ gate) @ down


def nested_block(params: dict[str, Array], x: Array) -> Array:
    """A block whose work is inside a jit, called twice."""
    with jax.named_scope("mlp"):
        once = x + jitted_mlp(params["gate"], params["down"], x)
        return once + jitted_mlp(params["gate"], params["down"], once)


def user_named_block(params: dict[str, Array], x: Array) -> Array:
    """A block with names of its author; one of them on a value that nothing reads."""
    x = checkpoint_name(x, "decoder_layer_input")
    wide = x @ params["gate"]
    checkpoint_name(wide, "wide")
    act = checkpoint_name(jax.nn.silu(wide), "act")
    return x + act @ params["down"]


def dropout_block(params: dict[str, Array], x: Array, key: Array) -> Array:
    """A block that drops elements, by a mask from its key."""
    wide = jnp.tanh(x @ params["gate"])
    kept = jax.random.bernoulli(key, 0.5, wide.shape)
    return x + jnp.where(kept, wide * 2, 0) @ params["down"]


def scan_stack(block: Block) -> Block:
    def run(params: Any, x: Array, *rest: Array) -> Array:
        def body(h: Array, slices: tuple[Any, ...]) -> tuple[Array, None]:
            return block(slices[0], h, *slices[1:]), None

        return jax.lax.scan(body, x, (params, *rest))[0]

    return run


def unrolled_stack(block: Block) -> Block:
    def run(params: Any, x: Array, *rest: Array) -> Array:
        for i in range(LAYERS):
            x = block(jax.tree.map(lambda a: a[i], params), x, *(r[i] for r in rest))  # noqa: B023
        return x

    return run


def gradients(stack: Block, params: Any, x: Array, *rest: Array) -> Any:
    """Loss and gradients of a stack, compiled so that equal operations give equal bits."""

    def loss(params: Any, x: Array) -> Array:
        return jnp.sum(stack(params, x, *rest).astype(jnp.float32) ** 2)

    return jax.jit(jax.value_and_grad(loss, (0, 1)), compiler_options=EXACT)(params, x)


def differing(one: Any, other: Any) -> list[str]:
    """Paths of arrays that have not the same bits."""
    pairs = zip(
        jax.tree_util.tree_flatten_with_path(one)[0],
        jax.tree.leaves(other),
        strict=True,
    )
    return [
        jax.tree_util.keystr(path)
        for (path, a), b in pairs
        if np.asarray(a).tobytes() != np.asarray(b).tobytes()
    ]
