"""A small model on the fake device beside a twin without ebbtide, and every way to step both.

Each method does one thing to the model and to its twin, and compares all that it leaves: outputs,
losses, gradients, buffers, random state, and the errors that either raises. `check` looks at
what the runtime holds. `test_lifetimes` calls them in random orders.
"""

# B batch, T tokens, D model width

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ebbtide.errors import RuntimeStateError
from ebbtide.memory.disk import DISK_ALIGNMENT_BYTES, DiskStore
from ebbtide.plan import TURN_END, TURN_START, Decision, Plan
from ebbtide.planner.named import named_plan
from ebbtide.planner.spill import spill_to_disk
from ebbtide.torch.devices.fake import Schedule
from ebbtide.workload import Workload
from tests.disk_folders import in_folder
from tests.torch.fakes import FakeTide, MakePlan

WIDTH = 8
NUM_BLOCKS = 3
TOKENS = (4, 8, 12)
"""Tokens of a batch; an activation of the shortest one has 256 bytes and more."""
MAX_GRAPHS = 3
"""Graphs that are alive at once."""
STREAMS = ("main", "side")
ENOUGH_BYTES = 1 << 18
"""A tier in which all of three graphs has room."""


class InjectedError(Exception):
    """Raised in a forward or a backward on purpose."""


class Trip(torch.autograd.Function):
    """Does nothing, and raises in backward where its block says so."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, block: Busy) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.block = block
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.block.raises_in_backward:
            raise InjectedError
        return gradient, None


class Busy(nn.Module):
    """A block with a bit of everything that a runtime can get wrong.

    Views with an offset, a custom function, a branch that a loss may leave out, and where it
    `writes`, dropout, a write in place and a buffer that each pass writes.
    """

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.raises_in_forward: type[BaseException] | None = None
        self.raises_in_backward = False

    def forward(self, h_BTD: Tensor) -> tuple[Tensor, Tensor]:
        gate_BTD, up_BTD, part_BTD = self.fused(self.norm(h_BTD)).chunk(3, dim=-1)
        x_BTD = functional.silu(gate_BTD) * up_BTD
        tripped: Any = Trip.apply(x_BTD, self)
        if self.raises_in_forward is not None:
            raise self.raises_in_forward
        y_BTD = tripped + part_BTD.tanh()
        if self.writes:
            y_BTD = functional.dropout(y_BTD, 0.1).relu_()
            with torch.no_grad():
                self.seen.add_(y_BTD.mean())
        return h_BTD + self.down(y_BTD), self.side(y_BTD).exp().mean()


class BusyStack(nn.Module):
    """Returns its output and the sum of the branches."""

    def __init__(self) -> None:
        super().__init__()
        # What writes in place is recorded in full; the others follow scripts.
        self.blocks = nn.ModuleList(Busy(writes=i == 1) for i in range(NUM_BLOCKS))

    def forward(self, h_BTD: Tensor) -> tuple[Tensor, Tensor]:
        total = h_BTD.new_zeros(())
        for block in self.blocks:
            h_BTD, side = block(h_BTD)
            total = total + side
        return h_BTD, total


# -- plans -----------------------------------------------------------------------------------------


def within_the_largest(plan: Plan, workload: Workload) -> Plan:
    """Return `plan` with both limits in flight at its largest activation: the smallest."""
    moved = [a.num_bytes for a in moved_by(plan, workload)]
    limit_bytes = max(moved, default=0)
    return replace(plan, max_out_bytes_in_flight=limit_bytes, max_in_bytes_in_flight=limit_bytes)


def moved_by(plan: Plan, workload: Workload) -> list[Any]:
    """Return the activations that a plan evicts."""
    moved = (Decision.HOST, Decision.DISK)
    every = [a for block in workload.blocks for a in block.activations]
    return [a for a in every if plan.decision(a.name) in moved]


def of_name(name: str, *, tier: Decision, is_tight: bool) -> MakePlan:
    """Return a maker of a named plan; `is_tight` bounds what is in flight as far as can be."""

    def make_plan(workload: Workload) -> Plan:
        plan = named_plan(name, workload, tier=tier, min_bytes=1)
        return within_the_largest(plan, workload) if is_tight else plan

    return make_plan


def spilled(workload: Workload) -> Plan:
    """Offload everything, a third of it to host memory and the rest to disk."""
    plan = named_plan(f"offload-last:{NUM_BLOCKS}", workload, min_bytes=1)
    return within_the_largest(spill_to_disk(plan, workload, plan.host_bytes // 3), workload)


def by_hand(seed: int) -> MakePlan:
    """Return a maker of a plan that decides, lets go and fetches at random."""

    def make_plan(workload: Workload) -> Plan:
        draw = random.Random(seed)
        every = [a for block in workload.blocks for a in block.activations]
        decisions: dict[str, Decision] = {}
        for activation in every:
            choices = [Decision.KEEP, Decision.HOST, Decision.DISK]
            if activation.is_replayable:
                choices += [Decision.RECOMPUTE, Decision.RECOMPUTE]
            decisions[activation.name] = draw.choice(choices)

        def bytes_on(tier: Decision) -> int:
            return sum(a.num_bytes for a in every if decisions[a.name] is tier)

        saved = [a.name for a in every if a.is_saved]
        release_at: dict[str, str] = {}
        fetch_at: dict[str, str] = {}
        for index, activation in enumerate(every):
            if decisions[activation.name] in (Decision.HOST, Decision.DISK) and seed % 3:
                later = [a.name for a in every[index + 1 :]][:12]
                release_at[activation.name] = draw.choice([*later, TURN_START, TURN_END])
                fetch_at[activation.name] = draw.choice([*saved, TURN_END])
        plan = Plan(
            name="by hand",
            model=workload.model,
            fingerprint=workload.fingerprint,
            decisions=decisions,
            host_bytes=bytes_on(Decision.HOST),
            disk_bytes=bytes_on(Decision.DISK),
            max_out_bytes_in_flight=0,
            max_in_bytes_in_flight=0,
            release_at=release_at,
            fetch_at=fetch_at,
        )
        return within_the_largest(plan, workload)

    return make_plan


PLANS: dict[str, MakePlan] = {
    "keep": of_name("keep", tier=Decision.HOST, is_tight=False),
    "recompute": of_name("recompute", tier=Decision.HOST, is_tight=False),
    "offload-inputs": of_name("offload-inputs", tier=Decision.HOST, is_tight=True),
    "offload": of_name("offload", tier=Decision.HOST, is_tight=False),
    "offload to disk": of_name("offload", tier=Decision.DISK, is_tight=True),
    "balanced": of_name("balanced", tier=Decision.HOST, is_tight=True),
    "offload-last:1": of_name("offload-last:1", tier=Decision.HOST, is_tight=False),
    "offload-last:3": of_name("offload-last:3", tier=Decision.HOST, is_tight=True),
    "spilled": spilled,
    **{f"by hand {seed}": by_hand(seed) for seed in range(12)},
}


# -- the model and its twin ------------------------------------------------------------------------


@dataclass(eq=False, slots=True, kw_only=True)
class Graph:
    """A graph of the model and the same one of its twin."""

    tide: FakeTide
    loss: Tensor
    twin_loss: Tensor
    other: tuple[Tensor, Tensor]
    """Outputs of the model that the loss may leave out; they keep its whole graph alive."""
    is_stale: bool = False
    """Parameters were written to since, or a backward of it failed: torch may refuse it."""
    is_begun: bool = False
    """Some backward of it ran, or a part of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the model is attached."""

    plan: str
    schedule: Schedule
    seed: int
    host_bytes: int = ENOUGH_BYTES
    disk_bytes: int = ENOUGH_BYTES
    is_growing: bool = False


class Twins:
    """The model, its twin, and the graphs of both that are alive."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(3)
        self.model = BusyStack()
        self.twin = copy.deepcopy(self.model)
        self.graphs: list[Graph] = []
        self.tide: FakeTide | None = None
        self.num_compared = 0
        """Backwards whose gradients were compared."""
        self._folder = folder
        self._closed: list[FakeTide] = []
        self._most_tokens = 0
        """Of a batch, since the model was attached."""
        self._planned_tokens = 0
        """Of the batch that the plan of now was made for."""
        self._is_interrupted = False
        both = (self.model, self.twin)
        self._optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in both]

    def attach(self, setting: Setting) -> None:
        """Close what is attached, with all graphs that are alive, and attach anew."""
        self.close()
        disk_bytes = setting.disk_bytes + -setting.disk_bytes % DISK_ALIGNMENT_BYTES
        self.tide = FakeTide(
            self.model,
            PLANS[setting.plan],
            schedule=setting.schedule,
            seed=setting.seed,
            num_host_bytes=setting.host_bytes,
            is_growing=setting.is_growing,
            disk=DiskStore(in_folder(self._folder, disk_bytes)),
        )
        self._most_tokens = self._planned_tokens = 0

    def close(self) -> None:
        """Detach; graphs that are alive stay."""
        if self.tide is not None:
            self.tide.close()
            self._closed.append(self.tide)
            self.tide = None
            self._is_interrupted = False

    def forward(self, *, num_tokens: int, seed: int, uses_side: bool, stream: str) -> None:
        """Run a forward whose graph stays alive."""
        assert self.tide is not None
        with self._on(self.tide, stream):
            output, side = self._run(self.model, num_tokens, seed)
            loss = self._loss(output, side, uses_side=uses_side)
        twin_output, twin_side = self._run(self.twin, num_tokens, seed)
        twin_loss = self._loss(twin_output, twin_side, uses_side=uses_side)
        assert torch.equal(output, twin_output) and torch.equal(loss, twin_loss)
        self._compare_buffers()
        self._note_tokens(num_tokens)
        graph = Graph(tide=self.tide, loss=loss, twin_loss=twin_loss, other=(side, twin_side))
        self.graphs.append(graph)
        self._is_interrupted = False

    def fail_in_forward(
        self, *, num_tokens: int, seed: int, block: int, error: type[BaseException], stream: str
    ) -> None:
        """Run a forward that an error or an interrupt ends inside a block."""
        assert self.tide is not None
        for model in (self.model, self.twin):
            failing: Any = model.blocks[block]
            failing.raises_in_forward = error
            raised: type[BaseException] | None = None
            is_ours = model is self.model
            # An interrupt leaves the tape on top of what watches, as it would of any other mode.
            is_watched = is_ours and error is not KeyboardInterrupt
            try:
                with self._on(self.tide, stream, is_watched=is_watched):
                    self._run(model, num_tokens, seed)
            except (InjectedError, KeyboardInterrupt) as found:
                raised = type(found)
            failing.raises_in_forward = None
            assert raised is error
        self._note_tokens(num_tokens)
        self._is_interrupted = error is KeyboardInterrupt

    def backward(self, graph: Graph, *, retains: bool, stream: str) -> None:
        """Run a backward of a graph, which dies unless it is retained."""
        self._both(graph, lambda loss, _: loss.backward(retain_graph=retains), stream)
        graph.is_begun = True
        if not retains:
            self.drop(graph)

    def backward_of_two(self, first: Graph, second: Graph, *, stream: str) -> None:
        """Run one backward through two graphs."""
        is_stale = first.is_stale or second.is_stale or first.tide is not second.tide
        sums = first.loss + second.loss, first.twin_loss + second.twin_loss
        joint = replace(first, loss=sums[0], twin_loss=sums[1], is_stale=is_stale)
        del sums
        self._both(joint, lambda loss, _: loss.backward(), stream)
        del joint
        self.drop(first)
        self.drop(second)

    def second_derivative(self, graph: Graph, *, stream: str) -> None:
        """Run backward through the gradients of a graph."""

        def run(loss: Tensor, model: nn.Module) -> None:
            parameters = list(model.parameters())
            found: Any = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            (loss + sum(g.square().sum() for g in found if g is not None)).backward()

        self._both(graph, run, stream)
        self.drop(graph)

    def part_of_backward(self, graph: Graph, *, block: int, retains: bool, stream: str) -> None:
        """Ask for the gradients from the last block down to `block` alone."""

        def run(loss: Tensor, model: nn.Module) -> None:
            found: Any = model
            inputs = list(found.blocks[block].down.parameters())
            gradients = torch.autograd.grad(loss, inputs, retain_graph=retains)
            for parameter, gradient in zip(inputs, gradients, strict=True):
                parameter.grad = gradient

        self._both(graph, run, stream)
        graph.is_begun = True
        if not retains:
            self.drop(graph)

    def fail_in_backward(self, graph: Graph, *, block: int, retains: bool, stream: str) -> None:
        """Run a backward that an error ends half-way; a retained graph may run again."""
        failing: list[Any] = [model.blocks[block] for model in (self.model, self.twin)]
        for found in failing:
            found.raises_in_backward = True
        self._both(graph, lambda loss, _: loss.backward(retain_graph=retains), stream)
        for found in failing:
            found.raises_in_backward = False
        graph.is_begun = True
        if not retains:
            self.drop(graph)

    def drop(self, graph: Graph) -> None:
        """Let go of a graph."""
        self.graphs.remove(graph)

    def evaluate(self, *, num_tokens: int, seed: int, is_inference: bool) -> None:
        """Run a pass without gradients: ebbtide must not count anything."""
        assert self.tide is not None
        before = self.tide.ledger.snapshot()
        with torch.inference_mode(is_inference), torch.no_grad():
            output, side = self._run(self.model, num_tokens, seed)
            twin_output, twin_side = self._run(self.twin, num_tokens, seed)
        assert torch.equal(output, twin_output) and torch.equal(side, twin_side)
        after = self.tide.ledger.snapshot()
        assert (after.host, after.disk) == (before.host, before.disk)
        assert after.num_recomputed_ops == before.num_recomputed_ops

    def step(self) -> None:
        """Update the parameters, under every graph that is alive."""
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for graph in self.graphs:
            graph.is_stale = True
        mine, theirs = self.model.state_dict(), self.twin.state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)

    def train_a_copy(self, *, num_tokens: int, seed: int) -> None:
        """Train a deep copy of the attached model for a step: it is not attached."""
        assert self.tide is not None
        before = self.tide.ledger.snapshot()
        copies = [copy.deepcopy(model) for model in (self.model, self.twin)]
        for copied in copies:
            copied.zero_grad()
            output, side = self._run(copied, num_tokens, seed)
            self._loss(output, side, uses_side=True).backward()
        assert same_gradients(*copies)
        after = self.tide.ledger.snapshot()
        assert (after.host, after.disk) == (before.host, before.disk)
        assert same_gradients(self.model, self.twin)

    def check(self) -> None:
        """Check that no rule was broken, that bounds were kept, and that nothing dead is held."""
        for tide in [*self._closed, *([] if self.tide is None else [self.tide])]:
            assert tide.device.violations == []
            graphs = [graph for graph in self.graphs if graph.tide is tide]
            if tide.runtime.traffic is None:
                continue
            tide.runtime.bury()
            if not graphs and not self._is_interrupted:
                tide.assert_nothing_is_left()
            if all(not graph.is_begun for graph in graphs) and not self._is_interrupted:
                # The backward of one graph may have fetched ahead for another.
                in_flight_bytes = sum(tide.traffic.bytes_in_flight)
                assert tide.ledger.snapshot().held_device_bytes == in_flight_bytes
            if tide is self.tide:
                self._check_bounds(tide)
        self._closed = [t for t in self._closed if any(g.tide is t for g in self.graphs)]

    def _check_bounds(self, tide: FakeTide) -> None:
        tiers, counts = tide.traffic.tiers, tide.ledger.snapshot()
        assert counts.host.peak_held_bytes <= tide.device.host.numel()
        assert counts.disk.peak_held_bytes <= tide.device.disk.numel()
        assert tiers.capacity_bytes(Decision.HOST) <= tide.device.host.numel()
        assert tide.runtime.workload is not None
        largest = max((a.num_bytes for a in moved_by(tide.plan, tide.runtime.workload)), default=0)
        if self._planned_tokens:  # a single one above the bound moves alone
            largest = -(-largest * self._most_tokens // self._planned_tokens)
        assert tide.device.peak_out_bytes <= max(tide.plan.max_out_bytes_in_flight, largest)
        assert tide.device.peak_in_bytes <= max(tide.plan.max_in_bytes_in_flight, largest)

    def _note_tokens(self, num_tokens: int) -> None:
        self._most_tokens = max(self._most_tokens, num_tokens)
        if self.tide is not None and self.tide.runtime.workload is None:
            # Blocks may be observed in several forwards, where some were cut short.
            self._planned_tokens = min(self._planned_tokens or num_tokens, num_tokens)

    @staticmethod
    def _run(model: nn.Module, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        output = model(torch.randn(2, num_tokens, WIDTH))
        model.drawn = torch.rand(())  # pyright: ignore[reportArgumentType]
        return output

    @staticmethod
    def _loss(output: Tensor, side: Tensor, *, uses_side: bool) -> Tensor:
        loss = output.square().mean()
        return loss + 0.1 * side if uses_side else loss

    def _both(self, graph: Graph, run: Callable[[Tensor, nn.Module], None], stream: str) -> None:
        """Run a backward of the model and of its twin, and compare what they leave."""
        errors: list[type[BaseException] | None] = []
        for loss, model in ((graph.loss, self.model), (graph.twin_loss, self.twin)):
            raised: type[BaseException] | None = None
            try:
                with self._on(graph.tide, stream, is_watched=model is self.model):
                    run(loss, model)
            except (RuntimeError, RuntimeStateError, InjectedError) as error:
                raised = type(error)
            errors.append(raised)
        ours, theirs = errors
        is_open = graph.tide is self.tide
        if ours is RuntimeStateError:
            assert not is_open, "only what close() took away may be missed"
        else:
            assert ours is theirs
        if not graph.is_stale and is_open:
            assert theirs in (None, InjectedError)
        if ours is theirs and ours in (None, InjectedError):
            assert same_gradients(self.model, self.twin)
            self.num_compared += 1
        else:
            # The errors of the two come at different places in backward.
            for optimizer in self._optimizers:
                optimizer.zero_grad()
        if ours is not None:
            graph.is_stale = True

    @contextmanager
    def _on(self, tide: FakeTide, stream: str, *, is_watched: bool = True) -> Generator[None]:
        """Run on a stream of a fake device, ordered behind what came before."""
        device = tide.device
        device.wait(stream, "main")
        with device.stream(stream):
            if is_watched:
                with device.watch():
                    yield
            else:
                yield
        device.wait("main", stream)

    def _compare_buffers(self) -> None:
        mine, theirs = dict(self.model.named_buffers()), dict(self.twin.named_buffers())
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert torch.equal(self.model.drawn, self.twin.drawn)  # pyright: ignore


def same_gradients(left: nn.Module, right: nn.Module) -> bool:
    """Return whether all gradients of two models have the same bits, and are there."""
    for mine, theirs in zip(left.parameters(), right.parameters(), strict=True):
        if mine.grad is None or theirs.grad is None:
            if mine.grad is not theirs.grad:
                return False
        elif not torch.equal(mine.grad, theirs.grad):
            return False
    return True
