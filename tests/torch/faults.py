"""Faults to plant in the runtime: what a wrong wait, layout, place or replay would do.

Each is a context manager. Most are planted once the plan's first steps are over: the check that
ends those would find them and keep what they hit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.torch import tape as _tape
from ebbtide.torch.devices.base import Place
from ebbtide.torch.devices.fake import FakeCopy, FakeDevice
from ebbtide.torch.identity import Layout
from ebbtide.torch.ops import OpFacts, facts_of
from ebbtide.torch.record import Record
from ebbtide.torch.runtime import Runtime
from ebbtide.torch.traffic import Pass, Slot, Traffic
from ebbtide.workload import OpKind
from tests.torch.models import WIDTH

# B batch, T tokens, D model width, F feed-forward width

Fault = Callable[[FakeDevice], AbstractContextManager[None]]


class Permuted(nn.Module):
    """Saves a product that lies permuted in memory, and one that is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        left_BTD = self.first(h_BTD).mT.contiguous().mT
        # Of the exponential autograd saves the output, in the layout of its input.
        left_BTD = left_BTD.tanh().exp()
        right_BTD = self.second(h_BTD).sigmoid().exp()
        return h_BTD + 0.1 * self.mix(left_BTD * right_BTD)


class Dropping(nn.Module):
    """Dropout by the operator that returns its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        dropped_BTD, _ = torch.native_dropout(self.linear(h_BTD).tanh(), 0.5, True)
        return h_BTD + dropped_BTD


@contextlib.contextmanager
def race(device: FakeDevice | None = None) -> Generator[None]:
    """Let compute read what a fetch may not have written yet."""
    del device
    fetch: Any = vars(Traffic)["_fetch"]

    def without_wait(self: Traffic, slot: Slot) -> None:
        fetch(self, slot)
        slot.copies.back_is_waited = True
        vars(self)["_in_bytes"] -= slot.num_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traffic, "_fetch", without_wait)
        yield


@contextlib.contextmanager
def lost_stride(device: FakeDevice | None = None) -> Generator[None]:
    """Bring back what lay permuted in memory as if it had lain in order."""
    del device
    restore: Any = Record.restore

    def in_order(self: Record, handle: Any) -> Tensor:
        found = restore(self, handle)
        if found.dim() < 2 or found.is_contiguous() or 0 in found.stride():
            return found
        row = found.as_strided((found.numel(),), (1,), found.storage_offset())
        return row.view(found.shape).as_strided(found.shape, _dense(found.shape))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "restore", in_order)
        yield


@contextlib.contextmanager
def race_on_used_memory(device: FakeDevice) -> Generator[None]:
    """As `race`, on a device that hands rows out as their last user left them."""
    rows: dict[int, list[Tensor]] = {}
    allocate: Any = FakeDevice.allocate
    used: list[Tensor] = []

    def start_step(self: Pass) -> None:
        device.finish()
        for row in used:
            rows.setdefault(row.numel(), []).append(row.clone())
        used.clear()
        init(self)

    def used_row(self: FakeDevice, num_bytes: int) -> Tensor:
        row = allocate(self, num_bytes)
        if rows.get(num_bytes):
            row.copy_(rows[num_bytes].pop(0))
        used.append(row)
        return row

    init: Any = Pass.__init__
    with race(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeDevice, "allocate", used_row)
        patch.setattr(Pass, "__init__", start_step)
        yield


@contextlib.contextmanager
def once(fault: Fault, device: FakeDevice, *, num_backward: int) -> Generator[None]:
    """Plant a fault for backward pass number `num_backward` from now on alone, from 1."""
    start: Any = Traffic.start_backward
    count = [0]
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def starts(self: Traffic, forward_pass: Pass | None, index: int) -> None:
            count[0] += 1
            stack.close()
            if count[0] == num_backward:
                stack.enter_context(fault(device))
            start(self, forward_pass, index)

        patch.setattr(Traffic, "start_backward", starts)
        yield


def _dense(shape: torch.Size) -> tuple[int, ...]:
    return Layout.of(torch.empty(shape)).stride


@contextlib.contextmanager
def lost_order(device: FakeDevice | None = None, *, block: str = "") -> Generator[None]:
    """Bring back the elements of what lay permuted in memory in another order, laid out right.

    Of all blocks, or of one.
    """
    del device
    restore: Any = Record.restore

    def another_order(self: Record, handle: Any) -> Tensor:
        found = restore(self, handle)
        if found.dim() < 2 or found.is_contiguous() or 0 in found.stride():
            return found
        if block not in ("", self.block):
            return found
        row = found.contiguous().view(-1)
        return row.as_strided(found.shape, found.stride())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "restore", another_order)
        yield


@contextlib.contextmanager
def swapped(device: FakeDevice | None = None) -> Generator[None]:
    """Give backward the bytes of another activation of the same size."""
    del device
    bytes_of: Any = Traffic.bytes_of

    def of_another(self: Traffic, slot: Slot) -> Tensor:
        alive: list[Slot] = [s for _, s in sorted(vars(self)["_order"].items())]
        others = [s for s in alive if s is not slot and s.num_bytes == slot.num_bytes]
        return bytes_of(self, others[0] if others else slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traffic, "bytes_of", of_another)
        yield


@contextlib.contextmanager
def stale(device: FakeDevice) -> Generator[None]:
    """Let evicts write to their places after their fetches: these find what was there before."""
    copy: Any = FakeDevice.copy
    init: Any = Pass.__init__
    late: list[tuple[FakeCopy, Tensor]] = []

    def too_late(self: FakeDevice, source: Any, target: Any, *, stream: Any, after: Any) -> Any:
        event = copy(self, source, target, stream=stream, after=after)
        if isinstance(target, Place) and event.memory is not None and not _is_poison(source):
            late.append((event, source.clone()))
            event.memory = None
            vars(self)["_pending"].remove(event)
        return event

    def start_pass(self: Pass) -> None:
        for event, row in late:
            device.host[event.first : event.last] = row
        late.clear()
        init(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeDevice, "copy", too_late)
        patch.setattr(Pass, "__init__", start_pass)
        yield


def _is_poison(row: Tensor) -> bool:
    return bool((row == row[0]).all())


@contextlib.contextmanager
def dropout_again() -> Generator[None]:
    """Run random operators again for backward, with nothing that checks what comes of it."""

    def facts(func: Any) -> OpFacts:
        known = facts_of(func)
        if known.kind is not OpKind.RANDOM:
            return known
        return replace(known, kind=OpKind.ELEMENTWISE, is_replayable=True)

    def believe(self: Runtime, state: Any, record: Record, tape: Any) -> None:
        del record, tape
        state.checked_plans.append(self.plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tape, "facts_of", facts)
        patch.setattr(Runtime, "_check", believe)
        yield
