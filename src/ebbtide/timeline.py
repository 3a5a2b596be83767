"""The Timeline: what ran when, as spans on lanes. Simulated and traced steps are the same type.

The JSON form is in `docs/formats.md`.
"""

import enum
import json
from dataclasses import dataclass
from typing import Any, Self

from ebbtide.errors import PlanError
from ebbtide.forms import (
    read_form,
    read_int,
    read_list,
    read_record,
    read_text,
    refuse_negative,
    refuse_unknown_fields,
)
from ebbtide.naming import unknown_name_message

TIMELINE_FORMAT = "ebbtide-timeline"
TIMELINE_VERSION = 3

_SINCE_2 = frozenset({"stream", "host_memory", "queued_ns"})
_SINCE_3 = frozenset({"launch"})


@enum.unique
class Lane(enum.Enum):
    """What was busy."""

    COMPUTE = "compute"
    """The device's kernels, recomputation too."""
    STALL = "stall"
    """Compute waits for a copy."""
    COPY_OUT = "copy-out"
    """Device to host."""
    COPY_IN = "copy-in"
    """Host to device."""
    DISK_WRITE = "disk-write"
    """Host to disk."""
    DISK_READ = "disk-read"
    """Disk to host."""
    COLLECTIVE = "collective"
    """Communication between devices."""
    HOST = "host"
    """The CPU is inside a call that waits for the device, or takes or returns memory."""
    STEP = "step"
    """Nothing ran: the span is a training step that the profiled program marked."""


@enum.unique
class HostMemory(enum.Enum):
    """What kind of host memory a copy read or wrote."""

    UNKNOWN = ""
    """Not a copy between host and device, or the source does not say."""
    PINNED = "pinned"
    """Page-locked: the copy may run beside the CPU and at the link's full speed."""
    PAGEABLE = "pageable"
    """The driver copies through a small pinned buffer of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that ran.

    Raises:
        PlanError: It ends before it starts, or a number is negative.
    """

    lane: Lane
    """What was busy."""
    name: str
    """An activation, or what was computed."""
    start_ns: int
    """From the start of the step."""
    end_ns: int
    """From the start of the step."""
    num_bytes: int = 0
    """Bytes copied; 0 for compute."""
    stream: str = ""
    """The queue that it ran on, or the CPU thread; empty: unknown."""
    host_memory: HostMemory = HostMemory.UNKNOWN
    """For a copy, what the host's side of it was."""
    queued_ns: int = 0
    """How long before `start_ns` the CPU asked for it; 0: unknown."""
    launch: str = ""
    """For a kernel, the shapes of its grid and of a block; empty: unknown."""

    def __post_init__(self) -> None:
        # Traces have millions of spans: the messages are only made where there is a fault.
        if self.start_ns < 0 or self.end_ns < self.start_ns or self.num_bytes < 0:
            refuse_negative(self.start_ns, f"span {self.name!r}", "start_ns")
            refuse_negative(self.num_bytes, f"span {self.name!r}", "num_bytes")
            refuse_negative(self.end_ns - self.start_ns, f"span {self.name!r}", "a length of")
        if self.queued_ns < 0:
            refuse_negative(self.queued_ns, f"span {self.name!r}", "queued_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One simulated step, or what a profiler recorded of one device.

    Raises:
        PlanError: A number is negative.
    """

    source: str
    """What it was made from, for people."""
    spans: tuple[Span, ...]
    """In the order of their starts."""
    peak_bytes: int
    """Most device memory allocated at once; 0 if that is unknown."""

    def __post_init__(self) -> None:
        refuse_negative(self.peak_bytes, "the timeline", "peak_bytes")

    @property
    def step_ns(self) -> int:
        """When the last compute span ends."""
        return max((s.end_ns for s in self.spans if s.lane is Lane.COMPUTE), default=0)

    @property
    def stall_ns(self) -> int:
        """Time for which compute waited for copies."""
        return sum(s.end_ns - s.start_ns for s in self.spans if s.lane is Lane.STALL)

    def busy_ns(self, lane: Lane) -> int:
        """Time for which a lane was busy; its spans must not overlap, as simulated ones never do.

        `ebbtide.trace.analyse` counts exactly where they may, as in traces.
        """
        return sum(s.end_ns - s.start_ns for s in self.spans if s.lane is lane)

    def to_json(self) -> str:
        """Return the JSON form; equal timelines give equal text, byte for byte."""
        form = {
            "format": TIMELINE_FORMAT,
            "version": TIMELINE_VERSION,
            "source": self.source,
            "peak_bytes": self.peak_bytes,
            "spans": [
                {
                    "lane": span.lane.value,
                    "name": span.name,
                    "start_ns": span.start_ns,
                    "end_ns": span.end_ns,
                    "num_bytes": span.num_bytes,
                    "stream": span.stream,
                    "host_memory": span.host_memory.value,
                    "queued_ns": span.queued_ns,
                    "launch": span.launch,
                }
                for span in self.spans
            ],
        }
        return json.dumps(form, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the JSON form that `to_json` writes.

        Raises:
            PlanError: The text is not JSON, not this format or version, lacks a field, has an
                unknown one or one of the wrong type, or breaks a rule of `Span` or `Timeline`.
        """
        record = read_form(text, form=TIMELINE_FORMAT, version=TIMELINE_VERSION)
        fields = {"format", "version", "source", "peak_bytes", "spans"}
        refuse_unknown_fields(record, fields, where="timeline")
        version = read_int(record, "version", where="timeline")
        spans = read_list(record, "spans", where="timeline")
        return cls(
            source=read_text(record, "source", where="timeline"),
            spans=tuple(
                _read_span(span, version, where=f"spans[{i}]") for i, span in enumerate(spans)
            ),
            peak_bytes=read_int(record, "peak_bytes", where="timeline"),
        )


def _read_span(value: object, version: int, *, where: str) -> Span:
    record = read_record(value, where=where)
    fields = set(Span.__dataclass_fields__)
    fields -= (_SINCE_2 if version < 2 else frozenset()) | (
        _SINCE_3 if version < 3 else frozenset()
    )
    refuse_unknown_fields(record, fields, where=where)
    lane = _read_choice(record, "lane", tuple(member.value for member in Lane), where=where)
    since: dict[str, Any] = {}
    if version >= 2:
        memories = tuple(member.value for member in HostMemory)
        since["stream"] = read_text(record, "stream", where=where)
        since["host_memory"] = HostMemory(
            _read_choice(record, "host_memory", memories, where=where)
        )
        since["queued_ns"] = read_int(record, "queued_ns", where=where)
    if version >= 3:
        since["launch"] = read_text(record, "launch", where=where)
    return Span(
        lane=Lane(lane),
        name=read_text(record, "name", where=where),
        start_ns=read_int(record, "start_ns", where=where),
        end_ns=read_int(record, "end_ns", where=where),
        num_bytes=read_int(record, "num_bytes", where=where),
        **since,
    )


def _read_choice(
    record: dict[str, object], field: str, valid: tuple[str, ...], *, where: str
) -> str:
    given = read_text(record, field, where=where)
    if given not in valid:
        raise PlanError(f"{where}: {unknown_name_message(field, given, valid)}")
    return given
