"""From decisions to a policy of jax, by name, and the check that it does what it says.

Only `save_and_offload_only_these_names`: jax's coming remat never calls a policy that is a Python
function, and recomputes everything without a word. jax itself accepts names that no value has, and
any text as a memory kind, and then moves nothing; here both are errors.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var

from ebbtide.errors import PlanError
from ebbtide.jax.internals import NAME_PRIMITIVE, refuse_ignored_names
from ebbtide.jax.names import with_names
from ebbtide.naming import nearest, unknown_name_message
from ebbtide.plan import Decision, Plan
from ebbtide.units import format_bytes

HOST_KIND = "pinned_host"
"""The one memory kind that jax maps to host memory; any other stays on the device in silence."""

SMALL_BYTES = 64 * 1024
"""An unnamed residual of less is no matter."""

NUM_SHOWN = 5

_COPIES = frozenset({"device_put", "reduce_precision"})
"""Primitives that jax puts between a named value and the residual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPolicy:
    """What stays on the device and what goes to the host, by name; the rest is recomputed.

    Raises:
        PlanError: A name is in both.
    """

    saved: tuple[str, ...]
    """Kept on the device."""
    offloaded: tuple[str, ...]
    """Kept in pinned host memory."""

    def __post_init__(self) -> None:
        both = sorted(set(self.saved) & set(self.offloaded))
        if both:
            raise PlanError(
                f"{', '.join(both)}: to be saved and to be offloaded; a value is in one place. "
                "Take it out of one of them."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """All names that the policy decides for."""
        return (*self.saved, *self.offloaded)

    def to_jax(self, memory_kind: str = HOST_KIND) -> Callable[..., Any]:
        """Return the policy for `jax.checkpoint(policy=...)`.

        Args:
            memory_kind: Where offloaded values go: `pinned_host`, there is no other.

        Raises:
            PlanError: Another memory kind.
            RuntimeStateError: jax is set to ignore names (`JAX_REMAT3`).
        """
        if memory_kind != HOST_KIND:
            message = unknown_name_message("memory kind", memory_kind, (HOST_KIND,))
            raise PlanError(f"{message}. jax takes any other for the device, and moves nothing.")
        refuse_ignored_names()
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.saved),
            names_which_can_be_offloaded=list(self.offloaded),
            offload_src="device",
            offload_dst=memory_kind,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One value that a block's backward keeps."""

    name: str
    """Its name; empty where it has none."""
    shape: tuple[int, ...]
    """Of the value; inside a shard_map there is one more, leading axis."""
    dtype: str
    """Of the value."""
    num_bytes: int
    """Of the value, on all devices together."""
    is_on_host: bool
    """Whether it waits in host memory."""
    is_argument: bool
    """Whether it is an argument of the block: it is there in any case, as the scan's carry or as a
    parameter."""


def residuals_of(fun: Callable[..., Any], *args: Any) -> tuple[Residual, ...]:
    """Return what the backward of a function keeps, each value once.

    Args:
        fun: Differentiable in all its arguments that can be; a block, or one under
            `jax.checkpoint`.
        args: Its arguments, or shapes and dtypes.
    """
    closed, shape = jax.make_jaxpr(lambda *a: jax.vjp(fun, *a), return_shape=True)(*args)
    jaxpr = closed.jaxpr
    num_kept = len(jax.tree.leaves(shape[1]))
    found: dict[Any, Residual] = {}
    for atom in jaxpr.outvars[len(jaxpr.outvars) - num_kept :]:
        if isinstance(atom, Literal) or atom in found:
            continue
        name, source = _name_of(jaxpr, atom)
        aval = atom.aval
        found[atom] = Residual(
            name=name,
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            num_bytes=num_bytes_of(aval),
            is_on_host=aval.memory_space == jax.memory.Space.Host,
            is_argument=source in jaxpr.invars or source in jaxpr.constvars,
        )
    return tuple(found.values())


def num_bytes_of(aval: Any) -> int:
    """Return the bytes of a value; 0 for what has none, such as the keys of random numbers."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0
    num = 1
    for length in aval.shape:
        num *= int(length)
    return num * aval.dtype.itemsize


def check_policy(
    policy: NamedPolicy, block: Callable[..., Any], params: Any, x: Any, *rest: Any
) -> tuple[Residual, ...]:
    """Raise unless a block's backward keeps just what the policy names, where it says.

    Traces the block under the policy and compares nothing but what jax will do: no program is
    compiled, so that the copies overlap is not shown by it.

    Args:
        policy: What should be kept.
        block: `block(params, x, *rest)`, without names placed.
        params: Its parameters, or shapes and dtypes.
        x: Its input.
        rest: Its other arguments.

    Returns:
        The residuals.

    Raises:
        PlanError: A name that no value or no residual carries, a value that should be on the host
            and is not, or a large residual that nothing names.
        RuntimeStateError: jax is set to ignore names (`JAX_REMAT3`).
    """
    named = with_names(block, policy.names)
    rematted = jax.checkpoint(named, policy=policy.to_jax(), prevent_cse=False)
    residuals = residuals_of(rematted, params, x, *rest)
    by_name = {r.name: r for r in residuals}
    for name in policy.names:
        if name not in by_name:
            close = ", ".join(nearest(name, [n for n in by_name if n])[:NUM_SHOWN]) or "none"
            raise PlanError(
                f"{name!r} is a value of the block, but no residual carries it: backward makes do "
                f"without it, and saving or offloading it does nothing. Residuals with a name: "
                f"{close}. Take it out of the policy."
            )
    for name in policy.offloaded:
        if not by_name[name].is_on_host:
            raise PlanError(
                f"{name!r} should be offloaded, and jax keeps it on the device. "
                "Report this with the jax version."
            )
    refuse_unnamed(residuals)
    return residuals


def refuse_unnamed(residuals: Collection[Residual]) -> None:
    """Raise for a large residual that has no name and is no argument of the block.

    Raises:
        PlanError: There is one.
    """
    large = [
        r for r in residuals if not r.name and not r.is_argument and r.num_bytes >= SMALL_BYTES
    ]
    if large:
        shown = ", ".join(
            f"{r.dtype}{list(r.shape)} of {format_bytes(r.num_bytes)}" for r in large[:NUM_SHOWN]
        )
        raise PlanError(
            f"backward keeps values on the device that no name stands for: {shown}. "
            "Name them in the block with jax.ad_checkpoint.checkpoint_name."
        )


def policy_of(plan: Plan, prefix: str, inputs: Collection[str] = ()) -> NamedPolicy:
    """Return the policy of one block of a plan.

    Args:
        plan: Its decisions.
        prefix: What the block's activations begin with, such as `layers.0.`.
        inputs: Names of the block's inputs without it. Where they stay on the device they are no
            part of the policy: the scan's carry, or the block before, keeps them.

    Raises:
        PlanError: The plan has a disk decision, which jax cannot carry out.
    """
    saved: list[str] = []
    offloaded: list[str] = []
    for name, decision in plan.decisions.items():
        if not name.startswith(prefix):
            continue
        local = name.removeprefix(prefix)
        if decision is Decision.DISK:
            raise PlanError(
                f"plan {plan.name!r} puts {name} on disk, and jax moves values to host memory "
                "only. Plan for a machine without a disk."
            )
        if decision is Decision.HOST:
            offloaded.append(local)
        elif decision is Decision.KEEP and local not in inputs:
            saved.append(local)
    return NamedPolicy(saved=tuple(saved), offloaded=tuple(offloaded))


def _name_of(jaxpr: Jaxpr, atom: Any) -> tuple[str, Any]:
    """Return the name of what a variable holds, and the variable that it is a copy of."""
    makers = {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}
    while isinstance(atom, Var) and atom in makers:
        eqn, i = makers[atom]
        if eqn.primitive.name == NAME_PRIMITIVE:
            return str(eqn.params["name"]), atom
        if eqn.primitive.name in _COPIES:
            atom = eqn.invars[0]
            continue
        inner = eqn.params.get("jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        if isinstance(inner, Jaxpr) and len(inner.outvars) == len(eqn.outvars):
            name, source = _name_of(inner, inner.outvars[i])
            if source in inner.invars and len(inner.invars) == len(eqn.invars):
                atom = eqn.invars[inner.invars.index(source)]
                if not name:
                    continue
            return name, atom
        break
    return "", atom
