"""Collect what a profiler recorded, in any order, and make one Timeline a device from it.

All readers use it, so that lanes, launches, steps and names of activations are found by one
piece of code, whatever the file was.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ebbtide.naming import shorten
from ebbtide.timeline import HostMemory, Lane, Span, Timeline
from ebbtide.trace.intervals import Times
from ebbtide.trace.names import MEMORY_CALLS, WAITING_CALLS, activation_of, plain_call, step_of

_FAR = 1 << 61
"""No clock shows so many nanoseconds, 73 years, and no copy has as many bytes."""

MOST_NOTES = 40
"""A file with more faults than that is told about by their number."""

NUM_NAMED = 5
"""So many unknown categories a note lists."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemorySeries:
    """What the framework's allocator held, at the moments that it changed.

    All arrays are as long; the times are sorted and are the CPU's.
    """

    times_ns: Times
    """On the timeline's clock; what came before its first moment is in the first entry."""
    allocated_bytes: Times
    reserved_bytes: Times


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTrace:
    """What was recorded of one device."""

    name: str
    """`GPU 0`, with the process where there are several."""
    timeline: Timeline
    """From the first thing on any device of the file on."""
    reserved_bytes: int = 0
    """Most memory that the framework's allocator held; 0: the trace does not say."""
    memory: MemorySeries | None = None
    """None: the trace does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A profiler's file, as far as it could be read."""

    file: str
    kind: str
    """What wrote it, for people: `PyTorch profiler`, `Nsight Systems`, ..."""
    num_events: int
    """All that the file has, not only what is on the timelines."""
    devices: tuple[DeviceTrace, ...]
    """In the order of their names; empty if the file shows no device at work."""
    notes: tuple[str, ...]
    """What was missing, cut or left out, and what to do about it."""


class Work(NamedTuple):
    """Something that ran on a device. A tuple, as there are millions."""

    process: int
    device: int
    lane: Lane
    name: str
    start_ns: int
    end_ns: int
    num_bytes: int = 0
    stream: str = ""
    host_memory: HostMemory = HostMemory.UNKNOWN
    correlation: int = -1
    """Of the call that asked for it; -1: unknown."""
    launch: str = ""
    """Of a kernel, as `name_launch` gives it."""


@dataclass(frozen=True, slots=True)
class _Range:
    start_ns: int
    end_ns: int
    name: str


_Launch = tuple[int, object]
"""When a call was made, and by which thread."""


@dataclass(slots=True, kw_only=True)
class TraceBuilder:
    """Takes what readers find; `build` makes the trace. Used once."""

    file: str
    kind: str
    num_events: int = 0
    _work: list[Work] = field(default_factory=list[Work])
    _launches: dict[int, dict[int, _Launch]] = field(
        default_factory=lambda: defaultdict[int, dict[int, _Launch]](dict)
    )
    _host: dict[int, list[Span]] = field(default_factory=lambda: defaultdict[int, list[Span]](list))
    _steps: dict[int, list[_Range]] = field(
        default_factory=lambda: defaultdict[int, list[_Range]](list)
    )
    _ours: dict[tuple[int, object], list[_Range]] = field(
        default_factory=lambda: defaultdict[tuple[int, object], list[_Range]](list)
    )
    _peaks: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    _reserved: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    _moments: dict[tuple[int, int], list[tuple[int, int, int]]] = field(
        default_factory=lambda: defaultdict[tuple[int, int], list[tuple[int, int, int]]](list)
    )
    """Time, bytes allocated, bytes reserved."""
    _unknown: Counter[str] = field(default_factory=Counter[str])
    _num_backward: int = 0
    _notes: list[str] = field(default_factory=list[str])
    _num_more_notes: int = 0

    def add_work(self, work: Work) -> None:
        """Add what ran on a device; what ends before it starts is counted and left out."""
        if not -_FAR < work.start_ns <= work.end_ns < _FAR:
            self._num_backward += 1
        elif work.num_bytes >= _FAR:
            self.note(f"a copy is said to have {work.num_bytes} bytes; it was left out")
        else:
            self._work.append(work)

    def add_call(
        self, process: int, thread: object, name: str, start_ns: int, end_ns: int, correlation: int
    ) -> None:
        """Add a call of the CUDA runtime or driver."""
        if not -_FAR < start_ns <= end_ns < _FAR:
            self._num_backward += 1
            return
        if correlation >= 0:
            # A library's call and the driver's inside it share a number: the outer one asks.
            launch = start_ns, thread
            launches = self._launches[process]
            if launches.setdefault(correlation, launch)[0] > start_ns:
                launches[correlation] = launch
        call = plain_call(name)
        if call in WAITING_CALLS or call in MEMORY_CALLS:
            self._host[process].append(
                Span(lane=Lane.HOST, name=call, start_ns=max(start_ns, 0), end_ns=max(end_ns, 0),
                     stream=str(thread))
            )  # fmt: skip

    def add_annotation(
        self, process: int, thread: object, name: str, start_ns: int, end_ns: int
    ) -> None:
        """Add a range that the program marked; steps and ebbtide's own are kept."""
        if not -_FAR < start_ns <= end_ns < _FAR:
            self._num_backward += 1
            return
        activation = activation_of(name)
        if activation is not None:
            self._ours[process, thread].append(_Range(start_ns, end_ns, activation))
        elif step_of(name) is not None:
            self._steps[process].append(_Range(start_ns, end_ns, name))

    def add_memory(
        self, process: int, device: int, allocated: int, reserved: int, time_ns: int | None
    ) -> None:
        """Add a moment's bytes of the framework's allocator; None: nobody knows when."""
        if not (0 <= allocated < _FAR and 0 <= reserved < _FAR):
            self.note("the allocator is said to hold impossible numbers of bytes; left out")
            return
        key = process, device
        if time_ns is not None and -_FAR < time_ns < _FAR:
            self._moments[key].append((time_ns, allocated, reserved))
        self._peaks[key] = max(self._peaks[key], allocated)
        self._reserved[key] = max(self._reserved[key], reserved)

    def add_unknown(self, category: str) -> None:
        """Count an event of a kind that the reader does not know."""
        self._unknown[category] += 1

    def note(self, text: str) -> None:
        """Say something about the file; the same only once, and no more than `MOST_NOTES`."""
        if text in self._notes:
            return
        if len(self._notes) < MOST_NOTES:
            self._notes.append(text)
        else:
            self._num_more_notes += 1

    def build(self) -> Trace:
        """Return the trace; times start with the first thing on any device or step."""
        self._work.sort(key=attrgetter("start_ns"))
        for ranges in self._ours.values():
            ranges.sort(key=lambda r: r.start_ns)
        by_device: dict[tuple[int, int], list[Work]] = defaultdict(list)
        for work in self._work:
            by_device[work.process, work.device].append(work)
        launches = {
            (process, device): [self._launches[process].get(work.correlation) for work in works]
            for (process, device), works in by_device.items()
        }
        steps = {
            key: self._steps_on(key[0], works, launches[key]) for key, works in by_device.items()
        }
        starts = [works[0].start_ns for works in by_device.values()]
        starts += [ranges[0].start_ns for ranges in steps.values() if ranges]
        zero = min(starts, default=0)
        processes = {process for process, _ in by_device}
        devices: list[DeviceTrace] = []
        for key in sorted(by_device):
            process, device = key
            name = f"GPU {device}" + (f" of process {process}" if len(processes) > 1 else "")
            spans = self._spans(by_device[key], launches[key], steps[key], zero)
            devices.append(
                DeviceTrace(
                    name=name,
                    timeline=Timeline(
                        source=f"{self.kind}: {name}", spans=spans, peak_bytes=self._peaks[key]
                    ),
                    reserved_bytes=self._reserved[key],
                    memory=self._memory(key, zero),
                )
            )
        return Trace(
            file=self.file,
            kind=self.kind,
            num_events=self.num_events,
            devices=tuple(devices),
            notes=(*self._notes, *self._closing_notes()),
        )

    def _memory(self, key: tuple[int, int], zero: int) -> MemorySeries | None:
        if key not in self._moments:
            return None
        moments = np.array(self._moments[key], np.int64)
        moments = moments[np.argsort(moments[:, 0], kind="stable")]
        times = moments[:, 0] - zero
        num_before = int(np.searchsorted(times, 0, side="right"))
        moments = moments[max(num_before - 1, 0) :]
        return MemorySeries(
            times_ns=np.maximum(moments[:, 0] - zero, 0),
            allocated_bytes=moments[:, 1],
            reserved_bytes=moments[:, 2],
        )

    def _closing_notes(self) -> list[str]:
        notes: list[str] = []
        if self._num_more_notes:
            notes.append(f"there was as much to say {self._num_more_notes} times more")
        if self._num_backward:
            notes.append(
                f"{self._num_backward} events end before they start, or have times that no clock "
                "shows, and were left out: the clocks of the host and the device were not aligned. "
                "Record again, a shorter time."
            )
        if self._unknown:
            named = ", ".join(
                f"{shorten(category)!r} ({count})"
                for category, count in self._unknown.most_common(NUM_NAMED)
            )
            more = len(self._unknown) - NUM_NAMED
            notes.append(
                f"events of kinds that are not known were passed over: {named}"
                + (f", and {more} kinds more" if more > 0 else "")
            )
        return notes

    def _spans(
        self, works: list[Work], launches: list[_Launch | None], steps: list[_Range], zero: int
    ) -> tuple[Span, ...]:
        process = works[0].process
        spans: list[Span] = []
        for work, launch in zip(works, launches, strict=True):
            label, start, queued_ns = work.name, work.start_ns, 0
            if launch is not None:
                queued_ns = max(start - launch[0], 0)
                if work.lane is Lane.COPY_OUT or work.lane is Lane.COPY_IN:
                    label = self._activation_at(process, launch[1], launch[0]) or label
            spans.append(
                Span(
                    lane=work.lane,
                    name=label,
                    start_ns=start - zero,
                    end_ns=work.end_ns - zero,
                    num_bytes=work.num_bytes,
                    stream=work.stream,
                    host_memory=work.host_memory,
                    queued_ns=queued_ns,
                    launch=work.launch,
                )
            )
        spans += [
            Span(lane=Lane.STEP, name=r.name, start_ns=r.start_ns - zero, end_ns=r.end_ns - zero)
            for r in steps
        ]
        spans += [
            Span(
                lane=Lane.HOST,
                name=call.name,
                start_ns=max(call.start_ns - zero, 0),
                end_ns=call.end_ns - zero,
                stream=call.stream,
            )
            for call in self._host[process]
            if call.end_ns > zero
        ]
        spans.sort(key=attrgetter("start_ns"))
        return tuple(spans)

    def _activation_at(self, process: int, thread: object, time_ns: int) -> str | None:
        """Return whose annotation surrounds a moment on a thread; ours do not nest."""
        ranges = self._ours.get((process, thread))
        if not ranges:
            return None
        at = bisect_right(ranges, time_ns, key=lambda r: r.start_ns) - 1
        return ranges[at].name if at >= 0 and time_ns < ranges[at].end_ns else None

    def _steps_on(
        self, process: int, works: list[Work], launches: list[_Launch | None]
    ) -> list[_Range]:
        """Return the steps as the device saw them.

        A step starts with the first thing that the CPU asked for in it, and ends where the next
        starts; the last one with its last. Without launches the CPU's own times are taken.
        """
        marked: list[_Range] = []
        for step in sorted(self._steps[process], key=lambda r: (r.start_ns, -r.end_ns)):
            if not marked or step.start_ns >= marked[-1].end_ns:
                marked.append(step)
        if not marked:
            return []
        starts = [step.start_ns for step in marked]
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for work, launch in zip(works, launches, strict=True):
            if launch is None:
                continue
            at = bisect_right(starts, launch[0]) - 1
            if at >= 0 and launch[0] < marked[at].end_ns:
                # They come in the order of their starts.
                first.setdefault(at, work.start_ns)
                if last.setdefault(at, work.end_ns) < work.end_ns:
                    last[at] = work.end_ns
        if not first:
            return marked
        numbers = sorted(first)
        seen: list[_Range] = []
        for at, following in zip(numbers, [*numbers[1:], None], strict=True):
            end = last[at] if following is None else first[following]
            if end > first[at]:
                seen.append(_Range(first[at], end, marked[at].name))
        return seen
