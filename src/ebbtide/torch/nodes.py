"""The storages that the forward of one block has met, as nodes of its record.

Which storage is which node, where its bytes come from, and what is held of it until the plan's
decision for it is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ebbtide.plan import Decision
from ebbtide.torch.devices.base import Place
from ebbtide.torch.identity import StorageRef, clone_storage, storage_key
from ebbtide.torch.internals import alias_of, is_plain, pause_dispatch, storage_address
from ebbtide.torch.parameters import (
    Parameters,
    is_gathered_for_its_module,
    may_be_updated_in_backward,
)
from ebbtide.torch.record import Node, Outer, Record, Role
from ebbtide.torch.sharded import local_of
from ebbtide.workload import OpKind

_MAX_COPIED_BYTES = 64 * 1024
"""Of what is only referenced, recipes start from a copy up to this size: it costs one small clone,
and saves nothing to move (it is the size below which nothing is moved, by default)."""


@runtime_checkable
class Policy(Protocol):
    """Decides what becomes of a storage at the moment it is made."""

    def decide(
        self, name: str, *, is_replayable: bool, num_bytes: int
    ) -> tuple[Decision, Place | None]:
        """Return the decision, with room reserved where it is HOST or DISK."""
        ...

    def is_kept_by_plan(self, name: str) -> bool:
        """Return whether a plan keeps a storage that could be made again."""
        ...

    def reach(self, group: str) -> None:
        """Note that the call that makes `group` runs next, or where that is not known, ran."""
        ...

    def keep_unknown(self, reason: str) -> None:
        """Count a tensor that stays on the device because it is not understood."""
        ...


class Nodes:
    """The nodes of a record that is being made, by the storages that they stand for.

    Args:
        record: Where they go.
        policy: Decides for each storage.
        device: The block's device; what is elsewhere stays where it is.
        parameters: Storages of the model's parameters and buffers as they are now.
        inputs: Storages of the block's differentiable inputs.
        stream: Storage of its first floating-point input.
        copies_inputs: Hold block inputs as copies, because the model writes to them later.
        is_checked: Keep the real tensors of what recipes start from, for `Record.check_roots`.
        written: Storages of parameters and buffers that some block was seen to write to.
        outers: DTensors that the block is given, by the storages of their local parts.
    """

    def __init__(
        self,
        record: Record,
        policy: Policy,
        *,
        device: torch.device,
        parameters: Parameters,
        inputs: frozenset[int],
        stream: int,
        copies_inputs: bool,
        is_checked: bool,
        written: set[int],
        outers: Mapping[int, Outer],
    ) -> None:
        self.record = record
        self.policy = policy
        self.device = device
        self.parameters = parameters
        self.inputs = inputs
        self.stream = stream
        self.is_checked = is_checked
        self.written = written
        self.by_storage: dict[int, Node] = {}
        self.held_id = 0
        """The tensor that a node was made to hold last: that alias counts its versions."""
        self.held_inputs: list[tuple[Tensor, int]] = []
        """Aliases of the inputs that were copied, and their versions then."""
        self.roots: list[tuple[Node, Tensor]] = []
        """While the block is checked: what recipes start from and is evicted, and the real one."""
        self._copies_inputs = copies_inputs
        self.has_unsteady = False
        """A hook may update some parameter that was met, in the middle of backward."""
        self.cut: set[int] = set()
        """Storages of such parameters that were detached."""
        self._outers = outers
        self._storages: list[StorageRef] = []

    def forget(self) -> None:
        """Let go of all that was only needed during the forward."""
        self.by_storage.clear()
        self._storages.clear()
        self.parameters = Parameters()
        self.held_inputs.clear()
        self._outers = {}
        self.roots.clear()

    def is_new(self, tensor: Tensor) -> bool:
        """Return whether a tensor stands on a storage that has no node and is no parameter's."""
        if not is_plain(tensor):
            return False
        key = storage_key(tensor)
        return key not in self.by_storage and self.parameters.get(key) is None

    def add(
        self,
        tensor: Tensor,
        name: str,
        role: Role,
        kind: OpKind,
        op: str,
        group: str,
        *,
        is_replayable: bool,
    ) -> Node:
        """Make a node of a tensor's storage, and decide for it."""
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        place = None
        if role is Role.DERIVED:
            decision = Decision.RECOMPUTE if is_replayable else Decision.KEEP
        elif role is Role.PARAMETER or role is Role.SHARED or tensor.device != self.device:
            decision = Decision.KEEP
        else:
            decision, place = self.policy.decide(
                name, is_replayable=is_replayable, num_bytes=num_bytes
            )
        nodes = self.record.nodes
        node = Node(len(nodes), name, role, kind, op, group, num_bytes, decision, place)
        nodes.append(node)
        self.enter(node, storage, storage_address(storage))
        return node

    def enter(self, node: Node, storage: torch.UntypedStorage, key: int) -> None:
        """Let `node` stand for a storage from now on."""
        self.by_storage[key] = node
        if node.role is not Role.PARAMETER:  # its node holds it to the block's end
            # Design rule 3: while it is weakly held, the address cannot mean another storage.
            self._storages.append(StorageRef(storage))

    def hold(self, node: Node, tensor: Tensor, parameter: Tensor | None = None) -> None:
        """Keep a node's storage for as long as its record needs it.

        Args:
            node: Which.
            tensor: Stands on the storage; its alias counts the versions.
            parameter: The parameter of it, where that was looked up already.
        """
        if node.kept is not None:
            return
        key = storage_key(tensor)
        if self._copies_inputs and (node.role is Role.INPUT or key == self.stream):
            self.held_inputs.append(self._outers.get(key) or (alias_of(tensor), tensor._version))
            with pause_dispatch():
                node.kept = clone_storage(tensor)
            node.version, node.is_copy = node.kept._version, True
            return
        node.kept, node.version, self.held_id = alias_of(tensor), tensor._version, id(tensor)
        outer = self._outer_of(node, key, parameter)
        if outer is not None:
            node.outers.append(outer)
        if node.place is None:
            return
        owner = tensor._base if tensor._base is not None else tensor
        # A part of a storage that is no view counts its versions apart from the other parts, as
        # those of `unsafe_split` do: an equal version does not tell that the storage is the same.
        node.is_shared = owner.numel() * owner.element_size() >= node.num_bytes

    def note_unsteady(self, node: Node) -> None:
        """Note that a node is, or is made again from, a parameter that a hook may update."""
        node.is_unsteady = self.has_unsteady = True

    def keep_cut(self, tensor: Tensor, *, is_followed: bool) -> bool:
        """Keep what is detached, where backward may come too late to make it again.

        What is made from a parameter is needed before the parameter's gradient is there, unless
        no gradient goes that way: then a hook may have updated the parameter by then. Returns
        whether it is such a parameter itself.

        Args:
            tensor: What is detached.
            is_followed: A script is followed.
        """
        if not is_plain(tensor):
            return False
        key = storage_key(tensor)
        node = self.by_storage.get(key)
        if node is None or node.role is Role.PARAMETER:
            # To look up all takes long, and what a script tells of was looked up before.
            parameter = (self.parameters.known if is_followed else self.parameters.get)(key)
            if parameter is None or not may_be_updated_in_backward(parameter):
                return False
            self.cut.add(key)
            if node is not None:
                node.is_cut = True
            return True
        if node.is_unsteady:
            node.until_check = False
            if node.decision is Decision.RECOMPUTE:
                node.decision = Decision.KEEP
                with pause_dispatch():
                    self.hold(node, tensor)
        return False

    def pass_by(self, tensor: Tensor) -> bool:
        """Return whether a parameter is there for its module alone, and note its address then.

        It is not held: it would stay gathered for as long as the graph.
        """
        parameter = self.parameters.get(storage_key(tensor))
        if parameter is None or not is_gathered_for_its_module(parameter):
            return False
        self._storages.append(StorageRef(tensor.untyped_storage()))
        return True

    def take_root(self, node: Node, tensor: Tensor) -> None:
        """Hold what a recipe starts from, at its first recorded use."""
        node.is_root = True
        if node.source is None and not node.is_copy and self._may_be_written(node, tensor):
            with pause_dispatch():
                # Not shared: writes through `.data` move no version, so none says which is right.
                node.source = clone_storage(tensor)
        if node.decision is Decision.RECOMPUTE or node.slot is not None:
            return
        self.hold(node, tensor)
        if node.place is not None:
            if self.is_checked:
                self.roots.append((node, alias_of(tensor)))
            self.record.evict(node)

    def _may_be_written(self, node: Node, tensor: Tensor) -> bool:
        """Return whether what is only referenced may have another value in backward.

        That is legal where autograd does not save it, as where a module clones its buffers.
        """
        if node.role is Role.PARAMETER:
            key = storage_key(tensor)
            if key in self.written or node.num_bytes > _MAX_COPIED_BYTES:
                return key in self.written
            return not isinstance(self.parameters.get(key), torch.nn.Parameter)
        if node.is_outside:
            return True  # the next block may write to it as this one did
        return node.role is Role.SHARED and node.num_bytes <= _MAX_COPIED_BYTES

    def _outer_of(self, node: Node, key: int, parameter: Tensor | None) -> Outer | None:
        """Return the DTensor that counts the writes to what comes from outside the block."""
        if node.role is Role.PARAMETER:
            parameter = self.parameters.get(key) if parameter is None else parameter
            if parameter is None or local_of(parameter) is None:
                return None
            return Outer(parameter, parameter._version)
        return self._outers.get(key)
