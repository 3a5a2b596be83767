"""Measure one step of an attached model: times and memory, block by block.

The step runs under the frugal decisions of the first one. Marks lie around each operator that
makes an activation, around each unpack in backward, and at the sides of the turn. What replays
take lies between the marks of an unpack and is not counted. Memory is what is left of the
allocator's peak when all is taken off that `docs/planner.md` counts elsewhere, so that a peak
that is added up by that page comes out as it was measured. Equal blocks get equal numbers: the
median of their times and the most of their bytes.

Known weaknesses: marks and counters take CPU time, so where the CPU is slower than the device
the times hold some of it. A gradient that a step makes counts from its event on, and one that
this step did not make (an expert without a token) as if it were there in all of backward.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor, nn

from ebbtide.torch.block_kinds import equalised, signature_of
from ebbtide.torch.devices.base import AbstractMeter, Mark
from ebbtide.torch.fused import FusedRun, fused_block
from ebbtide.torch.gradient_memory import GradientMemory, Growth, element_bytes, gradient_bytes
from ebbtide.torch.graphs import GraphFacts
from ebbtide.torch.identity import storage_key
from ebbtide.torch.internals import DTensor
from ebbtide.torch.record import ACTIVATION_ROLES, Node, Record, Role
from ebbtide.workload import BackwardEvent, Block, OpKind, Outside

log = logging.getLogger("ebbtide")

# The CPU queues so many events of backward while the device waits for it.
UNPACKS_AHEAD: Final = 8

# Where no allocator counts: backward holds the gradient of what an operator made, and makes that
# of what it read.
HELD_IN_LARGEST: Final = 2
# Logits, their gradient, and the softmax that the loss keeps.
TURN_IN_OUTPUTS: Final = 3

NO_BACKWARD: Final = (BackwardEvent(uses=(), compute_ns=0, held_bytes=0),)
"""Of a block that backward did not reach."""


class _Event:
    """One backward event: what it was given, and the spans of time in which it computes."""

    __slots__ = ("gradient_bytes", "held_bytes", "nodes", "number", "spans", "uses")

    def __init__(self) -> None:
        self.number = -1
        """Of the autograd node that asks."""
        self.uses: list[str] = []
        self.nodes: set[int] = set()
        """What it was given, by number in the record."""
        self.spans: list[tuple[Mark, Mark]] = []
        self.held_bytes = 0
        self.gradient_bytes = 0
        """Gradients that the block's own parameters have when it ends."""


class BlockTiming:
    """What is measured of one block, from the start of its forward to the end of its backward."""

    def __init__(self, index: int, parameters: Iterable[Tensor], meter: AbstractMeter) -> None:
        self.index = index
        self.parameters = tuple(parameters)
        self.block: Block | None = None
        """What the forward recorded; None until it has ended."""
        self.kept: dict[int, int] = {}
        """Bytes of the storages that it keeps for backward."""
        self.kept_names: set[str] = set()
        self.input_keys: dict[str, int] = {}
        """Storages of its inputs, where it keeps them."""
        self.calls: list[tuple[str, Mark, Mark, int]] = []
        """Name, start, end, and the peak since the call before."""
        self.end_peak_bytes = 0
        self.events: list[_Event] = []
        self.num_unpacks = 0
        self.replayed_bytes = 0
        """Replayed activations that were there when the last event began."""
        self.base_bytes = 0
        """What is counted elsewhere while its backward runs, but for what the next field says."""
        self.gradient_bytes = 0
        """Gradients that its own parameters had when the last event began."""
        self.first_gradient_bytes = 0
        """Those when its backward began."""
        self.start_gradient_bytes = gradient_bytes(self.parameters)
        """Those when its forward began."""
        self.graph: GraphFacts | None = None
        """Of a compiled block."""
        self.saved_bytes: Mapping[str, int] = {}
        """Local name to bytes of what a sample has made and saved."""
        self.is_sample = False
        """The compiled block saves all that it could."""
        self.waiting: tuple[object, ...] = ()
        """What a sample has waiting in host memory. To free GiBs there takes the CPU longer than it
        is ahead of the device: autograd would do so in the midst of what is timed, as it lets go of
        what it saved."""
        self.other_gradient_bytes = 0
        """What other parameters had then, beyond what was there before the step."""
        self._meter = meter
        self._call: tuple[Mark, Mark, int] | None = None
        self.start: Mark = None
        self.end: Mark = None

    def start_forward(self) -> None:
        """Mark the start of the block's forward."""
        self.start = self._meter.mark(is_ahead=True)

    def start_call(self) -> Mark:
        """Mark the start of an operator call."""
        return self._meter.mark()

    def end_call(self, start: Mark) -> None:
        """Mark its end; the next name is its own."""
        self._call = start, self._meter.mark(), self._meter.take_peak_bytes()

    def name_call(self, name: str) -> None:
        """Name the call that has just ended; a second name of one call takes no time."""
        if self._call is not None:
            self.calls.append((name, *self._call))
        self._call = None

    def end_forward(self) -> None:
        """Mark the end of the block's forward."""
        self.end = self._meter.mark()
        self.end_peak_bytes = self._meter.take_peak_bytes()

    def note_peak(self, record: Record | None) -> None:
        """Let the last event hold what the peak has beyond all that is counted elsewhere.

        None for a record that died with the block's last event: what that was given is alive.
        """
        peak_bytes = self._meter.take_peak_bytes()
        if self.events:
            event = self.events[-1]
            if record is not None:
                self.replayed_bytes = record.replayed_bytes(event.nodes)
            counted = self.base_bytes + self.gradient_bytes + self.replayed_bytes
            event.held_bytes = max(event.held_bytes, peak_bytes - counted)


class Stopwatch:
    """Measures one forward and backward of a model; then `blocks` and `outside` are there.

    Args:
        meter: The device's.
        model: For its parameters and buffers.
        num_blocks: How many blocks it has.
    """

    def __init__(self, meter: AbstractMeter, model: nn.Module, num_blocks: int) -> None:
        self.is_paused = False
        """No measurement starts."""
        self.is_done = False
        self.resting_bytes = 0
        """Allocated when the measured forward started, but for gradients."""
        self.blocks: tuple[Block, ...] = ()
        self.outside: Outside | None = None
        self.classes: tuple[tuple[str, ...], ...] = ()
        """Names of the blocks, those together that were taken for equal."""
        self._meter = meter
        self._num_blocks = num_blocks
        self._gradients = GradientMemory(model.parameters())
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers())
        self._reset()

    def _reset(self) -> None:
        self._gradients.close()
        self.is_running = False
        self._timings: dict[int, BlockTiming] = {}
        self._records: weakref.WeakKeyDictionary[Record, BlockTiming] = weakref.WeakKeyDictionary()
        self._open: tuple[BlockTiming, weakref.ref[Record], _Event, Mark] | None = None
        self._start: Mark = None
        self._start_bytes = 0
        self._first_block_bytes = 0
        self._first_peak_bytes = 0
        self._constant_bytes = 0
        self._output_bytes = 0
        self._turn_start: Mark = None
        self._turn_end: Mark = None
        self._turn_peak_bytes = 0
        self._first_block_end: Mark = None
        self._backward_end: Mark = None

    # -- forward -------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether the backward of the step that is measured is over."""
        return self._backward_end is not None

    @property
    def is_lost(self) -> bool:
        """Whether the step that is measured can have no backward any more."""
        return self.is_running and not self.has_ended and not self._records

    def start_forward(self) -> None:
        """Start to measure: the model's forward begins."""
        self._reset()
        self.is_running = True
        self._start_bytes = self._meter.allocated_bytes()
        self._gradients.start()
        self._meter.take_peak_bytes()
        self._start = self._meter.mark()

    def end_forward(self, output: Iterable[Tensor]) -> None:
        """Note what the model's forward returned."""
        if self.is_running and not self._output_bytes:
            self._output_bytes = _total_bytes(output)

    def start_block(self, index: int, record: Record, module: nn.Module) -> BlockTiming | None:
        """Start to measure a block, whose forward is about to start; None if it was measured."""
        if not self.is_running or self.has_ended or index in self._timings:
            return None
        peak_bytes = self._meter.take_peak_bytes()
        if not self._timings:
            self._first_block_bytes = self._meter.allocated_bytes()
            self._first_peak_bytes = peak_bytes
        timing = BlockTiming(index, module.parameters(), self._meter)
        self._timings[index] = self._records[record] = timing
        return timing

    def end_block(self, timing: BlockTiming, block: Block, record: Record) -> None:
        """Note a block that has ended, and what its sealed record keeps."""
        timing.block = block
        for node in record.nodes:
            if node is None or node.role not in ACTIVATION_ROLES or node.kept is None:
                continue
            key = storage_key(node.kept)
            timing.kept[key] = node.num_bytes
            timing.kept_names.add(node.activation)
            if node.role is Role.INPUT:
                timing.input_keys[node.activation] = key
        if len(self._timings) == 1:
            inputs = sum(a.num_bytes for a in block.activations if a.kind is OpKind.INPUT)
            grown = self._first_block_bytes - self._start_bytes
            self._constant_bytes = max(0, grown - inputs)

    def abort(self) -> None:
        """Forget a forward that failed; a later one is measured."""
        self._reset()

    def start_turn(self) -> None:
        """Mark the end of the last block's forward."""
        if self.is_running and self._turn_start is None:
            self._meter.take_peak_bytes()
            self._turn_start = self._meter.mark()

    # -- backward ------------------------------------------------------------------------------

    def start_backward(self) -> bool:
        """Note a sign of backward; returns whether it is the first, which ends the turn."""
        if not self.is_running or self._turn_end is not None:
            return False
        self._turn_end = self._meter.mark()
        self._turn_peak_bytes = self._meter.take_peak_bytes()
        return True

    def timing_of(self, record: Record) -> BlockTiming | None:
        """Return what is measured of a record's block; None where nothing is."""
        if not self.is_running or self.has_ended:
            return None
        return self._records.get(record)

    def start_unpack(self, timing: BlockTiming, number: int) -> None:
        """Note that autograd node `number` asks for something: what was asked before is done."""
        self._close_event(self._meter.mark())
        if not timing.events:
            timing.base_bytes = self._counted_bytes(timing)
            timing.first_gradient_bytes = gradient_bytes(timing.parameters)
        timing.gradient_bytes = gradient_bytes(timing.parameters)
        event = timing.events[-1] if timing.events else None
        if event is None or (event.number != number and event.uses):
            event = _Event()
            timing.events.append(event)
        event.number = number

    def end_unpack(self, timing: BlockTiming, record: Record, node: Node) -> None:
        """Note what autograd got: from now on the event computes."""
        event = timing.events[-1]
        if node.role in ACTIVATION_ROLES:
            if node.activation not in event.uses:
                event.uses.append(node.activation)
        elif not event.uses and len(timing.events) > 1:
            # Nothing to wait for: it computes as a part of the event before.
            timing.events.pop()
            timing.events[-1].held_bytes = max(timing.events[-1].held_bytes, event.held_bytes)
            event = timing.events[-1]
        event.nodes.add(node.index)
        timing.note_peak(record)
        is_ahead = timing.num_unpacks % UNPACKS_AHEAD == 0
        timing.num_unpacks += 1
        self._open = timing, weakref.ref(record), event, self._meter.mark(is_ahead=is_ahead)

    def end_unpack_stashed(self, timing: BlockTiming, record: Record) -> None:
        """Note that the backward of a sample got something back that its block had made."""
        event = timing.events[-1]
        event.uses.append("")
        timing.note_peak(record)
        self._open = timing, weakref.ref(record), event, self._meter.mark(is_ahead=True)

    def end_first_block(self) -> None:
        """Mark the gradient of the first block's input."""
        if self.is_running and not self.has_ended:
            self._first_block_end = self._meter.mark()
            self._close_event(self._first_block_end)

    def end_backward(self) -> None:
        """Mark the end of the backward pass."""
        if self.is_running and not self.has_ended:
            mark = self._meter.mark()
            self._close_event(mark)
            self._backward_end = mark
            self._gradients.end()

    def _close_event(self, mark: Mark) -> None:
        if self._open is None:
            return
        timing, known, event, start = self._open
        self._open = None
        event.spans.append((start, mark))
        event.gradient_bytes = gradient_bytes(timing.parameters)
        timing.note_peak(known())

    def _counted_bytes(self, timing: BlockTiming) -> int:
        """What is counted elsewhere as a block's backward starts, but for its own gradients."""
        own = gradient_bytes(timing.parameters)
        others = self._gradients.now_bytes() - own - self._gradients.start_bytes
        timing.other_gradient_bytes = others + timing.start_gradient_bytes
        return self._start_bytes + self._constant_bytes + others + self._kept_bytes(timing.index)

    def _kept_bytes(self, last_index: int) -> int:
        """Bytes that the blocks up to one keep for backward; shared storages count once."""
        kept: dict[int, int] = {}
        for index, timing in self._timings.items():
            if index <= last_index:
                kept |= timing.kept
        return sum(kept.values())

    # -- the result ----------------------------------------------------------------------------

    def take_growth(self, parameters: Iterable[Tensor]) -> Growth | None:
        """Return what rests on the device since the measured step, once; None if it is nothing.

        To be called when a forward starts. The optimizer's state appears at its first step, which
        may come after the one that was measured. Less than a 256th of what was there is nothing.
        """
        if not self.is_done:
            return None
        there_bytes, growth = self._gradients.take_growth(parameters)
        grown = self._meter.allocated_bytes() - there_bytes - self.resting_bytes
        if grown * 256 < self.resting_bytes or grown <= 0:
            grown = 0
        self.resting_bytes += grown
        growth = replace(growth, num_bytes=growth.num_bytes + grown)
        return growth or None

    def close(self) -> None:
        """Take everything off the model that measuring needs."""
        self._gradients.close()

    def finish(self, observed: Sequence[Block]) -> None:
        """Read the clocks: the next step starts, or nothing follows. Waits for the device.

        Args:
            observed: The blocks as they were observed, for those that this step did not run.
        """
        late_peak_bytes = self._meter.take_peak_bytes()
        blocks = [
            replace(block, backward=NO_BACKWARD)
            if (timing := self._timings.get(index)) is None
            or timing.block is None
            or timing.graph is not None
            else self._measured(timing, timing.block)
            for index, block in enumerate(observed)
        ]
        self._measure_fused(observed, blocks)
        self._meter.take_peak_bytes()  # what was run for that is no part of any step
        self.blocks, self.classes = equalised(blocks)
        self.outside = self._measured_outside(late_peak_bytes)
        self.is_done = True
        self.resting_bytes = self._start_bytes - self._gradients.start_bytes
        made_bytes = sum(block.gradient_bytes for block in self.blocks)
        outside = self.outside
        self._gradients.finish(
            made_bytes + outside.turn_gradient_bytes + outside.ends_gradient_bytes
        )
        self._reset()
        self._parameters, self._buffers = [], []
        names = ", ".join(f"{len(alike)} like {alike[0]}" for alike in self.classes)
        log.info("measured %d blocks of %d classes: %s", len(blocks), len(self.classes), names)

    def _measured(self, timing: BlockTiming, block: Block) -> Block:
        elapsed = self._meter.elapsed_ns
        make_ns = {name: elapsed(start, end) for name, start, end, _ in timing.calls}
        activations = tuple(replace(a, make_ns=make_ns.get(a.group, 0)) for a in block.activations)
        made_ns = sum({a.group: a.make_ns for a in activations}.values())
        held_bytes = _estimated_held_bytes(block)
        there = accumulate((e.gradient_bytes for e in timing.events), max,
                           initial=timing.first_gradient_bytes)  # fmt: skip
        events = tuple(
            BackwardEvent(
                uses=tuple(event.uses),
                compute_ns=sum(elapsed(start, end) for start, end in event.spans),
                held_bytes=event.held_bytes if self._has_allocator else held_bytes,
                gradient_bytes=after - before,
            )
            for event, (before, after) in zip(timing.events, pairwise(there), strict=True)
        )
        return replace(
            block,
            activations=activations,
            backward=events or NO_BACKWARD,
            rest_ns=max(0, elapsed(timing.start, timing.end) - made_ns),
            workspace_bytes=self._workspace_bytes(timing, block),
        )

    def _measure_fused(self, observed: Sequence[Block], blocks: list[Block]) -> None:
        """Put compiled blocks in their places in `blocks`, with what was measured of their kind."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for index, timing in self._timings.items():
            if timing.graph is not None and timing.events:
                kinds.setdefault(signature_of(observed[index]), []).append(index)
        for alike in kinds.values():
            sizes = {n: b for i in alike for n, b in self._timings[i].saved_bytes.items()}
            sized = {i: _with_sizes(observed[i], self._timings[i].block, sizes) for i in alike}
            runs = [self._fused_run(self._timings[i], sized[i]) for i in alike]
            graph = self._timings[alike[0]].graph
            assert graph is not None, "bug in ebbtide"
            reruns = {t.group: t.rerun for t in graph.lean if t.rerun is not None}
            call_ns = {group: rerun.time_ns(self._meter) for group, rerun in reruns.items()}
            for index in alike:
                block = sized[index]
                full_ns = {block.name + g: ns for g, ns in call_ns.items() if ns is not None}
                blocks[index] = fused_block(block, runs, full_ns)
                if not self._has_allocator:
                    blocks[index] = _estimated(blocks[index])

    def _fused_run(self, timing: BlockTiming, block: Block) -> FusedRun:
        elapsed = self._meter.elapsed_ns
        counted, twice = self._counted_in_forward(timing)
        kept = {a.name for a in block.activations} if timing.is_sample else timing.kept_names
        live_bytes = max(_live_bytes(block, kept, twice).values(), default=0)
        return FusedRun(
            is_full=timing.is_sample,
            forward_ns=elapsed(timing.start, timing.end),
            backward_ns=sum(elapsed(a, b) for event in timing.events for a, b in event.spans),
            held_bytes=max(event.held_bytes for event in timing.events),
            workspace_bytes=timing.end_peak_bytes - counted - live_bytes,
            gradient_bytes=max(0, timing.events[-1].gradient_bytes - timing.first_gradient_bytes),
        )

    def _counted_in_forward(self, timing: BlockTiming) -> tuple[int, set[str]]:
        """Return what is counted elsewhere in a block's forward, and which inputs that has."""
        earlier = {key for i, t in self._timings.items() if i < timing.index for key in t.kept}
        counted = self._start_bytes + self._constant_bytes + self._kept_bytes(timing.index - 1)
        return counted, {name for name, key in timing.input_keys.items() if key in earlier}

    def _workspace_bytes(self, timing: BlockTiming, block: Block) -> int:
        """The most that was allocated beyond what is counted elsewhere, call by call."""
        counted, twice = self._counted_in_forward(timing)
        live = _live_bytes(block, timing.kept_names, twice)
        most_bytes, live_bytes = 0, 0
        for name, _, _, peak_bytes in timing.calls:
            live_bytes = live.get(name, live_bytes)
            most_bytes = max(most_bytes, peak_bytes - counted - live_bytes)
        return max(most_bytes, timing.end_peak_bytes - counted - live_bytes)

    def _measured_outside(self, late_peak_bytes: int) -> Outside:
        elapsed = self._meter.elapsed_ns
        made_bytes = sum(block.gradient_bytes for block in self.blocks)
        turn_gradient_bytes = self._turn_gradient_bytes()
        left_bytes = self._gradients.grown_bytes - turn_gradient_bytes - made_bytes
        ends_gradient_bytes = max(0, left_bytes)
        all_gradient_bytes = turn_gradient_bytes + made_bytes + ends_gradient_bytes
        model_bytes = _total_bytes([*self._parameters, *self._buffers])
        start_gradient_bytes = self._gradients.start_bytes
        other_bytes = self._start_bytes - start_gradient_bytes
        resident_bytes = start_gradient_bytes + max(model_bytes, other_bytes)
        first = next(iter(self._timings.values()))
        ends_ns = elapsed(self._start, first.start)
        if self._first_block_end is not None:
            ends_ns += elapsed(self._first_block_end, self._backward_end)
        turn_bytes = TURN_IN_OUTPUTS * self._output_bytes
        if self._has_allocator:
            stored_bytes = self._constant_bytes + self._kept_bytes(self._num_blocks)
            turn_bytes = max(0, self._turn_peak_bytes - self._start_bytes - stored_bytes)
        first_bytes = self._first_peak_bytes - self._start_bytes
        return Outside(
            resident_bytes=resident_bytes,
            turn_bytes=turn_bytes,
            turn_ns=0 if self._turn_start is None else elapsed(self._turn_start, self._turn_end),
            ends_bytes=max(0, first_bytes, late_peak_bytes - resident_bytes - all_gradient_bytes),
            ends_ns=ends_ns,
            constant_bytes=self._constant_bytes,
            turn_gradient_bytes=turn_gradient_bytes,
            ends_gradient_bytes=ends_gradient_bytes,
        )

    def _turn_gradient_bytes(self) -> int:
        """Return the gradients that were there before those of the blocks, and what is missing."""
        most_bytes = later_bytes = 0
        for index in reversed(range(len(self.blocks))):
            if index in self._timings:
                other_bytes = self._timings[index].other_gradient_bytes
                most_bytes = max(most_bytes, other_bytes - later_bytes)
            later_bytes += self.blocks[index].gradient_bytes
        return most_bytes + self._gradients.missing_bytes

    @property
    def _has_allocator(self) -> bool:
        return self._start_bytes > 0  # the parameters at least


def _with_sizes(block: Block, measured: Block | None, saved_bytes: Mapping[str, int]) -> Block:
    """Return a compiled block with the sizes of the step that was measured.

    Args:
        block: As it was observed; the batch may have been another one.
        measured: As its forward left it then; of that the inputs are known.
        saved_bytes: Local name to bytes, of what a block of its kind has made.
    """
    given = () if measured is None else measured.activations
    known = {a.name: a.num_bytes for a in given if a.kind is OpKind.INPUT}
    known |= {block.name + name: num_bytes for name, num_bytes in saved_bytes.items()}
    return replace(
        block,
        activations=tuple(
            replace(a, num_bytes=known.get(a.name, a.num_bytes)) for a in block.activations
        ),
    )


def _estimated(block: Block) -> Block:
    """Return a compiled block with memory as it is taken to be where no allocator counts."""
    held_bytes = _estimated_held_bytes(block)
    events = tuple(replace(event, held_bytes=held_bytes) for event in block.backward)
    return replace(block, backward=events)


def _estimated_held_bytes(block: Block) -> int:
    return HELD_IN_LARGEST * max((a.num_bytes for a in block.activations), default=0)


def _live_bytes(block: Block, stored: AbstractSet[str], twice: AbstractSet[str]) -> dict[str, int]:
    """Return what `docs/planner.md` counts of a block's activations at each of its calls.

    Args:
        block: The block.
        stored: What stays for backward.
        twice: What is counted elsewhere.
    """
    places: dict[str, int] = {}
    last_read: dict[str, int] = {}
    for activation in block.activations:
        place = places.setdefault(activation.group, len(places))
        for name in activation.inputs:
            last_read[name] = place
    live = dict.fromkeys(places, 0)
    for activation in block.activations:
        if activation.name in twice:
            continue
        last = len(places)
        if activation.name not in stored and activation.kind is not OpKind.INPUT:
            last = last_read.get(activation.name, last)
        for group, place in places.items():
            if places[activation.group] <= place <= last:
                live[group] += activation.num_bytes
    return live


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages; one that several tensors stand on counts once."""
    return sum({storage_key(t): _num_bytes(t) for t in tensors}.values())


def _num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's storage; of a sharded one, of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if type(local) in (Tensor, nn.Parameter) and local.layout is torch.strided:
        return local.untyped_storage().nbytes()
    return element_bytes(local)
