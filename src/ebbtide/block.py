"""The Block: what a part of a model makes in forward, and what its backward asks for."""

import enum
from dataclasses import dataclass

from ebbtide.errors import PlanError
from ebbtide.forms import refuse_negative


@enum.unique
class OpKind(enum.Enum):
    """What made an activation, as far as planning needs to know."""

    INPUT = "input"
    """A block's input: produced outside the block, so the block cannot make it again."""
    MATMUL = "matmul"
    """A matrix product: dear to recompute."""
    ATTENTION = "attention"
    """An output of a fused attention kernel: dear to recompute."""
    NORM = "norm"
    """An output of a fused normalisation kernel: cheap to recompute."""
    ELEMENTWISE = "elementwise"
    """A cheap pure op: elementwise, cast, reduction, gather or copy."""
    RANDOM = "random"
    """An output of an op that draws random numbers: never re-run (design rule 8)."""
    OPAQUE = "opaque"
    """Anything else that may not be re-run: unknown op, in-place result, collective."""


# INPUT has no op in the block to run again; RANDOM and OPAQUE ops must not be run again.
NEVER_REPLAYED = frozenset({OpKind.INPUT, OpKind.RANDOM, OpKind.OPAQUE})

# A name below its block is written in JSON without the block's name, and starts with one of these.
LOCAL_MARKS = (".", ":")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """One storage that a block's forward produces or receives.

    Raises:
        PlanError: The size is negative, or `is_replayable` is claimed for a kind that is
            never re-run.
    """

    name: str
    """Unique in the workload, for example `model.layers.3.mlp.gate_proj`."""
    op: str
    """The op that made it, by its aten name, for example `aten.mm`."""
    kind: OpKind
    """What the op is to a planner."""
    num_bytes: int
    """Bytes of the whole storage, not of the view that autograd may keep."""
    inputs: tuple[str, ...]
    """Names of the earlier activations of the same block that its op reads.

    Parameters are not listed: they are always on the device.
    """
    is_saved: bool
    """True if autograd keeps it, or a view of it, for backward."""
    is_replayable: bool
    """True if its op is known to be pure, so that running it again gives the same bits."""
    group: str
    """Shared by the outputs of one op call, for example attention output and log-sum-exp."""
    make_ns: int = 0
    """Time of the op call that made it; the call's, not a share, for each of its outputs."""

    def __post_init__(self) -> None:
        refuse_negative(self.make_ns, f"activation {self.name!r}", "make_ns")
        if self.num_bytes < 0:
            raise PlanError(
                f"activation {self.name!r} has num_bytes {self.num_bytes}; a size is 0 or more. "
                "Give the bytes of its storage."
            )
        if self.is_replayable and self.kind in NEVER_REPLAYED:
            raise PlanError(
                f"activation {self.name!r} is of kind {self.kind.value!r} and marked replayable; "
                "inputs, random ops and opaque ops are never re-run. "
                "Set is_replayable to false, or give the kind of the op."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardEvent:
    """One moment of a block's backward: autograd asks for saved activations, then computes.

    Raises:
        PlanError: A number is negative.
    """

    uses: tuple[str, ...]
    """Saved activations that it asks for; one may be asked for in several events."""
    compute_ns: int
    """Time from then to the next event, without what recomputation takes."""
    held_bytes: int
    """Most bytes of gradients, the incoming one too, and of workspaces held in that time.
    Activations, recomputed ones too, are not counted, nor the parameters' gradients that were
    there before; those that this event makes are."""
    gradient_bytes: int = 0
    """Gradients of parameters that the event leaves until the step ends, and that were not there
    before the step."""

    def __post_init__(self) -> None:
        refuse_negative(self.compute_ns, "a backward event", "compute_ns")
        refuse_negative(self.held_bytes, "a backward event", "held_bytes")
        refuse_negative(self.gradient_bytes, "a backward event", "gradient_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One repeated part of a model, for example a transformer layer.

    Raises:
        PlanError: A name is there twice or starts with one of `LOCAL_MARKS`, an op reads what
            is not an earlier activation of the block, a backward event uses what is not saved,
            or a number is negative.
    """

    name: str
    """Module path, for example `model.layers.3`; unique in the workload."""
    class_name: str
    """Class of the module, for example `LlamaDecoderLayer`."""
    activations: tuple[Activation, ...]
    """In the order in which the forward pass makes them."""
    backward: tuple[BackwardEvent, ...] = ()
    """In the order in which the backward pass runs them; empty if it was not timed."""
    rest_ns: int = 0
    """Forward time in no activation's `make_ns`: writes in place, views, launches."""
    workspace_bytes: int = 0
    """Most bytes that forward ops hold beyond the activations that are alive then."""
    is_fused: bool = False
    """Its forward runs as one: all that it makes is made by its end, and nothing is let go or
    starts to leave within it; such as a compiled block."""
    store_ns_per_gib: int = 0
    """Compute time that each GiB costs which a plan keeps or moves, forward and backward together
    and beside what copies take: a loop over layers stacks what it keeps, and takes it apart."""

    def __post_init__(self) -> None:
        refuse_negative(self.rest_ns, f"block {self.name!r}", "rest_ns")
        refuse_negative(self.workspace_bytes, f"block {self.name!r}", "workspace_bytes")
        refuse_negative(self.store_ns_per_gib, f"block {self.name!r}", "store_ns_per_gib")
        earlier: set[str] = set()
        for activation in self.activations:
            self._refuse_marked_names(activation)
            if activation.name in earlier:
                raise PlanError(duplicate_name_message(activation.name, self.name))
            for name in activation.inputs:
                if name not in earlier:
                    raise PlanError(self._order_message(activation, name))
            earlier.add(activation.name)
        saved = {activation.name for activation in self.activations if activation.is_saved}
        for event in self.backward:
            for name in event.uses:
                if name not in saved:
                    raise PlanError(
                        f"block {self.name!r}: a backward event uses {name!r}, which is not a "
                        "saved activation of the block; backward asks only for what autograd "
                        "saved. Name one of those, or set its is_saved."
                    )

    @property
    def num_bytes_saved(self) -> int:
        """Bytes that autograd keeps for backward when no plan is active."""
        return sum(activation.num_bytes for activation in self.activations if activation.is_saved)

    def store_ns(self, num_bytes: int) -> int:
        """Return the compute time that keeping or moving so many bytes costs, rounded up."""
        return -(-num_bytes * self.store_ns_per_gib // 2**30)

    @property
    def forward_ns(self) -> int:
        """Time of the forward pass; each op call counts once."""
        make_ns = {activation.group: activation.make_ns for activation in self.activations}
        return sum(make_ns.values()) + self.rest_ns

    @property
    def backward_ns(self) -> int:
        """Time of the backward pass when nothing is recomputed or waited for."""
        return sum(event.compute_ns for event in self.backward)

    @property
    def gradient_bytes(self) -> int:
        """Gradients of parameters that the backward pass makes, and that were not there before."""
        return sum(event.gradient_bytes for event in self.backward)

    def _refuse_marked_names(self, activation: Activation) -> None:
        # Below a block without a name no name is shortened, so there nothing is ambiguous.
        for name in (activation.name, activation.group):
            if self.name and name.startswith(LOCAL_MARKS):
                raise PlanError(
                    f"block {self.name!r}: activation {activation.name!r} has the name or group "
                    f"{name!r}; the JSON form would read it as {self.name + name!r}. "
                    "Give a name that starts with neither '.' nor ':'."
                )

    def _order_message(self, reader: Activation, name: str) -> str:
        """Say why `reader` cannot read `name`: unknown, a cycle, or listed too late."""
        inputs_of = {activation.name: activation.inputs for activation in self.activations}
        given = f"block {self.name!r}: activation {reader.name!r} reads {name!r}, which"
        rule = "an activation reads only earlier activations of its own block"
        if name not in inputs_of:
            return (
                f"{given} the block does not have; {rule}. "
                "List it first, as kind 'input' if it comes from outside the block."
            )
        cycle = _path_through_inputs(inputs_of, start=name, goal=reader.name)
        if cycle:
            path = " reads ".join((reader.name, *cycle))
            return (
                f"{given} closes a cycle ({path}); {rule}. "
                "Give the result of an in-place op a name of its own."
            )
        return f"{given} is listed later; {rule}. List activations in execution order."


def duplicate_name_message(name: str, *block_names: str) -> str:
    """Say that the activation `name` is there twice, in one block or in two."""
    places = " and ".join(repr(block_name) for block_name in block_names)
    return (
        f"activation {name!r} is listed twice, in {places}; names are unique in a workload, since "
        "a plan decides by name. Number the outputs of an op that runs more than once."
    )


def _path_through_inputs(
    inputs_of: dict[str, tuple[str, ...]], *, start: str, goal: str
) -> tuple[str, ...]:
    """Names from `start` to `goal`, each reading the next; empty if there is no such path."""
    # A loop, not recursion: a long chain of ops would exceed Python's recursion limit.
    reader_of: dict[str, str | None] = {start: None}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name == goal:
            path: list[str] = []
            step: str | None = name
            while step is not None:
                path.append(step)
                step = reader_of[step]
            return tuple(reversed(path))
        for source in inputs_of.get(name, ()):
            if source not in reader_of:
                reader_of[source] = name
                waiting.append(source)
    return ()
