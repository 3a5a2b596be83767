"""Record the forward of one block, and take what autograd saves in it.

A dispatch mode sees every ATen call of the block, below autograd; saved-tensor hooks see every
tensor that autograd keeps. The two meet in the storage: each saved tensor is looked up among
the storages that the calls made.

A forward that follows its script (`follow.py`) may leave it at any call or saved tensor, and is
recorded from there on: both fill the same table of nodes.

A little longer than most modules: calls and saved tensors are told apart by the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.plan import Decision
from ebbtide.torch.devices.base import Mark
from ebbtide.torch.follow import Follower
from ebbtide.torch.identity import Layout, clone_storage, storage_key
from ebbtide.torch.internals import (
    alias_of,
    has_ended,
    is_active_mode,
    is_plain,
    is_top_mode,
    never_compile,
    pause_dispatch,
    pop_pack_hook,
)
from ebbtide.torch.nodes import Nodes, Policy
from ebbtide.torch.ops import OpFacts, facts_of, is_random_call
from ebbtide.torch.parameters import (
    Parameters,
    is_gathered_for_its_module,
    may_be_updated_in_backward,
)
from ebbtide.torch.record import Call, Handle, Node, Outer, Record, Ref, Role
from ebbtide.torch.script import Expected, ExpectedStep, Trace
from ebbtide.torch.sharded import SavedDTensor, local_of, outer_of
from ebbtide.torch.traffic import MUTATED
from ebbtide.workload import OpKind

# An attention kernel's seed and offset: its outputs after the first two, a few bytes that are
# left uninitialised when there is no dropout, so they have no value to compare or to move.
_NUM_ATTENTION_VALUES = 2


_DETACH = torch.ops.aten.detach.default
_FROM_PARAMETERS = frozenset({Role.PARAMETER, Role.DERIVED})


@runtime_checkable
class CallTimer(Protocol):
    """Measures operator calls."""

    def start_call(self) -> Mark:
        """Mark the start of a call."""
        ...

    def end_call(self, start: Mark) -> None:
        """Mark the end of a call."""
        ...

    def name_call(self, name: str) -> None:
        """Name the call that has just ended; one that gets no name makes no activation."""
        ...


Witness = Callable[[Handle, Tensor], None]


def noting(real: list[tuple[Handle, Tensor]], witness: Witness | None) -> Witness:
    """Return what puts each tensor into `real`, and tells `witness` of it."""

    def note(handle: Handle, tensor: Tensor) -> None:
        real.append((handle, alias_of(tensor)))
        if witness is not None:
            witness(handle, tensor)

    return note


class Tape(TorchDispatchMode):
    """Records one forward of one block into a `Record`.

    Args:
        record: Where to.
        policy: Decides for each storage.
        device: The block's device; what is elsewhere stays where it is.
        parameters: Storages of the model's parameters and buffers as they are now. FSDP swaps
            them around each block, so they are looked up when the block starts.
        inputs: Storages of the block's differentiable inputs.
        stream: Storage of its first floating-point input, which in the first block of a frozen
            model needs no gradient but is written to like the others.
        scope: Returns the path of the module that is running, and whether it has no children.
        names: The calls of the last forward and their names; brought up to date here.
        copies_inputs: Hold block inputs as copies, because the model writes to them later.
        is_checked: Keep the real tensors, for `Record.check`.
        witness: Told of each tensor that is taken over, as it is then.
        timer: Measures the calls.
        written: Storages of parameters and buffers that some block was seen to write to; those
            of this one are added.
        has_moments: The plan lets evictions go at calls of its own choice: the policy is told
            which call comes. Else it is not, which saves time in each call.
        frame: Ends with the block's forward. torch calls no hook when an interrupt ended that, so
            the tape looks for itself. None: it is told.
        note_over: Called when autograd saves something after the end of `frame`.
        script: What the last forwards of the block did; this one is compared with it.
        outers: DTensors that the block is given, by the storages of their local parts.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions inside the block run compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps each call of the mode, so that none is compiled; `never_compile` is
        how ours are not."""
        return False

    def __init__(
        self,
        record: Record,
        policy: Policy,
        *,
        device: torch.device,
        parameters: Parameters,
        inputs: frozenset[int],
        stream: int,
        scope: Callable[[], tuple[str, bool]],
        names: list[tuple[Any, str, str]],
        copies_inputs: bool,
        is_checked: bool,
        witness: Witness | None = None,
        timer: CallTimer | None = None,
        written: set[int] | None = None,
        has_moments: bool = False,
        frame: FrameType | None = None,
        note_over: Callable[[], None] | None = None,
        script: Expected | None = None,
        outers: Mapping[int, Outer] | None = None,
    ) -> None:
        super().__init__()
        self.record = record
        self.trace = Trace() if script is None else None
        """Notes for a script, where this forward follows none."""
        self.nodes = Nodes(
            record,
            policy,
            device=device,
            parameters=parameters,
            inputs=inputs,
            stream=stream,
            copies_inputs=copies_inputs,
            is_checked=is_checked,
            written=set[int]() if written is None else written,
            outers=outers or {},
        )
        self._follower = (
            None if script is None else Follower(script, self.nodes, has_moments=has_moments)
        )
        """While the forward does what its script says."""
        self._input_name = f"{record.block}:input"
        self.has_followed = False
        """Whether the forward did all that its script says, and nothing else; told at its end."""
        self.num_uses: tuple[int, ...] | None = None
        """Of each node, where the forward did all that its script says, and nothing else."""
        self.real: list[tuple[Handle, Tensor]] = []
        self._policy = policy
        self._device = device
        self._scope = scope
        self.is_checked = is_checked
        self._witness = noting(self.real, witness) if is_checked else witness
        self._timer = timer
        self._has_moments = has_moments
        self._is_odd_call = False
        self._is_passing_call = False
        """It reads a parameter that is there for the time of its module alone."""
        self._passing: set[int] = set()
        """Nodes of such parameters, by their numbers."""
        self._names = names
        self._num_calls = 0
        self.is_alike = bool(names)
        """The calls up to now are those of the last forward, so their names are known."""
        self._num_named: dict[str, int] = {}
        self._frame = frame
        self._note_over = note_over
        self._is_over = False
        self._outer: Outer | None = None
        """Counts the writes to what is packed now, where that is a DTensor's local part."""

    def put_on(self, unpack: Callable[[Any], Tensor]) -> None:
        """Listen to the calls of this thread, and to what autograd saves in it."""
        saved_tensors_hooks(self.pack, unpack).__enter__()
        self.__enter__()

    def take_off(self) -> None:
        """Listen no more. Where something was entered since, what lies below that stays on.

        It is inert then, and goes when autograd next saves something with nothing on top.
        """
        follower = self._follower
        if follower is not None and follower.is_done:
            self.has_followed = True
            self.num_uses = follower.script.num_uses if follower.is_as_planned else None
        self._is_over, self._frame, self._follower = True, None, None
        if is_top_mode(self):
            self.__exit__(None, None, None)
        if not is_active_mode(self):  # the hook is what takes the mode off later
            pop_pack_hook(self.pack)

    @property
    def is_over(self) -> bool:
        """Whether the block's forward has ended: what is called then belongs to somebody else."""
        if self._frame is not None and has_ended(self._frame):
            self._is_over, self._frame = True, None
        return self._is_over

    def add_parameters(self, module: nn.Module) -> None:
        """Note parameters that came in the middle of the block: FSDP groups gather theirs."""
        for key in self.nodes.parameters.add(module):
            self.nodes.by_storage.pop(key, None)

    def forget(self) -> None:
        """Let go of all that was only needed during the forward.

        Autograd holds the pack hook, and so this tape, as long as it holds a saved tensor.
        """
        self.nodes.forget()
        self.real.clear()
        self._witness = None
        self._is_over, self._frame, self._note_over = True, None, None

    # -- calls ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        follower = self._follower
        if follower is not None and not types:
            step = follower.steps[follower.position]
            if step.func is func:
                return self._follow(follower, step, args, kwargs or {})
        if types and any(t is not Tensor and t is not torch.nn.Parameter for t in types):
            if any(t.__name__ == "FakeTensor" for t in types):
                return func(*args, **(kwargs or {}))  # DTensor plans with it: it has no bytes
            return NotImplemented  # a subclass unwraps itself; its inner calls come here
        facts = facts_of(func)
        kwargs = kwargs or {}
        if facts.is_view:
            if func is _DETACH and self.nodes.keep_cut(args[0], is_followed=follower is not None):
                self._leave_script(follower)
            return func(*args, **kwargs) if kwargs else facts.direct(*args)
        if follower is not None:
            self._leave_script(follower)
        if self.is_over:
            return func(*args, **kwargs)
        if self._has_moments:
            self._reach_call(func)
        if facts.written_positions or facts.written_names:
            return self._write(func, facts, args, kwargs)
        result = self._run(func, args, kwargs)
        self._record(func, facts, args, kwargs, result)
        return result

    # -- a forward that follows a script -------------------------------------------------------

    def _follow(
        self, follower: Follower, step: ExpectedStep, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a call that the script has at this place, and take from it what backward needs."""
        func, name, index, expected, outputs = step
        if self._has_moments and name:
            self._policy.reach(name)
        if expected is None:
            follower.position += 1
            return func(*args, **kwargs)
        # Before it runs: what it makes could not be told from what it reads.
        is_same = follower.is_call(expected, args, kwargs)
        result = expected.run(*args, **kwargs) if is_same else func(*args, **kwargs)
        if not is_same or not follower.take_outputs(outputs, result):
            self._leave_script(follower)
            self._record(func, facts_of(func), args, kwargs, result)
            return result
        follower.position += 1
        self.record.calls[index] = expected.call
        return result

    def _leave_script(self, follower: Follower | None) -> None:
        """Record from here on: this forward is another one than the script's."""
        if follower is None:
            return
        self._follower = None
        self._num_calls = sum(1 for step in follower.steps[: follower.position] if step.name)
        inputs = [n for n in self.record.nodes if n is not None and n.role is Role.INPUT]
        if inputs:
            self._num_named[self._input_name] = len(inputs)

    # -- a forward that is recorded ------------------------------------------------------------

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        timer = self._timer
        if timer is None:
            return func(*args, **kwargs)
        start = timer.start_call()
        result = func(*args, **kwargs)
        timer.end_call(start)
        return result

    def _reach_call(self, func: Any) -> None:
        """Announce the next call before it takes memory, if it is the one of the last forward."""
        names, position = self._names, self._num_calls
        if self.is_alike and position < len(names) and names[position][0] is func:
            self._policy.reach(names[position][2])

    def _record(
        self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        outputs = result if isinstance(result, tuple | list) else (result,)
        if not any(isinstance(o, Tensor) and self.nodes.is_new(o) for o in outputs):
            if self.trace is not None:
                self.trace.add_call(func, "", -1, ())
            return
        kind, is_replayable = facts.kind, facts.is_replayable
        if is_random_call(facts, args, kwargs):
            kind, is_replayable = OpKind.RANDOM, False
        inputs: dict[int, Node] = {}
        self._is_odd_call = self._is_passing_call = False
        call_args = tuple([self._recorded(a, inputs) for a in args])
        call_kwargs = {k: self._recorded(a, inputs) for k, a in kwargs.items()} if kwargs else {}
        if self._is_odd_call:
            kind, is_replayable = OpKind.OPAQUE, False
        if self._is_passing_call:
            is_replayable = False
        if self.nodes.has_unsteady:
            is_replayable = is_replayable and not _is_late(inputs.values(), outputs)
        is_derived = is_replayable
        for node in inputs.values():
            is_derived = is_derived and node.role in _FROM_PARAMETERS
        base = self._name(func, facts.name, is_matmul=kind is OpKind.MATMUL)
        call_index = len(self.record.calls) if is_replayable else -1
        numbers: list[int] = []
        is_recomputed = False
        for position, output in enumerate(outputs):
            if not (isinstance(output, Tensor) and self.nodes.is_new(output)):
                numbers.append(-1)
                continue
            is_opaque_seed = kind is OpKind.ATTENTION and position >= _NUM_ATTENTION_VALUES
            node = self.nodes.add(
                output,
                f"{base}.{position}" if len(outputs) > 1 else base,
                Role.DERIVED if is_derived else Role.COMPUTED,
                kind,
                facts.name,
                base,
                is_replayable=is_replayable and not is_opaque_seed,
            )
            node.call = call_index
            if is_replayable and any(n.is_unsteady for n in inputs.values()):
                self.nodes.note_unsteady(node)
            if self.is_checked:
                node.layout = Layout.of(output)
                node.until_check = (
                    node.role is Role.COMPUTED
                    and is_replayable
                    and not is_opaque_seed
                    and self._policy.is_kept_by_plan(node.name)
                )
            is_recomputed = is_recomputed or node.decision is Decision.RECOMPUTE or node.until_check
            numbers.append(node.index)
        if self.trace is not None:
            self.trace.add_call(func, base, call_index, numbers)
        if is_replayable:
            # A number may come first where a tensor is meant, which direct calls do not take.
            is_direct = bool(args) and isinstance(args[0], Tensor)
            run = facts.direct if is_direct else func
            call = Call(func, run, call_args, call_kwargs, tuple(inputs), tuple(numbers))
            self.record.calls.append(call)
        if is_recomputed:
            for node in inputs.values():
                if not node.is_root and node.decision is not Decision.RECOMPUTE:
                    self._take_roots(args, kwargs)
                    break

    def _write(
        self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call that writes to some of its arguments."""
        if self.trace is not None:
            self.trace.is_odd = True
        written = [args[i] for i in facts.written_positions if i < len(args)]
        written += [kwargs[k] for k in facts.written_names if k in kwargs]
        targets = [t for w in written for t in (w if isinstance(w, list | tuple) else (w,))]
        targets = [t for t in targets if isinstance(t, Tensor) and is_plain(t)]
        outside: set[int] = set()
        for target in targets:
            key = storage_key(target)
            old = self.nodes.by_storage.get(key)
            if old is not None:
                self._part_with(old)
                if old.role is Role.SHARED or old.is_outside:
                    outside.add(key)
            elif key not in self.nodes.inputs and key != self.nodes.stream:
                outside.add(key)
        result = self._run(func, args, kwargs)
        kind = OpKind.RANDOM if facts.kind is OpKind.RANDOM else OpKind.OPAQUE
        for target in targets:
            key = storage_key(target)
            if self.nodes.parameters.get(key) is not None:
                self.nodes.by_storage.pop(key, None)
                self.nodes.written.add(key)
                continue
            node = self._new_opaque(func, facts, target, kind)
            node.is_outside = key in outside
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, Tensor) and self.nodes.is_new(output):
                self._new_opaque(func, facts, output, kind)
        return result

    def _new_opaque(self, func: Any, facts: OpFacts, tensor: Tensor, kind: OpKind) -> Node:
        name = self._name(func, facts.name)
        return self.nodes.add(
            tensor, name, Role.COMPUTED, kind, facts.name, name, is_replayable=False
        )

    def _part_with(self, node: Node) -> None:
        """Make a node independent of its storage, which is about to be written."""
        if node.slot is not None:
            assert self.record.traffic is not None, "bug in ebbtide"
            self.record.traffic.settle(node.slot)
            self.record.traffic.unshare(node.slot)
        elif node.kept is not None and node.is_root and node.source is None and not node.is_copy:
            # The write is legal where autograd saved nothing of what is written, so recipes
            # start from the old value.
            with pause_dispatch():
                node.source = clone_storage(node.kept)
            if not node.num_packs:
                node.kept, node.version, node.is_copy = node.source, node.source._version, True
                node.source = None
                node.outers.clear()

    # -- saved tensors -------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """Take over what autograd saves; the saved-tensor hook of the block."""
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            if self.is_over:
                return self._pack_after_end(tensor)
            return self._pack_subclass(tensor)
        if type(tensor) is torch.nn.Parameter and is_gathered_for_its_module(tensor):
            return _Alias(tensor, tensor._version)  # itself, as torch does: it is gathered again
        self.nodes.held_id = 0
        follower = self._follower
        if follower is not None:
            found = follower.take_pack(tensor)
            if found is not None:
                node, layout = found
                if node.decision is Decision.RECOMPUTE:
                    return self._handle(node, tensor, layout)
                with pause_dispatch():
                    return self._handle(node, tensor, layout)
        with pause_dispatch():
            is_ours = is_plain(tensor) and tensor.device == self._device
            if is_ours and follower is not None:
                self._leave_script(follower)
            if self.is_over:
                return self._pack_after_end(tensor)
            if not is_ours:
                return leave_alone(tensor)
            node, layout = self._node_of(tensor), Layout.of(tensor)
            if self.trace is not None:
                self.trace.packs.append((node.index, layout))
            return self._handle(node, tensor, layout)

    def _pack_subclass(self, tensor: Tensor) -> Any:
        """Take over this rank's part of a DTensor; any other subclass is left alone."""
        local = local_of(tensor)
        if local is None or local.device != self._device or not is_plain(local):
            # Also where a script is followed: what is saved here is none of its tensors.
            self._policy.keep_unknown(f"subclass {type(tensor).__name__}")
            return leave_alone(tensor)
        self._outer = outer_of(tensor)
        try:
            handle = self.pack(local)
        finally:
            self._outer = None
        return SavedDTensor.of(handle, tensor)

    def _handle(self, node: Node, tensor: Tensor, layout: Layout) -> Handle:
        handle = Handle(self.record, node.index, layout, tensor._version, node.num_packs)
        node.num_packs += 1
        if node.decision is not Decision.RECOMPUTE:
            self._store(node, tensor, handle)
        if self._witness is not None:
            self._witness(handle, tensor)
        return handle

    def _pack_after_end(self, tensor: Tensor) -> _Alias:
        packed = leave_alone(tensor)
        self.take_off()
        if self._note_over is not None:
            self._note_over()
        return packed

    def _store(self, node: Node, tensor: Tensor, handle: Handle) -> None:
        layout = handle.layout
        if node.slot is not None:
            assert self.record.traffic is not None, "bug in ebbtide"
            self.record.traffic.watch(node.slot, tensor)
            if self._outer is not None:
                self.record.traffic.watch_alias(node.slot, *self._outer)
            return
        is_held = node.kept is not None
        self.nodes.hold(node, tensor)
        if node.kept is not None and not node.is_copy:
            alias = alias_of(tensor) if is_held and self.nodes.held_id != id(tensor) else node.kept
            node.watched[handle.number] = alias, handle.version
            if self._outer is not None:
                node.outers.append(self._outer)
        if node.place is None:
            return
        if 2 * layout.num_bytes < node.num_bytes and not node.is_root and not layout.has_overlap:
            # Only a small view is saved so far: wait for the block's end, so that a storage
            # that is saved whole later does not move twice.
            node.pieces = node.pieces or {}
            node.pieces[layout] = node.pieces.get(layout, 0) + 1
            if 2 * sum(piece.num_bytes for piece in node.pieces) < node.num_bytes:
                return
        self.record.evict(node)

    def _take_roots(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hold what a recipe starts from, at its first recorded use."""
        tensors: dict[int, Tensor] = {}
        for argument in (*args, *kwargs.values()):
            for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(tensor, Tensor):
                    tensors[storage_key(tensor)] = tensor
        for key, tensor in tensors.items():
            self.nodes.take_root(self.nodes.by_storage[key], tensor)

    # -- nodes ---------------------------------------------------------------------------------

    def _recorded(self, argument: Any, inputs: dict[int, Node]) -> Any:
        if isinstance(argument, Tensor):
            if not is_plain(argument):
                self._is_odd_call = True
                return None
            node = self._node_of(argument)
            inputs[node.index] = node
            if node.index in self._passing:
                self._is_passing_call = True
            return Ref(node.index, Layout.of(argument))
        if isinstance(argument, list | tuple):
            return [self._recorded(a, inputs) for a in argument]
        return argument

    def _node_of(self, tensor: Tensor) -> Node:
        """Return the node that a tensor stands on, making one for what comes from outside."""
        key = storage_key(tensor)
        node = self.nodes.by_storage.get(key)
        if node is not None:
            return node
        return self._node_from_outside(tensor, *self._role_of(tensor, key))

    def _role_of(self, tensor: Tensor, key: int) -> tuple[Role, str]:
        """Return the role of what comes from outside, and the name of its node."""
        if self.nodes.parameters.get(key) is not None:
            return Role.PARAMETER, "parameter"
        if key in self.nodes.inputs and tensor.device == self._device:
            return Role.INPUT, self._input_name
        return Role.SHARED, "shared"

    def _node_from_outside(self, tensor: Tensor, role: Role, name: str) -> Node:
        if role is Role.INPUT:
            name = self._unique(name)
            if self._has_moments:
                self._policy.reach(name)
        node = self.nodes.add(tensor, name, role, OpKind.INPUT, "", name, is_replayable=False)
        if role is Role.PARAMETER:
            parameter = self.nodes.parameters.get(storage_key(tensor))
            if parameter is not None and may_be_updated_in_backward(parameter):
                self.nodes.note_unsteady(node)
                node.is_cut = storage_key(tensor) in self.nodes.cut
        if role is Role.PARAMETER and self.nodes.pass_by(tensor):
            self._passing.add(node.index)
            return node
        if node.place is None:
            self.nodes.hold(node, tensor)
        return node

    def _name(self, func: Any, op: str, *, is_matmul: bool = False) -> str:
        """Return the name of the call that has just run."""
        name = self._next_name(func, op, is_matmul=is_matmul)
        if self._timer is not None:
            self._timer.name_call(name)
        return name

    def _next_name(self, func: Any, op: str, *, is_matmul: bool) -> str:
        """Return the name of the next recorded call, from the last forward if that was alike."""
        names, position = self._names, self._num_calls
        self._num_calls += 1
        if self.is_alike:
            if position < len(names) and names[position][0] is func:
                return names[position][2]
            # The block took another turn than last time: count what was named so far.
            self.is_alike = False
            del names[position:]
            for _, base, _ in names:
                self._num_named[base] = self._num_named.get(base, 0) + 1
        path, is_leaf = self._scope()
        base = path if is_leaf and is_matmul else f"{path}:{op.strip('_')}"
        name = self._unique(base)
        names.append((func, base, name))
        if self._has_moments:
            self._policy.reach(name)
        return name

    def _unique(self, name: str) -> str:
        count = self._num_named.get(name, 0) + 1
        self._num_named[name] = count
        return name if count == 1 else f"{name}#{count}"


never_compile(Tape.__torch_dispatch__)
never_compile(Tape.pack)


def _is_late(inputs: Iterable[Node], outputs: Sequence[Any]) -> bool:
    """Whether backward may need what a call makes after a hook updated a parameter behind it.

    It may where no gradient goes to the parameter by way of this call.
    """
    unsteady = [node for node in inputs if node.is_unsteady]
    return bool(unsteady) and (
        not torch.is_grad_enabled()
        or any(node.is_cut for node in unsteady)
        or any(
            isinstance(o, Tensor) and not (o.is_floating_point() or o.is_complex()) for o in outputs
        )
    )


class _Alias:
    """A saved tensor that is left alone, with torch's own check for later writes."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor = tensor
        self.version = version


def leave_alone(tensor: Tensor) -> _Alias:
    """Pack a saved tensor as it is; `restore_alias` gives it back."""
    return _Alias(alias_of(tensor), tensor._version)


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
