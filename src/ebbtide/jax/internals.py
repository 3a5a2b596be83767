"""Every name of jax that is not documented, in one place, with what ebbtide relies on.

Looked up once, when this module is imported: a jax that lacks one of them is refused then, with
its name and jax's version, and not by a wrong result later.
"""

import importlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn

from ebbtide.errors import RuntimeStateError

Array = Any
"""A jax array or tracer: their classes are not what type checkers can use."""


def look_up(module: str, name: str) -> Any:
    """Return a name of jax that is not documented.

    Raises:
        RuntimeStateError: This jax has no such name.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RuntimeStateError(
            f"jax {jax.__version__} has no {module}.{name}, which ebbtide.jax relies on "
            f"({error}). Use jax 0.10.2 or 0.11.2, or a newer ebbtide."
        ) from error


# Lists what the backward of a function keeps: pairs of an aval, with `memory_space`, and a text.
_SAVED_RESIDUALS: Callable[..., list[tuple[Any, str]]] = look_up(
    "jax._src.ad_checkpoint", "saved_residuals"
)

NAME_PRIMITIVE = "name"
"""The primitive of `checkpoint_name`; its parameter `name` is the name."""

_PROBE_NAME = "ebbtide_probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedResidual:
    """What jax itself says of one residual."""

    shape: tuple[int, ...]
    """Of the value; inside a shard_map there is one more, leading axis."""
    dtype: str
    """Of the value."""
    is_on_host: bool
    """Whether it waits in host memory."""
    is_argument: bool
    """Whether it is an argument of the function, which is there in any case."""
    description: str
    """Where it is from, in jax's words."""


def saved_residuals(fun: Callable[..., Any], *args: Any) -> tuple[SavedResidual, ...]:
    """Return what the backward of `fun` keeps, as jax says.

    Args:
        fun: Any differentiable function.
        args: Arrays, or shapes and dtypes.
    """
    return tuple(
        SavedResidual(
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            is_on_host=aval.memory_space == jax.memory.Space.Host,
            is_argument=description.startswith("from the argument"),
            description=description,
        )
        for aval, description in _SAVED_RESIDUALS(fun, *args)
    )


def bind(eqn: JaxprEqn, values: Sequence[Array]) -> list[Array]:
    """Run one equation on values; returns one for each of its outputs."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Up to some version: functions that are passed first, and the parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    result = eqn.primitive.bind(*functions, *values, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


def scope_of(eqn: JaxprEqn) -> str:
    """Return the named scopes around an equation, with `/` between them; may be empty."""
    return str(eqn.source_info.name_stack)


@contextmanager
def context_of(eqn: JaxprEqn) -> Generator[None]:
    """Enter what was around an equation when it was traced: named scopes, where to compute."""
    scope = scope_of(eqn)
    with jax.named_scope(scope) if scope else nullcontext(), eqn.ctx.manager:
        yield


def refuse_ignored_names() -> None:
    """Raise where jax ignores names inside a rematerialised function.

    The coming remat (`JAX_REMAT3`) looks at no name inside. Asked of the switch, and of a tiny
    function, in case the switch goes and what it does stays.

    Raises:
        RuntimeStateError: Names are ignored.
    """
    is_on = bool(getattr(jax.config, "jax_remat3", False))  # older and newer jax may lack it
    if is_on or not _are_names_honoured():
        why = "JAX_REMAT3 (jax_remat3) is on" if is_on else f"jax {jax.__version__} does so"
        raise RuntimeStateError(
            f"names inside jax.checkpoint are ignored: {why}. Everything would be recomputed and "
            "nothing offloaded, without an error. Unset JAX_REMAT3, or call "
            "jax.config.update('jax_remat3', False) before planning."
        )


@cache
def _are_names_honoured() -> bool:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_PROBE_NAME],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def probe(x: Array) -> Array:
        return jnp.sin(checkpoint_name(jnp.sin(x), _PROBE_NAME))

    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    return any(r.is_on_host for r in saved_residuals(jax.checkpoint(probe, policy=policy), shape))
