"""A small measured run, scaled to the full model: its blocks as often as the model has layers."""

from dataclasses import replace

from ebbtide.block import Block, OpKind
from ebbtide.estimate.resident import Resident
from ebbtide.estimate.setup import Setup
from ebbtide.workload import Workload


def scale_measured(
    measured: Workload, setup: Setup, num_layers: int, resident: Resident
) -> Workload:
    """Return the step of a model with so many layers.

    Times and bytes of blocks and of the rest are those of the run; what is resident is the
    model's. Blocks of the run come first, and its last one is repeated.

    Args:
        measured: Of a few layers at the context and batch that are asked for.
        setup: The question.
        num_layers: Of the full model.
        resident: What a device holds all through a step of it.

    Raises:
        ValueError: The run had another number of tokens, or the question splits tokens, heads or
            layers, which a run does not tell.
    """
    degrees = setup.degrees
    for name in ("tp", "cp", "ep", "pp"):
        if getattr(degrees, name) > 1:
            raise ValueError(
                f"--{name} {getattr(degrees, name)} with --workload: a measured run does not tell "
                "what a part of a layer takes; leave one of them out"
            )
    if measured.outside is None or not measured.blocks:
        raise ValueError("--workload: it has no times; write it again with `ebbtide observe`")
    inputs = [a for a in measured.blocks[0].activations if a.kind is OpKind.INPUT]
    row_bytes = setup.shape.hidden * setup.dtype.width_bytes
    if not inputs or inputs[0].num_bytes != setup.tokens * row_bytes:
        given = inputs[0].num_bytes / row_bytes if inputs else 0
        raise ValueError(
            f"--workload: its blocks take {given:g} tokens of {setup.shape.name}'s width, and "
            f"--context {setup.context} by --batch {setup.batch} is {setup.tokens}; observe the "
            "batch that is asked for, or ask for the one that was observed"
        )
    blocks = list(measured.blocks[:num_layers])
    last = blocks[-1]
    for index in range(len(blocks), num_layers):
        blocks.append(_renamed(last, f"{last.name}+{index - len(measured.blocks) + 1}"))
    outside = replace(
        measured.outside,
        resident_bytes=resident.total,
        turn_gradient_bytes=0,
        ends_gradient_bytes=0,
    )
    # All gradients are resident, as everywhere in an estimate.
    blocks = [
        replace(b, backward=tuple(replace(e, gradient_bytes=0) for e in b.backward)) for b in blocks
    ]
    return Workload(model=measured.model, blocks=tuple(blocks), outside=outside)


def _renamed(block: Block, name: str) -> Block:
    def new(old: str) -> str:
        return name + old.removeprefix(block.name)

    return replace(
        block,
        name=name,
        activations=tuple(
            replace(
                a,
                name=new(a.name),
                group=new(a.group),
                inputs=tuple(new(i) for i in a.inputs),
            )
            for a in block.activations
        ),
        backward=tuple(replace(e, uses=tuple(new(u) for u in e.uses)) for e in block.backward),
    )
