"""What a block's forward did the last times, so that the next one need not be recorded anew.

Most of what a recording writes down is dropped when the block ends: backward needs some calls and
some storages of it. Once two forwards in a row left the same, a block has a *script* of that part.
A forward that follows it writes down nothing else, and takes the calls over from the script.

Nothing is taken over unseen: of every call that backward may replay, the operator, each number
and, by storage and layout, each tensor are compared with the script's (`Tape` does it). What the
script says nothing of is not needed. A forward that turns out another way is recorded from there
on; a storage that was passed over until then counts as made outside the block, and is kept.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ebbtide.plan import Decision, Plan
from ebbtide.torch.identity import Layout
from ebbtide.torch.internals import size_of
from ebbtide.torch.record import ACTIVATION_ROLES, Call, Node, Record, Ref, Role
from ebbtide.workload import OpKind

MAX_MISSES: Final = 3
"""A block whose forwards leave their scripts this often has none any more."""
MAX_SHAPES: Final = 16
"""Most kinds of inputs that a block has scripts for."""


class NodeFacts(NamedTuple):
    """What is the same of a node in every forward."""

    name: str
    role: Role
    kind: OpKind
    op: str
    group: str
    num_bytes: int
    call: int
    """The recorded call that makes it; -1 when backward does not replay that, and what it makes
    is told by when it is first used."""
    decision: Decision
    """What became of it."""
    is_asked: bool
    """The plan moves it, and what becomes of it depends on the room in the tier."""
    is_unsteady: bool
    """As `Node.is_unsteady`."""


class Step(NamedTuple):
    """One operator call that makes no view."""

    func: Any
    name: str
    """Of the call; empty when it makes no storage that could be recorded."""
    call: int
    """Number of the recorded call; -1 when backward does not replay it."""
    outputs: tuple[tuple[int, int], ...]
    """Position of each output that backward needs, and its node; of replayed calls alone."""


class Script(NamedTuple):
    """The part of a record that backward needs."""

    steps: tuple[Step, ...]
    """Ends with one that no call is."""
    nodes: tuple[NodeFacts | None, ...]
    calls: tuple[Call | None, ...]
    packs: tuple[tuple[int, Layout], ...]
    """Node and layout of each saved tensor."""
    num_uses: tuple[int, ...]
    """Of each node, the unpacks and replayed calls that will read it in one backward."""


_END: Final = Step(None, "", -1, ())


class ExpectedCall(NamedTuple):
    """A call that backward replays, as the next forward should make it."""

    call: Call
    run: Any
    """Calls its operator."""
    num_args: int
    tensors: tuple[tuple[int, int, Layout], ...]
    """Position, node and layout of each argument that is a tensor."""
    others: tuple[tuple[int, Any], ...]
    """Position and value of each that is none, or a list."""


class ExpectedStep(NamedTuple):
    """One operator call that makes no view."""

    func: Any
    name: str
    number: int
    """Of the recorded call; -1 when backward does not replay it."""
    call: ExpectedCall | None
    outputs: tuple[tuple[int, int], ...]
    """Position of each output that backward needs, and its node; of replayed calls alone."""


class Expected(NamedTuple):
    """A script, taken apart."""

    script: Script
    steps: tuple[ExpectedStep, ...]
    """Ends with one that no call is."""

    @staticmethod
    def of(script: Script) -> "Expected":
        """Take a script apart."""
        steps = tuple(
            ExpectedStep(
                step.func, step.name, step.call, _taken_apart(script, step.call), step.outputs
            )
            for step in script.steps
        )
        return Expected(script, steps)


def _taken_apart(script: Script, index: int) -> ExpectedCall | None:
    call = script.calls[index] if index >= 0 else None
    if call is None:
        return None
    refs = [(i, a.node, a.layout) for i, a in enumerate(call.args) if isinstance(a, Ref)]
    others = [(i, a) for i, a in enumerate(call.args) if not isinstance(a, Ref)]
    return ExpectedCall(call, call.run, len(call.args), tuple(refs), tuple(others))


class Trace:
    """Notes of one recorded forward, from which its script is made."""

    def __init__(self) -> None:
        self.is_odd = False
        """Something happened that no script tells of."""
        self.packs: list[tuple[int, Layout]] = []
        self._calls: list[tuple[Any, str, int, Sequence[int]]] = []

    def add_call(self, func: Any, name: str, call: int, outputs: Sequence[int]) -> None:
        """Note a call: the number that it was recorded under, or -1, and its outputs' nodes."""
        self._calls.append((func, name, call, outputs))

    def script(
        self,
        before: Sequence[Node | None],
        record: Record,
        is_moved: Callable[[str], bool],
    ) -> Script:
        """Return the script of a forward that has ended.

        Args:
            before: The nodes of its record as they were before that was sealed.
            record: Sealed.
            is_moved: Whether the plan moves an activation of this name.
        """
        calls = tuple(record.calls)
        needed = {index for index, _ in self.packs}
        for call in calls:
            if call is not None:
                needed.update(call.inputs)
                needed.update(i for i in call.outputs if i >= 0 and _is_used(i, before, record))
        replayed = {index for index, call in enumerate(calls) if call is not None}
        nodes = tuple(
            _facts(node, node.call if node.call in replayed else -1, is_moved(node.name))
            if node is not None and node.index in needed
            else None
            for node in before
        )
        steps = tuple(
            Step(func, name, call, tuple((p, i) for p, i in enumerate(outputs) if i in needed))
            if call in replayed
            else Step(func, name, -1, ())
            for func, name, call, outputs in self._calls
        )
        num_uses = tuple(0 if node is None else node.num_uses for node in before)
        return Script((*steps, _END), nodes, calls, tuple(self.packs), num_uses)


def _is_used(index: int, before: Sequence[Node | None], record: Record) -> bool:
    node = before[index]
    return node is not None and record.nodes[index] is node


def _facts(node: Node, call: int, is_moved: bool) -> NodeFacts:
    return NodeFacts(
        node.name, node.role, node.kind, node.op, node.group, node.num_bytes, call, node.decision,
        is_moved and node.role in ACTIVATION_ROLES, node.is_unsteady,
    )  # fmt: skip


class Scripts:
    """The scripts of one block under one plan, by kind of input."""

    def __init__(self) -> None:
        self.num_misses = 0
        """Forwards that left their scripts."""
        self._plan: Plan | None = None
        self._candidates: dict[object, Script] = {}
        self._proven: dict[object, Expected] = {}

    @property
    def num_proven(self) -> int:
        """Kinds of inputs that there is a script for."""
        return len(self._proven)

    def of(self, plan: Plan | None, key: object) -> Expected | None:
        """Return what a forward with an input like this one is expected to do, if that is known."""
        if plan is not self._plan:
            self.clear()
            self._plan = plan
        return self._proven.get(key)

    def wants(self, key: object) -> bool:
        """Whether a recorded forward with an input like this one may still make a script."""
        has_room = len(self._candidates) < MAX_SHAPES or key in self._candidates
        return has_room and self.num_misses < MAX_MISSES

    def learn(self, key: object, script: Script) -> None:
        """Take note of a recorded forward; the second in a row that is alike makes a script."""
        if self._candidates.get(key) == script:
            self.add(key, script)
        self._candidates[key] = script

    def add(self, key: object, script: Script) -> None:
        """Expect forwards with an input like this one to do the same."""
        self._proven[key] = Expected.of(script)

    def miss(self, key: object) -> None:
        """Note that a forward left its script."""
        self.num_misses += 1
        self._proven.pop(key, None)
        self._candidates.pop(key, None)
        if self.num_misses >= MAX_MISSES:
            self._proven.clear()

    def clear(self) -> None:
        """Forget every script, and every miss."""
        self.num_misses = 0
        self._candidates.clear()
        self._proven.clear()


def key_of(tensors: Iterable[Tensor], device: torch.device, *, is_training: bool) -> object:
    """Return what forwards with the same script have in common, as far as it is seen early."""
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return is_training, autocast, *((size_of(t), t.dtype, t.requires_grad) for t in tensors)


def is_same_number(left: Any, right: Any) -> bool:
    """Return whether two arguments that are no tensors are the same: type, value and sign."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left == right and (left != 0.0 or str(left) == str(right))
    if isinstance(left, complex):
        return str(left) == str(right)  # either part may be a zero
    return bool(left == right)
