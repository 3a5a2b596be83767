"""A Workload compiled for planning: numbers instead of names, and one entry for equal blocks.

Blocks that differ in their names alone are one `BlockClass`. A planner works out what can be done
with a class once (`ebbtide.planner.menu`, `ebbtide.planner.program`) and decides block by block.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ebbtide.errors import PlanError
from ebbtide.plan import Decision
from ebbtide.workload import Block, OpKind, Outside, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One op call of a block's forward."""

    outputs: tuple[int, ...]
    """Activations that it makes."""
    inputs: tuple[int, ...]
    """Activations that it reads, each once."""
    make_ns: int
    """Its time."""
    is_replayable: bool
    """Whether it may run again."""
    is_input: bool
    """It stands for what comes from outside the block, and takes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment of a block's forward: one call, or all calls of a fused block."""

    outputs: tuple[int, ...]
    """Activations that it makes; what is evicted of them leaves in this order."""
    spent_ns: int
    """Time after which they may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockClass:
    """What equal blocks have in common; activations are numbered in forward order."""

    num_bytes: tuple[int, ...]
    """Bytes of each activation."""
    is_saved: tuple[bool, ...]
    """Whether backward asks for it."""
    call_of: tuple[int, ...]
    """The call that makes each activation."""
    calls: tuple[Call, ...]
    """In forward order."""
    uses: tuple[tuple[int, ...], ...]
    """Activations that each backward event asks for, in backward order."""
    first_used: tuple[int | None, ...]
    """For each backward event an activation that no event before it asks for; None if it has
    none."""
    compute_ns: tuple[int, ...]
    """Time of each backward event."""
    held_bytes: tuple[int, ...]
    """Gradients and workspaces of each backward event, with the parameters' gradients that the
    block's events before it have left."""
    gradient_bytes: int
    """Parameters' gradients that all its events leave."""
    rest_ns: int
    """Forward time in no call."""
    workspace_bytes: int
    """Held by forward ops."""
    is_fused: bool
    """Whether its forward is one moment."""
    store_ns: tuple[int, ...]
    """Compute time that storing each activation costs."""
    pins: tuple[Decision | None, ...]
    """What the user decided for each activation."""

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Its forward's moments in order."""
        if self.is_fused:
            everything = tuple(range(len(self.num_bytes)))
            return (Moment(outputs=everything, spent_ns=self.forward_ns),)
        return tuple(Moment(outputs=c.outputs, spent_ns=c.make_ns) for c in self.calls)

    @property
    def tail_ns(self) -> int:
        """Time of one forward after its last moment's outputs may leave."""
        return 0 if self.is_fused else self.rest_ns

    @property
    def forward_ns(self) -> int:
        """Time of one forward."""
        return sum(call.make_ns for call in self.calls) + self.rest_ns

    @property
    def backward_ns(self) -> int:
        """Time of one backward without recomputation."""
        return sum(self.compute_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A whole timed workload."""

    classes: tuple[BlockClass, ...]
    """Each kind of block once."""
    class_of: tuple[int, ...]
    """The class of each block, in forward order."""
    names: tuple[tuple[str, ...], ...]
    """The activations' names of each block."""
    outside: Outside
    """The rest of the step."""

    @property
    def base_ns(self) -> int:
        """Time of a step without recomputation and without waiting."""
        return self.forward_ns + self.backward_ns + self.outside_ns

    @property
    def forward_ns(self) -> int:
        """Time of all blocks' forward."""
        return sum(block.forward_ns * count for block, count in self._counted())

    @property
    def backward_ns(self) -> int:
        """Time of all blocks' backward without recomputation."""
        return sum(block.backward_ns * count for block, count in self._counted())

    @property
    def most_gradient_bytes(self) -> int:
        """All parameters' gradients that the step makes, and that were not there before it."""
        made_bytes = sum(block.gradient_bytes * count for block, count in self._counted())
        outside = self.outside
        return made_bytes + outside.turn_gradient_bytes + outside.ends_gradient_bytes

    @property
    def ends_bytes(self) -> int:
        """Most bytes held before the first moment and after the last one."""
        outside = self.outside
        return outside.resident_bytes + self.most_gradient_bytes + outside.ends_bytes

    def gradient_bytes_before(self) -> list[int]:
        """Return, for each block, those of them that are there when its backward starts."""
        made = [self.classes[c].gradient_bytes for c in reversed(self.class_of)]
        there = accumulate(made, initial=self.outside.turn_gradient_bytes)
        return list(there)[-2::-1]

    @property
    def outside_ns(self) -> int:
        """Time outside of the blocks."""
        return self.outside.turn_ns + self.outside.ends_ns

    def _counted(self) -> list[tuple[BlockClass, int]]:
        return [(block, self.class_of.count(c)) for c, block in enumerate(self.classes)]


def compile_chain(workload: Workload, pins: Mapping[str, Decision] | None = None) -> Chain:
    """Number everything in a workload.

    Args:
        workload: A timed one.
        pins: Decisions that are made already, by activation.

    Raises:
        PlanError: The workload was not timed.
    """
    outside = workload.outside
    if outside is None or not workload.is_timed:
        raise PlanError(
            f"the workload of {workload.model} has no times, and a budget needs them: it was "
            "written by hand or by an older version. Observe it again: ebbtide observe."
        )
    names = tuple(tuple(a.name for a in block.activations) for block in workload.blocks)
    pins = pins or {}
    classes: dict[BlockClass, int] = {}
    known: dict[Hashable, int] = {}
    class_of: list[int] = []
    for block, of_block in zip(workload.blocks, names, strict=True):
        key = _without_names(block, of_block, pins)
        if key not in known:
            known[key] = classes.setdefault(_compile_block(block, pins), len(classes))
        class_of.append(known[key])
    return Chain(classes=tuple(classes), class_of=tuple(class_of), names=names, outside=outside)


def _without_names(block: Block, names: Sequence[str], pins: Mapping[str, Decision]) -> Hashable:
    """Return what `_compile_block` reads of a block, with numbers for names.

    Comparing this is many times faster than compiling each block of a long chain.
    """
    number_of = {name: i for i, name in enumerate(names)}.__getitem__
    calls: dict[str, int] = {}
    activations = [
        (
            a.num_bytes,
            a.make_ns,
            a.is_saved,
            a.is_replayable,
            a.kind is OpKind.INPUT,
            calls.setdefault(a.group, len(calls)),
            tuple(map(number_of, a.inputs)),
        )
        for a in block.activations
    ]
    events = [
        (e.compute_ns, e.held_bytes, e.gradient_bytes, tuple(map(number_of, e.uses)))
        for e in block.backward
    ]
    pinned = tuple(map(pins.get, names)) if pins else ()
    rest = (block.rest_ns, block.workspace_bytes, block.is_fused, block.store_ns_per_gib)
    return tuple(activations), tuple(events), rest, pinned


def _compile_block(block: Block, pins: Mapping[str, Decision]) -> BlockClass:
    index = {activation.name: i for i, activation in enumerate(block.activations)}
    members: dict[str, list[int]] = {}
    for i, activation in enumerate(block.activations):
        members.setdefault(activation.group, []).append(i)
    call_of = [0] * len(index)
    calls: list[Call] = []
    for number, outputs in enumerate(members.values()):
        made = [block.activations[i] for i in outputs]
        for i in outputs:
            call_of[i] = number
        read = _in_order(index[name] for activation in made for name in activation.inputs)
        calls.append(
            Call(
                outputs=tuple(outputs),
                inputs=tuple(i for i in read if i not in outputs),
                make_ns=max(activation.make_ns for activation in made),
                is_replayable=all(activation.is_replayable for activation in made),
                is_input=all(activation.kind is OpKind.INPUT for activation in made),
            )
        )
    if not calls:  # a block that is left alone still takes its time
        nothing = Call(outputs=(), inputs=(), make_ns=0, is_replayable=False, is_input=False)
        calls.append(nothing)
    uses = tuple(tuple(index[name] for name in event.uses) for event in block.backward)
    left = accumulate(event.gradient_bytes for event in block.backward)
    held = (
        event.held_bytes + left_bytes - event.gradient_bytes
        for event, left_bytes in zip(block.backward, left, strict=True)
    )
    return BlockClass(
        num_bytes=tuple(activation.num_bytes for activation in block.activations),
        is_saved=tuple(activation.is_saved for activation in block.activations),
        call_of=tuple(call_of),
        calls=tuple(calls),
        uses=uses,
        first_used=_first_used(uses),
        compute_ns=tuple(event.compute_ns for event in block.backward),
        held_bytes=tuple(held),
        gradient_bytes=block.gradient_bytes,
        rest_ns=block.rest_ns,
        workspace_bytes=block.workspace_bytes,
        is_fused=block.is_fused,
        store_ns=tuple(block.store_ns(activation.num_bytes) for activation in block.activations),
        pins=tuple(pins.get(activation.name) for activation in block.activations),
    )


def _first_used(uses: Iterable[tuple[int, ...]]) -> tuple[int | None, ...]:
    seen: set[int] = set()
    first: list[int | None] = []
    for asked in uses:
        first.append(next((i for i in asked if i not in seen), None))
        seen.update(asked)
    return tuple(first)


def _in_order(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers))
