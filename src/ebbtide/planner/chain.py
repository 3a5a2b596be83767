"""A Workload compiled for planning: numbers instead of names, and one entry for equal blocks.

Blocks that differ in their names alone are one `BlockClass`. A planner works out what can be done
with a class once (`ebbtide.planner.menu`, `ebbtide.planner.program`) and decides block by block.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
    compute_ns: tuple[int, ...]
    """Time of each backward event."""
    held_bytes: tuple[int, ...]
    """Gradients and workspaces of each backward event."""
    rest_ns: int
    """Forward time after the last call."""
    workspace_bytes: int
    """Held by forward ops."""
    pins: tuple[Decision | None, ...]
    """What the user decided for each activation."""

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
        blocks = (self.classes[c] for c in self.class_of)
        return sum(c.forward_ns + c.backward_ns for c in blocks) + self.outside_ns

    @property
    def outside_ns(self) -> int:
        """Time outside of the blocks."""
        return self.outside.turn_ns + self.outside.ends_ns


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
    classes: dict[BlockClass, int] = {}
    class_of: list[int] = []
    for block, before in zip(workload.blocks, (None, *workload.blocks), strict=False):
        if before is not None and not pins and _is_like(block, before):
            class_of.append(class_of[-1])
            continue
        compiled = _compile_block(block, pins or {})
        class_of.append(classes.setdefault(compiled, len(classes)))
    return Chain(
        classes=tuple(classes),
        class_of=tuple(class_of),
        names=tuple(tuple(a.name for a in block.activations) for block in workload.blocks),
        outside=outside,
    )


def _is_like(block: Block, other: Block) -> bool:
    """Whether two blocks differ in their names alone; a short cut for long chains."""
    if (
        len(block.activations) != len(other.activations)
        or len(block.backward) != len(other.backward)
        or (block.rest_ns, block.workspace_bytes) != (other.rest_ns, other.workspace_bytes)
    ):
        return False
    start, other_start = len(block.name), len(other.name)
    for ours, theirs in zip(block.activations, other.activations, strict=True):
        if (
            ours.num_bytes != theirs.num_bytes
            or ours.make_ns != theirs.make_ns
            or ours.is_saved != theirs.is_saved
            or ours.is_replayable != theirs.is_replayable
            or ours.kind is not theirs.kind
            or not ours.name.startswith(block.name)
            or not ours.group.startswith(block.name)
            or ours.name[start:] != theirs.name[other_start:]
            or ours.group[start:] != theirs.group[other_start:]
            or [n[start:] for n in ours.inputs] != [n[other_start:] for n in theirs.inputs]
        ):
            return False
    return all(
        ours.compute_ns == theirs.compute_ns
        and ours.held_bytes == theirs.held_bytes
        and [n[start:] for n in ours.uses] == [n[other_start:] for n in theirs.uses]
        for ours, theirs in zip(block.backward, other.backward, strict=True)
    )


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
    return BlockClass(
        num_bytes=tuple(activation.num_bytes for activation in block.activations),
        is_saved=tuple(activation.is_saved for activation in block.activations),
        call_of=tuple(call_of),
        calls=tuple(calls),
        uses=tuple(tuple(index[name] for name in event.uses) for event in block.backward),
        compute_ns=tuple(event.compute_ns for event in block.backward),
        held_bytes=tuple(event.held_bytes for event in block.backward),
        rest_ns=block.rest_ns,
        workspace_bytes=block.workspace_bytes,
        pins=tuple(pins.get(activation.name) for activation in block.activations),
    )


def _in_order(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers))
