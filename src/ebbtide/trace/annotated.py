"""A trace with what the analysis found, for Perfetto and other viewers; and read back exactly.

The form is Chrome's: JSON with a list `traceEvents`. A device is a process. Each lane and stream
has a track; the exposed times of copies and collectives have tracks of their own, and so have
steps, the longest idle windows and memory. Spans of one stream that overlap get a track each, as
viewers nest what lies on one. Events of the category `ebbtide` are the timeline's own, and carry
what the format has no field for; all others are made anew from them, and not read back.
"""

import gzip
import heapq
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

import numpy as np

from ebbtide.timeline import HostMemory, Lane, Span, Timeline
from ebbtide.trace.builder import DeviceTrace, MemorySeries, Trace
from ebbtide.trace.overlap import Analysis, find_exposed

CATEGORY: Final = "ebbtide"
SHOWN: Final = "ebbtide-shown"
"""The category of what is only there to be looked at."""
HEADER: Final = "ebbtide"
"""The field beside the events that says what the profiler's file was."""
MEMORY: Final = "memory"
VERSION: Final = 1

_MOST: Final = 1 << 61
"""No time in ns, and no number of bytes, is as large."""
_LANES: Final = {lane.value: lane for lane in Lane}
_MEMORIES: Final = {memory.value: memory for memory in HostMemory}
_IDLE: Final = "compute idle"
_EXPOSED: Final = "exposed"


def write_annotated(path: Path, trace: Trace, analyses: Sequence[Analysis]) -> None:
    """Write the annotated trace; gzip if the name ends with `.gz`. The same trace, the same bytes.

    Args:
        path: What is there is replaced.
        trace: As read.
        analyses: One for each device.

    Raises:
        OSError: The file cannot be written.
    """
    if path.suffix == ".gz":
        with (
            path.open("wb") as file,
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed,
        ):
            _write(packed.write, trace, analyses)
    else:
        with path.open("wb") as file:
            _write(file.write, trace, analyses)


def _write(write: Callable[[bytes], object], trace: Trace, analyses: Sequence[Analysis]) -> None:
    header = {
        "version": VERSION,
        "kind": trace.kind,
        "num_events": trace.num_events,
        "notes": list(trace.notes),
        "devices": [
            {
                "name": device.name,
                "peak_bytes": device.timeline.peak_bytes,
                "reserved_bytes": device.reserved_bytes,
            }
            for device in trace.devices
        ],
    }
    # The header first: what is cut off at the end of the file is then only events.
    start = f'{{"{HEADER}": {json.dumps(header)},\n"displayTimeUnit": "ms",\n"traceEvents": [\n'
    write(start.encode())
    separator = b""
    for number, (device, analysis) in enumerate(zip(trace.devices, analyses, strict=True)):
        # Perfetto takes process 0 for the idle one.
        for event in _device_events(number + 1, device, analysis):
            write(separator + event.encode())
            separator = b",\n"
    write(b"\n]}\n")


def _device_events(process: int, device: DeviceTrace, analysis: Analysis) -> Iterator[str]:
    yield _named("process_name", process, 0, {"name": device.name})
    yield _named("process_sort_index", process, 0, {"sort_index": process})
    spans = sorted(device.timeline.spans, key=attrgetter("start_ns"))
    slots = _slots(spans)
    exposed = {
        lane: found for lane, found in find_exposed(device.timeline).items() if len(found.starts_ns)
    }
    tracks = sorted(
        {(span.lane, span.stream, slot) for span, slot in zip(spans, slots, strict=True)}
        | {(lane, _EXPOSED, -1) for lane in exposed}
        | ({(Lane.COMPUTE, _IDLE, -1)} if analysis.windows else set()),
        key=_track_order,
    )
    threads = {track: number for number, track in enumerate(tracks, start=1)}
    for (lane, stream, slot), thread in threads.items():
        title = _track_title(lane, stream, slot)
        yield _named("thread_name", process, thread, {"name": title})
        yield _named("thread_sort_index", process, thread, {"sort_index": thread})
    for span, slot in zip(spans, slots, strict=True):
        thread = threads[span.lane, span.stream, slot]
        yield _complete(
            CATEGORY, span.name, process, thread, span.start_ns, span.end_ns, _facts(span)
        )
    for lane, found in exposed.items():
        thread = threads[lane, _EXPOSED, -1]
        for start, end in zip(found.starts_ns.tolist(), found.ends_ns.tolist(), strict=True):
            name = f"{lane.value} exposed"
            yield _complete(SHOWN, name, process, thread, start, end, {})
    for window in sorted(analysis.windows, key=attrgetter("start_ns")):
        name = f"waits: {window.reason.value}"
        facts = {"waited_for": window.waited_for}
        thread = threads[Lane.COMPUTE, _IDLE, -1]
        yield _complete(SHOWN, name, process, thread, window.start_ns, window.end_ns, facts)
    if device.memory is not None:
        yield from _memory_events(process, device.memory)


def _track_order(track: tuple[Lane, str, int]) -> tuple[int, bool, str, int]:
    lane, stream, slot = track
    order = (Lane.STEP, *(other for other in Lane if other is not Lane.STEP))
    return order.index(lane), slot < 0, stream, slot


def _track_title(lane: Lane, stream: str, slot: int) -> str:
    if slot < 0:
        return f"{lane.value} {stream}" if stream == _EXPOSED else stream
    place = "thread" if lane is Lane.HOST else "stream"
    where = f", {place} {stream}" if stream else ""
    return f"{lane.value}{where}" + (f" ({slot + 1})" if slot else "")


def _slots(spans: Sequence[Span]) -> list[int]:
    """Return for each span, in the order of the starts, which of its stream's tracks it lies on."""
    free: dict[tuple[Lane, str], list[tuple[int, int]]] = defaultdict(list)
    slots: list[int] = []
    for span in spans:
        ends = free[span.lane, span.stream]
        # Times of one track never overlap; of those that are free, the one free longest.
        if ends and ends[0][0] <= span.start_ns:
            slot = ends[0][1]
            heapq.heapreplace(ends, (span.end_ns, slot))
        else:
            slot = len(ends)
            heapq.heappush(ends, (span.end_ns, slot))
        slots.append(slot)
    return slots


def _facts(span: Span) -> dict[str, object]:
    """Return what an event has no field for, without what is not known."""
    facts: dict[str, object] = {"lane": span.lane.value}
    if span.stream:
        facts["stream"] = span.stream
    if span.num_bytes:
        facts["bytes"] = span.num_bytes
    if span.host_memory is not HostMemory.UNKNOWN:
        facts["host_memory"] = span.host_memory.value
    if span.queued_ns:
        facts["queued_ns"] = span.queued_ns
    if span.launch:
        facts["launch"] = span.launch
    return facts


def _memory_events(process: int, series: MemorySeries) -> Iterator[str]:
    columns = series.times_ns.tolist(), series.allocated_bytes.tolist()
    for time_ns, allocated, reserved in zip(*columns, series.reserved_bytes.tolist(), strict=True):
        yield (
            f'{{"ph":"C","cat":"{CATEGORY}","name":"{MEMORY}","pid":{process},'
            f'"ts":{_us(time_ns)},"args":{{"allocated":{allocated},"reserved":{reserved}}}}}'
        )


def _named(kind: str, process: int, thread: int, facts: dict[str, object]) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": facts})


def _complete(
    category: str,
    name: str,
    process: int,
    thread: int,
    start_ns: int,
    end_ns: int,
    facts: Mapping[str, object],
) -> str:
    return (
        f'{{"ph":"X","cat":"{category}","name":{json.dumps(name)},"pid":{process},"tid":{thread},'
        f'"ts":{_us(start_ns)},"dur":{_us(end_ns - start_ns)},"args":{json.dumps(facts)}}}'
    )


def _us(ns: int) -> str:
    """Write microseconds with all three decimals: a float might lose one."""
    return f"{ns // 1000}.{ns % 1000:03}"


class AnnotatedReader:
    """Takes the events of category `ebbtide`, and makes the trace that they were written from."""

    def __init__(self) -> None:
        self._spans: dict[int, list[Span]] = defaultdict(list)
        self._moments: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._num_broken = 0

    @property
    def is_empty(self) -> bool:
        """No span has been taken."""
        return not self._spans

    def take_span(self, event: dict[str, object], start_ns: int, end_ns: int) -> None:
        """Add a complete event; one that lacks something is counted."""
        found = _record(event.get("args"))
        process, name = event.get("pid"), event.get("name")
        lane = _LANES.get(_text(found.get("lane")))
        memory = _MEMORIES.get(_text(found.get("host_memory", "")))
        num_bytes, queued_ns = found.get("bytes", 0), found.get("queued_ns", 0)
        if (
            lane is None
            or memory is None
            or not isinstance(name, str)
            or not _is_number(process)
            or not _is_number(num_bytes)
            or not _is_number(queued_ns)
            or not 0 <= start_ns <= end_ns < _MOST
        ):
            self._num_broken += 1
            return
        self._spans[process].append(
            Span(
                lane=lane,
                name=name,
                start_ns=start_ns,
                end_ns=end_ns,
                num_bytes=num_bytes,
                stream=str(found.get("stream", "")),
                host_memory=memory,
                queued_ns=queued_ns,
                launch=str(found.get("launch", "")),
            )
        )

    def take_moment(self, event: dict[str, object], time_ns: int | None) -> None:
        """Add what the allocator held at a moment."""
        found = _record(event.get("args"))
        numbers = event.get("pid"), time_ns, found.get("allocated"), found.get("reserved")
        if not all(map(_is_number, numbers)):
            self._num_broken += 1
            return
        process, *moment = cast(tuple[int, int, int, int], numbers)
        self._moments[process].append((moment[0], moment[1], moment[2]))

    def build(self, file: str, header: object, num_events: int, notes: Sequence[str]) -> Trace:
        """Return the trace.

        Args:
            file: Where it was read.
            header: The field `ebbtide` beside the events; what it lacks is made up for.
            num_events: How many the file has.
            notes: What was wrong with the file.
        """
        facts = _record(header)
        kind = _text(facts.get("kind")) or "annotated trace"
        number = facts.get("num_events")
        about = [_record(each) for each in _list(facts.get("devices"))]
        first = [note for note in _list(facts.get("notes")) if isinstance(note, str)]
        if facts.get("version") != VERSION:
            first.append(
                f"it was not annotated by this version of ebbtide (form {facts.get('version')!r}, "
                f"not {VERSION}); figures may be missing. Annotate the profiler's file again."
            )
        if self._num_broken:
            first.append(f"{self._num_broken} events lack what they were written with; left out")
        return Trace(
            file=file,
            kind=kind,
            num_events=number if _is_number(number) else num_events,
            devices=tuple(
                self._device(process, kind, about[process - 1] if 0 < process <= len(about) else {})
                for process in sorted(self._spans)
            ),
            notes=(*first, *notes),
        )

    def _device(self, process: int, kind: str, about: dict[str, Any]) -> DeviceTrace:
        name = _text(about.get("name")) or f"GPU {process - 1}"
        peak, reserved = about.get("peak_bytes"), about.get("reserved_bytes")
        spans = self._spans[process]
        spans.sort(key=attrgetter("start_ns"))
        memory = None
        if process in self._moments:
            columns = np.array(sorted(self._moments[process], key=lambda m: m[0]), np.int64)
            memory = MemorySeries(
                times_ns=columns[:, 0],
                allocated_bytes=columns[:, 1],
                reserved_bytes=columns[:, 2],
            )
        return DeviceTrace(
            name=name,
            timeline=Timeline(
                source=f"{kind}: {name}",
                spans=tuple(spans),
                peak_bytes=peak if _is_number(peak) else 0,
            ),
            reserved_bytes=reserved if _is_number(reserved) else 0,
            memory=memory,
        )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _list(value: object) -> list[object]:
    return cast(list[object], value) if isinstance(value, list) else []


def _record(value: object) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST
