"""Compare a block's forward with its script, and take over from it what backward needs.

Every operator of every block passes through here, so a forward builds nothing that its record does
not need: what the script says of a call was taken apart before (`script.Expected`).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from ebbtide.plan import Decision
from ebbtide.torch.identity import Layout
from ebbtide.torch.internals import is_plain, pause_dispatch, storage_address
from ebbtide.torch.nodes import Nodes
from ebbtide.torch.parameters import may_be_updated_in_backward
from ebbtide.torch.record import Call, Node, Ref, Role
from ebbtide.torch.script import Expected, ExpectedCall, NodeFacts, is_same_number

_FROM_ANYWHERE: Final = frozenset({Role.INPUT, Role.SHARED, Role.COMPUTED})


class Follower:
    """A forward that has done what its script says up to now.

    Args:
        expected: What it is compared with.
        nodes: Where the storages are found, and those of the script are put.
        has_moments: The policy is told which call comes.
    """

    def __init__(self, expected: Expected, nodes: Nodes, *, has_moments: bool) -> None:
        self.script = expected.script
        self.steps = expected.steps
        self.position = 0
        """Of the call that comes next."""
        self.is_as_planned = True
        """Every tier had the room that it had when the script was made."""
        self._num_packs = 0
        self._packs = expected.script.packs
        self._facts = expected.script.nodes
        self._nodes = nodes
        self._has_moments = has_moments
        self._found: list[Node | None] = [None] * len(self._facts)
        """By its number in the script, what was met of it."""
        nodes.record.nodes = self._found
        nodes.record.calls = [None] * len(expected.script.calls)

    @property
    def is_done(self) -> bool:
        """Whether the forward did all that its script says."""
        is_at_end = self.position == len(self.steps) - 1
        return is_at_end and self._num_packs == len(self._packs)

    # -- calls ---------------------------------------------------------------------------------

    def is_call(self, expected: ExpectedCall, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Return whether a call that runs next is the script's, in each number and each tensor."""
        call, _, num_args, tensors, others = expected
        if len(args) != num_args or (
            (kwargs or call.kwargs) and not self._are_kwargs(call, kwargs)
        ):
            return False
        for position, index, layout in tensors:
            node = self._node_of(args[position], index, layout)
            if node is None:
                return False
            if not node.is_root and node.decision is not Decision.RECOMPUTE:
                self._nodes.take_root(node, args[position])
        for position, known in others:
            given = args[position]
            if known is not given and not self._is_argument(known, given):
                return False
        return True

    def take_outputs(self, outputs: tuple[tuple[int, int], ...], result: Any) -> bool:
        """Make nodes of the outputs that backward needs; returns whether they are as expected."""
        by_storage = self._nodes.by_storage
        for position, index in outputs:
            output = result
            if isinstance(result, tuple | list):
                output = result[position] if position < len(result) else None
            facts = self._facts[index]
            if facts is None or not isinstance(output, Tensor) or not is_plain(output):
                return False
            storage = output.untyped_storage()
            key = storage_address(storage)
            # No parameter either: it would be an argument, and have a node.
            if key in by_storage or storage.nbytes() != facts.num_bytes:
                return False
            if facts.is_unsteady and not torch.is_grad_enabled():
                return False  # no gradient goes that way now, so backward may come too late to it
            self._new(storage, key, facts, index, output)
        return True

    def _are_kwargs(self, call: Call, kwargs: Any) -> bool:
        return len(kwargs) == len(call.kwargs) and all(
            name in kwargs and (known is kwargs[name] or self._is_argument(known, kwargs[name]))
            for name, known in call.kwargs.items()
        )

    def _is_argument(self, known: Any, given: Any) -> bool:
        if type(known) is Ref:
            node = self._node_of(given, *known)
            if node is None:
                return False
            if not node.is_root and node.decision is not Decision.RECOMPUTE:
                self._nodes.take_root(node, given)
            return True
        if type(known) is list:
            return (
                isinstance(given, list | tuple)
                and len(known) == len(given)
                and all(self._is_argument(k, g) for k, g in zip(known, given, strict=True))
            )
        return not isinstance(given, Tensor) and is_same_number(known, given)

    # -- saved tensors -------------------------------------------------------------------------

    def take_pack(self, tensor: Tensor) -> tuple[Node, Layout] | None:
        """Return node and layout of what the script says is saved next, if that is `tensor`."""
        if self._num_packs == len(self._packs):
            return None
        index, layout = self._packs[self._num_packs]
        node = self._found[index]
        if node is not None:
            if not self._is_on(tensor, node, layout):
                return None
        elif tensor.device == self._nodes.device:
            with pause_dispatch():
                node = self._node_from_outside(tensor, index, layout)
        if node is None:
            return None
        self._num_packs += 1
        return node, layout

    # -- nodes ---------------------------------------------------------------------------------

    def _node_of(self, given: Any, index: int, layout: Layout) -> Node | None:
        """Return the node that the script has for an argument; None if it is another one."""
        if not isinstance(given, Tensor):
            return None
        node = self._found[index]
        if node is None:
            return self._node_from_outside(given, index, layout)
        return node if self._is_on(given, node, layout) else None

    def _is_on(self, tensor: Tensor, node: Node, layout: Layout) -> bool:
        """Return whether a tensor stands on a node's storage in this layout."""
        return (
            tensor.layout is torch.strided
            and not tensor.is_nested
            and self._nodes.by_storage.get(storage_address(tensor.untyped_storage())) is node
            and layout.is_of(tensor)
        )

    def _node_from_outside(self, tensor: Tensor, index: int, layout: Layout) -> Node | None:
        """Make a node of what the script does not say is made, where it says that this comes."""
        facts, nodes = self._facts[index], self._nodes
        if facts is None or facts.call >= 0 or not is_plain(tensor) or not layout.is_of(tensor):
            return None
        storage = tensor.untyped_storage()
        key = storage_address(storage)
        if key in nodes.by_storage or storage.nbytes() != facts.num_bytes:
            return None
        parameter = None
        if facts.role is Role.PARAMETER:
            parameter = nodes.parameters.get(key)
            if parameter is None or may_be_updated_in_backward(parameter) != facts.is_unsteady:
                return None
        elif not self._has_role(tensor, key, facts.role):
            return None
        if facts.role is Role.INPUT and self._has_moments:
            nodes.policy.reach(facts.name)
        node = self._new(storage, key, facts, index, tensor)
        if facts.role is not Role.COMPUTED and node.place is None:
            nodes.hold(node, tensor, parameter)
        return node

    def _has_role(self, tensor: Tensor, key: int, role: Role) -> bool:
        """Return whether what is no parameter, and not replayed, has the role that it had."""
        nodes = self._nodes
        is_input = key in nodes.inputs and tensor.device == nodes.device
        if is_input is not (role is Role.INPUT) or type(tensor) is torch.nn.Parameter:
            return False
        if nodes.parameters.known(key) is not None:
            return False
        # Made outside the block, or in it by a call that is not replayed: by which one matters
        # for its name alone.
        return role in _FROM_ANYWHERE

    def _new(
        self, storage: torch.UntypedStorage, key: int, facts: NodeFacts, index: int, tensor: Tensor
    ) -> Node:
        decision, place = facts.decision, None
        if facts.is_asked and tensor.device == self._nodes.device:
            decision, place = self._nodes.policy.decide(
                facts.name,
                is_replayable=decision is Decision.RECOMPUTE,
                num_bytes=facts.num_bytes,
            )
            if decision is not facts.decision:
                self.is_as_planned = False
        node = Node(
            index, facts.name, facts.role, facts.kind, facts.op, facts.group, facts.num_bytes,
            decision, place,
        )  # fmt: skip
        node.call = facts.call
        if facts.is_unsteady:
            self._nodes.note_unsteady(node)
        self._found[index] = node
        self._nodes.enter(node, storage, key)
        return node
