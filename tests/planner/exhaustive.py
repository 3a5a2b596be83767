"""Tiny workloads, and the best plan for one by trying all: what planners are tested against.

Everything here is deterministic in the generator that is passed. Sizes and times are small
numbers, so that a failing example can be followed by hand.
"""

import random
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.check import check_plan
from ebbtide.machine import Machine
from ebbtide.plan import TURN_END, TURN_START, Decision, Plan
from ebbtide.workload import Outside, Workload

EVICTIONS = (Decision.HOST, Decision.DISK)

# 3 decisions for each of 9 activations are 19683 assignments, some seconds of checking. 4 blocks
# of 3 would be half a million.
MAX_ACTIVATIONS = 9


def best_step_ns(
    workload: Workload,
    machine: Machine,
    budget_bytes: int,
    step_ns_of: Callable[[Plan], int | None],
    *,
    lay_out: Callable[[dict[str, Decision]], Plan | None] | None = None,
) -> int | None:
    """The shortest step of all sound plans within the budget; None if there is none.

    Tries every sound assignment of decisions. It is as good as the moments it tries: all of
    them without `lay_out`, which is for two or three activations that can be evicted at most.

    Args:
        workload: Timed, with at most `MAX_ACTIVATIONS` activations.
        machine: Its tiers limit the decisions; without a disk there is no DISK.
        budget_bytes: Most device memory of the step.
        step_ns_of: The caller's simulator; None leaves a plan out.
        lay_out: The caller's scheduler: the plan with the best moments for these decisions, or
            None if it finds none. It need not look at the budget.
    """
    num_activations = sum(len(block.activations) for block in workload.blocks)
    if num_activations > MAX_ACTIVATIONS:
        raise ValueError(
            f"{num_activations} activations have too many plans to try; at most {MAX_ACTIVATIONS} "
            "can be searched. Pass a smaller workload."
        )
    best_ns: int | None = None
    for decisions in all_decisions(workload, machine):
        if _turn_bytes(workload, decisions) > budget_bytes:
            continue
        if lay_out is None:
            plans: Iterable[Plan] = all_layouts(workload, decisions)
        else:
            laid_out = lay_out(decisions)
            plans = () if laid_out is None else (laid_out,)
        for plan in plans:
            if check_plan(plan, workload, machine, budget_bytes=budget_bytes).is_sound:
                step_ns = step_ns_of(plan)
                if step_ns is not None and (best_ns is None or step_ns < best_ns):
                    best_ns = step_ns
    return best_ns


def _turn_bytes(workload: Workload, decisions: dict[str, Decision]) -> int:
    """What the turn holds at least, whatever the moments: an exact and cheap way to prune."""
    outside = workload.outside
    assert outside is not None, "an exhaustive search needs a timed workload"
    outside_bytes = outside.resident_bytes + outside.constant_bytes + outside.turn_bytes
    return outside_bytes + tier_bytes(workload, decisions)[Decision.KEEP]


def all_decisions(workload: Workload, machine: Machine) -> Iterator[dict[str, Decision]]:
    """Every way to store or replay what backward needs, and nothing beyond that.

    What is not needed has no decision. Assignments that overfill host or disk are left out.
    """
    tiers = [Decision.KEEP]
    tiers += [Decision.HOST] if machine.host_bytes_per_rank else []
    tiers += [Decision.DISK] if machine.disk_bytes else []
    per_block = [list(_block_decisions(block, tiers)) for block in workload.blocks]
    caps = {Decision.HOST: machine.host_bytes_per_rank, Decision.DISK: machine.disk_bytes}
    for chosen in product(*per_block):
        decisions = {name: decision for part in chosen for name, decision in part.items()}
        sums = tier_bytes(workload, decisions)
        if all(sums[tier] <= cap_bytes for tier, cap_bytes in caps.items()):
            yield decisions


def _block_decisions(block: Block, tiers: list[Decision]) -> Iterator[dict[str, Decision]]:
    inputs_of: dict[str, set[str]] = {}
    for activation in block.activations:
        inputs_of.setdefault(activation.group, set()).update(activation.inputs)

    def choices(
        left: tuple[Activation, ...], needed: frozenset[str], decisions: dict[str, Decision]
    ) -> Iterator[dict[str, Decision]]:
        if not left:
            yield decisions
            return
        # From the last to the first: by then it is known whether anything replayed reads it.
        activation, left = left[-1], left[:-1]
        if not activation.is_saved and activation.name not in needed:
            yield from choices(left, needed, decisions)
            return
        for tier in tiers:
            yield from choices(left, needed, {**decisions, activation.name: tier})
        if activation.is_replayable:
            yield from choices(
                left,
                needed | inputs_of[activation.group],
                {**decisions, activation.name: Decision.RECOMPUTE},
            )

    return choices(block.activations, frozenset(), {})


def all_layouts(workload: Workload, decisions: dict[str, Decision]) -> Iterator[Plan]:
    """Plans with every choice of moments for these decisions; moments at one place count once.

    Their number multiplies with every evicted activation: for the tiniest workloads only.
    """
    evicted = [name for name, decision in decisions.items() if decision in EVICTIONS]
    releases = release_moments(workload)
    fetches = fetch_moments(workload)
    choices = [list(product(releases[name], [*fetches, None])) for name in evicted]
    draft = plan_with(workload, decisions)
    for moments in product(*choices):
        at = dict(zip(evicted, moments, strict=True))
        yield replace(
            draft,
            release_at={name: release for name, (release, _) in at.items()},
            fetch_at={name: fetch for name, (_, fetch) in at.items() if fetch is not None},
        )


def release_moments(workload: Workload) -> dict[str, list[str]]:
    """For each activation, one name for each moment at which it can be let go."""
    later = [TURN_START, TURN_END]
    releases: dict[str, list[str]] = {}
    for block in reversed(workload.blocks):
        if block.is_fused:
            releases.update({activation.name: later for activation in block.activations})
            # Each activation stands for the one moment; planners name the first.
            later = [block.activations[-1].name, *later]
            continue
        calls: dict[str, list[Activation]] = {}
        for activation in block.activations:
            calls.setdefault(activation.group, []).append(activation)
        for outputs in reversed(calls.values()):
            releases.update({output.name: later for output in outputs})
            later = [outputs[0].name, *later]
    return releases


def fetch_moments(workload: Workload) -> list[str]:
    """One name for each moment at which a fetch can start."""
    moments = [TURN_END]
    seen: set[str] = set()
    for block in reversed(workload.blocks):
        for event in block.backward:
            first = [name for name in event.uses if name not in seen]
            moments += first[:1]
            seen.update(first)
    return moments


def plan_with(workload: Workload, decisions: dict[str, Decision]) -> Plan:
    """A plan without moments, whose limits are wide enough for any."""
    sums = tier_bytes(workload, decisions)
    evicted_bytes = sums[Decision.HOST] + sums[Decision.DISK]
    return Plan(
        name="exhaustive",
        model=workload.model,
        fingerprint=workload.fingerprint,
        decisions=decisions,
        host_bytes=sums[Decision.HOST],
        disk_bytes=sums[Decision.DISK],
        max_out_bytes_in_flight=evicted_bytes,
        max_in_bytes_in_flight=evicted_bytes,
    )


def tier_bytes(workload: Workload, decisions: dict[str, Decision]) -> dict[Decision, int]:
    """Bytes of each decision."""
    sums = dict.fromkeys(Decision, 0)
    for block in workload.blocks:
        for activation in block.activations:
            if activation.name in decisions:
                sums[decisions[activation.name]] += activation.num_bytes
    return sums


def random_workload(rng: random.Random, num_blocks: int, num_activations: int) -> Workload:
    """A timed workload; every block has `num_activations`, the first of them its input.

    Some calls have two outputs, some activations are not saved, some may not be replayed, and
    about a quarter of the blocks are fused. Every saved one is used by one backward event or more.
    """
    blocks = [_random_block(rng, f"b{number}", num_activations) for number in range(num_blocks)]
    # Drawn from a copy, so that all else is the same for a seed as it was without fused blocks.
    copied = random.Random()
    copied.setstate(rng.getstate())
    return Workload(
        model="Random",
        blocks=tuple(replace(block, is_fused=copied.random() < 0.25) for block in blocks),
        outside=Outside(
            resident_bytes=rng.randrange(20),
            turn_bytes=rng.randrange(30),
            turn_ns=rng.randrange(10),
            ends_bytes=rng.randrange(30),
            ends_ns=rng.randrange(10),
            constant_bytes=rng.randrange(5),
            turn_gradient_bytes=rng.choice((0, rng.randrange(8))),
            ends_gradient_bytes=rng.choice((0, rng.randrange(8))),
        ),
    )


def _random_block(rng: random.Random, name: str, num_activations: int) -> Block:
    activations = [_random_activation(rng, f"{name}.input", OpKind.INPUT, (), f"{name}.in", 0)]
    while len(activations) < num_activations:
        earlier = [activation.name for activation in activations]
        # Most read what was made last, so that there are chains to replay.
        inputs = {earlier[-1]} if rng.random() < 0.8 else {rng.choice(earlier)}
        inputs |= {rng.choice(earlier)} if rng.random() < 0.3 else set[str]()
        kinds = (OpKind.MATMUL, OpKind.ATTENTION, OpKind.NORM, OpKind.ELEMENTWISE)
        kind = rng.choice(kinds) if rng.random() < 0.85 else rng.choice(_NOT_REPLAYED)
        group, make_ns = f"{name}.call{len(activations)}", rng.randrange(10)
        num_outputs = 2 if rng.random() < 0.2 else 1
        for _ in range(min(num_outputs, num_activations - len(activations))):
            activations.append(
                _random_activation(
                    rng,
                    f"{name}.a{len(activations)}",
                    kind,
                    tuple(sorted(inputs)),
                    group,
                    make_ns,
                )
            )
    if not any(activation.is_saved for activation in activations):
        activations[-1] = replace(activations[-1], is_saved=True)
    return Block(
        name=name,
        class_name="Layer",
        activations=tuple(activations),
        backward=_random_events(rng, [a.name for a in activations if a.is_saved]),
        rest_ns=rng.randrange(3),
        workspace_bytes=rng.randrange(6),
    )


_NOT_REPLAYED = (OpKind.RANDOM, OpKind.OPAQUE)


def _random_activation(
    rng: random.Random, name: str, kind: OpKind, inputs: tuple[str, ...], group: str, make_ns: int
) -> Activation:
    return Activation(
        name=name,
        op=f"aten.{kind.value}",
        kind=kind,
        num_bytes=rng.randrange(1, 12),
        inputs=inputs,
        is_saved=rng.random() < 0.65,
        is_replayable=kind is not OpKind.INPUT and kind not in _NOT_REPLAYED,
        group=group,
        make_ns=make_ns,
    )


def _random_events(rng: random.Random, saved: list[str]) -> tuple[BackwardEvent, ...]:
    """Roughly the saved activations backwards, each at least once, with some more uses."""
    unused = list(reversed(saved))
    events: list[BackwardEvent] = []
    while unused:
        num_new = rng.randint(1, min(2, len(unused)))
        uses, unused = unused[:num_new], unused[num_new:]
        more = rng.choice(saved)
        if rng.random() < 0.4 and more not in uses:
            uses.append(more)
        rng.shuffle(uses)
        events.append(
            BackwardEvent(
                uses=tuple(uses),
                compute_ns=rng.randrange(20),
                held_bytes=rng.randrange(12),
                gradient_bytes=rng.choice((0, 0, rng.randrange(8))),
            )
        )
    return tuple(events)


def random_machine(rng: random.Random, *, has_disk: bool = False) -> Machine:
    """A machine for a random workload: room for all of it on every tier, at various speeds.

    Bandwidths are some bytes per ns, as sizes are some bytes and times some ns.
    """
    speeds = (10**9, 2 * 10**9, 3 * 10**8, 7 * 10**8)
    return Machine(
        name="random",
        device_bytes=10**6,
        host_bytes=10**6,
        out_bytes_per_s=rng.choice(speeds),
        in_bytes_per_s=rng.choice(speeds),
        both_bytes_per_s=rng.choice(speeds),
        disk_bytes=10**6 if has_disk else 0,
        disk_write_bytes_per_s=rng.choice(speeds) // 2,
        disk_read_bytes_per_s=rng.choice(speeds) // 2,
    )


def random_plan(rng: random.Random, workload: Workload, *, has_disk: bool = False) -> Plan:
    """A plan that can be executed, with moments from anywhere that they may be, or without.

    Everything that is needed is stored or can be replayed. Some fetches come too late, and
    some activations that nobody needs are stored.
    """
    tiers = [Decision.KEEP, Decision.HOST, *([Decision.DISK] if has_disk else [])]
    decisions: dict[str, Decision] = {}
    for block in workload.blocks:
        needed: set[str] = set()
        for activation in reversed(block.activations):
            others = [a for a in block.activations if a.group == activation.group]
            is_needed = activation.is_saved or activation.name in needed
            if activation.is_replayable and rng.random() < 0.45:
                if is_needed:
                    needed.update(name for other in others for name in other.inputs)
                # Without a decision it is replayed all the same.
                if rng.random() < 0.8:
                    decisions[activation.name] = Decision.RECOMPUTE
            elif is_needed or rng.random() < 0.15:
                decisions[activation.name] = rng.choice(tiers)
    releases, fetches = release_moments(workload), fetch_moments(workload)
    evicted = [name for name, decision in decisions.items() if decision in EVICTIONS]
    return replace(
        plan_with(workload, decisions),
        release_at={n: rng.choice(releases[n]) for n in evicted if rng.random() < 0.8},
        fetch_at={n: rng.choice(fetches) for n in evicted if rng.random() < 0.8},
    )


def generators() -> st.SearchStrategy[random.Random]:
    """Seeded generators: hypothesis's own is far slower, and sizes shrink all the same."""
    return st.integers(0, 2**32 - 1).map(random.Random)


@st.composite
def workloads(draw: st.DrawFn, max_blocks: int = 3, max_activations: int = 3) -> Workload:
    """Random workloads, for hypothesis."""
    rng = draw(generators())
    num_blocks = draw(st.integers(1, max_blocks))
    num_activations = draw(st.integers(1, max_activations))
    with _global_random_kept():
        return random_workload(rng, num_blocks, num_activations)


@st.composite
def planned_workloads(
    draw: st.DrawFn, max_blocks: int = 3, max_activations: int = 6
) -> tuple[Workload, Plan]:
    """Random workloads with a random plan that can be executed."""
    workload = draw(workloads(max_blocks, max_activations))
    rng = draw(generators())
    has_disk = draw(st.booleans())
    with _global_random_kept():
        return workload, random_plan(rng, workload, has_disk=has_disk)


@contextmanager
def _global_random_kept() -> Generator[None]:
    # beartype draws from the global generator when it looks into a container, and hypothesis
    # refuses a strategy that does.
    state = random.getstate()
    yield
    random.setstate(state)
