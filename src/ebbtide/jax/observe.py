"""Observe a block: what its backward keeps, what making each value again needs, and what it costs.

The block is traced with a name on every value that can have one, then differentiated. Each
residual leads back, over what jax adds for derivatives, to the named values that it is made from:
those are what backward asks for, since a policy can only choose among names. What lies between two
named values is what recomputing the later one runs. Nothing is run for that; times come from
`ebbtide.jax.clock`, or from given rates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.errors import ModelError
from ebbtide.jax.graph import COLLECTIVES, NO_VALUE, PRODUCTS, Cost, Graph, Operation, flatten
from ebbtide.jax.names import VIEWS, Names, with_names
from ebbtide.jax.stacking import kept_ns_per_gib
from ebbtide.workload import Outside, Workload

LAYER = "layers"
"""Blocks are called `layers.0`, `layers.1` and so on."""

MIN_SHARE = 0.03
"""Of backward's work: an operation of more ends an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a device computes, where nothing may be run.

    Raises:
        ValueError: A rate is not positive.
    """

    flops_per_s: float
    """Of matrix products in the block's dtype, as they run: not the data sheet's peak."""
    memory_bytes_per_s: float
    """Of the device's own memory."""

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "memory_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a rate is more than 0")

    def ns(self, cost: Cost) -> float:
        """Return the time of an operation: of its arithmetic or its bytes, whichever is longer."""
        seconds = max(cost.flops / self.flops_per_s, cost.num_bytes / self.memory_bytes_per_s)
        return seconds * 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Rates for the shares, and what the whole took."""

    rates: Rates
    """How the time is shared out."""
    forward_ns: int
    """Of one block; 0: by the rates alone."""
    backward_ns: int
    """Of one block, with nothing recomputed; 0: by the rates alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One named value of a block."""

    name: str
    """What a policy calls it."""
    num_bytes: int
    """Its size; inside a shard_map one shard's."""
    primitive: str
    """What makes it."""
    kind: OpKind
    """What that is to a planner."""
    inputs: tuple[str, ...]
    """Named values that it is made from."""
    group: int
    """Equal for values that one operation makes."""
    cost: Cost
    """Of making its group from the inputs."""
    is_saved: bool
    """Whether backward asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One moment of backward."""

    uses: tuple[str, ...]
    """Named values that it asks for."""
    cost: Cost
    """What it does."""
    held_bytes: int
    """Most bytes of gradients that are alive in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A block as it was traced."""

    block_name: str
    """The function's name."""
    values: tuple[Value, ...]
    """In forward order, inputs first."""
    events: tuple[Event, ...]
    """In backward order."""
    rest: Cost
    """Of what makes no named value, such as casts of parameters."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the block's inputs."""
        return tuple(value.name for value in self.values if value.kind is OpKind.INPUT)

    @property
    def forward_cost(self) -> Cost:
        """Of the whole forward."""
        groups = {value.group: value.cost for value in self.values}
        return sum(groups.values(), self.rest)

    @property
    def backward_cost(self) -> Cost:
        """Of the whole backward, with nothing recomputed."""
        return sum((event.cost for event in self.events), Cost())

    def to_workload(self, layers: int, pace: Pace, *, is_scanned: bool) -> Workload:
        """Return the workload of a stack of such blocks.

        It is the stack's alone: parameters, their gradients, the optimizer and what lies outside
        of the stack take nothing in it.

        Args:
            layers: Blocks in the stack.
            pace: Their times.
            is_scanned: One loop runs them all, so nothing leaves within a block, and what is
                stored goes through the loop's stack.

        Raises:
            ValueError: `layers` is less than 1.
        """
        if layers < 1:
            raise ValueError(f"layers is {layers}; a stack has one block at least")
        forward = _shares(pace.rates, pace.forward_ns, self.forward_cost, self._forward_parts())
        backward_parts = [event.cost for event in self.events]
        backward = _shares(pace.rates, pace.backward_ns, self.backward_cost, backward_parts)
        groups = list(dict.fromkeys(value.group for value in self.values))
        make_ns = {group: forward[i] for i, group in enumerate(groups)}
        stack_ns = kept_ns_per_gib(pace.rates.memory_bytes_per_s) if is_scanned else 0
        blocks = tuple(
            self._block(f"{LAYER}.{i}", make_ns, forward[-1], backward, is_scanned, stack_ns)
            for i in range(layers)
        )
        outside = Outside(resident_bytes=0, turn_bytes=0, turn_ns=0, ends_bytes=0, ends_ns=0)
        return Workload(model=self.block_name, blocks=blocks, outside=outside)

    def _forward_parts(self) -> list[Cost]:
        groups = {value.group: value.cost for value in self.values}
        return [*groups.values(), self.rest]

    def _block(
        self,
        name: str,
        make_ns: dict[int, int],
        rest_ns: int,
        backward_ns: list[int],
        is_scanned: bool,
        stack_ns: int,
    ) -> Block:
        first = {}
        for value in self.values:
            first.setdefault(value.group, value.name)
        return Block(
            name=name,
            class_name=self.block_name,
            activations=tuple(
                Activation(
                    name=f"{name}.{value.name}",
                    op=value.primitive,
                    kind=value.kind,
                    num_bytes=value.num_bytes,
                    inputs=tuple(f"{name}.{other}" for other in value.inputs),
                    is_saved=value.is_saved,
                    is_replayable=value.kind not in (OpKind.INPUT, OpKind.OPAQUE),
                    group=f"{name}.{first[value.group]}",
                    make_ns=make_ns[value.group],
                )
                for value in self.values
            ),
            backward=tuple(
                BackwardEvent(
                    uses=tuple(f"{name}.{used}" for used in event.uses),
                    compute_ns=spent_ns,
                    held_bytes=event.held_bytes,
                )
                for event, spent_ns in zip(self.events, backward_ns, strict=True)
            ),
            rest_ns=rest_ns,
            is_fused=is_scanned,
            store_ns_per_gib=stack_ns,
        )


def observe(block: Callable[..., Any], params: Any, x: Any, *rest: Any) -> Observation:
    """Trace a block and its backward; nothing is compiled or run.

    Args:
        block: `block(params, x, *rest)`; what comes out has the shapes of x in a scan.
        params: Its parameters, or their shapes and dtypes.
        x: Its input: an array or several, or their shapes and dtypes.
        rest: What else it takes, such as masks, tables and random keys; held by nobody's plan.

    Raises:
        ModelError: The block keeps nothing of its input, or has no input of floating point.
    """
    found: list[Names] = []
    named = with_names(block, on_names=found.append)
    arguments = (params, x, *rest)
    traced, shape = jax.make_jaxpr(lambda *a: jax.vjp(named, *a), return_shape=True)(*arguments)
    output, pull_back = shape
    forward = flatten(traced.jaxpr)
    back = flatten(jax.make_jaxpr(lambda kept, given: kept(given))(pull_back, output).jaxpr)
    num_kept = len(jax.tree.leaves(pull_back))
    reader = _Reader(forward, found[-1])
    kept = forward.outputs[len(forward.outputs) - num_kept :]
    residuals = [reader.sources(value) for value in kept]
    events = _events(back, dict(zip(back.inputs, residuals, strict=False)), num_kept, params)
    values = reader.values({name for event in events for name in event.uses})
    if not any(value.kind is OpKind.INPUT for value in values):
        raise ModelError(
            f"{found and getattr(block, '__name__', 'the block')} takes no input of floating "
            "point; the first argument is parameters, the second is what the block before made."
        )
    if not any(value.is_saved for value in values):
        raise ModelError("the block's backward keeps nothing of what it makes: there is no plan")
    return Observation(
        block_name=getattr(block, "__name__", "block"),
        values=values,
        events=events,
        rest=reader.rest,
    )


class _Reader:
    """Reads the forward graph: which named values each value is made from."""

    def __init__(self, graph: Graph, names: Names) -> None:
        self._graph = graph
        self._names = names
        self._sources: dict[int, tuple[str, ...]] = {NO_VALUE: ()}
        self._parts: dict[int, frozenset[int]] = {NO_VALUE: frozenset()}
        """For each value the operations after its named values that make it."""
        self._made: dict[str, _Made] = {}
        """By name; in order."""
        for value in graph.inputs:
            self._sources[value], self._parts[value] = (), frozenset()
        for number, operation in enumerate(graph.operations):
            self._read(number, operation)

    def sources(self, value: int) -> tuple[str, ...]:
        """Return the named values that a value is, or is made from."""
        return self._sources.get(value, ())

    def _read(self, number: int, operation: Operation) -> None:
        sources = _union(self._sources.get(value, ()) for value in operation.inputs)
        parts = frozenset[int]().union(*(self._parts.get(v, frozenset()) for v in operation.inputs))
        if operation.name:
            self._name(operation, sources, parts)
            return
        for value in operation.outputs:
            self._sources[value] = sources
            self._parts[value] = parts if operation.primitive in VIEWS else parts | {number}

    def _name(self, operation: Operation, sources: tuple[str, ...], parts: frozenset[int]) -> None:
        (made,) = operation.outputs
        name = operation.name
        if not parts and len(sources) == 1:
            # Another name on a value that has one: the user's is what stays.
            (old,) = sources
            if name in self._names.users and old not in self._names.users:
                self._made[old].name = name
                self._rename(old, name)
            else:
                name = old
        elif name not in self._made:
            self._made[name] = _Made(name, self._graph.num_bytes[made], sources, parts)
        # What reads the value without its name, as derivatives do, is not served by a saved name.
        self._sources[made], self._parts[made] = (name,), frozenset()

    def _rename(self, old: str, new: str) -> None:
        self._made = {
            (new if name == old else name): made.renamed(old, new)
            for name, made in self._made.items()
        }
        for value, sources in self._sources.items():
            if old in sources:
                self._sources[value] = tuple(new if s == old else s for s in sources)

    def values(self, saved: set[str]) -> tuple[Value, ...]:
        """Return all named values, with those in `saved` marked."""
        group_of = _group([made.parts for made in self._made.values()])
        members: dict[int, list[_Made]] = {}
        for made, group in zip(self._made.values(), group_of, strict=True):
            members.setdefault(group, []).append(made)
        result: list[Value] = []
        for made, group in zip(self._made.values(), group_of, strict=True):
            together = members[group]
            parts = frozenset[int]().union(*(m.parts for m in together))
            own = {m.name for m in together}
            inputs = [s for s in _union(m.sources for m in together) if s not in own]
            earlier = list(self._made)[: list(self._made).index(together[0].name)]
            operations = [self._graph.operations[i] for i in sorted(parts)]
            result.append(
                Value(
                    name=made.name,
                    num_bytes=made.num_bytes,
                    primitive=self._graph.operations[max(made.parts)].primitive if parts else "",
                    kind=_kind_of(operations, made.name, len(together)),
                    inputs=tuple(s for s in inputs if s in earlier),
                    group=group,
                    cost=sum((operation.cost for operation in operations), Cost()),
                    is_saved=made.name in saved,
                )
            )
        return tuple(result)

    @property
    def rest(self) -> Cost:
        """Of operations that make no named value."""
        counted = frozenset[int]().union(*(made.parts for made in self._made.values()))
        return sum(
            (
                operation.cost
                for number, operation in enumerate(self._graph.operations)
                if number not in counted and not operation.name
            ),
            Cost(),
        )


class _Made:
    """How a named value is made."""

    def __init__(
        self, name: str, num_bytes: int, sources: tuple[str, ...], parts: frozenset[int]
    ) -> None:
        self.name, self.num_bytes, self.sources, self.parts = name, num_bytes, sources, parts

    def renamed(self, old: str, new: str) -> "_Made":
        self.sources = tuple(new if name == old else name for name in self.sources)
        return self


def _kind_of(operations: list[Operation], name: str, num_outputs: int) -> OpKind:
    primitives = {operation.primitive for operation in operations}
    if not operations:
        return OpKind.INPUT
    if primitives & COLLECTIVES or any(operation.has_effect for operation in operations):
        return OpKind.OPAQUE
    num_products = sum(operation.primitive in PRODUCTS for operation in operations)
    if num_products > 1 or any("attention" in primitive for primitive in primitives):
        return OpKind.ATTENTION
    return OpKind.MATMUL if num_products else OpKind.ELEMENTWISE


def _group(parts: list[frozenset[int]]) -> list[int]:
    """Number what is made together: values with an operation in common."""
    group_of: list[int] = []
    owner: dict[int, int] = {}
    merged: dict[int, int] = {}

    def root(group: int) -> int:
        while merged.get(group, group) != group:
            group = merged[group]
        return group

    for index, of_value in enumerate(parts):
        groups = {root(owner[part]) for part in of_value if part in owner}
        group = min(groups, default=index)
        for other in groups:
            merged[other] = group
        for part in of_value:
            owner[part] = group
        group_of.append(group)
    return [root(group) for group in group_of]


def _events(
    graph: Graph, residuals: dict[int, tuple[str, ...]], num_kept: int, params: Any
) -> tuple[Event, ...]:
    """Cut backward into events that each end with a large operation."""
    total = sum((op.cost for op in graph.operations), Cost())
    kept = set(graph.inputs[:num_kept])
    held = _held_bytes(graph, kept, len(jax.tree.leaves(params)))
    events: list[Event] = []
    uses: dict[str, None] = {}
    cost, held_bytes = Cost(), 0
    for number, operation in enumerate(graph.operations):
        for value in operation.inputs:
            uses.update(dict.fromkeys(residuals.get(value, ())))
        cost += operation.cost
        held_bytes = max(held_bytes, held[number])
        is_large = operation.cost.flops > MIN_SHARE * total.flops if total.flops else False
        if is_large or number == len(graph.operations) - 1:
            events.append(Event(uses=tuple(uses), cost=cost, held_bytes=held_bytes))
            uses, cost, held_bytes = {}, Cost(), 0
    return tuple(events)


def _held_bytes(graph: Graph, kept: set[int], num_params: int) -> list[int]:
    """Return the bytes of gradients that are alive at each operation.

    What one elementwise operation makes for another stays in registers: XLA fuses them. So only
    what products, reductions and the like read or make counts. Parameters' gradients do not.
    """
    ends = set(graph.outputs[:num_params])
    large = [op.primitive in PRODUCTS or len(op.outputs) > 1 for op in graph.operations]
    counted: set[int] = set(graph.inputs) - kept
    last: dict[int, int] = {}
    first: dict[int, int] = {value: 0 for value in counted}
    for number, operation in enumerate(graph.operations):
        for value in operation.inputs:
            last[value] = number
            if large[number]:
                counted.add(value)
        for value in operation.outputs:
            first[value] = number
            last[value] = number
            if large[number]:
                counted.add(value)
    for value in graph.outputs:
        last[value] = len(graph.operations) - 1
    change = [0] * (len(graph.operations) + 1)
    for value in counted - kept - ends - {NO_VALUE}:
        change[first.get(value, 0)] += graph.num_bytes[value]
        change[last.get(value, 0) + 1] -= graph.num_bytes[value]
    alive, result = 0, list[int]()
    for delta in change[:-1]:
        alive += delta
        result.append(alive)
    return result


def _shares(rates: Rates, measured_ns: int, total: Cost, parts: list[Cost]) -> list[int]:
    """Share a measured time out: products by their arithmetic, what is left by bytes.

    Where products alone would take more than was measured, all is scaled by one factor.
    """
    by_rate = [rates.ns(part) for part in parts]
    if not measured_ns:
        return [round(ns) for ns in by_rate]
    products_ns = total.flops / rates.flops_per_s * 1e9
    other_bytes = sum(part.num_bytes for part in parts if not part.flops)
    left_ns = measured_ns - products_ns
    if left_ns <= 0 or not other_bytes or not products_ns:
        scale = measured_ns / max(sum(by_rate), 1e-9)
        return [round(scale * ns) for ns in by_rate]
    per_byte = left_ns / other_bytes
    return [
        round(part.flops / rates.flops_per_s * 1e9 if part.flops else part.num_bytes * per_byte)
        for part in parts
    ]


def _union(parts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part))
