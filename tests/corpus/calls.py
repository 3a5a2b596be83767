"""From a block's op calls to a timed Block: activations, backward events, gradients alive.

What is not modelled: launches, allocator rounding, gradients of weights beside those that are
resident, and time that a kernel loses on small inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.block import NEVER_REPLAYED, Activation, BackwardEvent, Block, OpKind

# What an H200 reaches in bf16 matmuls of these sizes, and of its 4.8 TB/s in elementwise ops.
FLOPS_PER_NS = 400_000
MOVED_BYTES_PER_NS = 3_500

INPUT = ".input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One storage that a call makes."""

    num_bytes: int
    suffix: str = ""
    """Follows the call's name where the call makes several."""
    has_gradient: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One op call of a block. Names begin with a dot and are local to the block."""

    name: str
    op: str
    kind: OpKind
    reads: tuple[str, ...] = ()
    """Activations; parameters are left out."""
    outputs: tuple[Output, ...]
    uses: tuple[str, ...] = ()
    """Activations that its backward asks for, in order."""
    flops: int = 0
    """Of the forward; 0 for what is limited by the bytes that it moves."""
    backward_workspace_bytes: int = 0
    is_sum: bool = False
    """Its backward hands on the gradient of its output, and computes nothing."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.name + output.suffix for output in self.outputs)


def make_block(name: str, class_name: str, calls: Sequence[Call]) -> Block:
    """Make the block whose forward is `calls`; the first one must be its input.

    An activation is saved if some call's backward asks for it. There is one backward event for
    each call in reverse order, but for calls whose backward asks for nothing and takes no time.
    """
    num_bytes = {
        call.name + output.suffix: output.num_bytes for call in calls for output in call.outputs
    }
    saved = {used for call in calls for used in call.uses}
    activations = tuple(
        Activation(
            name=name + local,
            op=call.op,
            kind=call.kind,
            num_bytes=num_bytes[local],
            inputs=tuple(name + read for read in call.reads),
            is_saved=local in saved,
            is_replayable=call.kind not in NEVER_REPLAYED,
            group=name + call.name,
            make_ns=_forward_ns(call, num_bytes),
        )
        for call in calls
        for local in call.names
    )
    return Block(
        name=name,
        class_name=class_name,
        activations=activations,
        backward=_make_backward(name, calls, num_bytes),
    )


def flops_ns(flops: int) -> int:
    return -(-flops // FLOPS_PER_NS)


def moved_ns(num_bytes: int) -> int:
    return -(-num_bytes // MOVED_BYTES_PER_NS)


def _forward_ns(call: Call, num_bytes: dict[str, int]) -> int:
    if call.kind is OpKind.INPUT:
        return 0
    if call.flops:
        return flops_ns(call.flops)
    return moved_ns(sum(num_bytes[name] for name in (*call.reads, *call.names)))


def _make_backward(
    block_name: str, calls: Sequence[Call], num_bytes: dict[str, int]
) -> tuple[BackwardEvent, ...]:
    has_gradient = {
        call.name + output.suffix: output.has_gradient for call in calls for output in call.outputs
    }
    # Activation to bytes of its gradient. The gradient of the block's output is there at the
    # start; whatever holds it, it is counted here, since nothing else counts it.
    alive = {name: num_bytes[name] for name in calls[-1].names}
    events: list[BackwardEvent] = []
    for call in reversed(calls):
        if call.kind is OpKind.INPUT:
            continue
        given = sum(num_bytes[name] for name in call.names if has_gradient[name])
        read = [name for name in call.reads if has_gradient[name]]
        if call.is_sum:
            first = True
            for name in read:
                # One storage for all: its first reader stands for it.
                alive.setdefault(name, num_bytes[name] if first else 0)
                first = False
            for name in call.names:
                alive.pop(name, None)
            continue
        made = sum(num_bytes[name] for name in read)
        # Where there is a gradient already, the new one is added to it.
        added = sum(3 * num_bytes[name] for name in read if name in alive)
        if call.flops:
            ratio = (5, 2) if call.kind is OpKind.ATTENTION else (2, 1)
            compute_ns = flops_ns(call.flops * ratio[0] // ratio[1]) + moved_ns(added)
        else:
            asked = sum(num_bytes[name] for name in call.uses)
            compute_ns = moved_ns(given + asked + made + added)
        events.append(
            BackwardEvent(
                uses=tuple(block_name + name for name in call.uses),
                compute_ns=compute_ns,
                held_bytes=sum(alive.values()) + made + call.backward_workspace_bytes,
            )
        )
        for name in call.names:
            alive.pop(name, None)
        for name in read:
            alive[name] = num_bytes[name]
    return tuple(events)
