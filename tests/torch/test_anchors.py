"""The moments of a plan: before which call what is let go, and at which use what is fetched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.errors import PlanError
from ebbtide.plan import TURN_END, TURN_START, Decision, Plan
from ebbtide.torch.anchors import TURN_END_RANK, Anchors
from ebbtide.torch.devices.fake import Schedule
from ebbtide.torch.ops import facts_of
from ebbtide.torch.record import Handle
from ebbtide.torch.traffic import Slot
from ebbtide.workload import BackwardEvent, Block, Workload
from tests.torch.cases import CASES, ODD_CASES, Case
from tests.torch.fakes import ROW, Bench, FakeTide, MakePlan, offload_everything, planned
from tests.torch.models import CheckpointedStack, Gated, Stack, features
from tests.torch.training import differences, feature_step, seeded, train

NUM_BLOCKS = 4
HIDDEN_BYTES = 2 * 16 * 64 * 4
"""Bytes of what `Gated` computes between its products."""


def stack() -> nn.Module:
    return seeded(lambda: Stack(Gated, NUM_BLOCKS))


def values(tensor: Tensor) -> set[int]:
    return set(tensor.tolist())


# -- ranks -----------------------------------------------------------------------------------------


def observed_workload() -> Workload:
    """The workload of the stack, with its backward in the order in which it runs."""
    model = stack()
    with FakeTide(model, planned("offload")) as tide:
        for _ in range(2):
            feature_step(model, 0)
        assert tide.runtime.workload is not None
        return tide.runtime.workload


def all_hosted(workload: Workload, **changes: Any) -> Plan:
    return replace(offload_everything(workload), **changes)


def test_a_plan_that_names_no_moment_has_no_ranks() -> None:
    workload = observed_workload()
    assert Anchors.of(planned("offload")(workload), workload) == Anchors()


def test_moments_of_what_is_not_evicted_count_for_nothing() -> None:
    workload = observed_workload()
    plan = planned("recompute")(workload)
    plan = replace(plan, release_at={"blocks.0.up": TURN_END}, fetch_at={"blocks.0.up": TURN_END})
    assert Anchors.of(plan, workload) == Anchors()


def test_calls_come_in_forward_order_and_the_turn_after_them() -> None:
    workload = observed_workload()
    release_at = {
        "blocks.0.gate": "blocks.1:input",
        "blocks.0.up": TURN_START,
        "blocks.0:mul": TURN_END,
    }
    anchors = Anchors.of(all_hosted(workload, release_at=release_at), workload)
    groups = list(dict.fromkeys(a.group for b in workload.blocks for a in b.activations))
    assert [anchors.call_ranks[group] for group in groups] == list(range(len(groups)))
    assert anchors.turn_start_rank == len(groups)
    assert anchors.release_ranks == {
        "blocks.0.gate": groups.index("blocks.1:input"),
        "blocks.0.up": len(groups),
        "blocks.0:mul": len(groups) + 1,
    }
    assert (anchors.has_releases, anchors.has_fetches) == (True, False)
    assert anchors.blocks == {"blocks.1"}


def test_the_calls_of_a_fused_block_are_one_moment() -> None:
    workload = observed_workload()
    fused, *others = workload.blocks[1:]
    blocks = (workload.blocks[0], replace(fused, is_fused=True), *others)
    workload = replace(workload, blocks=blocks)
    last = next(a.name for a in reversed(fused.activations) if a.is_saved)
    release_at = {"blocks.0.gate": last, last: "blocks.2:input", "blocks.0.up": TURN_START}
    anchors = Anchors.of(all_hosted(workload, release_at=release_at), workload)
    groups = [list(dict.fromkeys(a.group for a in b.activations)) for b in workload.blocks]
    first = len(groups[0])
    ranks = [[anchors.call_ranks[group] for group in of_block] for of_block in groups]
    assert ranks[0] == list(range(first))
    assert ranks[1] == [first] * len(groups[1])
    after = [rank for of_block in ranks[2:] for rank in of_block]
    assert after == list(range(first + 1, first + 1 + len(after)))
    assert anchors.turn_start_rank == first + 1 + len(after)
    assert anchors.release_ranks == {
        "blocks.0.gate": first,
        last: first + 1,
        "blocks.0.up": anchors.turn_start_rank,
    }


def test_uses_come_in_the_order_of_the_first_events() -> None:
    workload = observed_workload()
    first, *others = workload.blocks

    def with_events(block: Block, *uses: tuple[str, ...]) -> Block:
        events = (BackwardEvent(uses=u, compute_ns=1, held_bytes=0) for u in uses)
        return replace(block, backward=tuple(events))

    timed = with_events(first, ("blocks.0.up", "blocks.0.gate"), (), ("blocks.0.up",))
    others = [
        with_events(block, ("blocks.3:mul",) if block is others[-1] else ()) for block in others
    ]
    workload = replace(workload, blocks=(timed, *others))
    plan = all_hosted(workload, fetch_at={"blocks.0.up": TURN_END, "blocks.0:mul": "blocks.0.gate"})
    anchors = Anchors.of(plan, workload)
    assert anchors.fetch_ranks["blocks.0.up"] == TURN_END_RANK < 0
    ranks = anchors.use_ranks
    assert ranks["blocks.3:mul"] == 0
    assert ranks["blocks.0.up"] == ranks["blocks.0.gate"] == anchors.fetch_ranks["blocks.0:mul"]
    later = [ranks[n] for n in ("blocks.3.up", "blocks.2.up", "blocks.1.up", "blocks.0.gate")]
    assert later == sorted(set(later)), "block after block, in reverse"
    assert ranks["blocks.0:mul"] == max(ranks.values()), "never asked for: at the block's end"
    assert (anchors.has_releases, anchors.has_fetches) == (False, True)
    assert anchors.blocks == {"blocks.0"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"release_at": {"blocks.0.up": "blocks.9.up"}},
            "plan 'offload-last:4' lets blocks.0.up go before 'blocks.9.up', which the workload "
            "does not have.",
        ),
        (
            {"fetch_at": {"blocks.0.up": TURN_START}},
            "plan 'offload-last:4' fetches blocks.0.up at the use of '<turn start>', which the "
            "workload does not have.",
        ),
        (
            {"fetch_at": {"blocks.0.up": "blocks.1:add"}},
            "plan 'offload-last:4' fetches blocks.0.up at the use of 'blocks.1:add', which the "
            "workload does not have.",
        ),
    ],
)
def test_a_moment_that_never_comes_is_refused(changes: dict[str, Any], message: str) -> None:
    workload = observed_workload()
    with pytest.raises(PlanError) as error:
        Anchors.of(all_hosted(workload, **changes), workload)
    assert str(error.value) == (
        f"{message} A moment is an activation's name, for a fetch that of a saved one, or a side "
        "of the turn. Make the plan again for this model."
    )


# -- traffic ---------------------------------------------------------------------------------------


def row_anchors(
    *, releases: dict[int, int] | None = None, fetches: dict[int, int] | None = None
) -> Anchors:
    """Moments of the rows of a `Bench`, by number; calls and uses are named by their places."""
    names = {str(place): place for place in range(10)}
    return Anchors(
        call_ranks=names,
        use_ranks=names,
        release_ranks={f"row {i * ROW}": rank for i, rank in (releases or {}).items()},
        fetch_ranks={f"row {i * ROW}": rank for i, rank in (fetches or {}).items()},
        turn_start_rank=10,
    )


def rows_out(bench: Bench) -> int:
    return bench.traffic.bytes_in_flight[0] // ROW


def rows_in(bench: Bench) -> int:
    return bench.traffic.bytes_in_flight[1] // ROW


def start_backward(bench: Bench) -> None:
    bench.traffic.start_turn()
    bench.traffic.start_backward(bench.traffic.forward_pass, bench.traffic.next_index)


def use(bench: Bench, place: int) -> None:
    bench.traffic.reach_use(bench.traffic.forward_pass, str(place))


def test_a_row_is_let_go_at_its_moment_whatever_the_order_of_eviction() -> None:
    bench = Bench(anchors=row_anchors(releases={0: 5, 1: 3, 2: 10, 3: 11}), max_out_bytes=9 * ROW)
    slots = [bench.evict(i) for i in range(5)]
    held = [rows_out(bench)]
    for place in (2, 3, 4, 5, 9):
        bench.traffic.reach_call(str(place))
        held.append(rows_out(bench))
    assert held == [5, 5, 4, 4, 3, 3]
    bench.traffic.start_turn()
    assert rows_out(bench) == 1, "what has no moment goes at the turn's start"
    bench.traffic.start_backward(bench.traffic.forward_pass, bench.traffic.next_index)
    assert rows_out(bench) == 0
    assert [values(bench.traffic.bytes_of(slot)) for slot in slots] == [{0}, {1}, {2}, {3}, {4}]
    assert bench.device.violations == []


def test_a_moment_that_was_missed_is_made_up_for_at_the_next() -> None:
    bench = Bench(anchors=row_anchors(releases={0: 2, 1: 4}))
    slots = [bench.evict(i) for i in range(2)]
    bench.traffic.reach_call("3")
    assert rows_out(bench) == 1
    bench.traffic.reach_call("unheard of")
    assert rows_out(bench) == 1
    bench.traffic.start_turn()
    assert rows_out(bench) == 0
    del slots
    bench.assert_nothing_is_left()


def test_the_bound_lets_go_before_the_moment() -> None:
    """Design rule 10."""
    bench = Bench(anchors=row_anchors(releases={0: 9, 1: 9, 2: 9}), max_out_bytes=2 * ROW)
    slots = [bench.evict(i) for i in range(3)]
    assert rows_out(bench) == 2
    del slots
    bench.assert_nothing_is_left()


def test_a_row_that_died_while_leaving_goes_at_its_moment() -> None:
    bench = Bench(anchors=row_anchors(releases={0: 1}))
    slot = bench.evict(0)
    del slot
    bench.traffic.reach_call("1")
    assert rows_out(bench) == 0
    bench.assert_nothing_is_left()


def test_the_next_pass_holds_no_source_of_the_one_before() -> None:
    bench = Bench(anchors=row_anchors(releases={0: 11, 1: 3}))
    first = bench.evict(0)
    bench.traffic.start_turn()
    assert rows_out(bench) == 1
    bench.traffic.start_pass()
    assert rows_out(bench) == 0
    second = bench.evict(1)
    bench.traffic.reach_call("2")
    assert rows_out(bench) == 1
    assert (values(bench.traffic.bytes_of(first)), values(bench.traffic.bytes_of(second))) == (
        {0},
        {1},
    )


def test_fetches_start_at_their_moments_and_not_before() -> None:
    bench = Bench(anchors=row_anchors(fetches={0: 6, 1: 4, 2: TURN_END_RANK}))
    slots = [bench.evict(i) for i in range(4)]
    start_backward(bench)
    started = [rows_in(bench)]
    for place in (3, 4, 5, 6, 7):
        use(bench, place)
        started.append(rows_in(bench))
    assert started == [1, 1, 2, 2, 3, 3]
    assert bench.ledger.snapshot().num_fetches == 3, "row 3 has no moment: it waits for its use"
    assert values(bench.traffic.bytes_of(slots[3])) == {3}
    assert bench.ledger.snapshot().num_fetches == 4


@pytest.mark.parametrize("has_moments", [False, True])
def test_a_pass_that_is_checked_fetches_nothing_ahead(has_moments: bool) -> None:
    """Its backward makes again what the plan keeps, in the room of what would come ahead."""
    fetches = dict.fromkeys(range(3), TURN_END_RANK) if has_moments else None
    bench = Bench(anchors=row_anchors(fetches=fetches))
    bench.traffic.forward_pass.is_checked = True
    slots = [bench.evict(i) for i in range(3)]
    start_backward(bench)
    assert bench.ledger.snapshot().num_fetches == 0
    assert values(bench.traffic.bytes_of(slots[2])) == {2}
    assert bench.ledger.snapshot().num_fetches == 1


def test_within_a_moment_the_row_evicted_last_comes_first() -> None:
    bench = Bench(anchors=row_anchors(fetches={0: 2, 1: 1, 2: 2, 3: 1}), max_in_bytes=ROW)
    slots = [bench.evict(i) for i in range(4)]
    start_backward(bench)
    use(bench, 5)
    order: list[int] = []
    for _ in slots:  # there is room for one at a time, so the ledger tells which was fetched
        (now,) = [i for i, s in enumerate(slots) if s.copies.back is not None]
        order.append(now)
        bench.traffic.bytes_of(slots[now])
        bench.traffic.release(slots[now])
    assert order == [3, 1, 2, 0]
    assert bench.ledger.snapshot().num_fetches == 4
    assert bench.device.peak_in_bytes == ROW


def test_a_fetch_for_which_there_is_no_room_starts_at_a_later_moment() -> None:
    """Design rule 10: the bound is a second limit."""
    bench = Bench(anchors=row_anchors(fetches={0: 1, 1: 1, 2: 1}), max_in_bytes=2 * ROW)
    slots = [bench.evict(i) for i in range(3)]
    start_backward(bench)
    use(bench, 1)
    assert bench.ledger.snapshot().num_fetches == 2
    assert values(bench.traffic.bytes_of(slots[2])) == {2}
    assert bench.ledger.snapshot().num_fetches == 3, "its use made room"
    assert bench.device.peak_in_bytes == 2 * ROW


def test_a_row_that_was_needed_before_its_moment_does_not_come_again() -> None:
    bench = Bench(anchors=row_anchors(fetches={0: 4}))
    slot = bench.evict(7)
    start_backward(bench)
    assert values(bench.traffic.bytes_of(slot)) == {7}
    bench.traffic.release(slot)
    use(bench, 4)
    assert rows_in(bench) == 0
    assert bench.ledger.snapshot().num_fetches == 1


def test_each_backward_of_a_retained_graph_fetches_at_the_moments() -> None:
    bench = Bench(anchors=row_anchors(fetches={0: 4}))
    slot = bench.evict(7)
    for number in (1, 2, 3):
        start_backward(bench)
        use(bench, 3)
        assert bench.ledger.snapshot().num_fetches == number - 1
        use(bench, 4)
        assert bench.ledger.snapshot().num_fetches == number
        assert values(bench.traffic.bytes_of(slot)) == {7}
        bench.traffic.release(slot)


def test_a_backward_that_nothing_announced_fetches_at_the_moments_too() -> None:
    bench = Bench(anchors=row_anchors(fetches={0: 4, 1: TURN_END_RANK}))
    slots = [bench.evict(i) for i in range(2)]
    bench.traffic.settle_all()
    use(bench, 0)
    assert rows_in(bench) == 1
    use(bench, 5)
    assert rows_in(bench) == 2
    del slots
    bench.assert_nothing_is_left()


def test_one_backward_starts_no_fetch_of_another_graph() -> None:
    """Design rule 4: passes that are alive at once are told apart."""
    bench = Bench(anchors=row_anchors(fetches={i: 2 for i in range(4)}), max_in_bytes=8 * ROW)
    passes = []
    slots: list[list[Slot]] = []
    for first in (0, 2):
        bench.traffic.start_pass()
        slots.append([bench.evict(first), bench.evict(first + 1)])
        bench.traffic.start_turn()
        passes.append(bench.traffic.forward_pass)
    bench.traffic.settle_all()
    for mine, other in ((0, 1), (1, 0)):
        bench.traffic.start_backward(passes[mine], bench.traffic.next_index)
        bench.traffic.reach_use(passes[mine], "2")
        assert all(s.copies.back is not None for s in slots[mine])
        assert all(s.copies.back is None for s in slots[other])
        for slot in slots[mine]:
            bench.traffic.bytes_of(slot)
            bench.traffic.release(slot)
    assert bench.ledger.snapshot().num_fetches == 4


def test_a_row_that_two_activations_share_comes_at_the_sooner_moment() -> None:
    """Design rule 3: it moves once, so whoever needs it first says when."""
    bench = Bench(anchors=row_anchors(fetches={0: 6, 1: 3}))
    row = torch.full((ROW,), 7, dtype=torch.uint8)
    first = bench.evict_row(row)
    assert bench.evict_row(row) is first
    bench.traffic.settle_all()
    start_backward(bench)
    use(bench, 3)
    assert rows_in(bench) == 1


# -- models ----------------------------------------------------------------------------------------


class Probe(TorchDispatchMode):
    """Notes a number before each operator that makes something."""

    def __init__(self, read: Callable[[], int]) -> None:
        super().__init__()
        self._read = read
        self.seen: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not facts_of(func).is_view:
            self.seen.append(self._read())
        return func(*args, **(kwargs or {}))


GATE = "blocks.0.gate"
OPS = tuple(
    f"blocks.{i}{op}"
    for i in range(NUM_BLOCKS)
    for op in (".norm:native_layer_norm", ".gate", ":silu", ".up", ":mul", ".down", ":add")
)
"""The calls of a forward of the stack, which the probe sees one by one."""


def only(name: str, **changes: Any) -> MakePlan:
    """Return a maker of a plan that evicts `name` and keeps all else."""

    def make_plan(workload: Workload) -> Plan:
        plan = offload_everything(workload)
        decisions = dict.fromkeys(plan.decisions, Decision.KEEP) | {name: Decision.HOST}
        return replace(plan, decisions=decisions, **changes)

    return make_plan


@pytest.mark.parametrize(
    "moment", ["blocks.0.up", "blocks.0:add", "blocks.1:input", "blocks.3.gate", "blocks.3:add"]
)
def test_a_source_is_let_go_before_the_call_that_its_plan_names(moment: str) -> None:
    """The calls of a block that keeps all are seen, too, if a moment lies there."""
    model = stack()
    with FakeTide(model, only(GATE, release_at={GATE: moment})) as tide:
        for _ in range(2):
            feature_step(model, 0)
        assert tide.runtime.workload is not None
        groups = dict.fromkeys(a.group for b in tide.runtime.workload.blocks for a in b.activations)
        assert tuple(g for g in groups if not g.endswith(":input")) == OPS
        with Probe(lambda: tide.traffic.bytes_in_flight[0]) as probe:
            output = model(features().requires_grad_())
        # `silu` saves what `gate` has made. An input has no call: the next one uses it.
        end = "blocks.1.norm:native_layer_norm" if moment == "blocks.1:input" else moment
        first, last = OPS.index("blocks.0:silu"), OPS.index(end)
        held = [HIDDEN_BYTES if first <= i < last else 0 for i in range(len(OPS))]
        assert probe.seen[-len(OPS) :] == held
        output.sum().backward()
        del output
        tide.assert_nothing_is_left()


@pytest.mark.parametrize("moment", [TURN_START, TURN_END, None])
def test_a_source_is_let_go_on_the_side_of_the_turn_that_its_plan_names(moment: str | None) -> None:
    release_at = {} if moment is None else {GATE: moment}
    model = stack()
    with FakeTide(model, only(GATE, release_at=release_at)) as tide:
        for _ in range(2):
            feature_step(model, 0)
        with Probe(lambda: tide.traffic.bytes_in_flight[0]) as probe:
            output = model(features())
        assert probe.seen[-1] == HIDDEN_BYTES
        loss = output.square().mean()
        in_turn = HIDDEN_BYTES if moment == TURN_END else 0
        assert tide.traffic.bytes_in_flight == (in_turn, 0)
        seen: list[int] = []
        output.register_hook(lambda _: seen.append(tide.traffic.bytes_in_flight[0]))
        loss.backward()
        assert seen == [0], "behind the hook of the turn"
        del output, loss
        tide.assert_nothing_is_left()


def note_uses(tide: FakeTide) -> Iterator[tuple[str, int]]:
    """Return, of each use in backward from now on, its activation and the fetches by then."""
    uses: list[tuple[str, int]] = []
    unpack = tide.runtime.unpack

    def noting(packed: Any) -> Tensor:
        tensor = unpack(packed)
        if isinstance(packed, Handle):
            name = packed.record.holder_of(packed).activation
            uses.append((name, tide.ledger.snapshot().num_fetches))
        return tensor

    tide.runtime.unpack = noting
    return iter(uses)


@pytest.mark.parametrize(
    "moment", [TURN_END, "blocks.3:mul", "blocks.2:silu", "blocks.1.norm:native_layer_norm.0"]
)
def test_a_fetch_starts_at_the_use_that_its_plan_names(moment: str) -> None:
    model = stack()
    with FakeTide(model, only(GATE, fetch_at={GATE: moment})) as tide:
        for _ in range(2):
            feature_step(model, 0)
        tide.ledger.reset()
        uses = note_uses(tide)
        output = model(features())
        seen: list[int] = []
        output.register_hook(lambda _: seen.append(tide.ledger.snapshot().num_fetches))
        output.square().mean().backward()
        assert seen == [1 if moment == TURN_END else 0]
        noted = list(uses)
        before = [n for n, num in noted if num == 0]
        after = [n for n, num in noted if num == 1]
        assert (before, after) == ([n for n, _ in noted][: len(before)], after)
        if moment == TURN_END:
            assert before == []
        else:
            assert moment not in before and after[0] == moment


def without_moments(workload: Workload) -> Plan:
    return only(GATE)(workload)


def test_a_plan_without_moments_fetches_as_the_bytes_allow() -> None:
    model = stack()
    with FakeTide(model, without_moments) as tide:
        for _ in range(2):
            feature_step(model, 0)
        tide.ledger.reset()
        output = model(features())
        seen: list[int] = []
        output.register_hook(lambda _: seen.append(tide.ledger.snapshot().num_fetches))
        output.sum().backward()
        assert seen == [1]


def with_random_moments(seed: int) -> MakePlan:
    """Return a maker of a plan that evicts much and waits at random, often too late."""

    def make_plan(workload: Workload) -> Plan:
        draw = random.Random(seed)
        plan = (offload_everything if seed % 2 else planned("offload"))(workload)
        activations = [a for b in workload.blocks for a in b.activations]
        places = {a.name: i for i, a in enumerate(activations)}
        saved = [a.name for a in activations if a.is_saved]
        release_at: dict[str, str] = {}
        fetch_at: dict[str, str] = {}
        for name in (n for n, d in plan.decisions.items() if d is Decision.HOST):
            later = [a.name for a in activations[places[name] + 1 :]][:20]
            if draw.random() < 0.9:
                release_at[name] = draw.choice([*later, TURN_START, TURN_END])
            if draw.random() < 0.9:
                fetch_at[name] = draw.choice([*saved, TURN_END])
        return replace(plan, release_at=release_at, fetch_at=fetch_at)

    return make_plan


@pytest.mark.parametrize("seed", range(6))
def test_fetches_keep_to_random_moments(seed: int) -> None:
    """At each use that many fetches have started as are due by then or were needed."""
    model = stack()
    with FakeTide(model, with_random_moments(seed)) as tide:
        for _ in range(2):
            feature_step(model, 0)
        tide.ledger.reset()
        uses = note_uses(tide)
        model(features()).square().mean().backward()
        ranks, due_at = tide.traffic.anchors.use_ranks, tide.traffic.anchors.fetch_ranks
        evicted = {n for n, d in tide.plan.decisions.items() if d is Decision.HOST}
        reached, used = TURN_END_RANK, set[str]()
        replays = Decision.RECOMPUTE in tide.plan.decisions.values()
        for name, num_fetches in uses:
            reached = max(reached, ranks.get(name, TURN_END_RANK))
            used |= {name} & evicted
            due = {n for n in evicted if due_at.get(n, reached + 1) <= reached}
            if replays:  # and what a replay needed
                assert len(due | used) <= num_fetches <= len(evicted)
            else:
                assert num_fetches == len(due | used)
        tide.assert_nothing_is_left()


MODELS = {
    name: {**CASES, **ODD_CASES}[name]
    for name in (
        "llama with grouped queries",
        "gpt2 with dropout",
        "two micro-batches",
        "a retained graph",
        "adapters on a frozen base",
        "second derivatives",
        "query, key and value chunked",
        "views of all kinds",
        "batch normalisation",
        "an unused branch",
        "an inner checkpoint",
        "an inner reentrant checkpoint",
        "writes in place",
        "writes in place to the residual stream",
        "a sequential",
        "backward on another thread",
        "a part of backward",
        "looking at what is saved",
        "steps without tokens",
        "training and evaluation mode in turn",
    )
} | {
    f"checkpointed blocks, {'re-entered' if reenters else 'with hooks'}": Case(
        build=lambda reenters=reenters: CheckpointedStack(use_reentrant=reenters)
    )
    for reenters in (False, True)
}


@pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("late", 1), ("random", 2)])
@pytest.mark.parametrize("name", MODELS)
def test_random_moments_change_no_bit(name: str, schedule: Schedule, seed: int) -> None:
    case = MODELS[name]
    wanted = train(seeded(case.build), case.step)
    model = seeded(case.build)
    with FakeTide(model, with_random_moments(seed), schedule=schedule, seed=seed) as tide:
        assert differences(train(model, case.step), wanted) == []
        assert tide.traffic.anchors.has_releases and tide.traffic.anchors.has_fetches
        tide.assert_nothing_is_left()
        tide.assert_bounds_were_kept()
        assert tide.ledger.snapshot().host.moved_out_bytes > 0


@pytest.mark.parametrize("is_reversed", [False, True])
def test_two_graphs_fetch_at_their_own_moments(is_reversed: bool) -> None:
    """Design rule 4."""
    model = stack()
    with FakeTide(model, only(GATE, fetch_at={GATE: "blocks.2:silu"})) as tide:
        for _ in range(2):
            feature_step(model, 0)
        tide.ledger.reset()
        uses = note_uses(tide)
        losses = [model(features()).square().mean() for _ in range(2)]
        if is_reversed:
            losses.reverse()
        while losses:
            losses.pop().backward()
        fetches = [num for name, num in uses if name == "blocks.2:silu"]
        assert fetches == [1, 2]
        tide.assert_nothing_is_left()


def test_a_block_that_is_skipped_leaves_nothing_undone() -> None:
    class Skipping(Stack):
        skipped = -1

        def forward(self, h_BTD: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                if index != self.skipped:
                    h_BTD = block(h_BTD)
            return h_BTD

    def step(model: Any, index: int) -> Tensor:
        model.skipped = -1 if index < 2 else index % NUM_BLOCKS
        return feature_step(model, index)

    def build() -> nn.Module:
        return Skipping(Gated, NUM_BLOCKS)

    def make_plan(workload: Workload) -> Plan:
        plan = offload_everything(workload)
        hosted = [n for n, d in plan.decisions.items() if d is Decision.HOST]
        moments = {n: "blocks.2:mul" for n in hosted if n.startswith("blocks.0")}
        return replace(plan, release_at=moments, fetch_at=moments)

    num_steps = 2 + 2 * NUM_BLOCKS
    wanted = train(seeded(build), step, num_steps=num_steps)
    model = seeded(build)
    with FakeTide(model, make_plan) as tide, tide.device.watch():
        assert differences(train(model, step, num_steps=num_steps), wanted) == []
        tide.assert_nothing_is_left()
