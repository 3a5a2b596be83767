"""Run a plan: what happens when a block starts, ends, and when backward asks for a tensor.

The first forward of every block is *observed* under the most frugal decisions (all that can be
recomputed is), so that it cannot run out of memory where full checkpointing would not. When all
blocks have been seen there is a Workload, from which the plan is made. The first forward of a
block under each plan is *checked*: everything is brought back at once and compared with the real
tensors, bit for bit; what differs is kept from then on (design rule 11).

Longer than most modules: what it does at a block's start, at its end and at an unpack reads the
same state under one lock, and the order of its steps is what has to be seen in one place.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ebbtide.errors import ModelError
from ebbtide.memory.ledger import Ledger
from ebbtide.plan import Decision, Plan
from ebbtide.torch.block_kinds import signature_of
from ebbtide.torch.compiled import SavedSet, Stashed, StashingSet
from ebbtide.torch.devices.base import AbstractMeter
from ebbtide.torch.forward import (
    BlockState,
    Forward,
    Policy,
    differentiable_storages,
    first_floating,
    observed_block,
    storages_in,
    tensors_in,
)
from ebbtide.torch.gradient_memory import Growth
from ebbtide.torch.identity import storage_key
from ebbtide.torch.internals import (
    active_modes,
    call_after_backward,
    count_ooms,
    current_autograd_node,
    frame_of_module_call,
    is_compiled,
    is_in_backward,
    pause_autocast,
    pause_dispatch,
    size_of,
)
from ebbtide.torch.pace import Pace, Paced
from ebbtide.torch.parameters import Parameters, Recent, storages_of
from ebbtide.torch.record import Handle, Node, Record
from ebbtide.torch.sanitizer import Sanitizer
from ebbtide.torch.script import key_of
from ebbtide.torch.sharded import SavedDTensor, local_of, outers_in
from ebbtide.torch.stopwatch import BlockTiming, Stopwatch
from ebbtide.torch.tape import Tape, Witness, restore_alias
from ebbtide.torch.tiers import Tiers
from ebbtide.torch.traffic import Traffic
from ebbtide.torch.variants import Compilation
from ebbtide.workload import Block, Workload

log = logging.getLogger("ebbtide")

MAX_CORRECTIONS = 3
"""Plans that are timed and made anew. One that comes out as it was is not timed again."""

MAX_RENAMED = 2
"""A block that made calls of other names this often keeps the hooks that tell its modules."""

MakePlan = Callable[[Workload], tuple[Plan, Traffic | None]]
FollowShape = Callable[[Workload, torch.Size, torch.Size], tuple[Plan, Traffic | None]]
"""From the workload, the size that it was observed at and the size now."""
Agree = Callable[[Workload, torch.Size], tuple[Workload, torch.Size]]
"""From the workload and the size that it was observed at to what all ranks plan for instead."""
NotePace = Callable[[Workload, Plan, int], tuple[Workload, Plan, Traffic | None] | None]
"""From the workload, the plan and the nanoseconds that steps under it took; None: no change."""


class Runtime:
    """The state of one attached model.

    Args:
        blocks: The blocks in execution order.
        model: The whole model, for its parameters and buffers.
        make_plan: Called once all blocks are observed, between two forwards; gives the plan
            and the traffic that executes it (none when the plan moves nothing).
        ledger: Counts.
        meter: Measures the step after the observed one, which runs under the same decisions; the
            plan is made one step later, from a workload with times. None: nothing is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: dict[str, nn.Module],
        make_plan: MakePlan,
        ledger: Ledger,
        meter: AbstractMeter | None = None,
    ) -> None:
        self.model_class = type(model).__name__
        self.plan: Plan | None = None
        self.workload: Workload | None = None
        self.traffic: Traffic | None = None
        self.tiers: Tiers | None = None
        """Those of the traffic of now, or of the last plan that moved something."""
        self.ledger = ledger
        self.is_closed = False
        self._model = weakref.ref(model)
        self._make_plan = make_plan
        self._lock = threading.RLock()
        self.blocks = [
            BlockState(
                index=i, path=path, module=weakref.ref(module), is_compiled=is_compiled(module)
            )
            for i, (path, module) in enumerate(blocks.items())
        ]
        self.stopwatch = None if meter is None else Stopwatch(meter, model, len(self.blocks))
        self.device = torch.device("cpu")
        """Where the blocks are."""
        self.follow_shape: FollowShape | None = None
        """Gives the plan for a batch of a size; with it, each size may have one of its own."""
        self.agree: Agree | None = None
        """Asks the other ranks once, before the first plan; None: this one plans for itself."""
        self.note_num_graphs: Callable[[int], None] | None = None
        """Told how many graphs were alive at once before there was a plan."""
        self._first_records: weakref.WeakSet[Record] = weakref.WeakSet()
        """Of the first block, those of graphs that are alive, up to the first plan."""
        self._num_graphs = 1
        self.note_out_of_memory: Callable[[], str] | None = None
        """Called after a planned step ran out of memory; returns what to tell the user."""
        self.observed_size: torch.Size | None = None
        """Of the activations that the first block was given in the step that was measured."""
        self.note_pace: NotePace | None = None
        """Told what planned steps took; gives the workload, plan and traffic to go on with."""
        self._pace = None if meter is None else Pace(meter)
        self._num_corrections = 0
        self.hook_blocks: Callable[[bool], None] | None = None
        """Puts the hooks of the blocks on, or takes them off while a plan keeps everything."""
        self.hook_scopes: Callable[[BlockState, bool], bool] | None = None
        """Puts the hooks of a block's inner modules on, or takes them off; tells whether they are
        on now."""
        self.compilation: Compilation | None = None
        """The blocks' compiled calls, where ebbtide compiles them."""
        self.close_all: Callable[[], None] | None = None
        """Takes everything off the model."""
        self.sanitizer: Sanitizer | None = None
        """Compares what comes back with what was saved; None: nothing does."""
        self.is_paused = False
        """The model runs as without ebbtide; graphs that are alive can still run backward."""
        self.is_untimed = False
        """Steps of now are no measure of what training takes."""
        self._samples: frozenset[int] = frozenset()
        """Compiled blocks that save all they could while steps are measured, one of a kind."""
        self.note_growth: Callable[[], None] | None = None
        """Called when more rests on the device than the plans of now were made for."""
        self._grown: list[Growth] = []
        """What of that no plan knows yet."""
        self._num_ooms = 0
        self._is_announced = False
        """The model's own hook has told of this forward."""
        self._siblings: list[weakref.ref[Record]] = []
        """Records of the model's forward that runs now, or ran last."""
        self._last_index = -1
        """The block of the last of them."""
        self._restoring: weakref.ref[Record] | None = None
        self._local = threading.local()
        self._model_storages: dict[int, Tensor] | None = None
        """Of the model's parameters, as they were when a block of this pass first asked."""
        self._recent_parameters = Recent()
        self._written: set[int] = set()
        """Storages of parameters and buffers that blocks were seen to write to."""
        self.num_followed = 0
        """Forwards of blocks that kept to their scripts."""
        self._is_alone = True
        """Nothing was held in the tiers when the pass of now started."""
        self._has_turned = False
        """The last block's forward has ended: the next block that starts is in another pass."""
        self._watched: list[tuple[BlockState, Tensor, int]] = []
        """Inputs of observed blocks, until the next block starts or backward does."""

    # -- forward -------------------------------------------------------------------------------

    def start_forward(self) -> None:
        """Note that the model's forward starts; only called where times are measured."""
        if self.is_closed or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return
        if self.is_paused or is_in_backward():
            return
        if self.is_untimed and self.plan is not None:
            return
        with self._lock:
            self._start_measuring()
            self._is_announced = True
            # A plan that keeps all costs nothing, not even a hook on a tensor.
            if self._pace is not None and self.plan is not None and not _keeps_all(self.plan):
                self._pace.start(self.plan)
            self._note_ooms()  # or what a failed step holds would count as what rests here
            model = self._model()
            if self.stopwatch is not None and model is not None:
                grown = self.stopwatch.take_growth(model.parameters())
                if grown is not None:
                    self._grown.append(grown)

    def end_forward(self, output: Any) -> None:
        """Note what the model's forward returns; only called where times are measured."""
        self._is_announced = False
        if self.is_paused:
            return
        if self.stopwatch is not None and torch.is_grad_enabled() and not is_in_backward():
            with self._lock:
                self.stopwatch.end_forward(tensors_in(output))

    def enter(self, state: BlockState, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start to record a block's forward."""
        if self.is_paused:
            return
        if self._forward is not None and self._forward.is_over:
            self._abandon(self._forward)
        # Design rule 5: a pass without gradients is invisible.
        if self.is_closed or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return
        if self._forward is not None:
            # Blocks never nest: that forward was ended in a way that nothing told of.
            self._abandon(self._forward)
        if state.is_left_alone:
            return
        given = tensors_in((args, kwargs))
        stream = first_floating(given)
        if stream is None:
            return
        with self._lock:
            if self.traffic is not None:
                self.traffic.bury()
                if (state.index == 0 or self._has_turned) and not is_in_backward():
                    self._has_turned = False
                    self.traffic.start_pass()
                if state.index == 0:
                    self._is_alone = self.traffic.is_idle
                    if self._is_alone:
                        self.traffic.tiers.grow_to_demand()
            if state.index == 0 and not self._is_announced and not is_in_backward():
                self._start_measuring()
            self._note_writes()
            self._plan_if_ready(state, size_of(stream))
            if self._is_left_alone(state):
                return
            is_checked = all(plan is not self.plan for plan in state.checked_plans)
            record = Record(
                state.path,
                self.traffic,
                is_checked=is_checked,
                device_type=stream.device.type,
            )
            self._add_sibling(state, record)
            if state.index == 0 and not is_in_backward():
                self._count_graphs(record)
            if is_checked and record.forward_pass is not None:
                record.forward_pass.is_checked = True
            policy = Policy(self.plan, self.traffic, self.ledger, state.unsafe)
            timing = None
            if self.stopwatch is not None and not is_in_backward():
                timing = self.stopwatch.start_block(state.index, record, module)
                if timing is not None and state.is_compiled:
                    timing.graph = next(iter(state.graphs), None)
                    timing.is_sample = state.index in self._samples
                if timing is not None and state.index == 0:
                    self.observed_size = size_of(stream)
                if timing is not None and state.index == 0 and stream.requires_grad:
                    stream.register_hook(_caller_of(self, Runtime._end_first_block))
            forward = Forward(state, record, policy, timing)
            if state.is_compiled:
                if state.observed is not None and state.observed.activations:
                    policy.reach(state.observed.activations[0].group)
                tape = self._saved_set(forward, module, stream.device, given)
            else:
                tape = self._tape(forward, module, stream, given)
            forward.tape = tape
            self._local.forward = forward
            tape.put_on(
                self.unpack if self.sanitizer is None else self.sanitizer.unpack_by(self.unpack)
            )
            if timing is not None:
                timing.start_forward()

    def _count_graphs(self, record: Record) -> None:
        """Note a forward that starts while graphs of others may be alive, up to the first plan."""
        if self.stopwatch is None or self.stopwatch.is_done:
            return
        self._first_records.add(record)
        self._num_graphs = max(self._num_graphs, len(self._first_records))

    def _saved_set(
        self, forward: Forward, module: nn.Module, device: torch.device, given: list[Tensor]
    ) -> SavedSet:
        is_sample = forward.state.index in self._samples and self.plan is None
        return (StashingSet if is_sample else SavedSet)(
            forward.record,
            forward.policy,
            device=device,
            parameters=self._parameters_of(forward.state, module),
            inputs=differentiable_storages(given),
            given=storages_in(given),
            is_checked=forward.record.is_checked,
            witness=self._witness(forward),
            frame=frame_of_module_call(),
            note_over=_caller_of(self, Runtime._abandon_interrupted),
        )

    def _tape(
        self, forward: Forward, module: nn.Module, stream: Tensor, given: list[Tensor]
    ) -> Tape:
        state, record, timing = forward.state, forward.record, forward.timing
        is_checked = record.is_checked
        script = None
        # While other graphs hold places of the tiers, more may have to be made again.
        if not is_checked and timing is None and (self.traffic is None or self._is_alone):
            forward.key = key_of(given, stream.device, is_training=module.training)
            script = state.scripts.of(self.plan, forward.key)
        local = stream if type(stream) is Tensor else local_of(stream)
        stream_key = 0 if local is None else storage_key(local)
        return Tape(
            record,
            forward.policy,
            device=stream.device,
            parameters=self._parameters_of(state, module),
            inputs=differentiable_storages(given),
            stream=stream_key,
            scope=forward.scope,
            names=state.names,
            copies_inputs=state.is_input_written or state.observed is None,
            is_checked=is_checked,
            witness=self._witness(forward),
            timer=timing,
            written=self._written,
            has_moments=self.traffic is not None and self.traffic.anchors.has_releases,
            frame=frame_of_module_call(),
            note_over=_caller_of(self, Runtime._abandon_interrupted),
            script=script,
            outers=outers_in(given),
        )

    def _witness(self, forward: Forward) -> Witness | None:
        if self.sanitizer is None:
            return None
        return self.sanitizer.witness(forward.record, forward.state.index)

    def _add_sibling(self, state: BlockState, record: Record) -> None:
        # Not at the first block alone: a plan may leave that to torch.
        if state.index <= self._last_index:
            self._siblings = []
        self._last_index = state.index
        self._siblings.append(weakref.ref(record))
        record.siblings = self._siblings

    def leave(self, state: BlockState, output: Any) -> None:
        """End a block's forward, also when it raised; `output` is None then."""
        if self.is_paused:
            return
        error = sys.exception() if output is None else None
        failed = None if error is None or self._forward is None else self._forward.record
        self._end_record(state, has_failed=output is None)
        if isinstance(error, torch.OutOfMemoryError) and self.note_out_of_memory is not None:
            with self._lock, torch.no_grad():
                error.add_note(self._run_out(failed))
        if error is not None and "saved tensor hooks" in str(error):
            self._leave_alone(state, error)
        is_last = state.index == len(self.blocks) - 1
        # A checkpointed block runs its forward in backward: that is no turn.
        is_turn = is_last and torch.is_grad_enabled() and not is_in_backward()
        if is_turn and self.traffic is not None:
            self._turn(self.traffic, output)
        if is_turn and self._pace is not None and self._pace.is_running:
            _hook_first(output, _caller_of(self, Runtime._end_step))
        if is_turn and self.stopwatch is not None and self.stopwatch.is_running:
            with self._lock:
                self.stopwatch.start_turn()
            _hook_first(output, _caller_of(self, Runtime._start_backward))

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
        _hook_first(output, fetch_first)

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

    def _abandon_interrupted(self) -> None:
        if self._forward is not None and self._forward.is_over:
            self._abandon(self._forward)

    def _abandon(self, forward: Forward) -> None:
        self._local.forward = None
        tape, forward.tape = forward.tape, None  # or a cycle would hold the record
        if tape is not None:
            tape.take_off()
        with self._lock, torch.no_grad(), pause_dispatch():
            if forward.timing is not None and self.stopwatch is not None:
                self.stopwatch.abort()
            forward.record.seal()
            if tape is not None:
                tape.forget()

    def _end_record(self, state: BlockState, *, has_failed: bool) -> None:
        forward = self._forward
        if forward is None or forward.state is not state:
            return
        record, tape = forward.record, forward.tape
        assert tape is not None, "bug in ebbtide"
        if forward.timing is not None:
            forward.timing.end_forward()
            if isinstance(tape, StashingSet):
                forward.timing.saved_bytes = tape.saved_bytes
                forward.timing.waiting = tape.stashes
        tape.take_off()
        self._local.forward = None
        with self._lock, torch.no_grad(), pause_autocast():
            forward.tape = None  # a cycle would hold the record until the garbage collector runs
            if state.observed is None and not has_failed:
                state.observed = observed_block(state, record)
                state.graphs = tuple(record.graphs)
                if isinstance(tape, Tape):
                    self._watched += [(state, *held) for held in tape.nodes.held_inputs]
            # Sealing drops nodes that a script has to tell of.
            is_traced = isinstance(tape, Tape) and tape.trace is not None
            nodes = list(record.nodes) if is_traced else []
            num_uses = tape.num_uses if isinstance(tape, Tape) else None
            self._seal(state, forward, num_uses, has_failed=has_failed)
            if isinstance(tape, Tape) and forward.key is not None and not has_failed:
                self._learn(forward, tape, nodes)
            if isinstance(tape, Tape):
                self._note_names(state, tape)
            if tape.is_checked and not has_failed:
                self._check(state, record, tape)
            tape.forget()

    def _learn(self, forward: Forward, tape: Tape, nodes: list[Node | None]) -> None:
        """Learn from a forward that was recorded, or note whether it kept to its script."""
        trace, scripts = tape.trace, forward.state.scripts
        if trace is None:
            self.num_followed += tape.has_followed
            if not tape.has_followed:
                scripts.miss(forward.key)
        elif not trace.is_odd and scripts.wants(forward.key):
            script = trace.script(nodes, forward.record, forward.policy.is_moved)
            scripts.learn(forward.key, script)

    def _note_names(self, state: BlockState, tape: Tape) -> None:
        """Tell modules apart only where a call may need a name."""
        if self.hook_scopes is None:
            return
        if not tape.is_alike and not state.has_scopes:
            # What was named last was named without its module.
            state.names.clear()
            state.num_renamed += 1
            state.has_scopes = self.hook_scopes(state, True)
        elif tape.is_alike and state.has_scopes and state.num_renamed < MAX_RENAMED:
            state.has_scopes = self.hook_scopes(state, False)
            if state.has_scopes:  # they have to stay, so do not ask again
                state.num_renamed = MAX_RENAMED

    def _seal(
        self,
        state: BlockState,
        forward: Forward,
        num_uses: tuple[int, ...] | None,
        *,
        has_failed: bool,
    ) -> None:
        record, timing, stopwatch = forward.record, forward.timing, self.stopwatch
        if timing is None or stopwatch is None:
            record.seal(num_uses)
            return
        block = observed_block(state, record)
        record.seal()
        if has_failed:
            stopwatch.abort()
        else:
            stopwatch.end_block(timing, block, record)

    def step_into(self, state: BlockState, module: nn.Module, path: str, is_leaf: bool) -> None:
        """Note that a module of a block starts; two blocks may share it."""
        forward = self._forward
        if forward is not None and forward.state is state:
            forward.path.append((path, is_leaf))
            if isinstance(forward.tape, Tape):
                forward.tape.add_parameters(module)

    def step_out(self, state: BlockState) -> None:
        """Note that a module of a block ends."""
        forward = self._forward
        if forward is not None and forward.state is state and len(forward.path) > 1:
            forward.path.pop()

    # -- backward ------------------------------------------------------------------------------

    def unpack(self, packed: Any) -> Tensor:
        """Give autograd a saved tensor back; the other saved-tensor hook."""
        if isinstance(packed, Stashed):
            with self._lock, torch.no_grad():
                return self._restore_stashed(packed)
        if isinstance(packed, SavedDTensor):
            return packed.over(self.unpack(packed.handle))
        if not isinstance(packed, Handle):
            return restore_alias(packed)
        modes = active_modes()
        with self._lock:
            if modes:
                # A tape among them is that of a block which takes a gradient in its forward, and
                # what is made again here is no part of that. The thread does not tell.
                is_in_block = any(isinstance(mode, Tape) and not mode.is_over for mode in modes)
                with torch.no_grad(), packed.record.settings.in_force():
                    return self._restore(packed, is_in_block=is_in_block)
            if not torch.is_grad_enabled():
                return self._restore(packed)
            with torch.no_grad():
                return self._restore(packed)

    def _restore(self, packed: Handle, *, is_in_block: bool = False) -> Tensor:
        record = packed.record
        timing = None if is_in_block else self._start_unpack(record)
        previous = None if self._restoring is None else self._restoring()
        if previous is not record:
            if previous is not None:
                # Backward went on to another block: what was not asked for may go.
                previous.drop_device_copies()
            self._restoring = weakref.ref(record)
        self._note_writes()
        traffic = record.traffic
        has_moments = traffic is not None and traffic.anchors.has_fetches and not is_in_block
        if traffic is not None and has_moments and record.forward_pass:
            traffic.reach_use(record.forward_pass, record.holder_of(packed).activation)
        before = record.num_replayed_calls
        try:
            tensor = record.restore(packed)
        except torch.OutOfMemoryError as error:
            record.drop_device_copies()
            if self.note_out_of_memory is not None:
                error.add_note(self._run_out(record))
            raise
        if timing is not None and self.stopwatch is not None:
            record.watch = None
            self.stopwatch.end_unpack(timing, record, record.holder_of(packed))
        if record.num_replayed_calls != before:
            self.ledger.count_recomputed_ops(record.num_replayed_calls - before)
        return tensor

    def _restore_stashed(self, packed: Stashed) -> Tensor:
        timing = self._start_unpack(packed.record)
        tensor = packed.stash.restore(packed.layout)
        if timing is not None and self.stopwatch is not None:
            self.stopwatch.end_unpack_stashed(timing, packed.record)
        return tensor

    # -- measuring -----------------------------------------------------------------------------

    @property
    def is_timed(self) -> bool:
        """Whether times and memory are measured."""
        return self.stopwatch is not None

    def finish_measuring(self) -> None:
        """Read the clocks if the step that is measured is over; then `workload` is there."""
        with self._lock:
            stopwatch, blocks = self.stopwatch, self._observed_blocks()
            if stopwatch is None or stopwatch.is_done or blocks is None:
                return
            if not (stopwatch.is_running and stopwatch.has_ended):
                return
            stopwatch.finish(blocks)
            for state, block in zip(self.blocks, stopwatch.blocks, strict=True):
                state.observed = block
            self.workload = Workload(
                model=self.model_class, blocks=stopwatch.blocks, outside=stopwatch.outside
            )

    def _start_measuring(self) -> None:
        """Go on with measuring, as a forward of the model starts."""
        self.finish_measuring()
        stopwatch = self.stopwatch
        if stopwatch is None or stopwatch.is_done or stopwatch.is_paused:
            return
        blocks = self._observed_blocks()
        if blocks is None or (stopwatch.is_running and not stopwatch.is_lost):
            return
        if self.compilation is not None and not self._samples:
            # They are compiled in the step that starts now; the one after it is measured.
            self._samples = self._choose_samples(self.compilation, blocks)
        else:
            stopwatch.start_forward()

    def _choose_samples(
        self, compilation: Compilation, blocks: tuple[Block, ...]
    ) -> frozenset[int]:
        """Let the last block of each kind save all it could, and return which these are."""
        for state, block in zip(self.blocks, blocks, strict=True):
            # A frozen block that is given nothing differentiable has no graph, and saves nothing.
            if state.is_compiled and len(state.graphs) != 1 and block.activations:
                if self.close_all is not None:
                    self.close_all()  # the model is left as it was, and trains on
                raise ModelError(
                    f"{state.path} compiles into {len(state.graphs)} graphs, and a budget needs "
                    "blocks of one: what goes from one graph to the next is not known. Take the "
                    "graph breaks out (TORCH_LOGS=graph_breaks names them), or give a plan, such "
                    "as 'offload'."
                )
        last = {
            signature_of(block): index
            for index, (state, block) in enumerate(zip(self.blocks, blocks, strict=True))
            if state.graphs
        }
        for index in last.values():
            compilation.save_all(self.blocks[index].path)
        return frozenset(last.values())

    def _start_unpack(self, record: Record) -> BlockTiming | None:
        stopwatch = self.stopwatch
        if stopwatch is None or stopwatch.is_done or not is_in_backward():
            return None
        timing = stopwatch.timing_of(record)
        if timing is not None:
            self._start_backward()
            stopwatch.start_unpack(timing, current_autograd_node())
            record.watch = timing
        return timing

    def _start_backward(self) -> None:
        with self._lock:
            if self.stopwatch is not None and self.stopwatch.start_backward():
                call_after_backward(_caller_of(self, Runtime._end_backward))

    def _end_step(self) -> None:
        """Time the step at the end of the backward that has just started."""
        if self._pace is not None:
            call_after_backward(self._pace.end)

    def _end_first_block(self) -> None:
        with self._lock:
            if self.stopwatch is not None:
                self.stopwatch.end_first_block()

    def _end_backward(self) -> None:
        with self._lock:
            if self.stopwatch is not None:
                self.stopwatch.end_backward()

    def read_pace(self) -> Paced | None:
        """Return what planned steps took; None before, and where nothing is measured.

        Waits for the device.
        """
        with self._lock:
            return None if self._pace is None else self._pace.read()

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
        if self.stopwatch is not None:
            self.stopwatch.close()
        self.is_closed = True

    @property
    def model(self) -> nn.Module | None:
        """The model, while it is alive."""
        return self._model()

    @property
    def _forward(self) -> Forward | None:
        return getattr(self._local, "forward", None)

    def _note_writes(self) -> None:
        for state, tensor, version in self._watched:
            state.is_input_written = state.is_input_written or tensor._version != version
        self._watched.clear()

    def _plan_if_ready(self, state: BlockState, size: torch.Size) -> None:
        if self.follow_shape is not None:
            if state.index == 0 and self.workload is not None and not is_in_backward():
                self._follow(self.workload, size)
            return
        if self.plan is not None or state.observed is None:
            return
        blocks = self._observed_blocks()
        if blocks is None:
            return
        if self.stopwatch is None:
            self.workload = Workload(model=self.model_class, blocks=blocks)
        if self.workload is not None:
            self._take_plan(*self._make_plan(self.workload))

    def _follow(self, workload: Workload, size: torch.Size) -> None:
        """Take the plan for a batch of this size, unless a graph of another one is alive."""
        assert self.follow_shape is not None and self.observed_size is not None, "bug in ebbtide"
        self._note_ooms()
        if self.traffic is not None and not self.traffic.is_idle:
            return
        workload = self._with_growth(workload)
        if self.plan is None and self.note_num_graphs is not None:
            self.note_num_graphs(self._num_graphs)
        if self.agree is not None:
            agree, self.agree = self.agree, None
            workload, self.observed_size = agree(workload, self.observed_size)
            self.workload = workload
        if self.plan is not None and self._pace is not None and self.note_pace is not None:
            measured_ns = self._pace.take_ns(self.plan)
            noted = self.note_pace(workload, self.plan, measured_ns) if measured_ns else None
            if noted is not None:
                workload, plan, traffic = noted
                self.workload = workload
                self._num_corrections += 1
                is_known = plan.decisions == self.plan.decisions
                if is_known:
                    self._keep_checked(plan)
                if is_known or self._num_corrections == MAX_CORRECTIONS:
                    self._pace.settle(plan)
                self._take_plan(plan, traffic)
        plan, traffic = self.follow_shape(workload, self.observed_size, size)
        if plan is not self.plan:
            self._take_plan(plan, traffic)

    def _keep_checked(self, plan: Plan) -> None:
        """Take blocks that were checked under the plan of now as checked under `plan`."""
        for state in self.blocks:
            if any(checked is self.plan for checked in state.checked_plans):
                state.checked_plans.append(plan)

    def _take_plan(self, plan: Plan, traffic: Traffic | None) -> None:
        self.plan, self.traffic = plan, traffic
        if traffic is not None:
            self.tiers = traffic.tiers
            traffic.start_pass()
        blocks = self._observed_blocks()
        if self.compilation is not None and blocks is not None:
            self.compilation.take_plan(plan, blocks)
        if self.hook_blocks is not None and self.follow_shape is not None:
            # The first block's entry stays: it sees when a batch needs another plan.
            self.hook_blocks(not _keeps_all(plan))
        log.info("plan %s: %d decisions", plan.name, len(plan.decisions))

    def _with_growth(self, workload: Workload) -> Workload:
        """Count what has come to rest on the device since the measured step."""
        grown, self._grown = self._grown, []
        if not grown or workload.outside is None:
            return workload
        if any(growth.has_gradients for growth in grown):
            log.info("gradients are there before a step: the plan counts them all through it")
            workload = workload.with_gradients_resident()
        assert workload.outside is not None, "bug in ebbtide"
        grown_bytes = sum(growth.num_bytes for growth in grown)
        resident_bytes = workload.outside.resident_bytes + grown_bytes
        outside = replace(workload.outside, resident_bytes=resident_bytes)
        self.workload = replace(workload, outside=outside)
        if self.note_growth is not None:
            self.note_growth()
        return self.workload

    def _note_ooms(self) -> None:
        """Plan anew after an operator of autograd ran out of memory, where no code of ours is."""
        if self.device.type != "cuda":
            return
        num_ooms = count_ooms(self.device)
        if num_ooms > self._num_ooms and self.plan is not None:
            # Where a backward stopped half-way, its error may still hold the graph.
            failed = None if self._restoring is None else self._restoring()
            log.warning("the last step ran out of memory. %s", self._run_out(failed))
        self._num_ooms = num_ooms

    def _run_out(self, failed: Record | None) -> str:
        """Note that a planned step ran out of memory; returns what to tell the user.

        Args:
            failed: The record in which it did. All of its forward is let go: an error holds the
                graph for as long as somebody holds the error.
        """
        if self.device.type == "cuda":
            self._num_ooms = count_ooms(self.device)
        if self.traffic is not None:
            self.traffic.settle_all()
        for known in () if failed is None else failed.siblings:
            record = known()
            if record is not None:
                record.let_go()
        if self.traffic is not None:
            self.traffic.bury()
        return "" if self.note_out_of_memory is None else self.note_out_of_memory()

    def _observed_blocks(self) -> tuple[Block, ...] | None:
        """Return all blocks in order; None while one has not been observed."""
        blocks = [s.observed for s in self.blocks if s.observed is not None]
        return tuple(blocks) if len(blocks) == len(self.blocks) else None

    def _is_left_alone(self, state: BlockState) -> bool:
        """Return whether the plan keeps all of a block: then it costs nothing."""
        if self.plan is None or state.observed is None:
            return False
        if self.traffic is not None and state.path in self.traffic.anchors.blocks:
            return False  # a moment of the plan lies in it
        decisions = (self.plan.decision(a.name) for a in state.observed.activations if a.is_saved)
        return all(d is Decision.KEEP for d in decisions)

    def _check(self, state: BlockState, record: Record, tape: Tape | SavedSet) -> None:
        roots = tape.nodes.roots if isinstance(tape, Tape) else []
        wrong = [*record.check_roots(roots), *record.check(tape.real)]
        for node in wrong:
            state.unsafe.add(node.activation)
            state.scripts.clear()
            if node.index in record.freed:
                self.ledger.count_kept_not_understood("a parameter was freed inside its block")
                log.warning(
                    "%s cannot be made again: a parameter that it is made from is freed inside "
                    "%s; it is kept on the device. Shard whole blocks with FSDP: one group each.",
                    node.name,
                    state.path,
                )
                continue
            self.ledger.count_kept_not_understood("did not come back bit for bit")
            log.warning(
                "%s did not come back bit for bit (made by %s); it is kept on the device. "
                "Something writes to it that torch's dispatcher does not see, or the operator "
                "is not deterministic.",
                node.name,
                node.op or "code outside the block",
            )
        if not wrong:  # or what recipes start from would not be what was checked
            record.end_check()
        state.checked_plans.append(self.plan)

    def _parameters_of(self, state: BlockState, block: nn.Module) -> Parameters:
        if state.index == 0:
            self._model_storages = None
        if not state.parts:
            state.parts = [weakref.ref(module) for module in block.modules()]

        def look_up() -> dict[int, Tensor]:
            if self._model_storages is None:
                model = self._model()
                self._model_storages = {} if model is None else storages_of(model.modules())
            # Parts of the block alone: what came after the first forward is among the model's.
            parts = (module for known in state.parts if (module := known()) is not None)
            return {**storages_of(parts), **self._model_storages}

        return Parameters(look_up, self._recent_parameters)


def _keeps_all(plan: Plan) -> bool:
    return all(decision is Decision.KEEP for decision in plan.decisions.values())


def _caller_of(runtime: Runtime, method: Callable[[Runtime], None]) -> Callable[..., None]:
    """Return a hook that calls a method of `runtime`, and does not keep it alive."""
    known = weakref.ref(runtime)

    def call(*_: object) -> None:
        found = known()
        if found is not None and not found.is_closed:
            method(found)

    return call


def _hook_first(output: Any, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` when backward comes to the first tensor of a block's output."""
    for tensor in tensors_in(output)[:1]:
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(hook)
