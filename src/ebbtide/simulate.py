"""Replay a plan, moment by moment, into a Timeline: the step that `docs/planner.md` describes.

Only the plan says what happens: decisions, when copies are let go, when fetches may start. The
result has the exact peak and every stall.
"""

from dataclasses import dataclass, field

from ebbtide.machine import Machine
from ebbtide.plan import TURN_END, TURN_START, Decision, Plan
from ebbtide.planner.chain import BlockClass, Chain, Moment, compile_chain
from ebbtide.planner.menu import Option
from ebbtide.planner.program import Program, make_program
from ebbtide.timeline import Lane, Span, Timeline
from ebbtide.workload import Workload

BESIDE = "slower beside copies"
"""Starts the names of the spans for what compute loses to the copies that run beside it."""
STORING = "stacking what is stored"
"""Starts the names of the spans for what storing costs by itself."""


def simulate(plan: Plan, workload: Workload, machine: Machine) -> Timeline:
    """Return the predicted step under a plan.

    Compute runs in the order of moments; copies in each direction share one link and run in the
    plan's order. Deterministic; O(n log n) in the number of moments.

    Raises:
        PlanError: The plan is for another workload, or the workload was not timed.
    """
    plan.check_fits(workload)
    return _Replay(plan, compile_chain(workload), machine).run()


@dataclass(slots=True)
class _Moved:
    """One evicted activation on its way."""

    name: str
    num_bytes: int
    is_on_disk: bool
    number: int
    """In the order of eviction."""
    out_end: int = 0
    in_end: int = -1
    """-1: not fetched yet."""
    held_until: int = 0
    """The forward moment up to which forward itself holds it."""


@dataclass(slots=True)
class _Clock:
    """When each lane is free, and what ran on it."""

    free: dict[Lane, int] = field(default_factory=dict[Lane, int])
    spans: list[Span] = field(default_factory=list[Span])

    def run(self, lane: Lane, name: str, ready: int, duration: int, num_bytes: int = 0) -> int:
        start = max(ready, self.free.get(lane, 0))
        end = start + duration
        self.free[lane] = end
        if duration:
            self.spans.append(Span(lane=lane, name=name, start_ns=start, end_ns=end,
                                   num_bytes=num_bytes))  # fmt: skip
        return end


class _Replay:
    def __init__(self, plan: Plan, chain: Chain, machine: Machine) -> None:
        self._plan = plan
        self._chain = chain
        self._machine = machine
        self._clock = _Clock()
        self._now = 0
        self._held = chain.outside.resident_bytes
        """Bytes that stay until something says otherwise."""
        self._peak = chain.ends_bytes
        self._moved: dict[str, _Moved] = {}
        self._leaving: dict[str, _Moved] = {}
        self._moment = 0
        self._freed_after: dict[int, int] = {}
        """Bytes that were let go while forward still held them, by the moment that frees them."""
        self._released_at: dict[str, list[str]] = {}
        for name, anchor in plan.release_at.items():
            self._released_at.setdefault(anchor, []).append(name)
        programs: dict[tuple[int, frozenset[int]], Program] = {}
        self._programs: list[Program] = []
        for block, number in enumerate(chain.class_of):
            stored = frozenset(
                i
                for i, name in enumerate(chain.names[block])
                if plan.decision(name) in (Decision.KEEP, Decision.HOST, Decision.DISK)
            )
            key = (number, stored)
            if key not in programs:
                option = Option(stored=stored, num_bytes=0, replay_ns=0, replayed=frozenset())
                programs[key] = make_program(chain.classes[number], option)
            self._programs.append(programs[key])

    def run(self) -> Timeline:
        outside = self._chain.outside
        self._compute("before the first block", outside.ends_ns // 2)
        self._held += outside.constant_bytes
        for block in range(len(self._programs)):
            self._forward(block)
        self._held -= sum(self._freed_after.values())
        for name in self._plan.decisions:
            if name in self._leaving and name not in self._plan.release_at:
                self._let_go(name)
        self._let_go_at(TURN_START)
        self._note(outside.turn_bytes)
        self._compute("turn", outside.turn_ns)
        self._let_go_at(TURN_END)
        self._backward()
        self._compute("after the last block", outside.ends_ns - outside.ends_ns // 2)
        spans = sorted(self._clock.spans, key=lambda s: (s.start_ns, s.lane.value, s.end_ns))
        return Timeline(
            source=f"simulated: plan {self._plan.name} on {self._machine.name}",
            spans=tuple(spans),
            peak_bytes=self._peak,
        )

    def _forward(self, block: int) -> None:
        program, names = self._programs[block], self._chain.names[block]
        block_class = self._block_class(block)
        for number, moment in enumerate(program.moments):
            self._held -= self._freed_after.pop(self._moment - 1, 0)
            for i in moment.outputs:
                self._let_go_at(names[i])
            self._note(program.call_bytes[number])
            self._held += program.call_bytes[number] - program.transient_bytes[number]
            self._compute(self._moment_name(block, moment), moment.spent_ns)
            for i in program.made[number]:
                decision = self._plan.decision(names[i])
                if decision is not Decision.KEEP:
                    moved = self._evict(names[i], program.num_bytes[i], decision is Decision.DISK)
                    moved.held_until = self._moment - number + program.last_held[i]
                    slow_ns = self._machine.slow_ns(moved.num_bytes, self._machine.out_bytes_per_s)
                    self._compute(f"{BESIDE} out", slow_ns)
            self._moment += 1
        self._compute("forward", block_class.tail_ns)

    def _backward(self) -> None:
        moment_of: dict[str, int] = {TURN_END: 0}
        moment = 0
        for block in reversed(range(len(self._programs))):
            for uses in self._block_class(block).uses:
                for i in uses:
                    moment_of.setdefault(self._chain.names[block][i], moment)
                moment += 1
        needed_ever = {
            self._chain.names[block][i]
            for block, program in enumerate(self._programs)
            for i in program.first_need
        }
        due: dict[int, list[_Moved]] = {}
        for name, anchor in self._plan.fetch_at.items():
            if name in self._moved and name in needed_ever and anchor in moment_of:
                due.setdefault(moment_of[anchor], []).append(self._moved[name])
        moment = gradient_bytes = 0
        gradients = self._chain.gradient_bytes_before()
        for block in reversed(range(len(self._programs))):
            program, names = self._programs[block], self._chain.names[block]
            decisions = {i: self._plan.decision(names[i]) for i in program.made_at}
            away = [i for i in program.made_at if decisions[i] is not Decision.KEEP]
            self._held += gradients[block] - gradient_bytes
            gradient_bytes = gradients[block]
            for event, spent_ns in enumerate(program.event_ns):
                for moved in sorted(due.get(moment, ()), key=lambda m: -m.number):
                    self._fetch(moved)
                needed = [i for i in away if program.first_need.get(i) == event]
                for i in sorted(needed, key=lambda i: -self._moved[names[i]].number):
                    self._fetch(self._moved[names[i]])
                for i in needed:
                    self._wait_until(self._moved[names[i]].in_end, names[i])
                for i in needed:
                    in_rate = self._machine.in_bytes_per_s
                    slow_ns = self._machine.slow_ns(program.num_bytes[i], in_rate)
                    self._compute(f"{BESIDE} in", slow_ns)
                self._note(program.scratch_bytes[event])
                store_ns = program.store_ns[event]
                self._compute(f"{STORING}", store_ns)
                self._compute(f"{self._event_name(block, event)}", spent_ns - store_ns)
                for i in away:
                    if program.last_need.get(i) == event:
                        self._held -= program.num_bytes[i]
                moment += 1
            for i, num_bytes in enumerate(program.num_bytes):
                if decisions.get(i) is Decision.KEEP:
                    self._held -= num_bytes

    def _moment_name(self, block: int, moment: Moment) -> str:
        if not moment.outputs:
            return "forward"  # of a block that is left alone
        first = self._chain.names[block][moment.outputs[0]]
        return f"forward of {first}" if self._block_class(block).is_fused else first

    def _event_name(self, block: int, event: int) -> str:
        uses = self._block_class(block).uses[event]
        return f"backward of {self._chain.names[block][uses[0]]}" if uses else "backward"

    def _block_class(self, block: int) -> BlockClass:
        return self._chain.classes[self._chain.class_of[block]]

    def _note(self, more_bytes: int) -> None:
        self._peak = max(self._peak, self._held + more_bytes)

    def _compute(self, name: str, duration: int) -> None:
        self._now = self._clock.run(Lane.COMPUTE, name, self._now, duration)

    def _wait_until(self, ready: int, name: str) -> None:
        if ready > self._now:
            self._clock.spans.append(
                Span(lane=Lane.STALL, name=name, start_ns=self._now, end_ns=ready)
            )
            self._now = ready

    def _let_go_at(self, anchor: str) -> None:
        for name in self._released_at.get(anchor, ()):
            if name in self._leaving:
                self._let_go(name)

    def _let_go(self, name: str) -> None:
        moved = self._leaving.pop(name)
        self._wait_until(moved.out_end, name)
        if moved.held_until < self._moment:
            self._held -= moved.num_bytes
        else:
            freed = self._freed_after.get(moved.held_until, 0)
            self._freed_after[moved.held_until] = freed + moved.num_bytes

    def _evict(self, name: str, num_bytes: int, is_on_disk: bool) -> _Moved:
        moved = _Moved(name, num_bytes, is_on_disk, len(self._moved))
        self._moved[name] = self._leaving[name] = moved
        machine, end = self._machine, self._now
        if machine.out_bytes_per_s:
            end = self._copy(Lane.COPY_OUT, moved, end, machine.out_bytes_per_s)
        if is_on_disk:
            end = self._copy(Lane.DISK_WRITE, moved, end, machine.disk_write_bytes_per_s)
        moved.out_end = end
        return moved

    def _fetch(self, moved: _Moved) -> None:
        if moved.in_end >= 0:
            return
        machine, end = self._machine, max(self._now, moved.out_end)
        if moved.is_on_disk:
            end = self._copy(Lane.DISK_READ, moved, end, machine.disk_read_bytes_per_s)
        if machine.in_bytes_per_s:
            end = self._copy(Lane.COPY_IN, moved, end, machine.in_bytes_per_s)
        moved.in_end = end
        self._held += moved.num_bytes

    def _copy(self, lane: Lane, moved: _Moved, ready: int, bytes_per_s: int) -> int:
        duration = -(-moved.num_bytes * 1_000_000_000 // bytes_per_s)
        return self._clock.run(lane, moved.name, ready, duration, moved.num_bytes)
