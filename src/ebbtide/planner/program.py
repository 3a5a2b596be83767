"""What a block does under one option: the moments of `docs/planner.md`, with times and bytes.

A program does not say which stored activations are evicted; it says when each is made, first
needed and last needed, so that any choice can be laid over it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from ebbtide.planner.chain import BlockClass, Moment
from ebbtide.planner.menu import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The moments of one block, by index: forward's and backward's (events) each from 0."""

    option: Option
    """What is stored."""
    moments: tuple[Moment, ...]
    """Those of forward."""
    call_ns: tuple[int, ...]
    """Time of each forward moment; the last one's includes the block's `rest_ns`."""
    transient_bytes: tuple[int, ...]
    """Bytes of each forward moment beside what is stored up to its end: activations that are
    alive and not stored, with workspaces."""
    made: tuple[tuple[int, ...], ...]
    """Stored activations that each forward moment makes."""
    call_bytes: tuple[int, ...]
    """Bytes of each forward moment beside what was stored before it."""
    event_ns: tuple[int, ...]
    """Time of each backward moment, replays and what storing costs included."""
    replay_ns: tuple[int, ...]
    """The part of it that replays take."""
    store_ns: tuple[int, ...]
    """The part of it that storing costs, forward's share too: it is charged where backward first
    asks for what was stored."""
    scratch_bytes: tuple[int, ...]
    """Most bytes of replayed activations, gradients and workspaces at each backward moment."""
    num_bytes: tuple[int, ...]
    """Bytes of each activation of the block."""
    last_held: tuple[int, ...]
    """The last forward moment during which forward itself holds each activation."""
    made_at: dict[int, int]
    """Stored activation to the forward moment that makes it."""
    first_need: dict[int, int]
    """Stored activation to the first event that needs it; stored ones that nothing needs are
    missing."""
    last_need: dict[int, int]
    """Stored activation to the last event that needs it."""


def make_program(block: BlockClass, option: Option) -> Program:
    """Walk through a block's forward and backward under `option`."""
    event_ns, replay_ns, scratch, first, last = _walk_backward(block, option.stored)
    last_held = _last_held(block)
    store_ns = [0] * len(event_ns)
    for i, event in first.items():
        store_ns[event] += block.store_ns[i]
    moments = block.moments
    call_ns = [moment.spent_ns for moment in moments]
    call_ns[-1] += block.tail_ns
    transient = _transient_bytes(block, option.stored, last_held)
    if block.is_fused:
        transient, last_held = _in_one_moment(block, option.stored, transient)
    made = tuple(tuple(i for i in moment.outputs if i in option.stored) for moment in moments)
    return Program(
        option=option,
        moments=moments,
        call_ns=tuple(call_ns),
        transient_bytes=transient,
        made=made,
        call_bytes=tuple(map(add, transient, _bytes_of(block, made))),
        event_ns=tuple(map(add, event_ns, store_ns)),
        replay_ns=tuple(replay_ns),
        store_ns=tuple(store_ns),
        scratch_bytes=tuple(scratch),
        num_bytes=block.num_bytes,
        last_held=last_held,
        made_at=dict(sorted((i, at) for at, outputs in enumerate(made) for i in outputs)),
        first_need=first,
        last_need=last,
    )


def _last_held(block: BlockClass) -> tuple[int, ...]:
    end = len(block.calls) - 1
    last_reader = {i: number for number, call in enumerate(block.calls) for i in call.inputs}
    return tuple(
        end if block.calls[number].is_input else last_reader.get(i, end)
        for i, number in enumerate(block.call_of)
    )


def _transient_bytes(
    block: BlockClass, stored: frozenset[int], last_held: tuple[int, ...]
) -> tuple[int, ...]:
    change = [0] * (len(block.calls) + 1)
    for i, num_bytes in enumerate(block.num_bytes):
        if i not in stored:
            change[block.call_of[i]] += num_bytes
            change[last_held[i] + 1] -= num_bytes
    alive, result = block.workspace_bytes, list[int]()
    for delta in change[:-1]:
        alive += delta
        result.append(alive)
    return tuple(result)


def _in_one_moment(
    block: BlockClass, stored: frozenset[int], transient: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Put the calls of a fused block together: its transient bytes, and what is held last when."""
    made = [[i for i in call.outputs if i in stored] for call in block.calls]
    so_far = list(accumulate(_bytes_of(block, made)))
    most = max(map(add, transient, so_far))
    return (most - so_far[-1],), (0,) * len(block.num_bytes)


def _bytes_of(block: BlockClass, made: Iterable[Iterable[int]]) -> Iterator[int]:
    return (sum(block.num_bytes[i] for i in outputs) for outputs in made)


def _walk_backward(
    block: BlockClass, stored: frozenset[int]
) -> tuple[list[int], list[int], list[int], dict[int, int], dict[int, int]]:
    uses_left = _count_uses(block, stored)
    there: set[int] = set()
    memo_bytes = 0
    event_ns: list[int] = []
    replay_ns: list[int] = []
    scratch: list[int] = []
    first: dict[int, int] = {}
    last: dict[int, int] = {}

    def need(i: int, event: int) -> None:
        first.setdefault(i, event)
        last[i] = event

    def use_up(i: int) -> int:
        """Count one use of a replayed activation; return the bytes that this frees."""
        uses_left[i] -= 1
        if uses_left[i] or i not in there:
            return 0
        there.discard(i)
        return block.num_bytes[i]

    last_held_bytes = max(block.held_bytes, default=0)
    for event, uses in enumerate(block.uses):
        spent_ns, peak_bytes = 0, 0
        # Gradients that are alive before an event are held in it and in the one before it.
        before_bytes = min(block.held_bytes[event], last_held_bytes)
        last_held_bytes = block.held_bytes[event]
        for i in uses:
            if i in stored:
                need(i, event)
                continue
            for number in _calls_to_make(block, i, stored, there):
                call = block.calls[number]
                spent_ns += call.make_ns
                # The op makes all its outputs, also those that are stored or not needed.
                made_bytes = sum(block.num_bytes[j] for j in call.outputs)
                peak_bytes = max(peak_bytes, memo_bytes + made_bytes + before_bytes)
                for j in call.outputs:
                    if j not in stored and j not in there and uses_left[j] > 0:
                        there.add(j)
                        memo_bytes += block.num_bytes[j]
                for j in call.inputs:
                    if j in stored:
                        need(j, event)
                    else:
                        memo_bytes -= use_up(j)
        replay_ns.append(spent_ns)
        event_ns.append(spent_ns + block.compute_ns[event])
        scratch.append(max(peak_bytes, memo_bytes + block.held_bytes[event]))
        for i in uses:
            if i not in stored:
                memo_bytes -= use_up(i)
    return event_ns, replay_ns, scratch, first, last


def _count_uses(block: BlockClass, stored: frozenset[int]) -> Counter[int]:
    """Count, for each activation, the events that use it and the replayed calls that read it."""
    counts: Counter[int] = Counter(i for uses in block.uses for i in uses)
    run: set[int] = set()
    for uses in block.uses:
        for i in uses:
            if i not in stored:
                run.update(_calls_to_make(block, i, stored, set()))
    counts.update(i for number in run for i in block.calls[number].inputs)
    return counts


def _calls_to_make(
    block: BlockClass, wanted: int, stored: frozenset[int], there: set[int]
) -> list[int]:
    """Return the calls, in forward order, that make `wanted` from what is there."""
    todo, found = [wanted], set[int]()
    while todo:
        i = todo.pop()
        number = block.call_of[i]
        if i in stored or i in there or number in found:
            continue
        found.add(number)
        todo += block.calls[number].inputs
    return sorted(found)
