"""Read Chrome traces: torch's profiler writes them, and so do others.

torch's events have a category that says what they are. Others are told by the process or thread
that they lie on, such as JAX's `/device:GPU:0`, and by their names.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ebbtide.naming import shorten
from ebbtide.timeline import Lane
from ebbtide.trace.annotated import CATEGORY, HEADER, MEMORY, SHOWN, AnnotatedReader
from ebbtide.trace.builder import Trace, TraceBuilder, Work
from ebbtide.trace.chrome_json import EventStream, nanoseconds
from ebbtide.trace.names import MARK, lane_of_copy, lane_of_kernel, memory_of, name_launch

TORCH = "PyTorch profiler"
OTHER = "Chrome trace"

HOW_TORCH = (
    "record with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) "
    "on a machine with a GPU, and prof.export_chrome_trace(FILE)"
)

_ON_GPU = re.compile(r"\bGPU[\s:#]*(?P<number>\d{1,9})", re.I)

# What torch's profiler writes that says nothing about devices, waiting or steps.
_PASSED_OVER = frozenset(
    {
        *(
            "ac2g",
            "overhead",
            "python_function",
            "fwdbwd",
            "Trace",
            "gpu_user_annotation",
        ),
        *("async_cpu_to_gpu", "forward_backward", "cpu_instant_event", "kernel_launch"),
        *("cuda_sync", "cuda_profiler_range", "collective_comm", "privateuse1_runtime", "Kernel"),
        *(SHOWN, "user_defined", "python", "mtia_runtime", "xpu_runtime", "cuda_event"),
    }
)

_MOST = 2**63 - 1

Event = dict[str, object]


def read_chrome(path: Path) -> Trace:
    """Read a Chrome trace, plain or gzip, of torch's profiler or another program.

    What is broken is left out, and a note says so. 200 MB take some seconds.

    Raises:
        OSError: The file cannot be read.
    """
    return _Reader(path).read()


class _Reader:
    def __init__(self, path: Path) -> None:
        self._stream = EventStream(path)
        self._builder = TraceBuilder(file=str(path), kind=OTHER)
        self._processes: dict[object, str] = {}
        self._threads: dict[tuple[object, object], str] = {}
        self._open: dict[tuple[object, object], list[Event]] = {}
        self._others: list[tuple[Event, int, int]] = []
        """Complete events without a category of torch's, with their times, until all names are
        known."""
        self._num_without_time = 0
        self._is_torch = False
        self._annotated = AnnotatedReader()
        self._by_category: dict[str, Callable[[Event, int, int], None]] = {
            "kernel": self._kernel,
            "gpu_memcpy": self._copy,
            "gpu_memset": self._kernel,
            "cuda_runtime": self._call,
            "cuda_driver": self._call,
            "user_annotation": self._annotation,
            "cpu_op": self._operator,
            CATEGORY: self._annotated.take_span,
        }

    def read(self) -> Trace:
        builder = self._builder
        for event in self._stream:
            builder.num_events += 1
            self._take(event)
        for event, start, end in self._others:
            self._take_other(event, start, end)
        fields = self._stream.fields
        if self._is_torch or "deviceProperties" in fields or "schemaVersion" in fields:
            builder.kind = TORCH
        self._say_what_was_wrong()
        trace = builder.build()
        if self._annotated.is_empty:
            return trace
        return self._annotated.build(trace.file, fields.get(HEADER), trace.num_events, trace.notes)

    def _take(self, event: Event) -> None:
        phase = event.get("ph")
        if phase == "X":
            category = event.get("cat", "")
            category = _text(category)
            handle = self._by_category.get(category)
            if handle is not None:
                self._is_torch = True
                start, end = self._times(event)
                if end is not None:
                    handle(event, start, end)
            elif category not in _PASSED_OVER:
                start, end = self._times(event)
                if end is not None:
                    self._others.append((event, start, end))
        elif phase == "M":
            self._name(event)
        elif phase == "B":
            self._open.setdefault(_thread(event), []).append(event)
        elif phase == "E":
            opened = self._open.get(_thread(event))
            if opened:
                start = opened.pop()
                begin, end = nanoseconds(start.get("ts")), nanoseconds(event.get("ts"))
                if begin is not None and end is not None:
                    arguments = {**_arguments(start), **_arguments(event)}
                    self._others.append(({**start, "args": arguments}, begin, end))
        elif phase == "C" and event.get("cat") == CATEGORY and event.get("name") == MEMORY:
            self._annotated.take_moment(event, nanoseconds(event.get("ts")))
        elif phase == "i" and event.get("name") == "[memory]":
            self._memory(_arguments(event), nanoseconds(event.get("ts")))

    def _name(self, event: Event) -> None:
        name = _text(_arguments(event).get("name"))
        thread = _thread(event)
        if event.get("name") == "process_name":
            self._processes[thread[0]] = name
        elif event.get("name") == "process_labels":
            labels = _text(_arguments(event).get("labels"))
            self._processes.setdefault(thread[0], labels)
        elif event.get("name") == "thread_name":
            self._threads[thread] = name

    def _times(self, event: Event) -> tuple[int, int | None]:
        start = nanoseconds(event.get("ts"))
        took = nanoseconds(event.get("dur", 0))
        if start is None or took is None:
            self._num_without_time += 1
            return 0, None
        return start, start + took

    def _kernel(self, event: Event, start: int, end: int) -> None:
        self._work(event, lane_of_kernel(_text(event.get("name"))), start, end)

    def _copy(self, event: Event, start: int, end: int) -> None:
        name = _text(event.get("name"))
        copied = lane_of_copy(name)
        if copied is None:
            self._builder.note(
                f"a copy is named {shorten(name)!r}, which says no direction; it was left out. "
                f"To have it counted, {HOW_TORCH}."
            )
            return
        self._work(event, copied.lane, start, end)

    def _work(self, event: Event, lane: Lane, start: int, end: int) -> None:
        arguments = _arguments(event)
        device = arguments.get("device", event.get("pid"))
        stream = _text(arguments.get("stream", event.get("tid")))
        name = _text(event.get("name"))
        self._builder.add_work(
            Work(
                process=0,
                device=_whole(device, 0),
                lane=lane,
                name=name,
                start_ns=start,
                end_ns=end,
                num_bytes=max(_whole(arguments.get("bytes"), 0), 0),
                stream=stream,
                host_memory=memory_of(name),
                correlation=_whole(arguments.get("correlation"), -1),
                launch=_launch(arguments),
            )
        )

    def _call(self, event: Event, start: int, end: int) -> None:
        correlation = _whole(_arguments(event).get("correlation"), -1)
        name = _text(event.get("name"))
        self._builder.add_call(0, _thread(event)[1], name, start, end, correlation)

    def _annotation(self, event: Event, start: int, end: int) -> None:
        name = _text(event.get("name"))
        self._builder.add_annotation(0, _thread(event)[1], name, start, end)

    def _operator(self, event: Event, start: int, end: int) -> None:
        # Ranges that pass torch's dispatcher by are written as operators; ours do.
        name = event.get("name")
        if isinstance(name, str) and name.startswith(MARK):
            self._builder.add_annotation(0, _thread(event)[1], name, start, end)

    def _memory(self, arguments: dict[str, Any], time_ns: int | None) -> None:
        # Device type 1 is CUDA in c10; 0 is the CPU.
        if _whole(arguments.get("Device Type"), 0) == 1:
            self._builder.add_memory(
                0,
                _whole(arguments.get("Device Id"), 0),
                _whole(arguments.get("Total Allocated"), 0),
                _whole(arguments.get("Total Reserved"), 0),
                time_ns,
            )

    def _take_other(self, event: Event, start: int, end: int) -> None:
        name, category = _text(event.get("name")), event.get("cat")
        process, number = _thread(event)
        place = self._processes.get(process, "")
        thread = self._threads.get((process, number), "")
        gpu = _ON_GPU.search(place) or _ON_GPU.search(thread)
        if gpu is None:
            if MARK in name or category is None:
                self._builder.add_annotation(0, number, name, start, end)
            if category is not None:
                self._builder.add_unknown(_text(category))
            return
        # JAX repeats what is on its streams on lines of its own, for modules and operators.
        if "stream" not in thread.lower() and any(
            "stream" in other.lower() for (pid, _), other in self._threads.items() if pid == process
        ):
            return
        arguments = _arguments(event)
        details = _text(arguments.get("memcpy_details", ""))
        copied = lane_of_copy(name)
        sizes = re.search(r"\bsize:(\d{1,18})", details)
        self._builder.add_work(
            Work(
                process=0,
                device=int(gpu["number"]),
                lane=lane_of_kernel(name) if copied is None else copied.lane,
                name=name,
                start_ns=start,
                end_ns=end,
                num_bytes=int(sizes[1]) if sizes else max(_whole(arguments.get("bytes"), 0), 0),
                stream=thread or _text(number),
                host_memory=memory_of(f"{details} {name}"),
                correlation=_whole(arguments.get("correlation"), -1),
            )
        )

    def _say_what_was_wrong(self) -> None:
        stream, note = self._stream, self._builder.note
        if stream.problem:
            note(
                f"the file is not whole: {stream.problem}. {self._builder.num_events} events "
                "before that were read. Let the program end, or the profiler stop, before copying "
                "the file."
            )
        if stream.num_skipped:
            note(f"{stream.num_skipped} events are broken JSON and were left out")
        if self._num_without_time:
            note(f"{self._num_without_time} events have no time that can be read; left out")
        num_open = sum(map(len, self._open.values()))
        if num_open:
            note(f"{num_open} events start and never end; they were left out")
        if not stream.has_events and not stream.problem:
            note(f"it is JSON without a list traceEvents, so it is no trace; {HOW_TORCH}")


def _arguments(event: Event) -> dict[str, Any]:
    arguments = event.get("args")
    return cast(dict[str, Any], arguments) if isinstance(arguments, dict) else {}


def _launch(arguments: dict[str, Any]) -> str:
    """Return how a kernel was launched; empty: the arguments do not say."""
    shapes: list[tuple[int, ...]] = []
    for name in ("grid", "block"):
        value = arguments.get(name)
        if not isinstance(value, list) or len(cast(list[object], value)) != 3:
            return ""
        x, y, z = cast(list[object], value)
        # In place of a loop: there are as many of these as kernels.
        if type(x) is not int or type(y) is not int or type(z) is not int:
            return ""
        shapes.append((x, y, z))
    return name_launch(*shapes)


def _text(value: object) -> str:
    """Return a text, or a number as one; what holds others has no place where this is asked."""
    if isinstance(value, str):
        return value
    return type(value).__name__ if isinstance(value, dict | list) else str(value)


def _thread(event: Event) -> tuple[object, object]:
    """Return process and thread, which may be numbers or texts."""
    process, thread = event.get("pid"), event.get("tid")
    return (
        None if isinstance(process, dict | list) else process,
        None if isinstance(thread, dict | list) else thread,
    )


def _whole(value: object, otherwise: int) -> int:
    """Return a whole number that may be written as text; `otherwise` if it is none of 64 bits."""
    try:
        number = int(value) if isinstance(value, int | str) else otherwise
    except ValueError:
        return otherwise
    return number if -_MOST <= number <= _MOST else otherwise
