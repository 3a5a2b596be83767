"""What ebbtide costs the host, counted on a machine without a GPU.

On a GPU a step of a small model takes what it takes the host to issue it. Here the model is so
narrow that computing takes next to nothing, and copies are plain copies in memory, so that the
CPU time of a step is what the host does in it: torch, the model's own code, and ebbtide. It leaves
out what a CUDA call takes, so the ratios are not those of a GPU; they tell whether a change helps.

`moments` stands for a plan made for a budget: the decisions of `balanced`, and a moment for every
copy. Its moments are the same in each run; those of a planner would follow measured times.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ebbtide.memory.ledger import Ledger
from ebbtide.plan import MOVED, TURN_START, Plan
from ebbtide.planner.named import named_plan
from ebbtide.torch.anchors import Anchors
from ebbtide.torch.blocks import find_blocks
from ebbtide.torch.devices.base import AbstractDevice, Event, Place, Stream
from ebbtide.torch.hooks import Hooks
from ebbtide.torch.runtime import Runtime
from ebbtide.torch.tiers import HostRegion, Tiers
from ebbtide.torch.traffic import Traffic
from ebbtide.workload import Workload

MOMENTS = "moments"
TINY_WIDTH = 48
TINY_CONTEXT = 16
TINY_VOCABULARY = 64
MIN_BYTES = 2048
"""A row of the tiny model's activations, and more than what `balanced` never moves of it."""
NUM_CALLS_TO_RELEASE = 3
"""Activations that are made until a copy out is waited for."""
NUM_USES_AHEAD = 12
"""Uses in backward before its first one at which a fetch starts: about a block."""


class MemoryDevice(AbstractDevice):
    """The CPU, with a row of its own memory as the host tier; a copy is done when it returns."""

    def __init__(self, host: Tensor) -> None:
        self._host = host

    def current_stream(self) -> Stream:
        return 0

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(
        self,
        source: Tensor | Place,
        target: Tensor | Place,
        *,
        stream: Stream,
        after: Sequence[Event],
    ) -> Event:
        if isinstance(target, Place):
            assert isinstance(source, Tensor)
            self._row(target).copy_(source)
        else:
            assert isinstance(source, Place)
            target.copy_(self._row(source))
        return 1

    def wait(self, stream: Stream, event: Event | Stream) -> None:
        """Every copy is done."""

    def _row(self, place: Place) -> Tensor:
        first = place.region.offset_bytes
        return self._host[first : first + place.region.num_bytes]


def with_moments(plan: Plan, workload: Workload) -> Plan:
    """Give each copy of a plan a moment to be let go at and one to be fetched at."""
    made = [a.name for block in workload.blocks for a in block.activations]
    used = [a.name for block in workload.blocks for a in block.activations if a.is_saved]
    used.reverse()
    moved = [name for name, decision in plan.decisions.items() if decision in MOVED]
    release_at = {
        name: made[place] if (place := made.index(name) + NUM_CALLS_TO_RELEASE) < len(made)
        else TURN_START
        for name in moved
    }  # fmt: skip
    fetch_at = {
        name: used[max(0, used.index(name) - NUM_USES_AHEAD)] for name in moved if name in used
    }
    return replace(plan, release_at=release_at, fetch_at=fetch_at)


@contextlib.contextmanager
def attached_in_memory(model: Any, name: str) -> Generator[Runtime]:
    """Attach a model on the CPU under a named plan, or `moments`, with a host tier in memory."""
    ledger = Ledger()

    def make_plan(workload: Workload) -> tuple[Plan, Traffic | None]:
        plan = named_plan("balanced" if name == MOMENTS else name, workload, min_bytes=MIN_BYTES)
        if name == MOMENTS:
            plan = with_moments(plan, workload)
        if not plan.host_bytes:
            return plan, None
        host = torch.empty(2 * plan.host_bytes, dtype=torch.uint8)
        traffic = Traffic(
            MemoryDevice(host),
            Tiers(host=HostRegion(host, unpin=_do_nothing), disk=None),
            ledger,
            max_out_bytes_in_flight=plan.max_out_bytes_in_flight,
            max_in_bytes_in_flight=plan.max_in_bytes_in_flight,
            anchors=Anchors.of(plan, workload),
        )
        return plan, traffic

    runtime = Runtime(model, find_blocks(model), make_plan, ledger)
    hooks = Hooks(runtime)
    runtime.hook_scopes = hooks.hook_scopes
    try:
        yield runtime
    finally:
        hooks.close()
        runtime.close()
        if runtime.traffic is not None:
            runtime.traffic.close()


def _do_nothing() -> None:
    """Plain memory is not pinned."""


@dataclass(slots=True, kw_only=True)
class Turns:
    """Strategies that take turns, each with a model of its own."""

    forwards: dict[str, Callable[[], Any]]
    """Runs a forward of a strategy and returns its loss."""
    forward_ns: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    step_ns: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def run(self, num_rounds: int) -> None:
        """Run a step of each in turn; the garbage collector waits until all are done."""
        gc.collect()
        gc.disable()
        try:
            for _ in range(num_rounds):
                for name, forward in self.forwards.items():
                    start = time.process_time_ns()
                    loss = forward()
                    middle = time.process_time_ns()
                    loss.backward()
                    end = time.process_time_ns()
                    self.forward_ns.setdefault(name, []).append(middle - start)
                    self.step_ns.setdefault(name, []).append(end - start)
        finally:
            gc.enable()

    def ratios(self, reference: str) -> dict[str, float]:
        """Return the median over rounds of a step's time over the reference's in that round."""
        return {
            name: statistics.median(
                own / other for own, other in zip(times, self.step_ns[reference], strict=True)
            )
            for name, times in self.step_ns.items()
        }
