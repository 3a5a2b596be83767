"""What `Tide.report` says: predicted against measured, what moved, who holds the peak, advice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from ebbtide.check import check_plan
from ebbtide.machine import Machine
from ebbtide.memory.ledger import SanitizerStatistics, Statistics
from ebbtide.plan import Decision, Plan
from ebbtide.planner.advice import advise_on_allocator, advise_on_logits, advise_on_time
from ebbtide.torch.pace import Paced
from ebbtide.units import format_bytes
from ebbtide.workload import Workload

NUM_HOLDERS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What torch's allocator counted since the process started, or since its peaks were reset."""

    peak_bytes: int
    """Most that was in use at once."""
    reserved_bytes: int
    """Most that the allocator held."""
    num_retries: int
    """How often it gave its cache back to the driver and asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that a report is written from."""

    plan: Plan
    counts: Statistics
    workload: Workload | None
    """What was observed."""
    machine: Machine | None
    """What was measured; None without a budget."""
    paced: Paced | None
    """What steps took; None while none was timed."""
    memory: DeviceMemory | None
    """None where no allocator counts, as on the CPU."""


def read_memory(device: torch.device) -> DeviceMemory | None:
    """Return what the allocator of a GPU counted; None on the CPU."""
    if device.type != "cuda":
        return None
    counted = torch.cuda.memory_stats(device)
    return DeviceMemory(
        peak_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        num_retries=int(counted.get("num_alloc_retries", 0)),
    )


def write_report(outcome: Outcome) -> str:
    """Return lines for people, with line breaks between."""
    return "\n".join(
        [
            *_describe_plan(outcome),
            *_describe_prediction(outcome.plan),
            *_describe_measured(outcome),
            *_describe_counts(outcome.counts),
            *_describe_holders(outcome),
            *_describe_odd(outcome.counts),
            *(f"advice: {advice}" for advice in _advise(outcome)),
        ]
    )


def _describe_plan(outcome: Outcome) -> Iterator[str]:
    """Yield the count and the bytes of each decision, at the shape that was observed."""
    plan, workload = outcome.plan, outcome.workload
    sizes: dict[str, int] = {}
    if workload is not None:
        sizes = {a.name: a.num_bytes for block in workload.blocks for a in block.activations}
    decided: list[str] = []
    for decision in Decision:
        names = [name for name, made in plan.decisions.items() if made is decision]
        if names:
            num_bytes = sum(sizes.get(name, 0) for name in names)
            decided.append(f"{len(names)} {decision.value} ({format_bytes(num_bytes)})")
    yield f"plan {plan.name}: " + ", ".join(decided)


def _describe_prediction(plan: Plan) -> Iterator[str]:
    if not plan.budget_bytes:
        yield "predicted: nothing, as the plan was made without a budget; steps are not timed"
        return
    gap = plan.predicted_step_ns / max(plan.bound_step_ns, 1) - 1
    yield (
        f"predicted: forward and backward {_ms(plan.predicted_step_ns)}, at most {gap:.2%} over "
        f"the least possible, {_ms(plan.bound_step_ns)}; peak {format_bytes(plan.peak_bytes)} of "
        f"a budget of {format_bytes(plan.budget_bytes)}"
    )


def _describe_measured(outcome: Outcome) -> Iterator[str]:
    paced, memory = outcome.paced, outcome.memory
    if paced is not None:
        before = paced.plan.predicted_step_ns
        apart = f" ({paced.measured_ns / before - 1:+.1%})" if before else ""
        is_other = paced.plan.decisions != outcome.plan.decisions
        yield (
            f"measured: forward and backward {_ms(paced.measured_ns)} in {paced.num_steps} steps, "
            f"where {_ms(before)} were predicted before them{apart}"
            + (", under the plan before this one" if is_other else "")
        )
    elif outcome.plan.budget_bytes and not _keeps_all(outcome.plan):
        yield "measured: no step has been timed yet; the third one under a plan is the first"
    if memory is not None:
        yield (
            f"measured: peak {format_bytes(memory.peak_bytes)} allocated, "
            f"{format_bytes(memory.reserved_bytes)} reserved, since the process started or its "
            "peaks were reset"
        )


def _describe_counts(counts: Statistics) -> Iterator[str]:
    yield (
        f"moved out {format_bytes(counts.moved_out_bytes)} in {counts.num_evictions} copies, in "
        f"{format_bytes(counts.moved_in_bytes)} in {counts.num_fetches}; "
        f"{counts.num_resurrections} fetches avoided, "
        f"{counts.num_recomputed_ops} operators run again"
    )
    yield (
        f"peaks: host {format_bytes(counts.host.peak_held_bytes)}, "
        f"disk {format_bytes(counts.disk.peak_held_bytes)}, "
        f"in flight on the device {format_bytes(counts.peak_held_device_bytes)}"
    )
    if counts.stall_ns:
        yield f"compute waited {_ms(counts.stall_ns)} for copies"


def _describe_holders(outcome: Outcome) -> Iterator[str]:
    """Yield who holds the device at the predicted peak, as the oracle computes it."""
    if outcome.workload is None or outcome.machine is None or not outcome.workload.is_timed:
        return
    checked = check_plan(outcome.plan, outcome.workload, outcome.machine)
    if not checked.holders:
        return
    shown = ", ".join(
        f"{name} {format_bytes(num_bytes)}" for name, num_bytes in checked.holders[:NUM_HOLDERS]
    )
    left_bytes = sum(num_bytes for _, num_bytes in checked.holders[NUM_HOLDERS:])
    rest = f", others {format_bytes(left_bytes)}" if left_bytes else ""
    yield (
        f"predicted peak of {format_bytes(checked.peak_bytes)}, at the shape that was measured: "
        f"{checked.peak_moment}, held by {shown}{rest}"
    )


def _describe_odd(counts: Statistics) -> Iterator[str]:
    for why, num in counts.num_kept_not_understood:
        yield f"kept on the device: {num} ({why})"
    if counts.sanitizer is not None:
        yield from _describe_sanitizer(counts.sanitizer)


def _describe_sanitizer(counts: SanitizerStatistics) -> Iterator[str]:
    yield (
        f"sanitizer, {counts.num_steps} steps: {counts.num_tensors} saved tensors and "
        f"{counts.num_copies} fetches compared ({format_bytes(counts.compared_bytes)}), no "
        f"difference; {format_bytes(counts.poisoned_bytes)} poisoned"
    )
    yield (
        f"it took {counts.check_ns / 1e6:.0f} ms of the host's time; {counts.num_delays} copies "
        f"were held back, for {counts.delay_ns / 1e6:.0f} ms in all or until they were wanted"
    )


def _advise(outcome: Outcome) -> Iterator[str]:
    plan, workload, memory = outcome.plan, outcome.workload, outcome.memory
    outside = None if workload is None else workload.outside
    if plan.budget_bytes and outside is not None:
        yield from _if_any(advise_on_logits(outside, plan.peak_bytes))
    if outcome.paced is not None:
        yield from _if_any(
            advise_on_time(outcome.paced.plan.predicted_step_ns, outcome.paced.measured_ns)
        )
    if memory is not None:
        yield from _if_any(
            advise_on_allocator(memory.peak_bytes, memory.reserved_bytes, memory.num_retries)
        )
    planned_bytes = plan.host_bytes + plan.disk_bytes
    if planned_bytes and not outcome.counts.num_evictions:
        yield (
            f"the plan moves {format_bytes(planned_bytes)} a step, and nothing has moved since "
            "the statistics were reset: train a step under it"
        )


def _if_any(advice: str | None) -> Iterator[str]:
    if advice is not None:
        yield advice


def _keeps_all(plan: Plan) -> bool:
    return all(decision is Decision.KEEP for decision in plan.decisions.values())


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f} ms"
