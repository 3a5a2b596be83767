"""Each finding: a step that has the fault, and one beside it that has not."""

from dataclasses import replace
from typing import Any

import pytest

from ebbtide.machine import Machine
from ebbtide.plan import Decision, Plan
from ebbtide.timeline import HostMemory, Lane, Span, Timeline
from ebbtide.trace.builder import DeviceTrace
from ebbtide.trace.findings import Code, Finding, find
from ebbtide.trace.overlap import analyse
from ebbtide.workload import Workload
from tests.two_blocks import MACHINE, two_blocks

MS = 1_000_000
MIB = 2**20


def span(lane: Lane, start: float, end: float, name: str = "x", **more: Any) -> Span:
    """A span with its times in ms."""
    return Span(lane=lane, name=name, start_ns=round(start * MS), end_ns=round(end * MS), **more)


def compute(start: float, end: float, name: str = "gemm", **more: Any) -> Span:
    return span(Lane.COMPUTE, start, end, name, **{"stream": "7", **more})


def copy_out(start: float, end: float, num_bytes: int = 64 * MIB, **more: Any) -> Span:
    facts: dict[str, Any] = {"stream": "20", "host_memory": HostMemory.PINNED, **more}
    return span(Lane.COPY_OUT, start, end, facts.pop("name", "h.0"), num_bytes=num_bytes, **facts)


def copy_in(start: float, end: float, num_bytes: int = 64 * MIB, **more: Any) -> Span:
    facts: dict[str, Any] = {"stream": "21", "host_memory": HostMemory.PINNED, **more}
    return span(Lane.COPY_IN, start, end, facts.pop("name", "h.0"), num_bytes=num_bytes, **facts)


def findings(
    *spans: Span,
    machine: Machine | None = None,
    plan: Plan | None = None,
    workload: Workload | None = None,
    peak_bytes: int = 0,
    reserved_bytes: int = 0,
) -> dict[Code, Finding]:
    timeline = Timeline(source="by hand", spans=spans, peak_bytes=peak_bytes)
    device = DeviceTrace(name="GPU 0", timeline=timeline, reserved_bytes=reserved_bytes)
    found = find(device, analyse(timeline, machine), machine=machine, plan=plan, workload=workload)
    return {finding.code: finding for finding in found}


GOOD = (
    compute(0, 50),
    copy_out(10, 12),
    compute(50, 100),
    copy_in(60, 62),
    span(Lane.HOST, 90, 101, "cudaStreamSynchronize"),
)
"""A step in which all is hidden; the CPU waits for its end."""


def test_a_good_step_has_no_findings() -> None:
    assert findings(*GOOD) == {}
    assert findings() == {}


def test_copies_that_the_cpu_waits_for_at_once() -> None:
    found = findings(
        compute(0, 50),
        copy_out(50, 60, queued_ns=10_000),
        span(Lane.HOST, 49.995, 60.005, "cudaStreamSynchronize"),
        compute(60, 100),
    )[Code.SYNCHRONOUS_COPIES]
    assert found.cost_ns == 10 * MS
    assert found.evidence == (
        "the CPU waited for 1 copies of 64.0 MiB as soon as it had asked for them "
        "(1 in cudaStreamSynchronize); compute was idle for 10.00 ms of that"
    )
    assert "non_blocking=True" in found.advice


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"wait": (40, 70)}, id="it waits for something else as well"),
        pytest.param({"num_bytes": 4}, id="it reads the loss"),
        pytest.param({"wait": (49.995, 60.005), "end": 60}, id="compute ran meanwhile"),
    ],
)
def test_waiting_that_is_no_synchronous_copy(changed: dict[str, Any]) -> None:
    start, end = changed.get("wait", (49.995, 60.005))
    found = findings(
        compute(0, changed.get("end", 50)),
        copy_out(50, 60, changed.get("num_bytes", 64 * MIB), queued_ns=10_000),
        span(Lane.HOST, start, end, "cudaStreamSynchronize"),
        compute(60, 100),
    )
    assert Code.SYNCHRONOUS_COPIES not in found


def test_pageable_memory() -> None:
    pageable = copy_out(50, 60, host_memory=HostMemory.PAGEABLE)
    found = findings(compute(0, 50), pageable, copy_in(70, 72), compute(60, 100))
    finding = found[Code.PAGEABLE_MEMORY]
    assert finding.evidence == (
        "64.0 MiB of 128.0 MiB were copied from or to pageable host memory, at 6.7 GB/s"
    )
    assert finding.cost_ns == 10 * MS


def test_a_loss_or_a_batch_in_pageable_memory_is_no_fault() -> None:
    small = copy_in(0, 0.1, 2 * MIB, host_memory=HostMemory.PAGEABLE)
    assert Code.PAGEABLE_MEMORY not in findings(*GOOD, small)


def test_copies_on_the_compute_stream() -> None:
    found = findings(compute(0, 50), copy_out(50, 60, stream="7"), compute(60, 100))
    finding = found[Code.COPIES_ON_COMPUTE_STREAM]
    assert finding.cost_ns == 10 * MS
    assert finding.evidence == (
        "1 copies of 64.0 MiB ran on stream 7, which also ran 90.00 ms of kernels: nothing on it "
        "runs beside them, and compute was idle for 10.00 ms"
    )


def test_copies_on_a_stream_of_their_own_or_small_ones_on_it() -> None:
    for copy in (copy_out(50, 60), copy_out(50, 60, 100, stream="7")):
        found = findings(compute(0, 50), copy, compute(60, 100))
        assert Code.COPIES_ON_COMPUTE_STREAM not in found


def test_the_first_fetch_of_backward_is_exposed() -> None:
    found = findings(
        compute(0, 50),
        copy_out(10, 30),
        copy_in(50, 58, name="h.11"),
        compute(58, 100),
        copy_in(60, 70, name="h.10"),
    )[Code.EXPOSED_FIRST_FETCH]
    assert found.cost_ns == 8 * MS
    assert found.evidence == (
        "the first fetches of backward ran while compute was idle, 8.00 ms in 1 steps (h.11): what "
        "was evicted last is wanted first"
    )


def test_later_fetches_or_inputs_that_are_exposed_are_another_matter() -> None:
    late = copy_in(50, 52), compute(50, 80), copy_in(80, 90), compute(90, 100)
    assert Code.EXPOSED_FIRST_FETCH not in findings(compute(0, 50), copy_out(10, 30), *late)
    # The batch is copied in before anything was copied out.
    inputs = copy_in(0, 10), compute(10, 100), copy_out(20, 30), copy_in(60, 70)
    assert Code.EXPOSED_FIRST_FETCH not in findings(*inputs)


def test_each_step_has_its_own_first_fetch() -> None:
    spans: list[Span] = []
    for at in (0, 100):
        spans += [
            span(Lane.STEP, at, at + 100, f"step {at}"),
            compute(at, at + 50),
            copy_out(at + 10, at + 30),
            copy_in(at + 50, at + 58, name="h.11"),
            compute(at + 58, at + 100),
        ]
    assert findings(*spans)[Code.EXPOSED_FIRST_FETCH].cost_ns == 16 * MS


# 64 MiB in 2 ms are 33.6 GB/s.
FAST = replace(
    MACHINE, out_bytes_per_s=80 * 10**9, in_bytes_per_s=40 * 10**9, both_bytes_per_s=90 * 10**9
)


def test_a_slow_link() -> None:
    found = findings(*GOOD, machine=FAST)
    assert list(found) == [Code.SLOW_LINK]
    assert found[Code.SLOW_LINK].evidence == (
        "copies out of 64.0 MiB ran at 33.6 GB/s, 42 % of what the link of small carries"
    )


def test_a_link_that_is_not_slow_not_known_or_busy_with_small_copies() -> None:
    assert findings(*GOOD, machine=replace(FAST, out_bytes_per_s=50 * 10**9)) == {}
    assert findings(*GOOD) == {}
    assert findings(compute(0, 100), copy_out(0, 2, MIB // 2), machine=FAST) == {}


def test_tiny_copies() -> None:
    tiny = [copy_out(50 + n / 10, 50 + n / 10 + 0.05, 4096) for n in range(100)]
    found = findings(compute(0, 50), *tiny, compute(60, 100))[Code.TINY_COPIES]
    assert found.evidence == (
        "100 copies have less than 256.0 KiB, 4.0 KiB each; they took 5.00 ms of 5.00 ms of copying"
    )
    assert found.cost_ns == 5 * MS


def test_few_or_hidden_tiny_copies_are_no_fault() -> None:
    tiny = [copy_out(50 + n / 10, 50 + n / 10 + 0.05, 4096) for n in range(100)]
    assert Code.TINY_COPIES not in findings(compute(0, 50), *tiny[:99], compute(60, 100))
    assert Code.TINY_COPIES not in findings(compute(0, 100), *tiny)


def a_plan(**decisions: Decision) -> Plan:
    names = {"a.x": Decision.KEEP, "a.h": Decision.HOST, "b.x": Decision.HOST, "b.h": Decision.HOST}
    named = {name.replace("_", "."): decision for name, decision in decisions.items()}
    return Plan(
        name="by hand",
        model="Model",
        fingerprint=two_blocks().fingerprint,
        decisions={**names, **named},
        host_bytes=140,
        disk_bytes=0,
        max_out_bytes_in_flight=200,
        max_in_bytes_in_flight=200,
    )


def test_activations_that_are_cheaper_to_recompute() -> None:
    # Of the two, b.h can be made again from b.x; b.x comes from outside the block.
    spans = (
        compute(0, 50),
        copy_in(50, 60, 80, name="b.h"),
        copy_in(60, 70, 80, name="b.x"),
        compute(70, 100),
    )
    found = findings(*spans, plan=a_plan(), workload=two_blocks())[Code.CHEAPER_TO_RECOMPUTE]
    # It takes 10 ns to make.
    assert found.cost_ns == 10 * MS - 10
    assert found.evidence == (
        "compute waited longer for the copies of 1 activations than making them again takes: "
        "b.h (10.00 ms)"
    )


def test_hidden_copies_and_inputs_that_are_not_there_are_no_reason_to_recompute() -> None:
    hidden = compute(0, 100), copy_in(50, 60, 80, name="b.h")
    assert Code.CHEAPER_TO_RECOMPUTE not in findings(*hidden, plan=a_plan(), workload=two_blocks())
    exposed = compute(0, 50), copy_in(50, 60, 80, name="b.h"), compute(60, 100)
    gone = a_plan(b_x=Decision.RECOMPUTE)
    assert Code.CHEAPER_TO_RECOMPUTE not in findings(*exposed, plan=gone, workload=two_blocks())
    assert Code.CHEAPER_TO_RECOMPUTE not in findings(*exposed)


def test_a_device_that_waits_for_the_cpu() -> None:
    found = findings(compute(0, 50), compute(60, 100, queued_ns=2 * MS))[Code.CPU_BOUND]
    assert found.cost_ns == 8 * MS
    assert found.evidence.startswith("compute was idle for 8.00 ms of 100.00 ms because the CPU ")


def test_a_cpu_that_is_ahead_or_waits_itself_is_no_fault() -> None:
    ahead = compute(0, 50), compute(60, 100, queued_ns=20 * MS)
    assert Code.CPU_BOUND not in findings(*ahead)
    waits = compute(0, 50), compute(60, 100, queued_ns=2 * MS)
    assert Code.CPU_BOUND not in findings(*waits, span(Lane.HOST, 50, 58, "cudaDeviceSynchronize"))


def steps(*more: Span) -> tuple[Span, ...]:
    marks = (span(Lane.STEP, at, at + 100, f"step {at}") for at in (0, 100))
    return (*marks, compute(0, 100), compute(110, 200), *more)


def test_memory_that_is_asked_of_the_driver_in_later_steps() -> None:
    calls = span(Lane.HOST, 100, 104, "cudaFree"), span(Lane.HOST, 104, 108, "cudaMalloc")
    found = findings(*steps(*calls))[Code.ALLOCATOR_RETRIES]
    assert found.evidence == (
        "after the first step memory was still asked of the driver and given back (1 cudaFree, "
        "1 cudaMalloc); the calls took 8.00 ms"
    )
    assert found.cost_ns == 8 * MS


def test_the_first_step_may_take_memory() -> None:
    calls = span(Lane.HOST, 10, 14, "cudaMalloc"), span(Lane.HOST, 150, 150.1, "cudaMalloc")
    assert Code.ALLOCATOR_RETRIES not in findings(*steps(*calls))


def test_fragmentation() -> None:
    found = findings(*GOOD, peak_bytes=35 * 2**30, reserved_bytes=48 * 2**30)
    assert list(found) == [Code.FRAGMENTATION]
    assert found[Code.FRAGMENTATION].evidence == (
        "the allocator held 48.0 GiB for a peak of 35.0 GiB in use"
    )
    assert "expandable_segments:True" in found[Code.FRAGMENTATION].advice


def test_an_allocator_that_holds_little_more_or_says_nothing() -> None:
    assert findings(*GOOD, peak_bytes=35 * 2**30, reserved_bytes=40 * 2**30) == {}
    assert findings(*GOOD, reserved_bytes=40 * 2**30) == {}


def test_a_plan_that_moved_nothing() -> None:
    found = findings(compute(0, 100), plan=a_plan(), workload=two_blocks())
    assert found[Code.NOTHING_MOVED].evidence == (
        "the plan by hand moves 140 B a step, and the trace shows 0 B of copies out in 1 steps"
    )


def test_a_plan_that_moved_or_has_nothing_to_move() -> None:
    assert findings(*GOOD, plan=a_plan(), workload=two_blocks()) == {}
    kept = replace(a_plan(), host_bytes=0)
    assert findings(compute(0, 100), plan=kept, workload=two_blocks()) == {}


def test_the_dearest_comes_first() -> None:
    found = findings(
        compute(0, 50),
        copy_out(50, 60, stream="7", host_memory=HostMemory.PAGEABLE),
        compute(80, 100, queued_ns=MS),
    )
    costs = [finding.cost_ns for finding in found.values()]
    assert costs == sorted(costs, reverse=True)
    assert next(iter(found)) is Code.CPU_BOUND
