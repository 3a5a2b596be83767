"""One block's forward while it is recorded: its state, who decides, and what was observed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ebbtide.block import Activation, Block
from ebbtide.memory.ledger import Ledger
from ebbtide.plan import MOVED, Decision, Plan
from ebbtide.torch.compiled import SavedSet
from ebbtide.torch.devices.base import Place
from ebbtide.torch.graphs import GraphFacts, described
from ebbtide.torch.identity import storage_key
from ebbtide.torch.internals import inner_module
from ebbtide.torch.record import ACTIVATION_ROLES, Record
from ebbtide.torch.script import Scripts
from ebbtide.torch.sharded import local_of
from ebbtide.torch.stopwatch import BlockTiming
from ebbtide.torch.tape import Tape
from ebbtide.torch.traffic import Traffic


@dataclass(slots=True, eq=False)
class BlockState:
    """What the runtime knows of one block."""

    index: int
    path: str
    module: weakref.ref[nn.Module]
    parts: list[weakref.ref[nn.Module]] = field(default_factory=list[weakref.ref[nn.Module]])
    """The modules of the block, it too, as they were at its first forward."""
    observed: Block | None = None
    checked_plans: list[Plan | None] = field(default_factory=list[Plan | None])
    """Plans under which a forward was checked; None for the frugal decisions."""
    is_compiled: bool = False
    """Calling it runs compiled code."""
    is_left_alone: bool = False
    """It cannot run under hooks."""
    names: list[tuple[Any, str, str]] = field(default_factory=list[tuple[Any, str, str]])
    """The calls of the last forward: operator, name without and with its number."""
    has_scopes: bool = True
    """Hooks tell which of its modules runs; they are off once all calls have their names."""
    num_renamed: int = 0
    """Forwards that made calls of other names with these hooks off."""
    is_input_written: bool = False
    """The model writes to the block's input after the block, as in `h += block(h)`. That is
    legal where no operator saves it; recipes that start from it then need a copy."""
    graphs: tuple[GraphFacts, ...] = ()
    """The compiled graphs that its forward ran when it was observed."""
    unsafe: set[str] = field(default_factory=set[str])
    """Activations that did not come back equal; kept from then on."""
    scripts: Scripts = field(default_factory=Scripts)
    """What its forwards are expected to do."""


class Forward:
    """The forward of one block that is being recorded in this thread."""

    def __init__(
        self, state: BlockState, record: Record, policy: Policy, timing: BlockTiming | None
    ) -> None:
        self.state = state
        self.timing = timing
        self.record = record
        self.policy = policy
        self.tape: Tape | SavedSet | None = None
        self.key: object = None
        """Of its script."""
        self.path: list[tuple[str, bool]] = [(state.path, False)]

    @property
    def is_over(self) -> bool:
        """Whether an interrupt ended the block's forward: torch calls no hook then."""
        return self.tape is not None and self.tape.is_over

    def scope(self) -> tuple[str, bool]:
        return self.path[-1]


class Policy:
    """Decides for the storages of one block, by the plan or frugally while observing."""

    def __init__(
        self, plan: Plan | None, traffic: Traffic | None, ledger: Ledger, unsafe: set[str]
    ) -> None:
        self._plan = plan
        self._traffic = traffic
        self._ledger = ledger
        self._unsafe = unsafe

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

    def is_moved(self, name: str) -> bool:
        """Return whether the plan moves an activation, where there is room."""
        if self._plan is None or name in self._unsafe:
            return False
        return self._plan.decision(name) in MOVED

    def is_kept_by_plan(self, name: str) -> bool:
        if self._plan is None or name in self._unsafe:
            return False
        return self._plan.decision(name) is Decision.KEEP

    def reach(self, group: str) -> None:
        if self._traffic is not None:
            self._traffic.reach_call(group)

    def keep_unknown(self, reason: str) -> None:
        self._ledger.count_kept_not_understood(reason)


def observed_block(state: BlockState, record: Record) -> Block:
    """Describe a record that is not sealed yet, made under frugal decisions."""
    every = [record.node(i) for i in range(len(record.nodes))]
    nodes = [n for n in every if n.role in ACTIVATION_ROLES]
    names = {n.index: n.name for n in nodes}
    module = state.module()
    class_name = type(module if module is None else inner_module(module)).__name__
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
    block = Block(name=state.path, class_name=class_name, activations=tuple(activations))
    return described(block, record.graphs) if record.graphs else block


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors_in(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_in(v)]
    return []


def storages_in(given: Sequence[Tensor]) -> frozenset[int]:
    """Return the storages of all that a block is given."""
    return frozenset(
        storage_key(t) for t in given if type(t) is Tensor and t.layout is torch.strided
    )


def differentiable_storages(given: Sequence[Tensor]) -> frozenset[int]:
    """Return the storages of what a block is given that needs gradients."""
    found = [t for t in given if t.requires_grad]
    plain = [t for t in found if type(t) is Tensor and t.layout is torch.strided]
    locals_ = [local for t in found if (local := local_of(t)) is not None]
    return frozenset(storage_key(t) for t in (*plain, *locals_))


def first_floating(given: Sequence[Tensor]) -> Tensor | None:
    """Return the first floating-point tensor that the block is given."""
    return next((t for t in given if t.is_floating_point()), None)
