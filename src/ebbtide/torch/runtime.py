"""Run a plan: what happens when a block starts, ends, and when backward asks for a tensor.

The first forward of every block is *observed* under the most frugal decisions (all that can be
recomputed is), so that it cannot run out of memory where full checkpointing would not. When all
blocks have been seen there is a Workload, from which the plan is made. The first forward of a
block under each plan is *checked*: everything is brought back at once and compared with the real
tensors, bit for bit; what differs is kept from then on (design rule 11).
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ebbtide.memory.ledger import Ledger
from ebbtide.plan import Decision, Plan
from ebbtide.torch.devices.base import Place
from ebbtide.torch.identity import storage_key
from ebbtide.torch.internals import is_in_backward, pause_autocast
from ebbtide.torch.record import Handle, Record, Role
from ebbtide.torch.tape import Tape, restore_alias
from ebbtide.torch.traffic import Traffic
from ebbtide.workload import Activation, Block, Workload

log = logging.getLogger("ebbtide")

MakePlan = Callable[[Workload], tuple[Plan, Traffic | None]]


@dataclass(slots=True, eq=False)
class BlockState:
    """What the runtime knows of one block."""

    index: int
    path: str
    module: weakref.ref[nn.Module]
    observed: Block | None = None
    checked_plan: Plan | None = None
    is_checked: bool = False
    is_left_alone: bool = False
    """It cannot run under hooks."""
    names: list[tuple[Any, str, str]] = field(default_factory=list[tuple[Any, str, str]])
    """The calls of the last forward: operator, name without and with its number."""
    is_input_written: bool = False
    """The model writes to the block's input after the block, as in `h += block(h)`. That is
    legal where no operator saves it; recipes that start from it then need a copy."""
    unsafe: set[str] = field(default_factory=set[str])
    """Activations that did not come back equal; kept from then on."""


class Runtime:
    """The state of one attached model.

    Args:
        blocks: The blocks in execution order.
        model: The whole model, for its parameters and buffers.
        make_plan: Called once all blocks are observed, between two forwards; gives the plan
            and the traffic that executes it (none when the plan moves nothing).
        ledger: Counts.
    """

    def __init__(
        self, model: nn.Module, blocks: dict[str, nn.Module], make_plan: MakePlan, ledger: Ledger
    ) -> None:
        self.model_class = type(model).__name__
        self.plan: Plan | None = None
        self.workload: Workload | None = None
        self.traffic: Traffic | None = None
        self.ledger = ledger
        self.is_closed = False
        self._model = weakref.ref(model)
        self._make_plan = make_plan
        self._lock = threading.RLock()
        self.blocks = [
            BlockState(index=i, path=path, module=weakref.ref(module))
            for i, (path, module) in enumerate(blocks.items())
        ]
        self._restoring: weakref.ref[Record] | None = None
        self._local = threading.local()
        self._model_storages: dict[int, Tensor] = {}
        self._has_turned = False
        """The last block's forward has ended: the next block that starts is in another pass."""
        self._watched: list[tuple[BlockState, Tensor, int]] = []
        """Inputs of observed blocks, until the next block starts or backward does."""

    # -- forward -------------------------------------------------------------------------------

    def enter(self, state: BlockState, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start to record a block's forward."""
        # Design rule 5: a pass without gradients is invisible.
        if self.is_closed or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return
        if self._forward is not None:
            # Blocks never nest: an interrupt ended that forward, and torch called no hook.
            self._abandon(self._forward)
        if state.is_left_alone:
            return
        stream = _first_floating(args, kwargs)
        if stream is None:
            return
        with self._lock:
            if self.traffic is not None:
                self.traffic.bury()
                if (state.index == 0 or self._has_turned) and not is_in_backward():
                    self._has_turned = False
                    self.traffic.start_pass()
                if state.index == 0 and self.traffic.is_idle:
                    self.traffic.tiers.grow_to_demand()
            self._note_writes()
            self._plan_if_ready(state)
            if self._is_left_alone(state):
                return
            is_checked = not state.is_checked or state.checked_plan is not self.plan
            record = Record(state.path, self.traffic, is_checked=is_checked)
            policy = _Policy(self, state)
            forward = _Forward(state, record, policy)
            tape = Tape(
                record,
                policy,
                device=stream.device,
                parameters=self._parameter_storages(state, module),
                inputs=_differentiable_storages(args, kwargs),
                stream=storage_key(stream) if type(stream) is Tensor else 0,
                scope=forward.scope,
                names=state.names,
                copies_inputs=state.is_input_written or state.observed is None,
                is_checked=is_checked,
            )
            forward.tape = tape
            forward.stack.enter_context(tape)
            forward.stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(tape.pack, self.unpack)
            )
            self._local.forward = forward

    def leave(self, state: BlockState, output: Any) -> None:
        """End a block's forward, also when it raised; `output` is None then."""
        error = sys.exception() if output is None else None
        self._end_record(state, has_failed=output is None)
        if error is not None and "saved tensor hooks" in str(error):
            self._leave_alone(state, error)
        is_last = state.index == len(self.blocks) - 1
        # A checkpointed block runs its forward in backward: that is no turn.
        is_turn = is_last and torch.is_grad_enabled() and not is_in_backward()
        if is_turn and self.traffic is not None:
            self._turn(self.traffic, output)

    def _turn(self, traffic: Traffic, output: Any) -> None:
        """Between the last block's forward and its backward, where the logits' peak lies."""
        with self._lock:
            traffic.start_turn()
            self._has_turned = True
            start = traffic.next_index
        known, known_pass = weakref.ref(traffic), weakref.ref(traffic.forward_pass)

        def fetch_first(_: Tensor) -> None:
            found = known()
            if found is not None and not self.is_closed:
                with self._lock, torch.no_grad():
                    found.start_backward(known_pass(), start)

        # The last block itself may have evicted nothing, so no unpack would start the fetches
        # of the block before it; its output's gradient is the first sign of backward.
        for tensor in _tensors_in(output)[:1]:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(fetch_first)

    def _leave_alone(self, state: BlockState, error: BaseException) -> None:
        """Leave blocks of a kind alone: torch.func cannot run under saved-tensor hooks."""
        kind = type(state.module())
        for other in self.blocks:
            if type(other.module()) is kind:
                other.is_left_alone = True
                other.observed = Block(name=other.path, class_name=kind.__name__, activations=())
                self.ledger.count_kept_not_understood("a block uses torch.func")
        error.add_note(
            f"ebbtide: {state.path} uses torch.func, which torch cannot run under saved-tensor "
            f"hooks. ebbtide leaves blocks of class {kind.__name__} alone from now on: run the "
            "step again, or name the other blocks: attach(model, blocks=[...])."
        )

    def _abandon(self, forward: _Forward) -> None:
        self._local.forward = None
        forward.stack.close()
        with self._lock, torch.no_grad():
            forward.record.seal()
            if forward.tape is not None:
                forward.tape.forget()

    def _end_record(self, state: BlockState, *, has_failed: bool) -> None:
        forward = self._forward
        if forward is None or forward.state is not state:
            return
        self._local.forward = None
        forward.stack.close()
        with self._lock, torch.no_grad(), pause_autocast():
            record, tape = forward.record, forward.tape
            assert tape is not None, "bug in ebbtide"
            forward.tape = None  # a cycle would hold the record until the garbage collector runs
            if state.observed is None and not has_failed:
                state.observed = _observed_block(state, record)
                self._watched += [(state, *held) for held in tape.held_inputs]
            record.seal()
            if tape.is_checked and not has_failed:
                self._check(state, record, tape)
            tape.forget()

    def step_into(self, state: BlockState, module: nn.Module, path: str, is_leaf: bool) -> None:
        """Note that a module of a block starts; two blocks may share it."""
        forward = self._forward
        if forward is not None and forward.state is state:
            forward.path.append((path, is_leaf))
            if forward.tape is not None:
                forward.tape.add_parameters(_storages_of(module, recurse=False))

    def step_out(self, state: BlockState) -> None:
        """Note that a module of a block ends."""
        forward = self._forward
        if forward is not None and forward.state is state and len(forward.path) > 1:
            forward.path.pop()

    # -- backward ------------------------------------------------------------------------------

    def unpack(self, packed: Any) -> Tensor:
        """Give autograd a saved tensor back; the other saved-tensor hook."""
        if not isinstance(packed, Handle):
            return restore_alias(packed)
        record = packed.record
        with self._lock, torch.no_grad(), pause_autocast():
            previous = None if self._restoring is None else self._restoring()
            if previous is not record:
                if previous is not None:
                    # Backward went on to another block: what was not asked for may go.
                    previous.drop_device_copies()
                self._restoring = weakref.ref(record)
            self._note_writes()
            if record.traffic is not None and record.forward_pass is not None:
                activation = record.holder_of(packed).activation
                record.traffic.reach_use(record.forward_pass, activation)
            before = record.num_replayed_calls
            tensor = record.restore(packed)
            if record.num_replayed_calls != before:
                self.ledger.count_recomputed_ops(record.num_replayed_calls - before)
            return tensor

    # -- plans ---------------------------------------------------------------------------------

    def bury(self) -> None:
        """Give back what dead graphs held in the tiers."""
        with self._lock:
            if self.traffic is not None:
                self.traffic.bury()

    def close(self) -> None:
        """Stop recording. Graphs that are alive can still run backward."""
        if self._forward is not None:
            self._abandon(self._forward)  # an interrupt ended it
        self.is_closed = True

    @property
    def _forward(self) -> _Forward | None:
        return getattr(self._local, "forward", None)

    def _note_writes(self) -> None:
        for state, tensor, version in self._watched:
            state.is_input_written = state.is_input_written or tensor._version != version
        self._watched.clear()

    def _plan_if_ready(self, state: BlockState) -> None:
        if self.plan is not None or state.observed is None:
            return
        blocks = [s.observed for s in self.blocks if s.observed is not None]
        if len(blocks) < len(self.blocks):
            return
        self.workload = Workload(model=self.model_class, blocks=tuple(blocks))
        self.plan, self.traffic = self._make_plan(self.workload)
        log.info("plan %s: %d decisions", self.plan.name, len(self.plan.decisions))

    def _is_left_alone(self, state: BlockState) -> bool:
        """Return whether the plan keeps all of a block: then it costs nothing."""
        if self.plan is None or state.observed is None:
            return False
        if self.traffic is not None and state.path in self.traffic.anchors.blocks:
            return False  # a moment of the plan lies in it
        decisions = (self.plan.decision(a.name) for a in state.observed.activations if a.is_saved)
        return all(d is Decision.KEEP for d in decisions)

    def _check(self, state: BlockState, record: Record, tape: Tape) -> None:
        wrong = record.check(tape.real)
        for node in wrong:
            state.unsafe.add(node.name)
            real = next(t for h, t in tape.real if record.holder_of(h) is node)
            record.keep_instead(node, real)
            self.ledger.count_kept_not_understood("did not come back bit for bit")
            log.warning(
                "%s did not come back bit for bit (made by %s); it is kept on the device. "
                "Something writes to it that torch's dispatcher does not see, or the operator "
                "is not deterministic.",
                node.name,
                node.op or "code outside the block",
            )
        state.is_checked, state.checked_plan = True, self.plan

    def _parameter_storages(self, state: BlockState, block: nn.Module) -> dict[int, Tensor]:
        if state.index == 0 or not self._model_storages:
            model = self._model()
            self._model_storages = {} if model is None else _storages_of(model)
        return self._model_storages | _storages_of(block)


class _Forward:
    """The forward of one block that is being recorded in this thread."""

    def __init__(self, state: BlockState, record: Record, policy: _Policy) -> None:
        self.state = state
        self.record = record
        self.policy = policy
        self.tape: Tape | None = None
        self.stack = ExitStack()
        self.path: list[tuple[str, bool]] = [(state.path, False)]

    def scope(self) -> tuple[str, bool]:
        return self.path[-1]


class _Policy:
    """Decides for the storages of one block, by the plan or frugally while observing."""

    def __init__(self, runtime: Runtime, state: BlockState) -> None:
        self._plan = runtime.plan
        self._traffic = runtime.traffic
        self._ledger = runtime.ledger
        self._unsafe = state.unsafe

    def decide(
        self, name: str, *, is_replayable: bool, num_bytes: int
    ) -> tuple[Decision, Place | None]:
        otherwise = Decision.RECOMPUTE if is_replayable else Decision.KEEP
        if name in self._unsafe:
            return Decision.KEEP, None
        decision = None if self._plan is None else self._plan.decision(name)
        if decision is None or decision is Decision.RECOMPUTE:
            return otherwise, None
        if decision is Decision.KEEP or num_bytes == 0:
            return Decision.KEEP, None
        assert self._traffic is not None, "bug in ebbtide"
        place = self._traffic.tiers.take(decision, num_bytes)
        if place is None:  # design rule 7: never a new pinned region in mid-step
            self._ledger.count_kept_not_understood(f"no room left in the {decision.value} tier")
            return otherwise, None
        return decision, place

    def reach(self, group: str) -> None:
        if self._traffic is not None:
            self._traffic.reach_call(group)

    def keep_unknown(self, reason: str) -> None:
        self._ledger.count_kept_not_understood(reason)


def _observed_block(state: BlockState, record: Record) -> Block:
    """Describe a record that is not sealed yet, made under frugal decisions."""
    every = [record.node(i) for i in range(len(record.nodes))]
    nodes = [n for n in every if n.role in (Role.INPUT, Role.COMPUTED)]
    names = {n.index: n.name for n in nodes}
    module = state.module()
    activations: list[Activation] = []
    for node in nodes:
        call = None if node.call < 0 else record.calls[node.call]
        activations.append(
            Activation(
                name=node.name,
                op=node.op,
                kind=node.kind,
                num_bytes=node.num_bytes,
                inputs=() if call is None else tuple(names[i] for i in call.inputs if i in names),
                is_saved=node.num_packs > 0,
                is_replayable=node.decision is Decision.RECOMPUTE,
                group=node.group,
            )
        )
    return Block(name=state.path, class_name=type(module).__name__, activations=tuple(activations))


def _storages_of(module: nn.Module, *, recurse: bool = True) -> dict[int, Tensor]:
    return {
        storage_key(t): t
        for t in (*module.parameters(recurse), *module.buffers(recurse))
        if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
    }


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors_in(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors_in(v)]
    return []


def _differentiable_storages(args: Any, kwargs: Any) -> frozenset[int]:
    found = (*_tensors_in(args), *_tensors_in(kwargs))
    return frozenset(
        storage_key(t)
        for t in found
        if t.requires_grad and type(t) is Tensor and t.layout is torch.strided
    )


def _first_floating(args: Any, kwargs: Any) -> Tensor | None:
    """Return the first floating-point tensor that the block is given."""
    found = (*_tensors_in(args), *_tensors_in(kwargs))
    return next((t for t in found if t.is_floating_point()), None)
