"""The oracle: whether a plan is sound for a workload and a machine, and what the step holds.

It executes the plan by the rules of `docs/planner.md`, moment by moment and call by call, and
shares no code with the planners or the simulator, so that one mistake cannot hide in both. It
needs no clock: memory depends on the order of moments alone. Linear in the number of op calls
and backward events.

Longer than most modules: it is read whole, beside that page, and takes nothing from elsewhere.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ebbtide.block import Activation, Block, OpKind
from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.plan import TURN_END, TURN_START, Decision, Plan
from ebbtide.workload import Outside, Workload

# Enough to see what fills the device; the report has all of them.
NUM_HOLDERS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What is wrong with a plan, and what executing it holds.

    What is held is computed for an unsound plan too, as far as it can be executed: a wrong
    anchor counts as none, and what may not be replayed as if it could. It is 0 where the
    workload is another one, and device memory also where the workload is not timed.
    """

    faults: tuple[str, ...]
    """One message for each broken rule, with the value, the rule and the next step."""
    peak_bytes: int
    """Most device memory of the step."""
    peak_moment: str
    """The first moment that holds it, for example `backward of layers.3, event 4`; events are
    counted from 0, as in `Block.backward`."""
    holders: tuple[tuple[str, int], ...]
    """What holds it, with bytes, largest first; nothing of 0 bytes."""
    host_bytes: int
    """The sum over HOST decisions."""
    disk_bytes: int
    """The sum over DISK decisions."""
    max_out_bytes_in_flight: int
    """Most bytes that are made, evicted and not yet let go."""
    max_in_bytes_in_flight: int
    """Most bytes that are fetched and not yet used."""

    @property
    def is_sound(self) -> bool:
        """Whether the plan can be executed and keeps what it promises."""
        return not self.faults


def check_plan(
    plan: Plan,
    workload: Workload,
    machine: Machine,
    *,
    budget_bytes: int | None = None,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
) -> CheckReport:
    """Execute a plan on paper and report every rule that it breaks.

    Never raises for a bad plan. Times are not checked; those of the workload
    say how much the steps of a day may write to disk.

    Args:
        plan: From any source; nothing in it is trusted.
        workload: What the plan is for; only a timed one can be checked.
        machine: Gives the limits that are not passed.
        budget_bytes: Most device memory; by default the plan's own budget, or all of the
            device if it has none.
        host_bytes: Most host memory; by default this rank's share of the machine's.
        disk_bytes: Most disk space; by default the machine's.
    """
    try:
        plan.check_fits(workload)
    except PlanError as error:
        return _report((str(error),), (), host_bytes=0, disk_bytes=0)
    step = _step(plan, workload)
    sums = {
        tier: sum(step.num_bytes[name] for name, d in plan.decisions.items() if d is tier)
        for tier in (Decision.HOST, Decision.DISK)
    }
    faults = [*_cone_faults(step), *_release_faults(plan, step)]
    moments: Sequence[_Moment] = ()
    if workload.outside is None or not workload.is_timed:
        faults.append(
            f"the workload of {workload.model} is not timed; what a step holds is known only with "
            "the backward events of every block and what is outside of the blocks. Observe a "
            "timed step."
        )
    else:
        faults += _fetch_faults(plan, step)
        moments = _moments(plan, step, workload.outside)
    host_cap_bytes = machine.host_bytes_per_rank if host_bytes is None else host_bytes
    faults += _tier_faults("host", sums[Decision.HOST], plan.host_bytes, host_cap_bytes)
    disk_cap_bytes = machine.disk_bytes if disk_bytes is None else disk_bytes
    faults += _tier_faults("disk", sums[Decision.DISK], plan.disk_bytes, disk_cap_bytes)
    faults += _endurance_faults(sums[Decision.DISK], workload, machine)
    report = _report(
        faults, moments, host_bytes=sums[Decision.HOST], disk_bytes=sums[Decision.DISK]
    )
    if not moments:
        return report
    if budget_bytes is None:
        budget_bytes = plan.budget_bytes or machine.device_bytes
    return replace(report, faults=(*faults, *_device_faults(plan, report, budget_bytes)))


def _report(
    faults: Sequence[str], moments: Sequence["_Moment"], *, host_bytes: int, disk_bytes: int
) -> CheckReport:
    peak = max(moments, key=lambda moment: moment.held_bytes, default=None)
    holders = [] if peak is None else [held for held in peak.holders() if held[1]]
    return CheckReport(
        faults=tuple(faults),
        peak_bytes=0 if peak is None else peak.held_bytes,
        peak_moment="" if peak is None else peak.name,
        holders=tuple(sorted(holders, key=lambda held: -held[1])),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        max_out_bytes_in_flight=max((m.leaving_bytes for m in moments), default=0),
        max_in_bytes_in_flight=max((m.unused_bytes for m in moments), default=0),
    )


# The rules.


def _cone_faults(step: "_Step") -> Iterator[str]:
    for part in step.blocks:
        for activation in part.block.activations:
            name = activation.name
            if name in step.needed and not step.is_stored(name) and not activation.is_replayable:
                yield (
                    f"activation {name!r} is neither kept nor evicted, and backward needs it "
                    f"({step.needed[name]}), but its op {activation.op!r} of kind "
                    f"{activation.kind.value!r} may not be replayed. Decide keep, host or disk "
                    "for it."
                )


def _release_faults(plan: Plan, step: "_Step") -> Iterator[str]:
    for name, anchor in plan.release_at.items():
        if name not in step.evicted:
            yield _not_evicted_message("release_at", name, plan, step)
        elif anchor in (TURN_START, TURN_END):
            continue
        elif anchor not in step.call_of:
            yield (
                f"release_at lets {name!r} go at {anchor!r}, which is no activation of the "
                f"workload; a moment is an activation, {TURN_START!r} or {TURN_END!r}. Name one."
            )
        elif step.call_of[anchor].number <= step.call_of[name].number:
            yield (
                f"release_at lets {name!r} go before {anchor!r} is made, when {name!r} itself is "
                "not made yet; it can leave only after that. Name an activation of a later op "
                "call."
            )
        elif step.call_of[anchor].moment == step.call_of[name].moment:
            yield (
                f"release_at lets {name!r} go before {anchor!r} is made, but the block that makes "
                "both is fused: its forward runs as one, and nothing leaves within it. Name an "
                "activation of a later block."
            )


def _fetch_faults(plan: Plan, step: "_Step") -> Iterator[str]:
    for name, anchor in plan.fetch_at.items():
        if name not in step.evicted:
            yield _not_evicted_message("fetch_at", name, plan, step)
        elif anchor != TURN_END and anchor not in step.first_use:
            known = "no backward event uses" if anchor in step.call_of else "is no activation"
            given = "which is before backward" if anchor == TURN_START else f"which {known}"
            yield (
                f"fetch_at fetches {name!r} at {anchor!r}, {given}; a fetch starts at the first "
                f"use of a saved activation in backward, or at {TURN_END!r}. Name one."
            )


def _not_evicted_message(mapping: str, name: str, plan: Plan, step: "_Step") -> str:
    decision = plan.decision(name)
    given = "has no decision" if decision is None else f"has the decision {decision.value!r}"
    if name not in step.call_of:
        given = "is no activation of the workload"
    return (
        f"{mapping} names {name!r}, which {given}; only what is evicted, to host or disk, has a "
        "moment there. Drop the entry, or evict the activation."
    )


def _tier_faults(tier: str, held_bytes: int, plan_bytes: int, cap_bytes: int) -> Iterator[str]:
    if held_bytes > cap_bytes:
        yield (
            f"what is evicted to {tier} takes {held_bytes} bytes, and {cap_bytes} may be used; "
            f"all of it is there at once. Evict less to {tier}, or give more {tier}_bytes."
        )
    if plan_bytes < held_bytes:
        yield (
            f"the plan's {tier}_bytes is {plan_bytes}, but its {tier} decisions add up to "
            f"{held_bytes} bytes; it must be at least that. Plan again."
        )


def _endurance_faults(written_bytes: int, workload: Workload, machine: Machine) -> Iterator[str]:
    outside, limit = workload.outside, machine.disk_write_bytes_per_day
    if not (written_bytes and limit and outside is not None):
        return
    step_ns = outside.turn_ns + outside.ends_ns
    step_ns += sum(block.forward_ns + block.backward_ns for block in workload.blocks)
    if written_bytes * _DAY_NS > limit * step_ns:
        yield (
            f"each step writes {written_bytes} bytes to disk, and steps of {step_ns} ns, the "
            f"fastest that there are, may write {limit * step_ns // _DAY_NS} to stay within the "
            f"machine's disk_write_bytes_per_day of {limit}. Evict less to disk, or raise the "
            "limit."
        )


_DAY_NS = 24 * 60 * 60 * 10**9


def _device_faults(plan: Plan, report: CheckReport, budget_bytes: int) -> Iterator[str]:
    if report.peak_bytes > budget_bytes:
        shown = ", ".join(f"{name} {held}" for name, held in report.holders[:NUM_HOLDERS_SHOWN])
        yield (
            f"{report.peak_moment} holds {report.peak_bytes} bytes (most in: {shown}), and the "
            f"budget is {budget_bytes} bytes; no moment may hold more. Plan with this budget, or "
            "give a larger one."
        )
    if plan.peak_bytes not in (0, report.peak_bytes):
        yield (
            f"the plan's peak_bytes is {plan.peak_bytes}, but {report.peak_moment} holds "
            f"{report.peak_bytes} bytes, the most of the step; a predicted peak is exact. "
            "Plan again."
        )
    for field, limit_bytes, reached_bytes in (
        ("out", plan.max_out_bytes_in_flight, report.max_out_bytes_in_flight),
        ("in", plan.max_in_bytes_in_flight, report.max_in_bytes_in_flight),
    ):
        if limit_bytes < reached_bytes:
            yield (
                f"the plan's max_{field}_bytes_in_flight is {limit_bytes}, but its moments reach "
                f"{reached_bytes} bytes; it must be at least that. Plan again."
            )


# The step: a workload and a plan, looked up by name.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One op call: the activations of one group."""

    number: int
    """From 0, through all blocks in forward order."""
    moment: int
    """Its place among the moments of forward, from 0; all calls of a fused block have one."""
    outputs: tuple[Activation, ...]
    inputs: tuple[str, ...]
    """What any of its outputs reads; the call reads it whichever output is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A backward event takes one saved activation, or a replayed call reads its inputs."""

    names: tuple[str, ...]
    call: _Call | None
    """None: the event itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockStep:
    block: Block
    calls: tuple[_Call, ...]
    uses: tuple[tuple[_Use, ...], ...]
    """For each backward event, what happens for it in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    blocks: tuple[_BlockStep, ...]
    num_bytes: Mapping[str, int]
    call_of: Mapping[str, _Call]
    kept: frozenset[str]
    evicted: frozenset[str]
    needed: Mapping[str, str]
    """What backward needs, with the reason."""
    last_held: Mapping[str, _Call]
    """Activation to the last call during which forward itself holds it."""
    num_moments: int
    """Of forward."""
    first_use: Mapping[str, int]
    """Saved activation to the number of the first event that asks for it; events are numbered
    from 0 in backward order."""

    def is_stored(self, name: str) -> bool:
        return name in self.kept or name in self.evicted


def _step(plan: Plan, workload: Workload) -> _Step:
    evicted = {n for n, d in plan.decisions.items() if d in (Decision.HOST, Decision.DISK)}
    kept = {name for name, decision in plan.decisions.items() if decision is Decision.KEEP}
    blocks: list[_BlockStep] = []
    needed: dict[str, str] = {}
    call_of: dict[str, _Call] = {}
    last_held: dict[str, _Call] = {}
    num_calls = num_moments = 0
    for block in workload.blocks:
        calls = _calls(block, num_calls, num_moments)
        last_held.update(_last_held(block, calls))
        num_calls += len(calls)
        num_moments += len({call.moment for call in calls})
        call_of.update({output.name: call for call in calls for output in call.outputs})
        needed.update(_needed(calls, kept | evicted))
        uses = _uses(block, call_of, kept | evicted)
        blocks.append(_BlockStep(block=block, calls=calls, uses=uses))
    first_use: dict[str, int] = {}
    events = [event for block in reversed(workload.blocks) for event in block.backward]
    for number, event in enumerate(events):
        for name in event.uses:
            first_use.setdefault(name, number)
    return _Step(
        blocks=tuple(blocks),
        num_bytes={a.name: a.num_bytes for block in workload.blocks for a in block.activations},
        call_of=call_of,
        kept=frozenset(kept),
        evicted=frozenset(evicted),
        needed=needed,
        last_held=last_held,
        num_moments=num_moments,
        first_use=first_use,
    )


def _last_held(block: Block, calls: tuple[_Call, ...]) -> dict[str, _Call]:
    last_reader = {name: call for call in calls for name in call.inputs}
    return {
        activation.name: calls[-1]
        if activation.kind is OpKind.INPUT
        else last_reader.get(activation.name, calls[-1])
        for activation in block.activations
    }


def _calls(block: Block, first_number: int, first_moment: int) -> tuple[_Call, ...]:
    members: dict[str, list[Activation]] = {}
    for activation in block.activations:
        members.setdefault(activation.group, []).append(activation)
    calls: list[_Call] = []
    for index, outputs in enumerate(members.values()):
        own = {output.name for output in outputs}
        inputs = {name: None for a in outputs for name in a.inputs if name not in own}
        calls.append(
            _Call(
                number=first_number + index,
                moment=first_moment if block.is_fused else first_moment + index,
                outputs=tuple(outputs),
                inputs=tuple(inputs),
            )
        )
    return tuple(calls)


def _needed(calls: tuple[_Call, ...], stored: set[str]) -> dict[str, str]:
    needed: dict[str, str] = {}
    for call in reversed(calls):
        for output in call.outputs:
            if output.is_saved:
                needed[output.name] = "autograd saves it"
        made_again = [a.name for a in call.outputs if a.name in needed and a.name not in stored]
        for name in call.inputs if made_again else ():
            needed.setdefault(name, f"{made_again[0]!r} is made again from it")
    return needed


def _uses(
    block: Block, call_of: Mapping[str, _Call], stored: set[str]
) -> tuple[tuple[_Use, ...], ...]:
    # What is replayed stays until its last use, so no call is ever replayed twice.
    replayed: set[int] = set()
    uses_by_event: list[tuple[_Use, ...]] = []
    for event in block.backward:
        uses: list[_Use] = []
        for name in event.uses:
            missing: dict[int, _Call] = {}
            waiting = [name]
            while waiting:
                wanted = waiting.pop()
                call = call_of[wanted]
                if wanted not in stored and call.number not in replayed:
                    replayed.add(call.number)
                    missing[call.number] = call
                    waiting.extend(call.inputs)
            calls = [missing[number] for number in sorted(missing)]
            uses.extend(_Use(names=call.inputs, call=call) for call in calls)
            uses.append(_Use(names=(name,), call=None))
        uses_by_event.append(tuple(uses))
    return tuple(uses_by_event)


# The moments, in their order.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    name: str
    resident_bytes: int
    constant_bytes: int = 0
    ends_bytes: int = 0
    turn_bytes: int = 0
    gradient_bytes: int = 0
    kept_bytes: int = 0
    leaving_bytes: int = 0
    passing_bytes: int = 0
    fetched_bytes: int = 0
    recomputed_bytes: int = 0
    working_bytes: int = 0
    unused_bytes: int = 0
    """The part of `fetched_bytes` that is not yet used."""

    @property
    def held_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.holders())

    def holders(self) -> tuple[tuple[str, int], ...]:
        return (
            ("resident", self.resident_bytes),
            ("constant", self.constant_bytes),
            ("ends (such as the optimizer's)", self.ends_bytes),
            ("turn (logits and loss)", self.turn_bytes),
            ("gradients that backward made", self.gradient_bytes),
            ("kept", self.kept_bytes),
            ("leaving", self.leaving_bytes),
            ("forward only", self.passing_bytes),
            ("fetched", self.fetched_bytes),
            ("recomputed", self.recomputed_bytes),
            ("gradients and workspace", self.working_bytes),
        )


class _Pool:
    """A set of activations on the device, with the sum of their bytes."""

    def __init__(self, num_bytes: Mapping[str, int]) -> None:
        self.total_bytes = 0
        self._num_bytes = num_bytes
        self._names: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        if name not in self._names:
            self._names.add(name)
            self.total_bytes += self._num_bytes[name]

    def drop(self, name: str) -> None:
        if name in self._names:
            self._names.remove(name)
            self.total_bytes -= self._num_bytes[name]


def _moments(plan: Plan, step: _Step, outside: Outside) -> Sequence[_Moment]:
    made_bytes = sum(event.gradient_bytes for part in step.blocks for event in part.block.backward)
    ends = _Moment(
        name="the ends of the step",
        resident_bytes=outside.resident_bytes,
        gradient_bytes=outside.turn_gradient_bytes + made_bytes + outside.ends_gradient_bytes,
        ends_bytes=outside.ends_bytes,
    )
    return [ends, *_forward_and_turn(plan, step, outside), *_backward(plan, step, outside)]


def _forward_and_turn(plan: Plan, step: _Step, outside: Outside) -> Iterator[_Moment]:
    let_go: dict[int | str, list[str]] = {}
    for name in step.evicted:
        let_go.setdefault(_release_moment(plan, step, name), []).append(name)
    kept = _Pool(step.num_bytes)
    leaving = _Pool(step.num_bytes)
    for part in step.blocks:
        passing = _Pool(step.num_bytes)
        dropped_after = _last_readers(part, step)
        if not part.calls:
            yield _Moment(
                name=f"forward of {part.block.name}",
                resident_bytes=outside.resident_bytes,
                constant_bytes=outside.constant_bytes,
                kept_bytes=kept.total_bytes,
                leaving_bytes=leaving.total_bytes,
                working_bytes=part.block.workspace_bytes,
            )
        for call in part.calls:
            # In a fused block only the first call finds something here. Its moment is the most of
            # its calls, each of which is looked at.
            for name in let_go.pop(call.moment, ()):
                leaving.drop(name)
            for output in call.outputs:
                if output.name in step.kept:
                    kept.add(output.name)
                elif output.name in step.evicted:
                    leaving.add(output.name)
                else:
                    passing.add(output.name)
            yield _Moment(
                name=f"forward of {part.block.name}, making {call.outputs[0].name}",
                resident_bytes=outside.resident_bytes,
                constant_bytes=outside.constant_bytes,
                kept_bytes=kept.total_bytes,
                leaving_bytes=leaving.total_bytes,
                passing_bytes=passing.total_bytes,
                working_bytes=part.block.workspace_bytes,
            )
            for name in dropped_after.get(call.number, ()):
                passing.drop(name)
    for name in let_go.get(TURN_START, ()):
        leaving.drop(name)
    yield _Moment(
        name="the turn",
        resident_bytes=outside.resident_bytes,
        constant_bytes=outside.constant_bytes,
        turn_bytes=outside.turn_bytes,
        kept_bytes=kept.total_bytes,
        leaving_bytes=leaving.total_bytes,
    )


def _last_readers(part: _BlockStep, step: _Step) -> dict[int, list[str]]:
    """Calls after which forward drops what is not stored."""
    dropped_after: dict[int, list[str]] = {}
    for activation in part.block.activations:
        if not step.is_stored(activation.name):
            last = step.last_held[activation.name].number
            dropped_after.setdefault(last, []).append(activation.name)
    return dropped_after


def _release_moment(plan: Plan, step: _Step, name: str) -> int | str:
    """The moment of forward, or the end of the turn, at which an evicted activation is gone.

    Forward itself holds it until the last call that reads it; an input, until the block's end.
    """
    anchor = plan.release_at.get(name, TURN_START)
    if anchor not in step.call_of or step.call_of[anchor].moment <= step.call_of[name].moment:
        return TURN_END if anchor == TURN_END else TURN_START
    moment = max(step.call_of[anchor].moment, step.last_held[name].moment + 1)
    return moment if moment < step.num_moments else TURN_START


def _backward(plan: Plan, step: _Step, outside: Outside) -> Iterator[_Moment]:
    fetched_at = _fetches(plan, step)
    uses_left = Counter(name for use in _all_uses(step.blocks) for name in use.names)
    kept, fetched, unused, recomputed = (_Pool(step.num_bytes) for _ in range(4))
    for name in step.kept:
        kept.add(name)
    number = 0
    gradient_bytes = outside.turn_gradient_bytes
    for part in reversed(step.blocks):
        own_bytes = 0
        last_held_bytes: int | None = None
        for index, (event, uses) in enumerate(zip(part.block.backward, part.uses, strict=True)):
            where = f"backward of {part.block.name}, event {index}"
            started = fetched_at.get(number, [])
            number += 1
            for name in started:
                fetched.add(name)
                unused.add(name)
            # Gradients that are alive before the event are held in it and in the one before it.
            held_bytes = own_bytes + event.held_bytes
            before_bytes = held_bytes
            if last_held_bytes is not None and last_held_bytes < held_bytes:
                before_bytes = last_held_bytes
            last_held_bytes = held_bytes
            own_bytes += event.gradient_bytes
            # The last one stands for the event's own compute.
            for use in (*uses, _Use(names=(), call=None)):
                outputs = () if use.call is None else use.call.outputs
                yield _Moment(
                    name=f"{where}, making {outputs[0].name} again" if outputs else where,
                    resident_bytes=outside.resident_bytes,
                    constant_bytes=outside.constant_bytes,
                    gradient_bytes=gradient_bytes,
                    kept_bytes=kept.total_bytes,
                    fetched_bytes=fetched.total_bytes,
                    # All outputs of the call, also those that are stored or not needed.
                    recomputed_bytes=recomputed.total_bytes + sum(a.num_bytes for a in outputs),
                    working_bytes=before_bytes if use.names or outputs else held_bytes,
                    unused_bytes=unused.total_bytes,
                )
                for name in use.names:
                    unused.drop(name)
                if use.call is None:
                    continue
                for output in outputs:
                    if output.name in step.needed and not step.is_stored(output.name):
                        recomputed.add(output.name)
                for name in use.names:
                    uses_left[name] -= 1
                    if not uses_left[name]:
                        recomputed.drop(name)
            uses_left.subtract(event.uses)
            for name in (*started, *_touched(uses)):
                if not uses_left[name]:
                    for pool in (fetched, unused, recomputed):
                        pool.drop(name)
        gradient_bytes += own_bytes
        for activation in part.block.activations:
            kept.drop(activation.name)


def _fetches(plan: Plan, step: _Step) -> dict[int, list[str]]:
    """Number of an event to what is fetched at its start: at its moment, or at its first need.

    What is evicted and needed by nothing is never fetched.
    """
    start_of: dict[str, int] = {}
    events = [uses for part in reversed(step.blocks) for uses in part.uses]
    for number, uses in enumerate(events):
        for use in uses:
            for name in use.names:
                start_of.setdefault(name, number)
    for name, anchor in plan.fetch_at.items():
        moment = 0 if anchor == TURN_END else step.first_use.get(anchor)
        if moment is not None:
            start_of[name] = min(moment, start_of.get(name, moment))
    fetched_at: dict[int, list[str]] = {}
    for name in step.evicted & start_of.keys() & step.needed.keys():
        fetched_at.setdefault(start_of[name], []).append(name)
    return fetched_at


def _all_uses(blocks: Iterable[_BlockStep]) -> Iterator[_Use]:
    return (use for part in blocks for uses in part.uses for use in uses)


def _touched(uses: Iterable[_Use]) -> Iterator[str]:
    for use in uses:
        yield from use.names
        if use.call is not None:
            yield from (output.name for output in use.call.outputs)
