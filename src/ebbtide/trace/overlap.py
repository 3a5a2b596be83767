"""What a timeline says about copies: how much of them lay under compute, and how much did not.

The definitions, with worked examples, are in `docs/overlap.md`. Everything is counted in whole
nanoseconds on merged intervals, so nothing is counted twice however many streams there are.
"""

import enum
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ebbtide.machine import Machine
from ebbtide.timeline import HostMemory, Lane, Span, Timeline
from ebbtide.trace.intervals import Intervals, Times, merge, whole

_Key = TypeVar("_Key", bound=Hashable)

ON_DEVICE = (Lane.COMPUTE, Lane.COPY_OUT, Lane.COPY_IN, Lane.COLLECTIVE)
"""The lanes that a profiler sees on a device."""

NUM_WINDOWS = 20
"""So many idle windows are kept, the longest."""

MIN_ALONE = 3
"""A kernel's median without a copy needs so many runs without one."""


@enum.unique
class Reason(enum.Enum):
    """What compute waited for while it was idle."""

    LAUNCH = "launch"
    """The CPU had not asked for the next kernel yet, and was in no call that waits."""
    COPY_IN = "copy-in"
    """A copy to the device ran."""
    COPY_OUT = "copy-out"
    """A copy to the host ran, and none to the device."""
    COLLECTIVE = "collective"
    """Communication between devices ran, and no copy to or from the host."""
    UNKNOWN = "unknown"
    """Nothing ran that the trace shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFigures:
    """One direction of the link."""

    num_copies: int
    num_bytes: int
    pinned_bytes: int
    """Of these, to or from page-locked host memory, as far as the trace says."""
    pageable_bytes: int
    """Of these, to or from pageable host memory, as far as the trace says."""
    busy_ns: int
    """At least one copy ran."""
    hidden_ns: int
    """A copy ran, and compute too."""
    exposed_ns: int
    """A copy ran, and compute was idle: `busy_ns - hidden_ns`."""
    beside_collectives_ns: int
    """A copy ran, and communication between devices too."""
    link_share: float | None
    """Bytes moved against what the machine's link carries in `busy_ns`; None: not known."""

    @property
    def gb_per_s(self) -> float:
        """10**9 bytes a second while busy; 0 where nothing was copied."""
        return self.num_bytes / self.busy_ns if self.busy_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleWindow:
    """Compute was idle between two kernels."""

    start_ns: int
    end_ns: int
    reason: Reason
    """What most of it was waited for."""
    waited_for: str
    """The copy or collective that ran longest in it, or else the next kernel; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A kernel's runs of one kind beside copies, against its runs of that kind without.

    One kind has the same name and launch, and no length is more than 1.5 times the next shorter.
    """

    name: str
    launch: str
    """Shapes of grid and block; empty: unknown."""
    num_beside: int
    """Runs with a copy beside them for at least half of their time."""
    num_alone: int
    """Runs without a copy at any moment."""
    median_alone_ns: int
    """Of the runs alone; of two middle ones the shorter."""
    beside_ns: int
    """All the runs beside copies took together."""

    @property
    def extra_ns(self) -> int:
        """What they took more than so many medians; negative if they took less."""
        return self.beside_ns - self.num_beside * self.median_alone_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedFigures:
    """All copies of one name in one direction."""

    name: str
    """The activation, or what the profiler calls the copy."""
    lane: Lane
    num_copies: int
    num_bytes: int
    busy_ns: int
    hidden_ns: int

    @property
    def exposed_ns(self) -> int:
        """Compute was idle meanwhile."""
        return self.busy_ns - self.hidden_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One marked step."""

    name: str
    start_ns: int
    end_ns: int
    compute_busy_ns: int
    out_bytes: int
    """Of copies that start in the step."""
    out_exposed_ns: int
    in_bytes: int
    """Of copies that start in the step."""
    in_exposed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """All figures of one device."""

    start_ns: int
    """Of the first span on the device."""
    end_ns: int
    """Of the last one."""
    compute_busy_ns: int
    idle_ns: int
    """Compute was idle between `start_ns` and `end_ns`."""
    collective_busy_ns: int
    collective_exposed_ns: int
    """Communication ran, and compute was idle."""
    copy_out: CopyFigures
    copy_in: CopyFigures
    idle_by_reason_ns: dict[Reason, int]
    """Each idle nanosecond has one reason: they add up to `idle_ns`."""
    windows: tuple[IdleWindow, ...]
    """The longest, longest first."""
    slowdowns: tuple[Slowdown, ...]
    """Kernels with runs of both kinds, those that lost most first."""
    moved: tuple[MovedFigures, ...]
    """By name and direction; those exposed longest first."""
    steps: tuple[StepFigures, ...]

    @property
    def compute_lost_ns(self) -> int:
        """What all kernels took more beside copies than alone."""
        return sum(slowdown.extra_ns for slowdown in self.slowdowns)


def analyse(timeline: Timeline, machine: Machine | None = None) -> Analysis:
    """Return all figures of a timeline, simulated or traced.

    Deterministic; O(n log n) in the number of spans.

    Args:
        timeline: One device; spans may overlap and come in any order.
        machine: Whose link the copies are held against; None: against none.
    """
    return _Analyser(timeline, machine).run()


def find_exposed(timeline: Timeline) -> dict[Lane, Intervals]:
    """Return when each lane of a device but compute was busy while compute was idle."""
    lanes = {lane: [s for s in timeline.spans if s.lane is lane] for lane in ON_DEVICE}
    busy = {lane: _columns(spans).merged() for lane, spans in lanes.items()}
    compute = busy.pop(Lane.COMPUTE)
    return {lane: times.subtract(compute) for lane, times in busy.items()}


def clip(timeline: Timeline, start_ns: int, end_ns: int) -> Timeline:
    """Return what ran in `[start_ns, end_ns)`, with times from `start_ns` on.

    Spans that cross a border are cut there. A copy's bytes count where it starts.
    """
    spans = [
        Span(
            lane=span.lane,
            name=span.name,
            start_ns=max(span.start_ns - start_ns, 0),
            end_ns=min(span.end_ns, end_ns) - start_ns,
            num_bytes=span.num_bytes if span.start_ns >= start_ns else 0,
            stream=span.stream,
            host_memory=span.host_memory,
            queued_ns=span.queued_ns if span.start_ns >= start_ns else 0,
            launch=span.launch,
        )
        for span in timeline.spans
        if span.start_ns < end_ns and max(span.end_ns, span.start_ns + 1) > start_ns
    ]
    return Timeline(source=timeline.source, spans=tuple(spans), peak_bytes=timeline.peak_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """The spans of one lane, in the order of their starts."""

    spans: Sequence[Span]
    starts_ns: Times
    ends_ns: Times
    num_bytes: Times

    def merged(self) -> Intervals:
        return merge(self.starts_ns, self.ends_ns)


def _columns(spans: list[Span]) -> _Columns:
    spans.sort(key=attrgetter("start_ns"))
    count = len(spans)
    return _Columns(
        spans,
        np.fromiter(map(attrgetter("start_ns"), spans), np.int64, count),
        np.fromiter(map(attrgetter("end_ns"), spans), np.int64, count),
        np.fromiter(map(attrgetter("num_bytes"), spans), np.int64, count),
    )


class _Analyser:
    def __init__(self, timeline: Timeline, machine: Machine | None) -> None:
        # A pass a lane: to hash an enum's member a million times would take longer.
        lanes = {
            lane: _columns([span for span in timeline.spans if span.lane is lane]) for lane in Lane
        }
        self._machine = machine
        self._lanes = lanes
        self._compute = lanes[Lane.COMPUTE].merged()
        self._out = lanes[Lane.COPY_OUT].merged()
        self._in = lanes[Lane.COPY_IN].merged()
        self._collective = lanes[Lane.COLLECTIVE].merged()
        there = [lanes[lane] for lane in ON_DEVICE if lanes[lane].spans]
        self._start_ns = min((int(lane.starts_ns[0]) for lane in there), default=0)
        self._end_ns = max((int(lane.ends_ns.max()) for lane in there), default=0)
        self._idle = whole(self._start_ns, self._end_ns).subtract(self._compute)

    def run(self) -> Analysis:
        reasons = self._idle_reasons()
        return Analysis(
            start_ns=self._start_ns,
            end_ns=self._end_ns,
            compute_busy_ns=self._compute.length_ns,
            idle_ns=self._idle.length_ns,
            collective_busy_ns=self._collective.length_ns,
            collective_exposed_ns=self._collective.subtract(self._compute).length_ns,
            copy_out=self._copy_figures(Lane.COPY_OUT, self._out, self._in),
            copy_in=self._copy_figures(Lane.COPY_IN, self._in, self._out),
            idle_by_reason_ns={reason: part.length_ns for reason, part in reasons.items()},
            windows=self._windows(reasons),
            slowdowns=self._slowdowns(),
            moved=self._moved(),
            steps=self._steps(),
        )

    def _copy_figures(self, lane: Lane, busy: Intervals, opposite: Intervals) -> CopyFigures:
        by_memory: Counter[HostMemory] = Counter()
        for span in self._lanes[lane].spans:
            by_memory[span.host_memory] += span.num_bytes
        busy_ns, hidden_ns = busy.length_ns, busy.intersect(self._compute).length_ns
        num_bytes = by_memory.total()
        share = None
        if self._machine is not None and busy_ns:
            out_rate, in_rate = self._machine.out_bytes_per_s, self._machine.in_bytes_per_s
            rate = out_rate if lane is Lane.COPY_OUT else in_rate
            both_ns = busy.intersect(opposite).length_ns
            # Twice the bytes in units of 10**-9: of the sum of both directions, half is ours.
            most = 2 * (busy_ns - both_ns) * rate + both_ns * self._machine.both_bytes_per_s
            share = 2 * num_bytes * 10**9 / most if most else None
        return CopyFigures(
            num_copies=len(self._lanes[lane].spans),
            num_bytes=num_bytes,
            pinned_bytes=by_memory[HostMemory.PINNED],
            pageable_bytes=by_memory[HostMemory.PAGEABLE],
            busy_ns=busy_ns,
            hidden_ns=hidden_ns,
            exposed_ns=busy_ns - hidden_ns,
            beside_collectives_ns=busy.intersect(self._collective).length_ns,
            link_share=share,
        )

    def _idle_reasons(self) -> dict[Reason, Intervals]:
        """Share the idle time out, each nanosecond to the first reason that holds."""
        waiting_cpu = self._lanes[Lane.HOST].merged()
        not_asked = self._not_asked_for().subtract(waiting_cpu)
        rest = self._idle
        reasons: dict[Reason, Intervals] = {}
        for reason, when in (
            (Reason.LAUNCH, not_asked),
            (Reason.COPY_IN, self._in),
            (Reason.COPY_OUT, self._out),
            (Reason.COLLECTIVE, self._collective),
        ):
            reasons[reason] = rest.intersect(when)
            rest = rest.subtract(when)
        reasons[Reason.UNKNOWN] = rest
        return reasons

    def _not_asked_for(self) -> Intervals:
        """Return the parts of idle windows before the CPU asked for the kernel that ends them."""
        compute = self._lanes[Lane.COMPUTE]
        if not compute.spans or not len(self._idle.starts_ns):
            return merge(np.empty(0, np.int64), np.empty(0, np.int64))
        next_at = np.searchsorted(compute.starts_ns, self._idle.ends_ns, side="left")
        has_next = next_at < len(compute.spans)
        starts, ends = self._idle.starts_ns[has_next], self._idle.ends_ns[has_next]
        # Kernels that start at once: the window ends as soon as the first one was asked for.
        queued = np.fromiter(
            (compute.spans[int(i)].queued_ns for i in next_at[has_next]), np.int64, len(starts)
        )
        asked = np.where(queued > 0, ends - queued, starts)
        return merge(starts, np.clip(asked, starts, ends))

    def _windows(self, reasons: dict[Reason, Intervals]) -> tuple[IdleWindow, ...]:
        idle = self._idle
        order = np.argsort(idle.starts_ns - idle.ends_ns, kind="stable")[:NUM_WINDOWS]
        windows: list[IdleWindow] = []
        for i in order:
            start, end = int(idle.starts_ns[i]), int(idle.ends_ns[i])
            parts = {reason: part.overlap_of(start, end) for reason, part in reasons.items()}
            reason = max(parts, key=lambda reason: parts[reason])
            windows.append(
                IdleWindow(
                    start_ns=start,
                    end_ns=end,
                    reason=reason,
                    waited_for=self._waited_for(reason, start, end),
                )
            )
        return tuple(windows)

    def _waited_for(self, reason: Reason, start: int, end: int) -> str:
        match reason:
            case Reason.COPY_IN:
                lane = self._lanes[Lane.COPY_IN]
            case Reason.COPY_OUT:
                lane = self._lanes[Lane.COPY_OUT]
            case Reason.COLLECTIVE:
                lane = self._lanes[Lane.COLLECTIVE]
            case Reason.LAUNCH | Reason.UNKNOWN:
                lane = self._lanes[Lane.COMPUTE]
                at = int(np.searchsorted(lane.starts_ns, end, side="left"))
                return lane.spans[at].name if at < len(lane.spans) else ""
        inside = np.minimum(lane.ends_ns, end) - np.maximum(lane.starts_ns, start)
        return lane.spans[int(np.argmax(inside))].name

    def _slowdowns(self) -> tuple[Slowdown, ...]:
        compute = self._lanes[Lane.COMPUTE]
        copies = self._lanes[Lane.COPY_OUT], self._lanes[Lane.COPY_IN]
        copying = merge(
            np.concatenate([lane.starts_ns for lane in copies]),
            np.concatenate([lane.ends_ns for lane in copies]),
        )
        took = compute.ends_ns - compute.starts_ns
        beside = copying.overlap_ns(compute.starts_ns, compute.ends_ns)
        is_beside = (2 * beside >= took) & (took > 0)
        launches, of_launch = _number((span.name, span.launch) for span in compute.spans)
        order = np.lexsort((took, of_launch))
        # Matrix products of all sizes may share a name and a grid: as many blocks as the device
        # runs at once. Their lengths lie apart, further than copies slow a kernel down.
        steps = took[order][1:] - took[order][:-1]
        is_other = (of_launch[order][1:] != of_launch[order][:-1]) | (2 * steps > took[order][:-1])
        borders = [0, *(np.flatnonzero(is_other) + 1).tolist(), len(order)]
        slowdowns: list[Slowdown] = []
        for start, end in pairwise(borders):
            # The shortest first.
            runs = order[start:end]
            alone = took[runs][beside[runs] == 0]
            slowed = took[runs][is_beside[runs]]
            if len(alone) >= MIN_ALONE and len(slowed):
                name, launch = launches[of_launch[runs[0]]]
                slowdowns.append(
                    Slowdown(
                        name=name,
                        launch=launch,
                        num_beside=len(slowed),
                        num_alone=len(alone),
                        median_alone_ns=int(alone[(len(alone) - 1) // 2]),
                        beside_ns=int(slowed.sum()),
                    )
                )
        return tuple(
            sorted(slowdowns, key=lambda s: (-s.extra_ns, s.name, s.launch, s.median_alone_ns))
        )

    def _moved(self) -> tuple[MovedFigures, ...]:
        moved: list[MovedFigures] = []
        for lane in (Lane.COPY_OUT, Lane.COPY_IN):
            columns = self._lanes[lane]
            names, of_name = _number(span.name for span in columns.spans)
            order = np.argsort(of_name, kind="stable")
            borders = np.searchsorted(of_name[order], np.arange(len(names) + 1))
            for number, name in enumerate(names):
                copies = order[borders[number] : borders[number + 1]]
                busy = merge(columns.starts_ns[copies], columns.ends_ns[copies])
                hidden = self._compute.overlap_ns(busy.starts_ns, busy.ends_ns)
                moved.append(
                    MovedFigures(
                        name=name,
                        lane=lane,
                        num_copies=len(copies),
                        num_bytes=int(columns.num_bytes[copies].sum()),
                        busy_ns=busy.length_ns,
                        hidden_ns=int(hidden.sum()),
                    )
                )
        return tuple(sorted(moved, key=lambda m: (-m.exposed_ns, m.name, m.lane.value)))

    def _steps(self) -> tuple[StepFigures, ...]:
        marks = self._lanes[Lane.STEP]
        exposed = {
            Lane.COPY_OUT: self._out.subtract(self._compute),
            Lane.COPY_IN: self._in.subtract(self._compute),
        }
        totals = {
            lane: np.concatenate((np.zeros(1, np.int64), np.cumsum(self._lanes[lane].num_bytes)))
            for lane in exposed
        }

        def num_bytes(lane: Lane, start_ns: int, end_ns: int) -> int:
            borders = np.searchsorted(self._lanes[lane].starts_ns, [start_ns, end_ns], side="left")
            return int(totals[lane][borders[1]] - totals[lane][borders[0]])

        return tuple(
            StepFigures(
                name=span.name,
                start_ns=span.start_ns,
                end_ns=span.end_ns,
                compute_busy_ns=self._compute.overlap_of(span.start_ns, span.end_ns),
                out_bytes=num_bytes(Lane.COPY_OUT, span.start_ns, span.end_ns),
                out_exposed_ns=exposed[Lane.COPY_OUT].overlap_of(span.start_ns, span.end_ns),
                in_bytes=num_bytes(Lane.COPY_IN, span.start_ns, span.end_ns),
                in_exposed_ns=exposed[Lane.COPY_IN].overlap_of(span.start_ns, span.end_ns),
            )
            for span in marks.spans
        )


def _number(keys: Iterable[_Key]) -> tuple[list[_Key], npt.NDArray[np.int64]]:
    """Return the different keys, in the order in which they come, and the number of each key."""
    numbers: dict[_Key, int] = {}
    of_key = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64)
    return list(numbers), of_key
