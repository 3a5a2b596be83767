"""Read JAX's `xplane.pb`: what `jax.profiler.trace` writes of the GPUs.

Field numbers are those of tensorflow's `xplane.proto` (XSpace). On a GPU's plane each line is a
stream, and copies and kernels share streams, so every event is told by itself. Known weakness: an
`xplane.pb` has no launches that can be told apart from others, so idle time before a kernel has
the reason `unknown` where no copy ran.
"""

import mmap
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeGuard

from ebbtide.errors import TraceError
from ebbtide.timeline import Lane
from ebbtide.trace import wire
from ebbtide.trace.builder import Trace, TraceBuilder, Work
from ebbtide.trace.hlo_program import HloProgram
from ebbtide.trace.names import activation_of, lane_of_copy, lane_of_kernel, memory_of, name_launch
from ebbtide.trace.wire import WireError, read_fields, signed, text

KIND = "JAX profiler"
HOW_JAX: Final = (
    "record with jax.profiler.trace(FOLDER) around some steps on a machine with a GPU; the file is "
    "FOLDER/plugins/profile/*/*.xplane.pb"
)

_GPU_PLANE = re.compile(r"/device:GPU:(?P<number>\d{1,9})")
_HOST_PLANE = "/host:CPU"
# What some versions write for an instruction that has none.
_NO_SCOPE = "XlaModule:"
_PROGRAMS_PLANE = "/host:metadata"
_SIZE = re.compile(r"\bsize:(?P<bytes>\d{1,18})")
_LAUNCH = re.compile(
    r"\bgrid:(?P<grid>\d{1,9}(?:,\d{1,9}){2}) block:(?P<block>\d{1,9}(?:,\d{1,9}){2})"
)
# Lines that repeat what is on the streams, by module and operator.
_DERIVED = frozenset({"Steps", "XLA Modules", "XLA Ops", "XLA TraceMe", "Framework Ops"})

Message = memoryview


@dataclass(slots=True)
class _Plane:
    name: str = ""
    lines: list[Message] = field(default_factory=list[Message])
    events: dict[int, str] = field(default_factory=dict[int, str])
    stats: dict[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True, slots=True)
class _Event:
    name: str
    start_ns: int
    end_ns: int
    stats: dict[str, str | int]


def read_xplane(path: Path) -> Trace:
    """Read an XSpace; only the planes of GPUs, and the steps of the host's.

    Raises:
        TraceError: It is no XSpace.
        OSError: The file cannot be read.
    """
    builder = TraceBuilder(file=str(path), kind=KIND)
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise TraceError(f"{path}: it is empty; {HOW_JAX}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)
            try:
                _read_space(view, builder)
            finally:
                view.release()
    return builder.build()


def _read_space(view: Message, builder: TraceBuilder) -> None:
    planes: list[Message] = []
    try:
        for number, kind, value in read_fields(view):
            if number == 1 and not isinstance(value, int) and kind == wire.LENGTH:
                planes.append(value)
    except WireError as error:
        if not planes:
            raise TraceError(f"{builder.file}: it is no xplane.pb ({error}); {HOW_JAX}") from error
        builder.note(
            f"the file is not whole ({error}); {len(planes)} planes before that were read. Let "
            "jax.profiler.stop_trace() return before copying the file."
        )
    programs = _Programs(builder)
    for plane in planes:
        programs.add_plane(plane)
    for plane in planes:
        _read_plane(plane, builder, programs)


class _Programs:
    """The compiled programs of a profile: each is read when one of its copies is met."""

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._protos: dict[int, Message] = {}
        self._read: dict[int, HloProgram | None] = {}

    def add_plane(self, view: Message) -> None:
        """Note the programs of a plane, if it is the one that has them, up to where it breaks."""
        try:
            fields = list(read_fields(view))
        except WireError:
            return  # whoever reads the rest of the plane says so
        if not any(number == 2 and text(v) == _PROGRAMS_PLANE for number, _, v in fields):
            return
        try:
            stats = dict(_read_metadata(v)[:2] for n, _, v in fields if n == 5 and _is_message(v))
            for number, _, value in fields:
                if number == 4 and _is_message(value):
                    self._add(value, stats)
        except WireError as error:
            self._builder.note(
                f"the profile's programs are not whole ({error}); copies of those that are "
                "missing have XLA's names"
            )

    def _add(self, entry: Message, stats: dict[int, str]) -> None:
        number, proto = None, None
        for part, _, metadata in read_fields(entry):
            if part != 2 or isinstance(metadata, int):
                continue
            for inner, _, stat in read_fields(metadata):
                if inner == 5 and not isinstance(stat, int):
                    key, value = _read_raw_stat(stat)
                    if stats.get(key) == "program_id" and isinstance(value, int):
                        number = signed(value)
                    elif stats.get(key) == "Hlo Proto" and not isinstance(value, int):
                        proto = value
        if number is not None and proto is not None:
            self._protos[number] = proto

    def activation_moved_by(self, program: int, instruction: str) -> str | None:
        """Return the activation that an instruction copies, if its program says so."""
        if program not in self._read:
            proto = self._protos.pop(program, None)
            self._read[program] = None if proto is None else self._read_program(program, proto)
        read = self._read[program]
        return None if read is None else read.activation_moved_by(instruction)

    def _read_program(self, number: int, proto: Message) -> HloProgram | None:
        try:
            return HloProgram(proto)
        except WireError as error:
            self._builder.note(
                f"the program {number} is not whole ({error}); its copies have XLA's names"
            )
            return None


def _read_plane(view: Message, builder: TraceBuilder, programs: _Programs) -> None:
    plane = _Plane()
    try:
        for number, _, value in read_fields(view):
            if number == 2:
                plane.name = text(value)
            elif number == 3 and not isinstance(value, int):
                plane.lines.append(value)
            elif number in (4, 5) and not isinstance(value, int):
                key, name = _read_metadata(value)
                (plane.events if number == 4 else plane.stats)[key] = name
    except WireError as error:
        builder.note(f"the plane {plane.name!r} is not whole ({error}); the rest of it was read")
    gpu = _GPU_PLANE.search(plane.name)
    for line in plane.lines:
        try:
            if gpu is not None:
                _read_stream(line, plane, int(gpu["number"]), builder, programs)
            elif plane.name == _HOST_PLANE:
                _read_host(line, plane, builder)
        except WireError as error:
            builder.note(f"a line of {plane.name!r} is not whole ({error}); the rest was read")
        line.release()


def _read_metadata(entry: Message) -> tuple[int, str]:
    """Read an entry of the maps from numbers to names of events or statistics."""
    key, name, display = 0, "", ""
    for number, _, value in read_fields(entry):
        if number == 1:
            key = signed(value)
        elif number == 2 and not isinstance(value, int):
            for inner, _, part in read_fields(value):
                if inner == 2:
                    name = text(part)
                elif inner == 4 and not isinstance(part, int):
                    display = text(part)
    return key, name or display


@dataclass(slots=True)
class _Line:
    name: str = ""
    start_ns: int = 0
    events: list[Message] = field(default_factory=list[Message])


def _read_line(view: Message) -> _Line:
    line = _Line()
    for number, _, value in read_fields(view):
        if number in (2, 11) and not isinstance(value, int):
            line.name = line.name or text(value)
        elif number == 3:
            line.start_ns = signed(value)
        elif number == 4 and not isinstance(value, int):
            line.events.append(value)
    return line


def _read_event(view: Message, plane: _Plane, line_start_ns: int) -> _Event:
    name, offset_ps, duration_ps = "", 0, 0
    stats: dict[str, str | int] = {}
    for number, _, value in read_fields(view):
        if number == 1:
            name = plane.events.get(signed(value), "")
        elif number == 2:
            offset_ps = signed(value)
        elif number == 3:
            duration_ps = signed(value)
        elif number == 4 and not isinstance(value, int):
            key, stat = _read_stat(value, plane)
            stats[key] = stat
    # Both ends are rounded down from the line's start, so that events that touch still do.
    start = line_start_ns + offset_ps // 1000
    return _Event(name, start, line_start_ns + (offset_ps + duration_ps) // 1000, stats)


def _is_message(value: int | Message) -> TypeGuard[Message]:
    return not isinstance(value, int)


def _read_raw_stat(view: Message) -> tuple[int, int | Message]:
    """Return the number of a statistic's name, and its value as it is written."""
    key: int = 0
    stat: int | Message = 0
    for number, _, value in read_fields(view):
        if number == 1:
            key = signed(value)
        else:
            stat = value
    return key, stat


def _read_stat(view: Message, plane: _Plane) -> tuple[str, str | int]:
    key, stat = "", ""
    for number, _, value in read_fields(view):
        if number == 1:
            key = plane.stats.get(signed(value), "")
        elif number in (3, 4):
            return key, signed(value)
        elif number == 5:
            stat = text(value)
        elif number == 7:
            stat = plane.stats.get(signed(value), "")
    return key, stat


def _read_stream(
    view: Message, plane: _Plane, device: int, builder: TraceBuilder, programs: _Programs
) -> None:
    line = _read_line(view)
    if line.name in _DERIVED:
        return
    for message in line.events:
        event = _read_event(message, plane, line.start_ns)
        builder.num_events += 1
        details = str(event.stats.get("memcpy_details", ""))
        copied = lane_of_copy(event.name)
        size = _SIZE.search(details)
        scopes = (str(event.stats.get(key, "")) for key in ("tf_op", "name"))
        scope = next((s for s in scopes if s not in ("", _NO_SCOPE)), "")
        instruction = str(event.stats.get("hlo_op", ""))
        name = event.name
        if copied is not None and copied.lane in (Lane.COPY_OUT, Lane.COPY_IN):
            name = (
                activation_of(scope)
                or _activation(event, instruction, programs)
                or " ".join(filter(None, (instruction, scope)))
                or name
            )
        builder.add_work(
            Work(
                process=0,
                device=device,
                lane=lane_of_kernel(event.name) if copied is None else copied.lane,
                name=name,
                start_ns=event.start_ns,
                end_ns=event.end_ns,
                num_bytes=int(size["bytes"]) if size else 0,
                stream=line.name,
                host_memory=memory_of(details),
                launch=_launch(str(event.stats.get("kernel_details", ""))),
            )
        )


def _activation(event: _Event, instruction: str, programs: _Programs) -> str | None:
    program = event.stats.get("program_id")
    if not instruction or not isinstance(program, int):
        return None
    return programs.activation_moved_by(program, instruction)


def _launch(details: str) -> str:
    """Read a stat such as `regs:32 static_shared:0 dynamic_shared:0 grid:8,1,1 block:128,1,1`."""
    found = _LAUNCH.search(details)
    if found is None:
        return ""
    return name_launch(*(tuple(map(int, found[part].split(","))) for part in ("grid", "block")))


def _read_host(view: Message, plane: _Plane, builder: TraceBuilder) -> None:
    """Take the steps: `jax.profiler.StepTraceAnnotation` gives its ranges a `step_num`."""
    line = _read_line(view)
    for message in line.events:
        event = _read_event(message, plane, line.start_ns)
        builder.num_events += 1
        if "step_num" in event.stats:
            step = f"step {event.stats['step_num']}"
            builder.add_annotation(0, line.name, step, event.start_ns, event.end_ns)
