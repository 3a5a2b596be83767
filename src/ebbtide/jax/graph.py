"""A jaxpr as a flat list of operations with their cost: what observing a block reads.

Nested jits, shard_maps and the like are laid out in place. Values are numbered; a value inside a
shard_map is one shard's. Costs are counts of what the mathematics does: 2 x M x N x K for a matrix
product, one for each element of anything else, and all operands read and written once. XLA fuses,
so that the bytes are an upper bound; they share a measured time out and are no time themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, Literal

from ebbtide.jax.policy import num_bytes_of

NO_VALUE = -1
"""Stands for a literal."""

COLLECTIVES = frozenset(
    {"psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "pgather", "all_gather"}
    | {"all_gather_invariant", "all_to_all", "ragged_all_to_all", "psum_scatter", "reduce_scatter"}
)
"""Primitives that talk to other devices."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
"""Primitives that are matrix products."""

_LAID_OUT = frozenset(
    {"jit", "pjit", "shard_map", "custom_jvp_call", "custom_vjp_call", "closed_call", "core_call"}
    | {"remat", "remat2", "checkpoint", "custom_lin"}
)
_REPEATED = frozenset({"scan", "while", "cond"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an operation does."""

    flops: int = 0
    """Floating-point operations of matrix products; 0 for all else."""
    num_bytes: int = 0
    """Bytes read and written."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(flops=self.flops + other.flops, num_bytes=self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One equation."""

    primitive: str
    """What it does."""
    name: str
    """Of a `name` equation: the name; empty otherwise."""
    inputs: tuple[int, ...]
    """Values that it reads; `NO_VALUE` for literals."""
    outputs: tuple[int, ...]
    """Values that it makes."""
    cost: Cost
    """What that takes."""
    has_effect: bool
    """It does something beside making values, such as printing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A jaxpr laid out flat."""

    operations: tuple[Operation, ...]
    """In order."""
    inputs: tuple[int, ...]
    """The arguments' values."""
    outputs: tuple[int, ...]
    """The results' values; `NO_VALUE` for literals."""
    num_bytes: tuple[int, ...]
    """Bytes of each value."""


def flatten(jaxpr: Jaxpr) -> Graph:
    """Lay a jaxpr out flat."""
    sizes: list[int] = []
    operations: list[Operation] = []

    def new(variable: Any) -> int:
        sizes.append(num_bytes_of(variable.aval))
        return len(sizes) - 1

    def lay_out(inside: Jaxpr, arguments: Sequence[int]) -> list[int]:
        values: dict[Any, int] = {v: new(v) for v in inside.constvars}
        values.update(zip(inside.invars, arguments, strict=True))

        def read(atom: Any) -> int:
            return NO_VALUE if isinstance(atom, Literal) else values[atom]

        for eqn in inside.eqns:
            inputs = tuple(read(atom) for atom in eqn.invars)
            name = eqn.primitive.name
            nested = _nested(eqn) if name in _LAID_OUT else None
            if nested is not None and len(nested.invars) == len(inputs):
                values.update(zip(eqn.outvars, lay_out(nested, inputs), strict=True))
                continue
            outputs = tuple(new(v) for v in eqn.outvars)
            values.update(zip(eqn.outvars, outputs, strict=True))
            operations.append(
                Operation(
                    primitive=name,
                    name=str(eqn.params["name"]) if name == "name" else "",
                    inputs=inputs,
                    outputs=outputs,
                    cost=_cost_of(eqn),
                    has_effect=bool(eqn.effects),
                )
            )
        return [read(atom) for atom in inside.outvars]

    inputs = tuple(new(v) for v in jaxpr.invars)
    outputs = tuple(lay_out(jaxpr, inputs))
    return Graph(
        operations=tuple(operations), inputs=inputs, outputs=outputs, num_bytes=tuple(sizes)
    )


def _nested(eqn: Any) -> Jaxpr | None:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            inner = eqn.params[key]
            inner = getattr(inner, "jaxpr", inner)
            return inner if isinstance(inner, Jaxpr) else None
    return None


def _cost_of(eqn: Any) -> Cost:
    name = eqn.primitive.name
    if name in _REPEATED:
        return _cost_of_repeated(eqn)
    moved = sum(num_bytes_of(a.aval) for a in (*eqn.invars, *eqn.outvars) if hasattr(a, "aval"))
    shapes = [a.aval.shape for a in eqn.invars]
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(shapes[0][axis] for axis in contracted)
        return Cost(flops=2 * depth * math.prod(eqn.outvars[0].aval.shape), num_bytes=moved)
    if name in ("ragged_dot", "ragged_dot_general"):
        # Each row of the left side meets one group of the right: [M, K] and [G, K, N].
        return Cost(flops=2 * math.prod(shapes[0]) * shapes[1][-1], num_bytes=moved)
    if name == "conv_general_dilated":
        spec = eqn.params["dimension_numbers"].rhs_spec
        per_output = math.prod(shapes[1]) // max(shapes[1][spec[0]], 1)
        return Cost(flops=2 * per_output * math.prod(eqn.outvars[0].aval.shape), num_bytes=moved)
    if "attention" in name and len(shapes) >= 3 and all(len(s) == 4 for s in shapes[:3]):
        # Scores and their mix: [B, T, N, H] against [B, S, K, H]; backward has five products.
        products = 10 if "bwd" in name else 4
        # A kernel leaves out the half that a causal mask hides.
        seen = 2 if "CAUSAL" in str(eqn.params.get("mask_type", "")) else 1
        flops = products * math.prod(shapes[0]) * shapes[1][1] // seen
        return Cost(flops=flops, num_bytes=moved)
    return Cost(num_bytes=moved)


def _cost_of_repeated(eqn: Any) -> Cost:
    bodies: list[Any] = []
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if isinstance(inner, Jaxpr):
                bodies.append(inner)
    costs = [sum((op.cost for op in flatten(body).operations), Cost()) for body in bodies]
    if eqn.primitive.name == "cond":
        return max(costs, key=lambda cost: (cost.flops, cost.num_bytes), default=Cost())
    # A while loop says nowhere how often it runs: once is counted.
    times = int(eqn.params.get("length", 1))
    total = sum(costs, Cost())
    return Cost(flops=times * total.flops, num_bytes=times * total.num_bytes)
