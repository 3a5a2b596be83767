"""Record the forward of one block, and take what autograd saves in it.

A dispatch mode sees every ATen call of the block, below autograd; saved-tensor hooks see every
tensor that autograd keeps. The two meet in the storage: each saved tensor is looked up among
the storages that the calls made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.plan import Decision
from ebbtide.torch.devices.base import Place
from ebbtide.torch.identity import Layout, StorageRef, storage_key
from ebbtide.torch.internals import pause_dispatch, storage_address
from ebbtide.torch.ops import OpFacts, facts_of, is_random_call
from ebbtide.torch.record import Call, Handle, Node, Record, Ref, Role
from ebbtide.torch.traffic import MUTATED
from ebbtide.workload import OpKind

# An attention kernel's seed and offset: its outputs after the first two, a few bytes that are
# left uninitialised when there is no dropout, so they have no value to compare or to move.
_NUM_ATTENTION_VALUES = 2


class Policy(Protocol):
    """Decides what becomes of a storage at the moment it is made."""

    def decide(
        self, name: str, *, is_replayable: bool, num_bytes: int
    ) -> tuple[Decision, Place | None]:
        """Return the decision, with room reserved where it is HOST or DISK."""
        ...

    def keep_unknown(self, reason: str) -> None:
        """Count a tensor that stays on the device because it is not understood."""
        ...


class Tape(TorchDispatchMode):
    """Records one forward of one block into a `Record`.

    Args:
        record: Where to.
        policy: Decides for each storage.
        device: The block's device; what is elsewhere stays where it is.
        parameters: Storages of the model's parameters and buffers as they are now. FSDP swaps
            them around each block, so they are looked up when the block starts.
        inputs: Storages of the block's differentiable inputs.
        scope: Returns the path of the module that is running, and whether it has no children.
        is_checked: Keep the real tensors, for `Record.check`.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions inside the block run compiled."""
        return True

    def __init__(
        self,
        record: Record,
        policy: Policy,
        *,
        device: torch.device,
        parameters: dict[int, Tensor],
        inputs: frozenset[int],
        scope: Callable[[], tuple[str, bool]],
        is_checked: bool,
    ) -> None:
        super().__init__()
        self.record = record
        self.real: list[tuple[Handle, Tensor]] = []
        self._policy = policy
        self._device = device
        self._parameters = parameters
        self._inputs = inputs
        self._scope = scope
        self.is_checked = is_checked
        self._by_storage: dict[int, Node] = {}
        self._num_named: dict[str, int] = {}

    # -- calls ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(t is not Tensor and t is not torch.nn.Parameter for t in types):
            return NotImplemented  # a subclass unwraps itself; its inner calls come here
        kwargs = kwargs or {}
        facts = facts_of(func)
        if facts.is_view:
            return func(*args, **kwargs)
        if facts.written_positions or facts.written_names:
            return self._write(func, facts, args, kwargs)
        result = func(*args, **kwargs)
        self._record(func, facts, args, kwargs, result)
        return result

    def _record(
        self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        outputs = result if isinstance(result, tuple | list) else (result,)
        made = [o for o in outputs if isinstance(o, Tensor) and self._is_new(o)]
        if not made:
            return
        is_random = is_random_call(facts, args, kwargs)
        is_replayable = facts.is_replayable and not is_random
        kind = OpKind.RANDOM if is_random else facts.kind
        inputs: dict[int, None] = {}
        recorded_args = tuple(self._recorded(a, inputs) for a in args)
        recorded_kwargs = {k: self._recorded(a, inputs) for k, a in kwargs.items()}
        reads = [self.record.node(i) for i in inputs]
        is_derived = is_replayable and all(n.role in (Role.PARAMETER, Role.DERIVED) for n in reads)
        path, is_leaf = self._scope()
        base = path if is_leaf and kind is OpKind.MATMUL else f"{path}:{facts.name.strip('_')}"
        base = self._unique(base)
        call_index = len(self.record.calls)
        numbers: list[int] = []
        is_recomputed = False
        for position, output in enumerate(outputs):
            if not (isinstance(output, Tensor) and self._is_new(output)):
                numbers.append(-1)
                continue
            name = f"{base}.{position}" if len(outputs) > 1 else base
            is_opaque_seed = kind is OpKind.ATTENTION and position >= _NUM_ATTENTION_VALUES
            node = self._new_node(
                output,
                name=name,
                role=Role.DERIVED if is_derived else Role.COMPUTED,
                kind=kind,
                op=facts.name,
                group=base,
                is_replayable=is_replayable and not is_opaque_seed,
            )
            node.call, node.output = (call_index, position) if is_replayable else (-1, 0)
            node.layout = Layout.of(output)
            is_recomputed |= node.decision is Decision.RECOMPUTE
            numbers.append(node.index)
        if not is_replayable:
            return
        self.record.calls.append(
            Call(func, recorded_args, recorded_kwargs, tuple(inputs), tuple(numbers))
        )
        if is_recomputed:
            self._take_roots(reads, args, kwargs)

    def _write(
        self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call that writes to some of its arguments."""
        written = [args[i] for i in facts.written_positions if i < len(args)]
        written += [kwargs[k] for k in facts.written_names if k in kwargs]
        targets = [t for w in written for t in (w if isinstance(w, list | tuple) else (w,))]
        targets = [t for t in targets if isinstance(t, Tensor)]
        for target in targets:
            old = self._by_storage.get(storage_key(target))
            if old is not None:
                self._part_with(old)
        result = func(*args, **kwargs)
        path, _ = self._scope()
        kind = OpKind.RANDOM if facts.kind is OpKind.RANDOM else OpKind.OPAQUE
        for target in targets:
            key = storage_key(target)
            if key in self._parameters:
                self._by_storage.pop(key, None)
                continue
            name = self._unique(f"{path}:{facts.name.strip('_')}")
            self._new_node(
                target, name=name, role=Role.COMPUTED, kind=kind, op=facts.name, group=name,
                is_replayable=False,
            )  # fmt: skip
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, Tensor) and self._is_new(output):
                name = self._unique(f"{path}:{facts.name.strip('_')}")
                self._new_node(
                    output, name=name, role=Role.COMPUTED, kind=kind, op=facts.name, group=name,
                    is_replayable=False,
                )  # fmt: skip
        return result

    def _part_with(self, node: Node) -> None:
        """Make a node independent of its storage, which is about to be written."""
        if node.slot is not None:
            assert self.record.traffic is not None, "bug in ebbtide"
            self.record.traffic.settle(node.slot)
        elif node.kept is not None and node.is_root and not node.num_packs:
            # A root that autograd did not save: the write is legal, so keep the old value.
            with pause_dispatch():
                node.kept = _clone_storage(node.kept)
                node.version = node.kept._version

    # -- saved tensors -------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """Take over what autograd saves; the saved-tensor hook of the block."""
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            self._policy.keep_unknown(f"subclass {type(tensor).__name__}")
            return _Alias(tensor.detach(), tensor._version)
        with pause_dispatch(), torch.no_grad():
            if tensor.layout is not torch.strided or tensor.device != self._device:
                return _Alias(tensor.detach(), tensor._version)
            node = self._node_of(tensor)
            handle = Handle(self.record, node.index, Layout.of(tensor), tensor._version)
            node.num_packs += 1
            if node.decision is not Decision.RECOMPUTE and node.slot is None:
                self._store(node, tensor, handle.layout)
            if self.is_checked:
                self.real.append((handle, tensor.detach()))
            return handle

    def _store(self, node: Node, tensor: Tensor, layout: Layout) -> None:
        if node.kept is None:
            node.kept, node.version = tensor.detach(), tensor._version
        if node.place is None:
            return
        if 2 * layout.num_bytes < node.num_bytes and not node.is_root and not layout.has_overlap:
            # Only a small view is saved so far: wait for the block's end, so that a storage
            # that is saved whole later does not move twice.
            node.pieces[layout] = node.pieces.get(layout, 0) + 1
            if 2 * sum(piece.num_bytes for piece in node.pieces) < node.num_bytes:
                return
        self.record.evict(node)

    def _take_roots(self, reads: list[Node], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hold what a recipe starts from, at its first recorded use."""
        if all(n.is_root or n.decision is Decision.RECOMPUTE for n in reads):
            return
        tensors: dict[int, Tensor] = {}
        for argument in (*args, *kwargs.values()):
            for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(tensor, Tensor):
                    tensors[storage_key(tensor)] = tensor
        with pause_dispatch(), torch.no_grad():
            for key, tensor in tensors.items():
                node = self._by_storage[key]
                node.is_root = True
                if node.decision is Decision.RECOMPUTE or node.slot is not None:
                    continue
                if node.kept is None:
                    node.kept, node.version = tensor.detach(), tensor._version
                self.record.evict(node)

    # -- nodes ---------------------------------------------------------------------------------

    def _recorded(self, argument: Any, inputs: dict[int, None]) -> Any:
        if isinstance(argument, Tensor):
            node = self._node_of(argument)
            inputs[node.index] = None
            return Ref(node.index, Layout.of(argument))
        if isinstance(argument, list | tuple):
            return [self._recorded(a, inputs) for a in argument]
        return argument

    def _is_new(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key not in self._by_storage and key not in self._parameters

    def _node_of(self, tensor: Tensor) -> Node:
        """Return the node that a tensor stands on, making one for what comes from outside."""
        key = storage_key(tensor)
        node = self._by_storage.get(key)
        if node is not None:
            return node
        if key in self._parameters:
            role, name = Role.PARAMETER, "parameter"
        elif key in self._inputs and tensor.device == self._device:
            role, name = Role.INPUT, self._unique(f"{self.record.block}:input")
        else:
            role, name = Role.SHARED, "shared"
        with pause_dispatch(), torch.no_grad():
            node = self._new_node(
                tensor, name=name, role=role, kind=OpKind.INPUT, op="", group=name,
                is_replayable=False,
            )  # fmt: skip
            if node.place is None:
                node.kept, node.version = tensor.detach(), tensor._version
        return node

    def _new_node(
        self,
        tensor: Tensor,
        *,
        name: str,
        role: Role,
        kind: OpKind,
        op: str,
        group: str,
        is_replayable: bool,
    ) -> Node:
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        place = None
        if role is Role.DERIVED:
            decision = Decision.RECOMPUTE if is_replayable else Decision.KEEP
        elif role in (Role.PARAMETER, Role.SHARED) or tensor.device != self._device:
            decision = Decision.KEEP
        else:
            decision, place = self._policy.decide(
                name, is_replayable=is_replayable, num_bytes=num_bytes
            )
        node = Node(
            index=len(self.record.nodes),
            name=name,
            role=role,
            kind=kind,
            op=op,
            group=group,
            num_bytes=num_bytes,
            storage=StorageRef(storage),
            decision=decision,
            place=place,
        )
        self.record.nodes.append(node)
        self._by_storage[storage_address(storage)] = node
        return node

    def _unique(self, name: str) -> str:
        count = self._num_named.get(name, 0) + 1
        self._num_named[name] = count
        return name if count == 1 else f"{name}#{count}"


class _Alias:
    """A saved tensor that is left alone, with torch's own check for later writes."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor = tensor
        self.version = version


def restore_alias(packed: _Alias) -> Tensor:
    """Return a tensor that `pack` left alone.

    Raises:
        RuntimeError: It was written to after it was saved, as torch itself says.
    """
    if packed.tensor._version != packed.version:
        raise RuntimeError(
            MUTATED.format(name="a tensor", saved=packed.version, now=packed.tensor._version)
        )
    return packed.tensor


def _clone_storage(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage().clone()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
