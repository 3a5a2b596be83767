"""Take what the forward of a compiled block leaves for its backward.

A compiled block runs as one autograd function: which of its tensors are saved was decided by the
partitioner when the block was compiled, and all of them are packed as its forward ends. There is
nothing to record in between, and nothing may look: an active dispatch mode turns compiled code
off without a word. So saved-tensor hooks alone are put on, and what was saved is looked up by its
storage. What is made again is made inside the compiled backward, and is not seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ebbtide.plan import Decision
from ebbtide.torch.graphs import GraphFacts, Names, numbered, running
from ebbtide.torch.identity import Layout, StorageRef, bytes_of, storage_key
from ebbtide.torch.internals import (
    alias_of,
    has_ended,
    is_plain,
    never_compile,
    pause_dispatch,
    pop_pack_hook,
)
from ebbtide.torch.nodes import Policy
from ebbtide.torch.parameters import Parameters
from ebbtide.torch.record import Handle, Node, Record, Role
from ebbtide.torch.tape import Witness, leave_alone, noting
from ebbtide.workload import OpKind

COMPILED_OP: Final = "compiled"
"""Name of the operator that makes all that a compiled block saves."""


class SavedSet:
    """Takes one forward of one compiled block into a `Record`.

    Args:
        record: Where to.
        policy: Decides for each storage.
        device: The block's device; what is elsewhere stays where it is.
        parameters: Storages of the model's parameters and buffers as they are now.
        inputs: Storages of the block's differentiable inputs.
        given: Storages of all tensors that the block is given: what is not among `inputs` is
            made outside, as masks and tables are, and stays.
        is_checked: Keep the real tensors, for `Record.check`.
        witness: Told of each tensor that is taken over, as it is then.
        frame: Ends with the block's forward. None: the end is told.
        note_over: Called when autograd saves something after the end of `frame`.
    """

    def __init__(
        self,
        record: Record,
        policy: Policy,
        *,
        device: torch.device,
        parameters: Parameters,
        inputs: frozenset[int],
        given: frozenset[int],
        is_checked: bool,
        witness: Witness | None = None,
        frame: FrameType | None = None,
        note_over: Callable[[], None] | None = None,
    ) -> None:
        self.record = record
        self.is_checked = is_checked
        self.real: list[tuple[Handle, Tensor]] = []
        self._witness = noting(self.real, witness) if is_checked else witness
        self._policy = policy
        self._device = device
        self._parameters = parameters
        self._inputs = inputs
        self._given = given
        self._frame = frame
        self._note_over = note_over
        self._by_storage: dict[int, Node] = {}
        self._storages: list[StorageRef] = []
        self._names: Iterator[str] = iter(())
        """Of what is packed next, where that is known."""
        self._numbers = Names()
        self._num_saved = 0
        self._is_over = False

    def put_on(self, unpack: Callable[[Any], Tensor]) -> None:
        """Listen to what autograd saves in this thread."""
        saved_tensors_hooks(self.pack, unpack).__enter__()
        running.listener = self

    def take_off(self) -> None:
        """Listen no more. Where hooks were entered since, these stay below them, inert."""
        self._is_over, self._frame = True, None
        if running.listener is self:
            running.listener = None
        pop_pack_hook(self.pack)

    def start_graph(self, graph: GraphFacts) -> None:
        """Note that a compiled graph starts: what is packed next is what it saves."""
        index = len(self.record.graphs)
        self.record.graphs.append(graph)
        self._names = iter([numbered(name, index) if name else "" for name in graph.names])

    @property
    def is_over(self) -> bool:
        """Whether the block's forward has ended: what is saved then belongs to somebody else."""
        if self._frame is not None and has_ended(self._frame):
            self._is_over, self._frame = True, None
        return self._is_over

    def forget(self) -> None:
        """Let go of all that was only needed during the forward."""
        self._by_storage.clear()
        self._storages.clear()
        self._parameters = Parameters()
        self.real.clear()
        self._witness = None
        self._is_over, self._frame, self._note_over = True, None, None

    def pack(self, tensor: Tensor) -> Any:
        """Take over what autograd saves; the saved-tensor hook of the block."""
        with pause_dispatch():
            if self.is_over:
                packed = leave_alone(tensor)
                self.take_off()
                if self._note_over is not None:
                    self._note_over()
                return packed
            local = next(self._names, "")
            if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
                self._policy.keep_unknown(f"subclass {type(tensor).__name__}")
                return leave_alone(tensor)
            if not is_plain(tensor) or tensor.device != self._device:
                return leave_alone(tensor)
            node, layout = self._node_of(tensor, local), Layout.of(tensor)
            handle = Handle(self.record, node.index, layout, tensor._version, node.num_packs)
            node.num_packs += 1
            self._hold(node, tensor, handle)
            if self._witness is not None:
                self._witness(handle, tensor)
            return handle

    def _hold(self, node: Node, tensor: Tensor, handle: Handle) -> None:
        """Hold a storage until the record is sealed, which evicts what has a place."""
        alias = alias_of(tensor)
        node.watched[handle.number] = alias, handle.version
        layout = handle.layout
        is_part = 2 * layout.num_bytes < node.num_bytes and not layout.has_overlap
        if node.kept is None:
            node.kept, node.version = alias, handle.version
            owner = tensor._base if tensor._base is not None else tensor
            node.is_shared = owner.numel() * owner.element_size() >= node.num_bytes
            node.pieces = {} if is_part and node.place is not None else None
        if node.pieces is None:
            return
        node.pieces[layout] = node.pieces.get(layout, 0) + 1
        if not is_part or 2 * sum(piece.num_bytes for piece in node.pieces) >= node.num_bytes:
            node.pieces = None  # it moves whole

    def _node_of(self, tensor: Tensor, local: str) -> Node:
        key = storage_key(tensor)
        node = self._by_storage.get(key)
        return self._new_node(tensor, key, local) if node is None else node

    def _new_node(self, tensor: Tensor, key: int, local: str) -> Node:
        role, name, kind, op = self._facts_of(key, local)
        num_bytes = tensor.untyped_storage().nbytes()
        decision, place = Decision.KEEP, None
        if role is Role.INPUT or role is Role.COMPUTED:
            decision, place = self._policy.decide(name, is_replayable=False, num_bytes=num_bytes)
        nodes = self.record.nodes
        node = Node(len(nodes), name, role, kind, op, name, num_bytes, decision, place)
        nodes.append(node)
        self._by_storage[key] = node
        # Design rule 3: while it is weakly held, the address cannot mean another storage.
        self._storages.append(StorageRef(tensor.untyped_storage()))
        return node

    def _given_role(self, key: int) -> Role | None:
        """Return what a storage is that the block was given; None for what it has made."""
        if self._parameters.get(key) is not None:
            return Role.PARAMETER
        if key in self._inputs:
            return Role.INPUT
        return Role.SHARED if key in self._given else None

    def _facts_of(self, key: int, local: str) -> tuple[Role, str, OpKind, str]:
        block, role = self.record.block, self._given_role(key)
        if role is Role.INPUT:
            return role, self._numbers.unique(f"{block}:input"), OpKind.INPUT, ""
        if role is not None:
            return role, role.name.lower(), OpKind.INPUT, ""
        if not local:
            self._num_saved += 1
            local = f":saved.{self._num_saved}"
        return Role.COMPUTED, self._numbers.unique(f"{block}{local}"), OpKind.OPAQUE, COMPILED_OP


class _Stash:
    """One storage in pageable host memory, for a step that is measured."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = bytes_of(tensor).to("cpu", copy=True)
        self._device = tensor.device
        self._back: Tensor | None = None
        self.num_packs = self._num_left = 0

    def restore(self, layout: Layout) -> Tensor:
        """Return a tensor over the storage, back on its device; once for all that stand on it."""
        if self._back is None:
            self._back, self._num_left = self._host.to(self._device, copy=True), self.num_packs
        tensor = layout.over(self._back)
        self._num_left -= 1
        if not self._num_left:
            self._back = None
        return tensor


@dataclass(frozen=True, slots=True)
class Stashed:
    """What autograd holds in place of a saved tensor that a `StashingSet` took."""

    record: Record
    stash: _Stash
    layout: Layout


class StashingSet(SavedSet):
    """Takes a forward that saves all that it could, to measure what its backward then takes.

    What the block makes waits in pageable host memory until then. That is slow, and lets no step
    hold more on the device than the frugal ones do.
    """

    def __init__(self, record: Record, policy: Policy, **options: Any) -> None:
        super().__init__(record, policy, **options)
        self.saved_bytes: dict[str, int] = {}
        """Local name to the bytes of what the block has made and saved: a graph for any size
        knows those that it was traced with alone."""
        self._stashes: dict[tuple[int, int], _Stash] = {}
        """By storage and its version."""

    def pack(self, tensor: Tensor) -> Any:
        """Take over what autograd saves; the saved-tensor hook of the block."""
        with pause_dispatch():
            is_ours = type(tensor) is Tensor and tensor.device == self._device
            if self.is_over or not is_ours or not is_plain(tensor):
                return super().pack(tensor)
            key = storage_key(tensor)
            if self._given_role(key) is not None:
                return super().pack(tensor)
            self.saved_bytes[next(self._names, "")] = tensor.untyped_storage().nbytes()
            stash = self._stashes.get((key, tensor._version))
            if stash is None:
                stash = self._stashes[key, tensor._version] = _Stash(tensor)
                # Design rule 3: while it is weakly held, the address cannot mean another storage.
                self._storages.append(StorageRef(tensor.untyped_storage()))
            stash.num_packs += 1
            return Stashed(self.record, stash, Layout.of(tensor))

    @property
    def stashes(self) -> tuple[object, ...]:
        """What waits in host memory."""
        return tuple(self._stashes.values())

    def forget(self) -> None:
        """Let go of all that was only needed during the forward."""
        super().forget()
        self._stashes.clear()


# A block that breaks into several graphs packs while the compiler looks on.
never_compile(SavedSet.pack)
never_compile(StashingSet.pack)
