"""What copies in pieces would gain: fetches that an urgent one may overtake, by the simulator.

    PYTHONPATH=src:. python3 benchmarks/split.py

Plans budgets of several shapes for a link of 55 GB/s and replays each on links of that rate and
slower ones, twice: as the runtime copies, whole and in the order in which fetches start; and in
pieces of 16 MiB, each of the fetch that is needed first among those that may run, at no cost a
piece. Prints for each rate the largest gain of all plans, and how many blocks the plans keep whole.
No GPU is used; takes a minute.
"""

# pyright: reportPrivateUsage=false
# The replay has no opening for another order on the link, and nobody but this program wants one.

from __future__ import annotations

import sys
from dataclasses import dataclass

from ebbtide.machine import Machine
from ebbtide.plan import Decision, Plan
from ebbtide.planner import plan_for_budget
from ebbtide.planner.chain import Chain, compile_chain
from ebbtide.simulate import _Moved, _Replay
from ebbtide.timeline import Timeline
from tests.corpus.machines import budget_of, machine_with
from tests.corpus.shapes import make_corpus

PLANNED_GB_PER_S = 55
RATES_GB_PER_S = (55, 45, 35, 25)
SHARES = (0.02, 0.15, 0.35, 0.6)
SHAPES = (
    *("llama-8b-x8/8k", "llama-8b-x8/32k", "llama-8b-x8/128k", "llama-8b/32k"),
    *("llama-70b/32k", "gpt2/8k", "deepseek/8k"),
)
PIECE_BYTES = 16 * 2**20


@dataclass(slots=True)
class Waiting:
    """A fetch that was started and is not over."""

    need: tuple[int, int]
    """When backward first needs it; what was evicted last comes first of those at one time."""
    left_bytes: int
    ready_ns: int


class InPieces(_Replay):
    """The replay of a step whose fetches go in pieces, the one needed first before the others."""

    def __init__(self, plan: Plan, chain: Chain, machine: Machine) -> None:
        super().__init__(plan, chain, machine)
        self._waiting: dict[str, Waiting] = {}
        self._link_free_ns = 0
        self._needed_at: dict[str, int] = {}
        event_number = 0
        for block in reversed(range(len(self._programs))):
            program, names = self._programs[block], chain.names[block]
            for index, event in program.first_need.items():
                self._needed_at[names[index]] = event_number + event
            event_number += len(program.event_ns)

    def _fetch(self, moved: _Moved) -> None:
        if moved.in_end >= 0:
            return
        moved.in_end = 0  # started; when it ends is known once somebody waits for it
        need = (self._needed_at[moved.name], -moved.number)
        ready_ns = max(self._now, moved.out_end)
        self._waiting[moved.name] = Waiting(need, moved.num_bytes, ready_ns)
        self._held += moved.num_bytes

    def _wait_until(self, ready: int, name: str) -> None:
        if name in self._waiting:
            ready = self._run_link_until(name)
        super()._wait_until(ready, name)

    def _run_link_until(self, name: str) -> int:
        while name in self._waiting:
            earliest_ns = min(each.ready_ns for each in self._waiting.values())
            self._link_free_ns = max(self._link_free_ns, earliest_ns)
            first = min(
                (n for n, each in self._waiting.items() if each.ready_ns <= self._link_free_ns),
                key=lambda n: self._waiting[n].need,
            )
            piece_bytes = min(PIECE_BYTES, self._waiting[first].left_bytes)
            self._link_free_ns += piece_bytes * 10**9 // self._machine.in_bytes_per_s
            self._waiting[first].left_bytes -= piece_bytes
            if not self._waiting[first].left_bytes:
                del self._waiting[first]
        return self._link_free_ns


def main() -> int:
    corpus = make_corpus()
    num_whole = num_blocks = 0
    gains: dict[int, list[tuple[float, str]]] = {rate: [] for rate in RATES_GB_PER_S}
    for name in SHAPES:
        workload = corpus[name]
        chain = compile_chain(workload)
        for share in SHARES:
            budget_bytes = budget_of(workload, share)
            machine = machine_with(PLANNED_GB_PER_S)
            plan = plan_for_budget(workload, machine, budget_bytes=budget_bytes).plan
            if plan is None:
                continue  # below the least budget of this shape
            num_blocks += len(chain.names)
            for names in chain.names:
                num_whole += all(plan.decision(each) is Decision.KEEP for each in names)
            for rate in RATES_GB_PER_S:
                whole_ns = end_of(_Replay(plan, chain, machine_with(rate)).run())
                pieces_ns = end_of(InPieces(plan, chain, machine_with(rate)).run())
                gains[rate].append(
                    (1 - pieces_ns / whole_ns, f"{name}, {share:.0%} of what is saved")
                )
    for rate, found in gains.items():
        share, of = max(found)
        print(f"{rate} GB/s: at most {share:.4%} of a step ({of}), {len(found)} plans")
    print(f"{num_whole} of {num_blocks} blocks of these plans are kept whole")
    return 0


def end_of(timeline: Timeline) -> int:
    """Return when the step ends, in ns."""
    return max(span.end_ns for span in timeline.spans)


if __name__ == "__main__":
    sys.exit(main())
