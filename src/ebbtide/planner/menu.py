"""The menu of a block class: the best ways to trade stored bytes for recomputation.

An option is a set of stored activations; the rest of what backward needs is replayed from them.
For a price of one byte, the option with the least (recomputation + price x stored bytes) is a
minimum cut: a call is replayed or not, replaying it needs its inputs, and what is needed and not
replayed is stored. All such options together are the lower convex hull of (bytes, time) over the
2^n sets; they are found by cutting between neighbours until nothing new appears (project selection,
Picard 1976; the chord method, Eisner and Severance 1976). What differs: op calls with several
outputs pay once, and inputs shared by several replays are stored once, so cones need no special
case. What storing a value costs by itself is a part of its price. Known weakness: the working set
of a replay has no part in the price.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ebbtide.plan import Decision
from ebbtide.planner.chain import BlockClass

_STORED = frozenset({Decision.KEEP, Decision.HOST, Decision.DISK})

NEAR_HULL_SHARE = 0.02
"""How far above the hull an option may lie, as a share of the time between its corners."""

# Node numbers of the cut; calls and unsaved activations follow.
_SOURCE, _SINK = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to treat a block's activations."""

    stored: frozenset[int]
    """Activations that are kept or evicted; all are needed."""
    num_bytes: int
    """Their bytes."""
    replay_ns: int
    """Time to replay what is needed and not stored, each call once."""
    store_ns: int = 0
    """Compute time that storing costs, whether what is stored stays or leaves."""
    replayed: frozenset[int]
    """The calls that this runs again."""

    @property
    def spent_ns(self) -> int:
        """Time that it costs beside copies."""
        return self.replay_ns + self.store_ns


def make_menu(block: BlockClass) -> tuple[Option, ...]:
    """Return the options on the hull, from most bytes and least time to least bytes.

    The first one stores all that autograd saves. Where storing costs time, others may be faster.
    """
    everything = sum(block.num_bytes) + 1
    all_time = sum(call.make_ns for call in block.calls) + sum(block.store_ns) + 1
    keep = _least_replayed(block)
    # Ties go to the fewer bytes on the first, and to the least time on the last.
    first = _cut(block, time_weight=everything, byte_weight=1)
    last = _cut(block, time_weight=1, byte_weight=all_time)
    if keep.num_bytes <= last.num_bytes:
        return (keep,)
    if first.num_bytes >= keep.num_bytes:
        first = keep  # else calls that take no time are replayed on the first corner
    options = [first, last]
    todo = [(first, last)]
    while todo:
        left, right = todo.pop()
        time_weight = left.num_bytes - right.num_bytes
        byte_weight = right.spent_ns - left.spent_ns
        if time_weight <= 0 or byte_weight <= 0:
            continue
        found = _cut(block, time_weight=time_weight, byte_weight=byte_weight)
        cost = time_weight * found.spent_ns + byte_weight * found.num_bytes
        if cost < time_weight * left.spent_ns + byte_weight * left.num_bytes:
            options.append(found)
            todo += [(left, found), (found, right)]
    # The fastest of each size; nothing is larger than what autograd saves.
    fastest: dict[int, Option] = {}
    for option in sorted(options, key=lambda option: -option.spent_ns):
        fastest[option.num_bytes] = option
    fastest[keep.num_bytes] = keep
    options = [fastest[size] for size in sorted(fastest, reverse=True) if size <= keep.num_bytes]
    between = [o for left, right in pairwise(options) for o in _between(block, left, right)]
    return tuple(sorted([*options, *between], key=lambda option: -option.num_bytes))


def _least_replayed(block: BlockClass) -> Option:
    """Return the option that runs again only what pins ask for, of what backward needs."""
    replayed = frozenset[int]()
    while True:
        option = make_option(block, replayed)
        pinned = {block.call_of[i] for i in option.stored if block.pins[i] is Decision.RECOMPUTE}
        more = {number for number in pinned if block.calls[number].is_replayable} - replayed
        if not more:
            return option
        replayed |= more


def _between(block: BlockClass, left: Option, right: Option) -> list[Option]:
    """Return options on the way from one corner of the hull to the next that lie on the hull.

    Of several calls with one price the corners drop all or none. Where only whole options can be
    chosen, those between make the steps smaller at no cost.
    """
    more = sorted(right.replayed - left.replayed)
    found: list[Option] = []
    replayed, last = left.replayed, left
    for number in more[:-1]:
        replayed = replayed | {number}
        option = make_option(block, replayed)
        share = (left.num_bytes - option.num_bytes) / (left.num_bytes - right.num_bytes)
        line_ns = left.spent_ns + share * (right.spent_ns - left.spent_ns)
        slack_ns = NEAR_HULL_SHARE * abs(right.spent_ns - left.spent_ns)
        is_step = right.num_bytes < option.num_bytes < last.num_bytes
        if is_step and option.spent_ns <= line_ns + slack_ns:
            found.append(option)
            last = option
    return found


def make_option(block: BlockClass, replayed: frozenset[int]) -> Option:
    """Return the option in which just the calls `replayed`, where they are needed, run again."""
    needed = {i for i, is_saved in enumerate(block.is_saved) if is_saved}
    todo, run, stored = sorted(needed), set[int](), set[int]()
    while todo:
        i = todo.pop()
        number = block.call_of[i]
        if number not in replayed:
            stored.add(i)
        elif number not in run:
            run.add(number)
            todo += [j for j in block.calls[number].inputs if j not in stored]
    return Option(
        stored=frozenset(stored),
        num_bytes=sum(block.num_bytes[i] for i in stored),
        replay_ns=sum(block.calls[number].make_ns for number in run),
        store_ns=sum(block.store_ns[i] for i in stored),
        replayed=frozenset(run),
    )


def _cut(block: BlockClass, *, time_weight: int, byte_weight: int) -> Option:
    """Return the option with the least weighted sum of time and stored bytes."""
    num_calls = len(block.calls)
    edges: list[dict[int, int]] = [{} for _ in range(2 + num_calls + len(block.num_bytes))]
    endless = 1 + sum(
        time_weight * (call.make_ns + sum(block.store_ns[i] for i in call.outputs))
        + byte_weight * sum(block.num_bytes[i] for i in call.outputs)
        for call in block.calls
    )

    def add(tail: int, head: int, capacity: int) -> None:
        edges[tail][head] = edges[tail].get(head, 0) + capacity
        edges[head].setdefault(tail, 0)

    # On the source's side: the calls that are replayed and the unsaved inputs that they need.
    for number, call in enumerate(block.calls):
        node = 2 + number
        pins = {block.pins[i] for i in call.outputs}
        may_run_again = call.is_replayable and not pins & _STORED
        add(node, _SINK, time_weight * call.make_ns if may_run_again else endless)
        for i in call.outputs:
            is_pinned = block.pins[i] is Decision.RECOMPUTE and may_run_again
            # Saved ones are needed; the others if a replayed call reads them.
            tail = _SOURCE if block.is_saved[i] else 2 + num_calls + i
            price = byte_weight * block.num_bytes[i] + time_weight * block.store_ns[i]
            if is_pinned or price:
                add(tail, node, endless if is_pinned else price)
        if may_run_again:
            for i in call.inputs:
                if not block.is_saved[i]:
                    add(node, 2 + num_calls + i, endless)
    reached = _source_side(edges)
    return make_option(
        block, frozenset(number for number in range(num_calls) if 2 + number in reached)
    )


def _source_side(edges: list[dict[int, int]]) -> set[int]:
    """Saturate the network and return what the source still reaches; `edges` are used up."""
    # Most of the flow takes two edges, and needs no search.
    for node in list(edges[_SOURCE]):
        _push(edges, (_SOURCE, node, _SINK))
    while True:
        parent = {_SOURCE: _SOURCE}
        waiting = deque([_SOURCE])
        while waiting and _SINK not in parent:
            tail = waiting.popleft()
            for head, capacity in edges[tail].items():
                if capacity > 0 and head not in parent:
                    parent[head] = tail
                    waiting.append(head)
        if _SINK not in parent:
            return set(parent)
        path = [_SINK]
        while path[-1] != _SOURCE:
            path.append(parent[path[-1]])
        _push(edges, path[::-1])


def _push(edges: list[dict[int, int]], path: Sequence[int]) -> None:
    """Let as much flow along a path as it takes."""
    steps = list(pairwise(path))
    flow = min(edges[tail].get(head, 0) for tail, head in steps)
    if flow:
        for tail, head in steps:
            edges[tail][head] -= flow
            edges[head][tail] += flow
