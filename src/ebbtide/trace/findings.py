"""What is wrong with a step, by its trace: each finding has evidence and says what to do.

Each rule is one function, and has a threshold below which it says nothing: noise is no finding.
`docs/overlap.md` lists them.
"""

import enum
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Final

import numpy as np

from ebbtide.machine import Machine
from ebbtide.plan import MOVED, Decision, Plan
from ebbtide.planner.advice import EXPANDABLE, is_fragmented
from ebbtide.timeline import HostMemory, Lane, Span, Timeline
from ebbtide.trace.builder import DeviceTrace
from ebbtide.trace.intervals import Intervals, merge
from ebbtide.trace.names import MEMORY_CALLS, WAITING_CALLS
from ebbtide.trace.overlap import Analysis, CopyFigures, Reason
from ebbtide.units import format_bytes
from ebbtide.workload import Workload

MIN_FRACTION: Final = 0.01
"""Of the recorded time: what costs less is left alone. Timings vary by as much."""
LAUNCH_FRACTION: Final = 0.05
"""Of the recorded time that compute may wait for the CPU."""
LINK_FRACTION: Final = 0.6
"""Of the link's bandwidth. Pinned copies of 1 MiB reach 0.9 of it (DESIGN.md, section 7)."""
LARGE_BYTES: Final = 1 << 20
"""A smaller copy is no activation's worth moving."""
TINY_BYTES: Final = 256 << 10
"""Below this a copy spends more time on starting than on bytes."""
NUM_TINY: Final = 100
PAGEABLE_FRACTION: Final = 0.05
"""Of all bytes: losses and inputs come from pageable memory in any program."""
SYNC_SLACK_NS: Final = 100_000
"""A call that waits for one copy starts and ends with it, but for this."""
NUM_SHOWN: Final = 3
SLICE_KERNELS: Final = ("dynamic_slice", "dynamic_update_slice")
"""In names of XLA's kernels."""
MIN_SLICE_NS: Final = 100_000
"""Slices within the device's memory take less, but for very large ones."""

_STORED: Final = MOVED | {Decision.KEEP}


@enum.unique
class Code(enum.Enum):
    """Which rule found it."""

    SYNCHRONOUS_COPIES = "synchronous-copies"
    PAGEABLE_MEMORY = "pageable-memory"
    COPIES_ON_COMPUTE_STREAM = "copies-on-compute-stream"
    COPIES_BY_KERNELS = "copies-by-kernels"
    EXPOSED_FIRST_FETCH = "exposed-first-fetch"
    SLOW_LINK = "slow-link"
    TINY_COPIES = "tiny-copies"
    CHEAPER_TO_RECOMPUTE = "cheaper-to-recompute"
    CPU_BOUND = "cpu-bound"
    ALLOCATOR_RETRIES = "allocator-retries"
    FRAGMENTATION = "fragmentation"
    NOTHING_MOVED = "nothing-moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to change."""

    code: Code
    device: str
    evidence: str
    """What the trace shows, with numbers."""
    advice: str
    """What to do."""
    cost_ns: int
    """Time in the trace that it explains; 0: none that can be told."""


def find(
    device: DeviceTrace,
    analysis: Analysis,
    *,
    machine: Machine | None = None,
    plan: Plan | None = None,
    workload: Workload | None = None,
) -> tuple[Finding, ...]:
    """Return what is wrong on one device, the dearest first.

    Args:
        device: As read.
        analysis: Of its timeline.
        machine: Whose link is held against the copies; None: they are held against none.
        plan: That the program ran under; None: unknown.
        workload: That the plan is for; None: what recomputing costs is unknown.
    """
    seen = _Seen(device, analysis, machine, plan, workload)
    found = [finding for rule in _RULES for finding in rule(seen)]
    return tuple(sorted(found, key=lambda finding: (-finding.cost_ns, finding.code.value)))


class _Seen:
    """What the rules look at."""

    def __init__(
        self,
        device: DeviceTrace,
        analysis: Analysis,
        machine: Machine | None,
        plan: Plan | None,
        workload: Workload | None,
    ) -> None:
        self.device = device
        self.analysis = analysis
        self.machine = machine
        self.plan = plan
        self.workload = workload
        self.whole_ns = max(analysis.end_ns - analysis.start_ns, 1)
        self.num_steps = max(len(analysis.steps), 1)

    @property
    def timeline(self) -> Timeline:
        return self.device.timeline

    @cached_property
    def copies(self) -> list[Span]:
        copies = [
            s for s in self.timeline.spans if s.lane is Lane.COPY_OUT or s.lane is Lane.COPY_IN
        ]
        return sorted(copies, key=attrgetter("start_ns"))

    @cached_property
    def compute(self) -> Intervals:
        return _merged([s for s in self.timeline.spans if s.lane is Lane.COMPUTE])

    @cached_property
    def host(self) -> list[Span]:
        return [s for s in self.timeline.spans if s.lane is Lane.HOST]

    def exposed_ns(self, spans: list[Span]) -> int:
        """Time for which one of the spans ran and compute was idle."""
        parts = _merged(spans)
        hidden = self.compute.overlap_ns(parts.starts_ns, parts.ends_ns)
        return parts.length_ns - int(hidden.sum())

    def finding(self, code: Code, evidence: str, advice: str, cost_ns: int = 0) -> Finding:
        return Finding(
            code=code,
            device=self.device.name,
            evidence=evidence,
            advice=advice,
            cost_ns=cost_ns,
        )


def _merged(spans: list[Span]) -> Intervals:
    """Return the nanoseconds that any of the spans has."""
    return merge(
        np.array([span.start_ns for span in spans], np.int64),
        np.array([span.end_ns for span in spans], np.int64),
    )


def _synchronous_copies(seen: _Seen) -> list[Finding]:
    waits = sorted(
        (s for s in seen.host if s.name in WAITING_CALLS), key=lambda span: span.start_ns
    )
    starts = np.array([wait.start_ns for wait in waits], np.int64)
    waited: list[Span] = []
    calls: Counter[str] = Counter()
    for copy in seen.copies:
        if copy.num_bytes < TINY_BYTES:
            continue  # the loss, read by the CPU
        asked = copy.start_ns - copy.queued_ns
        at = int(np.searchsorted(starts, asked, side="left"))
        if at < len(waits):
            wait = waits[at]
            is_at_once = wait.start_ns - asked <= SYNC_SLACK_NS
            if is_at_once and abs(wait.end_ns - copy.end_ns) <= SYNC_SLACK_NS:
                waited.append(copy)
                calls[wait.name] += 1
    cost_ns = seen.exposed_ns(waited)
    if cost_ns < MIN_FRACTION * seen.whole_ns:
        return []
    named = ", ".join(f"{count} in {name}" for name, count in calls.most_common(NUM_SHOWN))
    return [
        seen.finding(
            Code.SYNCHRONOUS_COPIES,
            f"the CPU waited for {len(waited)} copies of {format_bytes(_bytes(waited))} as soon as "
            f"it had asked for them ({named}); compute was idle for {_ms(cost_ns)} of that",
            "Copy with non_blocking=True from or to pinned memory, on a stream of its own, and "
            "wait for an event where the copy is needed; `ebbtide.torch.attach` does so.",
            cost_ns,
        )
    ]


def _pageable_memory(seen: _Seen) -> list[Finding]:
    pageable = [s for s in seen.copies if s.host_memory is HostMemory.PAGEABLE]
    num_bytes, all_bytes = _bytes(pageable), _bytes(seen.copies)
    if num_bytes < LARGE_BYTES or num_bytes < PAGEABLE_FRACTION * all_bytes:
        return []
    busy_ns = _merged(pageable).length_ns
    rate = f", at {num_bytes / busy_ns:.1f} GB/s" if busy_ns else ""
    return [
        seen.finding(
            Code.PAGEABLE_MEMORY,
            f"{format_bytes(num_bytes)} of {format_bytes(all_bytes)} were copied from or to "
            f"pageable host memory{rate}",
            "Use pinned host memory: save_on_cpu(pin_memory=True), DataLoader(pin_memory=True), or "
            "`ebbtide.torch.attach`, which pins all that it needs once. Pageable copies go through "
            "a small buffer of the driver and block the CPU.",
            seen.exposed_ns(pageable),
        )
    ]


def _copies_on_compute_stream(seen: _Seen) -> list[Finding]:
    on_stream: Counter[str] = Counter()
    for span in seen.timeline.spans:
        if span.lane is Lane.COMPUTE and span.stream:
            on_stream[span.stream] += span.end_ns - span.start_ns
    if not on_stream:
        return []
    stream, compute_ns = on_stream.most_common(1)[0]
    there = [s for s in seen.copies if s.stream == stream and s.num_bytes >= LARGE_BYTES]
    cost_ns = seen.exposed_ns(there)
    if cost_ns < MIN_FRACTION * seen.whole_ns:
        return []
    return [
        seen.finding(
            Code.COPIES_ON_COMPUTE_STREAM,
            f"{len(there)} copies of {format_bytes(_bytes(there))} ran on stream {stream}, which "
            f"also ran {_ms(compute_ns)} of kernels: nothing on it runs beside them, and compute "
            f"was idle for {_ms(cost_ns)}",
            "Copy on a stream of its own. In JAX, turn command buffers off "
            "(--xla_gpu_enable_command_buffer=) and the latency-hiding scheduler on.",
            cost_ns,
        )
    ]


def _copies_by_kernels(seen: _Seen) -> list[Finding]:
    """XLA moves some slices of a stack in host memory by kernels, which write or read it there."""
    streams = {s.stream for s in seen.copies if s.num_bytes >= LARGE_BYTES}
    kernels = [
        s
        for s in seen.timeline.spans
        if s.lane is Lane.COMPUTE
        and s.stream in streams
        and any(word in s.name for word in SLICE_KERNELS)
        and s.end_ns - s.start_ns >= MIN_SLICE_NS
    ]
    cost_ns = _merged(kernels).length_ns
    if cost_ns < MIN_FRACTION * seen.whole_ns:
        return []
    names = Counter(s.name for s in kernels)
    named = ", ".join(name for name, _ in names.most_common(NUM_SHOWN))
    return [
        seen.finding(
            Code.COPIES_BY_KERNELS,
            f"{len(kernels)} kernels that move slices ran {_ms(cost_ns)} on streams that copy "
            f"({named}): over the link, but counted as compute, and without their bytes",
            "XLA takes the first or last pass of a loop out of it and moves its slices so. More "
            "layers in the loop make it a smaller share; what is shown as hidden under these "
            "kernels is exposed.",
            cost_ns,
        )
    ]


def _exposed_first_fetch(seen: _Seen) -> list[Finding]:
    steps = seen.analysis.steps
    windows = [(s.start_ns, s.end_ns) for s in steps] or [
        (seen.analysis.start_ns, seen.analysis.end_ns)
    ]
    cost_ns = 0
    names: Counter[str] = Counter()
    for start, end in windows:
        within = (
            bisect_left(seen.copies, start, key=attrgetter("start_ns")),
            bisect_left(seen.copies, end, key=attrgetter("start_ns")),
        )
        large = [s for s in seen.copies[slice(*within)] if s.num_bytes >= LARGE_BYTES]
        first_out = next((s for s in large if s.lane is Lane.COPY_OUT), None)
        if first_out is None:
            continue
        fetches = [s for s in large if s.lane is Lane.COPY_IN and s.start_ns > first_out.start_ns]
        leading: list[Span] = []
        for fetch in fetches:
            if not seen.exposed_ns([fetch]):
                break
            leading.append(fetch)
        leading_ns = seen.exposed_ns(leading)
        if leading and 2 * leading_ns >= seen.exposed_ns(fetches):
            cost_ns += leading_ns
            names.update(fetch.name for fetch in leading)
    if cost_ns < MIN_FRACTION * seen.whole_ns:
        return []
    named = ", ".join(name for name, _ in names.most_common(NUM_SHOWN))
    return [
        seen.finding(
            Code.EXPOSED_FIRST_FETCH,
            f"the first fetches of backward ran while compute was idle, {_ms(cost_ns)} in "
            f"{len(windows)} steps ({named}): what was evicted last is wanted first",
            "Keep the activations of the last blocks on the device. A budget's plan does so: "
            "attach(model, budget=...); by hand, name fewer blocks.",
            cost_ns,
        )
    ]


def _slow_link(seen: _Seen) -> list[Finding]:
    found: list[Finding] = []
    for word, figures in (("out", seen.analysis.copy_out), ("in", seen.analysis.copy_in)):
        share = figures.link_share
        if share is None or share >= LINK_FRACTION or not _is_of_large_copies(figures):
            continue
        assert seen.machine is not None, "bug in ebbtide: a share of no machine's link"
        found.append(
            seen.finding(
                Code.SLOW_LINK,
                f"copies {word} of {format_bytes(figures.num_bytes)} ran at "
                f"{figures.gb_per_s:.1f} GB/s, {100 * share:.0f} % of what the link of "
                f"{seen.machine.name} carries",
                "Look whether the pinned memory lies on the GPU's own NUMA node, whether other "
                "GPUs copy over the same uplink at that time, and at which PCIe generation and "
                "width the GPU runs (nvidia-smi -q -d PCIE).",
                round(figures.exposed_ns * (1 - share)),
            )
        )
    return found


def _is_of_large_copies(figures: CopyFigures) -> bool:
    return figures.num_bytes >= figures.num_copies * LARGE_BYTES


def _tiny_copies(seen: _Seen) -> list[Finding]:
    tiny = [s for s in seen.copies if 0 < s.num_bytes < TINY_BYTES]
    tiny_ns = sum(s.end_ns - s.start_ns for s in tiny)
    all_ns = sum(s.end_ns - s.start_ns for s in seen.copies)
    cost_ns = seen.exposed_ns(tiny)
    if len(tiny) < NUM_TINY or 5 * tiny_ns < all_ns or cost_ns < MIN_FRACTION * seen.whole_ns:
        return []
    return [
        seen.finding(
            Code.TINY_COPIES,
            f"{len(tiny)} copies have less than {format_bytes(TINY_BYTES)}, "
            f"{format_bytes(_bytes(tiny) // len(tiny))} each; they took {_ms(tiny_ns)} of "
            f"{_ms(all_ns)} of copying",
            "Do not move small activations: attach(min_bytes=...). Where the program copies them "
            "itself, gather them into one buffer first.",
            cost_ns,
        )
    ]


def _cheaper_to_recompute(seen: _Seen) -> list[Finding]:
    plan, workload = seen.plan, seen.workload
    if plan is None or workload is None:
        return []
    activations = {a.name: a for block in workload.blocks for a in block.activations}
    exposed: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for moved in seen.analysis.moved:
        exposed[moved.name] += moved.exposed_ns
        times[moved.name] = max(times[moved.name], moved.num_copies)
    gains: Counter[str] = Counter()
    for name, exposed_ns in exposed.items():
        activation = activations.get(name)
        if activation is None or not activation.is_replayable or not activation.make_ns:
            continue
        # Only what one call makes again: its inputs must be there.
        if any(plan.decision(needed) not in _STORED for needed in activation.inputs):
            continue
        gain_ns = exposed_ns - times[name] * activation.make_ns
        if gain_ns > 0:
            gains[name] = gain_ns
    cost_ns = gains.total()
    if cost_ns < MIN_FRACTION * seen.whole_ns:
        return []
    named = ", ".join(f"{name} ({_ms(ns)})" for name, ns in gains.most_common(NUM_SHOWN))
    return [
        seen.finding(
            Code.CHEAPER_TO_RECOMPUTE,
            f"compute waited longer for the copies of {len(gains)} activations than making them "
            f"again takes: {named}",
            "Recompute them: decide={'PATTERN': 'RECOMPUTE'}, or plan again with this machine's "
            "measured bandwidth.",
            cost_ns,
        )
    ]


def _cpu_bound(seen: _Seen) -> list[Finding]:
    cost_ns = seen.analysis.idle_by_reason_ns[Reason.LAUNCH]
    if cost_ns < LAUNCH_FRACTION * seen.whole_ns:
        return []
    return [
        seen.finding(
            Code.CPU_BOUND,
            f"compute was idle for {_ms(cost_ns)} of {_ms(seen.whole_ns)} because the CPU had not "
            "asked for the next kernel yet, and waited for nothing itself",
            "Give the GPU more work a launch (a larger batch or longer context), compile the "
            "blocks, or leave more of them alone: recording costs CPU time. Profile without "
            "with_stack and record_shapes, which slow the CPU down.",
            cost_ns,
        )
    ]


def _allocator_retries(seen: _Seen) -> list[Finding]:
    steps = seen.analysis.steps
    # In the first step all memory is new.
    since = steps[1].start_ns if len(steps) > 1 else None
    if since is None:
        return []
    calls = [s for s in seen.host if s.name in MEMORY_CALLS and s.start_ns >= since]
    blocked_ns = _merged(calls).length_ns
    counts = Counter(call.name for call in calls)
    if not calls or blocked_ns < MIN_FRACTION * (seen.analysis.end_ns - since):
        return []
    named = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return [
        seen.finding(
            Code.ALLOCATOR_RETRIES,
            f"after the first step memory was still asked of the driver and given back ({named}); "
            f"the calls took {_ms(blocked_ns)}",
            f"{EXPANDABLE}, and keep some memory free: "
            "torch.cuda.memory_stats()['num_alloc_retries'] should not grow. Pinned memory is best "
            "taken before training.",
            _idle_ns(seen, calls),
        )
    ]


def _idle_ns(seen: _Seen, calls: list[Span]) -> int:
    """Return for how long compute was idle during the calls."""
    idle = _merged(calls).subtract(seen.compute)
    return idle.overlap_of(seen.analysis.start_ns, seen.analysis.end_ns)


def _fragmentation(seen: _Seen) -> list[Finding]:
    used, held = seen.timeline.peak_bytes, seen.device.reserved_bytes
    if not is_fragmented(used, held):
        return []
    return [
        seen.finding(
            Code.FRAGMENTATION,
            f"the allocator held {format_bytes(held)} for a peak of {format_bytes(used)} in use",
            f"{EXPANDABLE}; the rest is lost to gaps between tensors that came and went.",
        )
    ]


def _nothing_moved(seen: _Seen) -> list[Finding]:
    if seen.plan is None:
        return []
    planned_bytes = (seen.plan.host_bytes + seen.plan.disk_bytes) * seen.num_steps
    moved_bytes = seen.analysis.copy_out.num_bytes
    if not planned_bytes or moved_bytes >= MIN_FRACTION * planned_bytes:
        return []
    return [
        seen.finding(
            Code.NOTHING_MOVED,
            f"the plan {seen.plan.name} moves {format_bytes(planned_bytes // seen.num_steps)} a "
            f"step, and the trace shows {format_bytes(moved_bytes)} of copies out in "
            f"{seen.num_steps} steps",
            "Record steps that run under the plan: the first ones only measure. Look whether the "
            "plan was attached to the model that was trained.",
        )
    ]


_RULES: Final[tuple[Callable[[_Seen], list[Finding]], ...]] = (
    _synchronous_copies,
    _pageable_memory,
    _copies_on_compute_stream,
    _copies_by_kernels,
    _exposed_first_fetch,
    _slow_link,
    _tiny_copies,
    _cheaper_to_recompute,
    _cpu_bound,
    _allocator_retries,
    _fragmentation,
    _nothing_moved,
)


def _bytes(spans: list[Span]) -> int:
    return sum(span.num_bytes for span in spans)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f} ms"
