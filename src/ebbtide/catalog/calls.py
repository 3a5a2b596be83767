"""From a block's op calls to a timed Block: activations, backward events, gradients alive.

What is not modelled: launches, allocator rounding, gradients of weights beside those that are
resident, and time that a kernel loses on small inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from ebbtide.block import NEVER_REPLAYED, Activation, BackwardEvent, Block, OpKind
from ebbtide.catalog.networks import Axis

INPUT = ".input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reaches, which is less than what it is sold with."""

    flops_per_ns: int
    """In matrix products."""
    attention_flops_per_ns: int
    """In fused attention."""
    moved_bytes_per_ns: int
    """Of its memory, in ops that are limited by the bytes that they move."""
    sent_bytes_per_ns: Mapping[Axis, float] = field(default_factory=dict[Axis, float])
    """To other ranks, by who they are; what is not in it takes no time."""

    def flops_ns(self, flops: int) -> int:
        """Return the time of matrix products, rounded up."""
        return -(-flops // self.flops_per_ns)

    def attention_ns(self, flops: int) -> int:
        """Return the time of fused attention, rounded up."""
        return -(-flops // self.attention_flops_per_ns)

    def moved_ns(self, num_bytes: int) -> int:
        """Return the time of reading and writing so many bytes, rounded up."""
        return -(-num_bytes // self.moved_bytes_per_ns)

    def sent_ns(self, axis: Axis, num_bytes: int) -> int:
        """Return the time of sending so many bytes to these ranks, rounded up."""
        rate = self.sent_bytes_per_ns.get(axis)
        return ceil(num_bytes / rate) if rate else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What a call sends to other ranks: bytes of one rank, none of which stay where they are."""

    axis: Axis
    """To whom."""
    forward_bytes: int
    """In forward."""
    backward_bytes: int
    """In backward."""
    is_beside: bool = False
    """It runs beside the call's own work, as in ring attention; else the call waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One storage that a call makes."""

    num_bytes: int
    """Of the storage."""
    suffix: str = ""
    """Follows the call's name where the call makes several."""
    has_gradient: bool = True
    """Whether backward makes a gradient for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One op call of a block. Names begin with a dot and are local to the block."""

    name: str
    """Of the call, and of its output if it makes one."""
    op: str
    """By its aten name."""
    kind: OpKind
    """What it is to a planner."""
    reads: tuple[str, ...] = ()
    """Activations; parameters are left out."""
    outputs: tuple[Output, ...]
    """What it makes."""
    uses: tuple[str, ...] = ()
    """Activations that its backward asks for, in order."""
    flops: int = 0
    """Of the forward; 0 for what is limited by the bytes that it moves."""
    backward_workspace_bytes: int = 0
    """Held while its backward runs, beside gradients."""
    is_sum: bool = False
    """Its backward hands on the gradient of its output, and computes nothing."""
    is_frozen: bool = False
    """A product with weights that are not trained: backward makes the input's gradient alone."""
    exchanges: tuple[Exchange, ...] = ()
    """With other ranks, as part of it."""
    is_kept_from_rerun: bool = False
    """To run it again would be a collective again, which ebbtide never does (design rule 9)."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its outputs."""
        return tuple(self.name + output.suffix for output in self.outputs)

    @property
    def model_backward_flops(self) -> int:
        """Operations of backward as model FLOPs count them: no kernel's own recomputation."""
        return self.flops if self.is_frozen else 2 * self.flops


def make_block(
    name: str, class_name: str, calls: Sequence[Call], rates: Rates, *, is_fused: bool = False
) -> Block:
    """Make the block whose forward is `calls`; the first one must be its input.

    An activation is saved if some call's backward asks for it. There is one backward event for
    each call in reverse order, but for calls whose backward asks for nothing and takes no time.

    Args:
        name: Module path.
        class_name: Of the module.
        calls: In the order of forward.
        rates: Of the device.
        is_fused: Its forward runs as one, as a compiled block's.
    """
    return make_blocks((name,), class_name, calls, rates, is_fused=is_fused)[0]


def make_blocks(
    names: Sequence[str],
    class_name: str,
    calls: Sequence[Call],
    rates: Rates,
    *,
    is_fused: bool = False,
) -> tuple[Block, ...]:
    """Make equal blocks, as `make_block` makes one; what they share is worked out once."""
    num_bytes = {
        call.name + output.suffix: output.num_bytes for call in calls for output in call.outputs
    }
    saved = {used for call in calls for used in call.uses}
    make_ns = [_forward_ns(call, num_bytes, rates) for call in calls]
    backward = _make_backward(calls, num_bytes, rates)
    locals_of = [call.names for call in calls]
    return tuple(
        Block(
            name=name,
            class_name=class_name,
            activations=tuple(
                Activation(
                    name=name + local,
                    op=call.op,
                    kind=call.kind,
                    num_bytes=num_bytes[local],
                    inputs=tuple([name + read for read in call.reads]),
                    is_saved=local in saved,
                    is_replayable=call.kind not in NEVER_REPLAYED and not call.is_kept_from_rerun,
                    group=name + call.name,
                    make_ns=ns,
                )
                for call, ns, outputs in zip(calls, make_ns, locals_of, strict=True)
                for local in outputs
            ),
            backward=tuple(
                BackwardEvent(
                    uses=tuple([name + use for use in event.uses]),
                    compute_ns=event.compute_ns,
                    held_bytes=event.held_bytes,
                )
                for event in backward
            ),
            is_fused=is_fused,
        )
        for name in names
    )


def _forward_ns(call: Call, num_bytes: dict[str, int], rates: Rates) -> int:
    if call.kind is OpKind.INPUT:
        return 0
    if call.kind is OpKind.ATTENTION and call.flops:
        own_ns = rates.attention_ns(call.flops)
    elif call.flops:
        own_ns = rates.flops_ns(call.flops)
    else:
        own_ns = rates.moved_ns(sum(num_bytes[name] for name in (*call.reads, *call.names)))
    for exchange in call.exchanges:
        own_ns = _with(own_ns, exchange, exchange.forward_bytes, rates)
    return own_ns


def _with(own_ns: int, exchange: Exchange, num_bytes: int, rates: Rates) -> int:
    sent_ns = rates.sent_ns(exchange.axis, num_bytes)
    return max(own_ns, sent_ns) if exchange.is_beside else own_ns + sent_ns


def _make_backward(
    calls: Sequence[Call], num_bytes: dict[str, int], rates: Rates
) -> tuple[BackwardEvent, ...]:
    """Return the events, with names that are local to the block."""
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
        if call.kind is OpKind.ATTENTION and call.flops:
            # Flash attention's backward makes the scores again: 5 products for 2 of forward.
            compute_ns = rates.attention_ns(call.flops * 5 // 2) + rates.moved_ns(added)
        elif call.flops:
            compute_ns = rates.flops_ns(call.model_backward_flops) + rates.moved_ns(added)
        else:
            asked = sum(num_bytes[name] for name in call.uses)
            compute_ns = rates.moved_ns(given + asked + made + added)
        for exchange in call.exchanges:
            compute_ns = _with(compute_ns, exchange, exchange.backward_bytes, rates)
        events.append(
            BackwardEvent(
                uses=call.uses,
                compute_ns=compute_ns,
                held_bytes=sum(alive.values()) + made + call.backward_workspace_bytes,
            )
        )
        for name in call.names:
            alive.pop(name, None)
        for name in read:
            alive[name] = num_bytes[name]
    return tuple(events)
