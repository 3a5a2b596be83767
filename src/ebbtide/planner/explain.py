"""Why a plan decides as it does for one activation: its price beside the link's."""

from dataclasses import dataclass

from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.naming import nearest
from ebbtide.plan import Decision, Plan
from ebbtide.planner.chain import BlockClass, compile_chain
from ebbtide.planner.menu import make_option
from ebbtide.planner.named import MIN_BYTES
from ebbtide.units import format_bytes
from ebbtide.workload import Workload

# A model has hundreds of activations.
NUM_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The price of one activation, and what a plan makes of it."""

    name: str
    """The activation."""
    decision: Decision | None
    """None: backward does not need it under this plan."""
    num_bytes: int
    """Bytes of its storage."""
    may_run_again: bool
    """Whether what makes it is pure."""
    freed_bytes: int
    """Bytes less to store if it is recomputed and all else stays; less than `num_bytes` where
    recomputing it needs something else stored, and more where that frees something."""
    recompute_ns: int
    """Time more to recompute for that."""
    copy_ns: int
    """Time of the link for one way; 0 where nothing can be moved."""
    reason: str
    """One sentence for people."""

    def __str__(self) -> str:
        decided = "not needed" if self.decision is None else self.decision.name
        price = "it cannot be recomputed"
        if self.may_run_again:
            price = (
                f"recomputing it takes {self.recompute_ns / 1e6:.3f} ms and frees "
                f"{format_bytes(self.freed_bytes)}"
            )
        return (
            f"{self.name}: {decided}, {format_bytes(self.num_bytes)}; {price}; moving it takes "
            f"{self.copy_ns / 1e6:.3f} ms of the link each way. {self.reason}"
        )


def explain(plan: Plan, workload: Workload, machine: Machine, name: str) -> Explanation:
    """Say what an activation costs, and why the plan decides so.

    Raises:
        PlanError: The workload has no such activation, or no times.
    """
    chain = compile_chain(workload)
    places = {n: (b, i) for b, names in enumerate(chain.names) for i, n in enumerate(names)}
    if name not in places:
        close = ", ".join(nearest(name, places)[:NUM_SHOWN])
        raise PlanError(f"{workload.model} has no activation {name!r}; the nearest are {close}.")
    index, i = places[name]
    block = chain.classes[chain.class_of[index]]
    decisions = [plan.decision(n) for n in chain.names[index]]
    decision = decisions[i]
    replayed = frozenset(
        block.call_of[j] for j, d in enumerate(decisions) if d is Decision.RECOMPUTE
    )
    call = block.call_of[i]
    dropped = make_option(block, replayed | {call})
    stored = make_option(block, replayed - {call})
    rate = machine.out_bytes_per_s if machine.host_bytes else machine.disk_write_bytes_per_s
    copy_ns = block.num_bytes[i] * 10**9 // rate if rate else 0
    is_last = index == len(chain.names) - 1
    freed_bytes = stored.num_bytes - dropped.num_bytes
    recompute_ns = dropped.replay_ns - stored.replay_ns
    return Explanation(
        name=name,
        decision=decision,
        num_bytes=block.num_bytes[i],
        may_run_again=block.calls[call].is_replayable,
        freed_bytes=freed_bytes,
        recompute_ns=recompute_ns,
        copy_ns=copy_ns,
        reason=_reason(block, i, decision, copy_ns, freed_bytes, recompute_ns, is_last=is_last),
    )


def _reason(
    block: BlockClass,
    i: int,
    decision: Decision | None,
    copy_ns: int,
    freed_bytes: int,
    recompute_ns: int,
    *,
    is_last: bool,
) -> str:
    is_cheap = recompute_ns * max(block.num_bytes[i], 1) < copy_ns * max(freed_bytes, 1)
    may_run_again = block.calls[block.call_of[i]].is_replayable
    match decision:
        case None:
            return "Neither backward nor what it recomputes needs it."
        case Decision.RECOMPUTE:
            if is_cheap:
                return "Recomputing costs less than the link's time for the same bytes."
            return "The link is busy with what is dearer to recompute, and waiting costs more."
        case Decision.HOST | Decision.DISK:
            if not may_run_again:
                return "It must not be run again, and it leaves while the forward goes on."
            if freed_bytes <= 0:
                return "Recomputing it would free nothing: what it is made from would stay."
            if is_cheap:
                return "The link has time to spare, so even what is cheap to recompute leaves."
            return "It is dear to recompute, and it leaves while the forward goes on."
        case Decision.KEEP:
            if block.num_bytes[i] < MIN_BYTES:
                return "It is too small for a copy to pay."
            if is_last:
                return "Backward starts with its block, so it would be wanted back at once."
            return "The budget has room for it, and its block comes late, so it is wanted soon."
