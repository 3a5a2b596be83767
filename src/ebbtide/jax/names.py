"""Put names onto the values of a block, without a change to the block's code.

A policy of `jax.checkpoint` decides by name, and most values have none. So the block is traced
when it is called, and its equations are run again one by one, with `checkpoint_name` on the
outputs that are asked for. The equations are the same ones in the same order, so the results have
the same bits.

A value's name is its named scopes, its primitive, and a number among the equal ones:
`mlp.dot_general.0`. A nested jit counts as a scope. Names that the user placed stay, and stand for
the value that they were placed on, for all that read it. The block's input is `input`. What does
not depend on the input gets no name: it comes from parameters, tables and random keys, is
recomputed in any case, and so a dropout mask is made again from its key.

Names are placed inside nested jits and shard_maps, and on the residuals of a `custom_vjp`
(`ebbtide.jax.attention.nameable`). Of a `custom_jvp`, a scan, a while loop, a cond and a nested
checkpoint only the outputs get names: what is inside has no name.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ebbtide.errors import PlanError
from ebbtide.jax.attention import nameable
from ebbtide.jax.internals import NAME_PRIMITIVE, Array, bind, context_of, scope_of
from ebbtide.naming import nearest
from ebbtide.trace.names import name_scope

INPUT = "input"
"""The name of a block's input; of one with several arrays their paths follow: `input.hidden`."""

VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient"})
"""Primitives whose output is the same bytes: the value that they are made from has the name."""

_JITS = frozenset({"jit", "pjit"})
_NAMED_INSIDE = VIEWS | _JITS | {"shard_map", "custom_vjp_call"}
"""What makes their outputs names them, or they need no name of their own."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9]+")

NUM_SHOWN = 5
"""Names in a message: a block has a hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of a block's values."""

    all: tuple[str, ...]
    """In the order of the block's equations."""
    users: frozenset[str]
    """Those of them that the user placed."""


def with_names(
    block: Callable[..., Any],
    wanted: Collection[str] | None = None,
    *,
    on_names: Callable[[Names], None] | None = None,
) -> Callable[..., Any]:
    """Return the block with names on its values.

    It takes and returns what the block does, bit for bit, and works under jit, grad, vmap and
    scan. It traces the block at each call.

    Args:
        block: `block(params, x, *rest)`, traceable by jax; keyword arguments are passed on.
        wanted: The names to place; None for all.
        on_names: Called with all names that there are, at each call of the result.

    Raises:
        PlanError: At a call: one of `wanted` is none of the block's names.
    """
    asked = None if wanted is None else frozenset(wanted)

    def named(params: Any, x: Any, *rest: Any, **options: Any) -> Any:
        arguments = (params, x, *rest)
        leaves, tree = jax.tree.flatten(arguments)
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(arguments)[0]]
        is_input = [
            path[0].idx == 1 and _is_inexact(leaf) for path, leaf in zip(paths, leaves, strict=True)
        ]

        def flat(*values: Array) -> Any:
            return block(*jax.tree.unflatten(tree, values), **options)

        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        users = names_in(closed.jaxpr)
        placer = _Placer(asked, users)
        inputs = _input_names(paths, is_input)
        next_inputs: dict[Any, str] = {}
        if jax.tree.structure(shape) == jax.tree.structure(x):
            of_x = (n for path, n in zip(paths, inputs, strict=True) if path[0].idx == 1)
            pairs = zip(closed.jaxpr.outvars, of_x, strict=True)
            next_inputs = {v: n for v, n in pairs if n is not None and not isinstance(v, Literal)}
        outputs, _ = placer.run(
            closed.jaxpr, closed.consts, leaves, is_input, "", inputs, next_inputs
        )
        placer.refuse_missing()
        if on_names is not None:
            on_names(Names(all=tuple(dict.fromkeys(placer.names)), users=frozenset(users)))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    named.__name__ = getattr(block, "__name__", "block")
    return named


def names_of(block: Callable[..., Any], params: Any, x: Any, *rest: Any) -> tuple[str, ...]:
    """Return every name that `with_names` can place, in the order of the block's equations.

    Args:
        block: As for `with_names`.
        params: Its parameters, or their shapes and dtypes.
        x: Its input, or shapes and dtypes.
        rest: Its other arguments.
    """
    found: list[Names] = []
    jax.eval_shape(with_names(block, on_names=found.append), params, x, *rest)
    return found[-1].all


class _Placer:
    """Runs the equations of one trace and names what they make."""

    def __init__(self, wanted: frozenset[str] | None, users: Collection[str]) -> None:
        self._wanted = wanted
        self._users = frozenset(users)
        """Names that the user placed: none of ours may be one of them."""
        self._counts: dict[str, int] = {}
        self._given: set[str] = set()
        """Names of the user that a value has."""
        self.names: list[str] = []
        """All that there are; some more than once."""

    def refuse_missing(self) -> None:
        """Raise for a name that was asked for and that no value has."""
        for name in sorted((self._wanted or frozenset()).difference(self.names)):
            close = ", ".join(nearest(name, self.names)[:NUM_SHOWN])
            raise PlanError(
                f"no value of the block has the name {name!r}; the nearest are {close}. "
                "ebbtide.jax.names_of(block, params, x) lists all."
            )

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Array],
        arguments: Sequence[Array],
        depends: Sequence[bool],
        scope: str,
        inputs: Sequence[str | None] = (),
        next_inputs: Mapping[Any, str] | None = None,
    ) -> tuple[list[Array], list[bool]]:
        """Run a jaxpr; returns its outputs, and whether each depends on the block's input.

        Args:
            jaxpr: What is run.
            consts: Its constants.
            arguments: Its arguments.
            depends: Whether each of these depends on the block's input.
            scope: What the names begin with.
            inputs: Names for the arguments.
            next_inputs: Names that outputs have as the next block's input.
        """
        values: dict[Any, Array] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))
        dependent = {v for v, does in zip(jaxpr.invars, depends, strict=True) if does}
        users = _names_by_value(jaxpr)
        named: dict[Any, str] = {}

        def write(variable: Any, value: Array, name: str | None) -> None:
            if users.get(variable, "") not in ("", *self._given):
                name = users[variable]
                self._given.add(name)
            if name is not None and _can_be_named(value):
                named[variable] = name
                value = self._place(value, name)
            values[variable] = value

        for variable, name in zip(jaxpr.invars, inputs):  # noqa: B905 (there may be none)
            write(variable, values[variable], name)
        for eqn in jaxpr.eqns:
            read = [a.val if isinstance(a, Literal) else values[a] for a in eqn.invars]
            flags = [not isinstance(a, Literal) and a in dependent for a in eqn.invars]
            if eqn.primitive.name == NAME_PRIMITIVE:
                is_first = named.get(eqn.invars[0]) != eqn.params["name"]
                values[eqn.outvars[0]] = self._keep_user_name(eqn, read, is_first=is_first)
                if flags[0]:
                    dependent.add(eqn.outvars[0])
                continue
            with context_of(eqn):
                inner = _join(scope, scope_of(eqn))
                base = self._number(_join(inner, eqn.primitive.name))
                with self._scope_of(eqn, base, users, next_inputs or {}):
                    outputs, made = self._run_equation(eqn, read, flags, inner)
                for i, variable in enumerate(eqn.outvars):
                    name = base if len(eqn.outvars) == 1 else f"{base}.out.{i}"
                    is_ours = made[i] and eqn.primitive.name not in _NAMED_INSIDE
                    write(variable, outputs[i], name if is_ours else None)
                    if made[i]:
                        dependent.add(variable)
        outputs = [a.val if isinstance(a, Literal) else values[a] for a in jaxpr.outvars]
        return outputs, [not isinstance(a, Literal) and a in dependent for a in jaxpr.outvars]

    def _scope_of(
        self, eqn: JaxprEqn, base: str, users: Mapping[Any, str], next_inputs: Mapping[Any, str]
    ) -> AbstractContextManager[Any]:
        """Return a scope with the name of what an equation makes, where that was asked for.

        A name is nothing that is run, so the compiled program has none; scopes it has, and a
        profiler's trace with it, so that copies can be told by name. What a block returns is made
        under the name of the next one's input.
        """
        asked = self._wanted or frozenset()
        if eqn.primitive.name in _NAMED_INSIDE:
            own = None
        elif len(eqn.outvars) == 1:
            name = users.get(eqn.outvars[0], base)
            own = name if name in asked else None
        else:
            # One operation makes them all: what it is called stands for each.
            names = (users.get(v, f"{base}.out.{i}") for i, v in enumerate(eqn.outvars))
            own = None if asked.isdisjoint(names) else base
        if own is None:
            given = (next_inputs[v] for v in eqn.outvars if v in next_inputs)
            own = next((name for name in given if name in asked), None)
        return nullcontext() if own is None else jax.named_scope(name_scope(own))

    def _place(self, value: Array, name: str) -> Array:
        self.names.append(name)
        is_wanted = self._wanted is None or name in self._wanted
        return checkpoint_name(value, name) if is_wanted else value

    def _keep_user_name(self, eqn: JaxprEqn, read: list[Array], *, is_first: bool) -> Array:
        """Run the user's own naming, unless the value has that name already, or another one has."""
        name = eqn.params["name"]
        is_wanted = self._wanted is None or name in self._wanted
        if is_wanted and not (is_first and name not in self._given):
            return read[0]
        self.names.append(name)
        self._given.add(name)
        return bind(eqn, read)[0]

    def _run_equation(
        self, eqn: JaxprEqn, inputs: list[Array], flags: list[bool], scope: str
    ) -> tuple[list[Array], list[bool]]:
        primitive = eqn.primitive.name
        everywhere = [any(flags)] * len(eqn.outvars)
        if primitive in _JITS:
            return self._run_jit(eqn, inputs, flags, scope)
        if primitive == "shard_map":
            return self._run_shard_map(eqn, inputs, flags, scope)
        if primitive == "custom_vjp_call" and any(flags):
            return self._run_custom_vjp(eqn, inputs, scope), everywhere
        return bind(eqn, inputs), everywhere

    def _run_custom_vjp(self, eqn: JaxprEqn, inputs: list[Array], scope: str) -> list[Array]:
        base = self._number(_join(scope, "custom_vjp"))

        def kernel(*values: Array) -> tuple[Array, ...]:
            return tuple(bind(eqn, values))

        own = _names_of_residuals(kernel, inputs)
        if own:
            # Its author named what it keeps.
            self.names += own
            self._given.update(own)
            return bind(eqn, inputs)
        call = nameable(kernel, base)
        self.names += _names_of_residuals(call, inputs)
        is_wanted = self._wanted is None or any(n.startswith(base + ".") for n in self._wanted)
        if not is_wanted:
            return bind(eqn, inputs)
        with jax.named_scope(name_scope(base)):
            return list(call(*inputs))

    def _run_jit(
        self, eqn: JaxprEqn, inputs: list[Array], flags: list[bool], scope: str
    ) -> tuple[list[Array], list[bool]]:
        closed = eqn.params["jaxpr"]
        name = str(eqn.params["name"])
        body = self._body(closed.jaxpr, closed.consts, flags, _join(scope, name))
        body.fun.__name__ = name
        shardings: dict[str, Any] = {}
        for key in ("in_shardings", "out_shardings"):
            given = [s if isinstance(s, jax.sharding.Sharding) else None for s in eqn.params[key]]
            if any(s is not None for s in given):
                shardings[key] = tuple(given)
        return list(jax.jit(body.fun, **shardings)(*inputs)), body.depends

    def _run_shard_map(
        self, eqn: JaxprEqn, inputs: list[Array], flags: list[bool], scope: str
    ) -> tuple[list[Array], list[bool]]:
        params = eqn.params
        inside = params["jaxpr"]
        body = self._body(inside, (), flags, scope)
        axes = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
        mapped = jax.shard_map(
            body.fun,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )
        return list(mapped(*inputs)), body.depends

    def _body(
        self, jaxpr: Jaxpr, consts: Sequence[Array], flags: list[bool], scope: str
    ) -> "_Body":
        counts, given = dict(self._counts), set(self._given)
        body = _Body()

        def run(*values: Array) -> tuple[Array, ...]:
            # jax may trace it more than once; each time it counts from where it began.
            self._counts, self._given = dict(counts), set(given)
            outputs, body.depends[:] = self.run(jaxpr, consts, values, flags, scope)
            return tuple(outputs)

        body.fun = run
        return body

    def _number(self, base: str) -> str:
        while True:
            number = self._counts.get(base, 0)
            self._counts[base] = number + 1
            if f"{base}.{number}" not in self._users:
                return f"{base}.{number}"


class _Body:
    """A function to trace, and what is known once it was."""

    def __init__(self) -> None:
        self.fun: Any = None
        self.depends: list[bool] = []


def _names_by_value(jaxpr: Jaxpr) -> dict[Any, str]:
    """Return the first name that the user placed on each value, by variable."""
    names: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == NAME_PRIMITIVE and not isinstance(eqn.invars[0], Literal):
            names.setdefault(eqn.invars[0], eqn.params["name"])
    return names


def names_in(jaxpr: Jaxpr) -> set[str]:
    """Return all names that are placed in a jaxpr, nested ones too."""
    names: set[str] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == NAME_PRIMITIVE:
            names.add(eqn.params["name"])
        for inner in eqn.params.values():
            inner_jaxpr = getattr(inner, "jaxpr", inner)
            if isinstance(inner_jaxpr, Jaxpr):
                names |= names_in(inner_jaxpr)
    return names


def _names_of_residuals(kernel: Callable[..., Any], inputs: Sequence[Array]) -> list[str]:
    """Return the names that a kernel's author gave to what its backward keeps, sorted."""
    return sorted(names_in(jax.make_jaxpr(lambda *values: jax.vjp(kernel, *values))(*inputs).jaxpr))


def _join(*parts: str) -> str:
    """Return scopes and a primitive as one name; a part may have several, with `/` or dots."""
    words = (
        _NOT_IN_NAMES.sub("_", word).strip("_")
        for part in parts
        for word in re.split(r"[./]", part)
    )
    return ".".join(word for word in words if word)


def _input_names(paths: Sequence[tuple[Any, ...]], is_input: Sequence[bool]) -> list[str | None]:
    names: list[str | None] = []
    for path, is_ours in zip(paths, is_input, strict=True):
        keys = [jax.tree_util.keystr((key,)) for key in path[1:]] if sum(is_input) > 1 else []
        names.append(_join(INPUT, *keys) if is_ours else None)
    return names


def _is_inexact(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.numpy.inexact)


def _can_be_named(value: Array) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    return dtype != jax.dtypes.float0 and len(value.shape) > 0
