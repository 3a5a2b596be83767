"""A workload at another batch shape, worked out from the one that was observed.

What a block makes grows with the tokens, and so do times; attention's time, and the matrices of
attention that is not fused, grow with the square of the sequence. Known weakness: kernels do not
scale exactly, and what does not depend on the shape is scaled with the rest, so a longer batch is
planned with a little more than it needs.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.workload import Workload

# Products and weights of attention that is not fused: one number for each pair of tokens.
SQUARE_OPS = frozenset({"aten.bmm", "aten.baddbmm", "aten._softmax", "aten._safe_softmax"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much larger a batch is than the observed one."""

    rows: Fraction
    """Of sequences."""
    length: Fraction
    """Of tokens in a sequence."""

    @property
    def linear(self) -> Fraction:
        """Of tokens in all."""
        return self.rows * self.length

    @property
    def square(self) -> Fraction:
        """Of pairs of tokens within a sequence."""
        return self.linear * self.length


def scale_workload(workload: Workload, scale: Scale) -> Workload:
    """Return the workload of a batch that is `scale` times the observed one.

    Names and the fingerprint stay, so a plan for the result runs on the same model. Everything
    is rounded up.
    """
    outside = workload.outside
    if outside is not None:
        outside = replace(
            outside,
            turn_bytes=_times(outside.turn_bytes, scale.linear),
            turn_ns=_times(outside.turn_ns, scale.linear),
            ends_ns=_times(outside.ends_ns, scale.linear),
            constant_bytes=_times(outside.constant_bytes, scale.linear),
        )
    return replace(
        workload, blocks=tuple(_block(block, scale) for block in workload.blocks), outside=outside
    )


def pace_workload(workload: Workload, factor: Fraction) -> Workload:
    """Return the workload of a device that takes `factor` times as long for everything."""
    outside = workload.outside
    if outside is not None:
        outside = replace(
            outside,
            turn_ns=_times(outside.turn_ns, factor),
            ends_ns=_times(outside.ends_ns, factor),
        )
    blocks = tuple(
        replace(
            block,
            activations=tuple(
                replace(a, make_ns=_times(a.make_ns, factor)) for a in block.activations
            ),
            backward=tuple(
                replace(event, compute_ns=_times(event.compute_ns, factor))
                for event in block.backward
            ),
            rest_ns=_times(block.rest_ns, factor),
            store_ns_per_gib=_times(block.store_ns_per_gib, factor),
        )
        for block in workload.blocks
    )
    return replace(workload, blocks=blocks, outside=outside)


def _block(block: Block, scale: Scale) -> Block:
    attention = {a.name for a in block.activations if a.kind is OpKind.ATTENTION}
    factor = scale.square
    if block.is_fused:
        # One event has all of backward: as much of it is attention's as of forward.
        attention_ns = sum({a.group: a.make_ns for a in block.activations
                            if a.name in attention}.values())  # fmt: skip
        share = Fraction(attention_ns, max(block.forward_ns, 1))
        factor = share * scale.square + (1 - share) * scale.linear
    return replace(
        block,
        activations=tuple(_activation(a, scale) for a in block.activations),
        backward=tuple(_event(event, scale, attention, factor) for event in block.backward),
        rest_ns=_times(block.rest_ns, scale.linear),
        workspace_bytes=_times(block.workspace_bytes, scale.linear),
    )


def _activation(activation: Activation, scale: Scale) -> Activation:
    is_square = activation.op in SQUARE_OPS
    slow = is_square or activation.kind is OpKind.ATTENTION
    return replace(
        activation,
        num_bytes=_times(activation.num_bytes, scale.square if is_square else scale.linear),
        make_ns=_times(activation.make_ns, scale.square if slow else scale.linear),
    )


def _event(
    event: BackwardEvent, scale: Scale, attention: set[str], slow_factor: Fraction
) -> BackwardEvent:
    slow = any(name in attention for name in event.uses)
    # Gradients of parameters are of one size whatever the batch.
    fixed_bytes = min(event.held_bytes, event.gradient_bytes)
    return replace(
        event,
        compute_ns=_times(event.compute_ns, slow_factor if slow else scale.linear),
        held_bytes=fixed_bytes + _times(event.held_bytes - fixed_bytes, scale.linear),
    )


def _times(number: int, factor: Fraction) -> int:
    return -(-number * factor.numerator // factor.denominator)
