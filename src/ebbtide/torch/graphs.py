"""What is known of a compiled graph of a block: what it saves, and what it could save instead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ebbtide.block import NEVER_REPLAYED, Activation, Block, OpKind
from ebbtide.torch.rerun import Rerun


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """One storage that a graph makes in forward and may save; names are local to the block."""

    name: str
    """Such as `.mlp.gate_proj`; the block's path comes before it."""
    op: str
    kind: OpKind
    num_bytes: int
    """Of the whole storage, as it was traced; 0 where that is not known."""
    inputs: tuple[str, ...]
    """Others of them that it is made from."""
    reads_input: bool
    """Whether it is also made from what the graph is given."""
    group: str
    """Shared by the outputs of one call."""
    rerun: Rerun | None = field(default=None, compare=False, repr=False)
    """The call, where it can be timed by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """One compiled graph."""

    names: tuple[str, ...]
    """Of what it saves, in the order in which autograd packs it; "" for what it was given."""
    lean: tuple[Tensors, ...]
    """What it saves when nothing dear is run again and all that is cheap is."""


class Running(threading.local):
    """Who is told of the compiled graphs that run in this thread."""

    listener: Any = None
    """Its `start_graph(graph)` is called when one starts."""


running = Running()


def described(block: Block, graphs: Sequence[GraphFacts]) -> Block:
    """Return a block whose forward ran these graphs, with all that they could save.

    Args:
        block: As it was recorded: of that the inputs stay.
        graphs: In the order in which they ran. Where there are several, nothing is known of what
            goes from one to the next, so nothing of them can be made again.
    """
    inputs = tuple(a for a in block.activations if a.kind is OpKind.INPUT)
    given = tuple(a.name for a in inputs)
    is_whole = len(graphs) == 1
    activations: list[Activation] = []
    for index, graph in enumerate(graphs):
        full = {t.name: block.name + numbered(t.name, index) for t in graph.lean}
        for tensors in graph.lean:
            can_replay = is_whole and tensors.kind not in NEVER_REPLAYED
            read = tuple(full[name] for name in tensors.inputs if name in full)
            activations.append(
                Activation(
                    name=full[tensors.name],
                    op=tensors.op,
                    kind=tensors.kind,
                    num_bytes=tensors.num_bytes,
                    inputs=(*(given if tensors.reads_input else ()), *read) if is_whole else (),
                    is_saved=True,
                    is_replayable=can_replay,
                    group=block.name + tensors.group if is_whole else full[tensors.name],
                )
            )
    return replace(block, activations=(*inputs, *activations))


def numbered(name: str, index: int) -> str:
    """Return a local name with the number of its graph, from the block's second graph on."""
    return name if index == 0 else f"{name}@{index + 1}"


class Names:
    """Numbers names that come more than once."""

    def __init__(self) -> None:
        self._num_named: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """Return the name, with its number from the second time on."""
        count = self._num_named.get(name, 0) + 1
        self._num_named[name] = count
        return name if count == 1 else f"{name}#{count}"
