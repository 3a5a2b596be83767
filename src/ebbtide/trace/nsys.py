"""Read the SQLite file that `nsys export --type sqlite` writes.

nsys makes a table only if there is something in it, and the columns differ between versions, so
both are asked for. Enumerations are read from the file where it has them; the numbers that stand
here otherwise are CUPTI's.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from ebbtide.errors import TraceError
from ebbtide.timeline import HostMemory, Lane
from ebbtide.trace.builder import Trace, TraceBuilder, Work
from ebbtide.trace.names import lane_of_kernel, memory_of, name_launch

KIND = "Nsight Systems"
HOW_NSYS: Final = (
    "record with nsys profile --trace=cuda,nvtx --cuda-graph-trace=node -o OUT COMMAND, "
    "then nsys export --type sqlite --output OUT.sqlite OUT.nsys-rep"
)

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
SETS = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES = "NVTX_EVENTS"
TABLES: Final = (KERNELS, COPIES, SETS, GRAPHS, CALLS, RANGES)

# CUPTI's CUpti_ActivityMemcpyKind and CUpti_ActivityMemoryKind.
_COPY_KINDS: Final = {1: Lane.COPY_IN, 2: Lane.COPY_OUT, 8: Lane.COMPUTE, 10: Lane.COLLECTIVE}
_MEMORY_KINDS: Final = {1: HostMemory.PAGEABLE, 2: HostMemory.PINNED}
_ENUM_LANES: Final = (
    (("host-to-device", "htod"), Lane.COPY_IN),
    (("device-to-host", "dtoh"), Lane.COPY_OUT),
    (("device-to-device", "dtod"), Lane.COMPUTE),
    (("peer-to-peer", "ptop"), Lane.COLLECTIVE),
)
# Columns that hold texts, or numbers of texts.
_NAMES: Final = frozenset({"shortName", "demangledName", "text"})

# A message of SQLite's may quote what is in the file, which need not be UTF-8.
_FAULTS: Final = (sqlite3.Error, UnicodeDecodeError)

_MOST_VALUE_BYTES: Final = 1 << 26
"""No name and no row is longer."""

_STEPS_AT_ONCE: Final = 100_000
_FREE_STEPS: Final = 20_000_000
_STEPS_PER_BYTE: Final = 40
"""SQLite takes some 40 steps a row, a row has 10 bytes and more, and each table is read twice."""

# NvtxPushPopRange and NvtxStartEndRange.
_RANGE_TYPES = (59, 60)


def read_nsys(path: Path) -> Trace:
    """Read an SQLite export of Nsight Systems.

    Two million rows take some seconds. Rows that make no sense are left out, and a note says so.

    Raises:
        TraceError: It is another kind of SQLite file, or broken from the start.
    """
    uri = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        database = sqlite3.connect(uri, uri=True)
    except sqlite3.Error as error:
        raise TraceError(f"{path}: SQLite cannot open it ({error}); {HOW_NSYS}") from error
    try:
        _distrust(database, path.stat().st_size)
        return _Reader(path, database).read()
    finally:
        database.close()


def _distrust(database: sqlite3.Connection, file_bytes: int) -> None:
    """Bound what a file that was made to do harm can take of memory and time.

    A broken tree can lead to the same rows for ever, and a number of steps that grows with the
    file ends it. The settings are those that SQLite's own documents advise for foreign files.
    """
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_VALUE_BYTES)
    for setting in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
        database.execute(f"PRAGMA {setting}")
    num_left = (_FREE_STEPS + _STEPS_PER_BYTE * file_bytes) // _STEPS_AT_ONCE

    def has_had_enough() -> bool:
        nonlocal num_left
        num_left -= 1
        return num_left < 0

    database.set_progress_handler(has_had_enough, _STEPS_AT_ONCE)


class _Reader:
    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self._path = path
        self._database = database
        self._builder = TraceBuilder(file=str(path), kind=KIND)
        database.text_factory = _as_text
        try:
            names = database.execute("SELECT name FROM sqlite_master WHERE type='table'")
            self._tables = {str(name) for (name,) in names}
        except _FAULTS as error:
            raise TraceError(
                f"{path}: it is an SQLite file that cannot be read ({error}). Copy it again, or "
                f"{HOW_NSYS}."
            ) from error

    def read(self) -> Trace:
        if not self._tables & {*TABLES, "StringIds"}:
            found = ", ".join(sorted(self._tables)[:5]) or "none"
            raise TraceError(
                f"{self._path}: it is an SQLite file, but no export of Nsight Systems: it has none "
                f"of its tables (tables here: {found}). To make one, {HOW_NSYS}."
            )
        self._strings = self._read_strings()
        for read in (
            self._read_kernels,
            self._read_copies,
            self._read_sets,
            self._read_graphs,
            self._read_calls,
            self._read_ranges,
        ):
            try:
                read()
            except _FAULTS as error:
                self._builder.note(
                    f"the file is damaged ({error}); what was read before that is shown. "
                    "Export the .nsys-rep again."
                )
        missing = [table for table in (CALLS, RANGES) if table not in self._tables]
        if missing:
            self._builder.note(
                f"the export has no {' and no '.join(missing)}: no calls mean that it is not known "
                "when the CPU asked for what ran, no ranges that steps and activations have no "
                f"names. To have them, {HOW_NSYS}"
            )
        return self._builder.build()

    def _read_strings(self) -> dict[int, str]:
        if "StringIds" not in self._tables:
            return {}
        try:
            return dict(
                self._database.execute(
                    "SELECT id, value FROM StringIds "
                    "WHERE typeof(id) = 'integer' AND typeof(value) = 'text'"
                )
            )
        except _FAULTS as error:
            self._builder.note(f"the names of kernels and calls cannot be read ({error})")
            return {}

    def _rows(self, table: str, *wanted: str) -> Iterable[tuple[Any, ...]]:
        """Return process, start, end and the wanted columns of all rows that have a time.

        A column that is not there is None; what is no name is a whole number or None, since SQLite
        lets any value into any column. The process is the 24 bits that nsys keeps it in.
        """
        if table not in self._tables:
            return ()
        listed = self._database.execute(f"PRAGMA table_info({table})")
        columns = {str(row[1]).lower() for row in listed}
        if not {"start", "end"} <= columns:
            self._builder.note(f"the table {table} has no times; it was left out")
            return ()
        owner = next((c for c in ("globalPid", "globalTid") if c.lower() in columns), None)
        process = f"COALESCE({owner} >> 24 & 16777215, 0)" if owner else "0"
        chosen = [
            "NULL"
            if column.lower() not in columns
            else f'"{column}"'
            if column in _NAMES
            else f'CAST("{column}" AS INTEGER)'
            for column in wanted
        ]
        timed = "typeof(start) = 'integer' AND typeof(\"end\") = 'integer'"
        if table == RANGES:
            # What is pushed and never popped has no end: the reader counts it.
            timed = "typeof(start) = 'integer'"
        self._count(table, timed)
        selected = ", ".join((process, "start", '"end"', *chosen))
        return self._database.execute(f"SELECT {selected} FROM {table} WHERE {timed}")

    def _count(self, table: str, timed: str) -> None:
        try:
            counts = self._database.execute(f"SELECT COUNT(*), SUM({timed}) FROM {table}")
            num_rows, num_timed = counts.fetchone()
        except _FAULTS:
            return  # reading the rows says so
        self._builder.num_events += num_rows
        if (num_timed or 0) < num_rows:
            self._builder.note("rows without a start or an end were left out")

    def _name(self, number: object, otherwise: str) -> str:
        if isinstance(number, str):
            return number
        return self._strings.get(number, otherwise) if isinstance(number, int) else otherwise

    def _read_kernels(self) -> None:
        known: dict[tuple[object, ...], tuple[Lane, str, str]] = {}
        add = self._builder.add_work
        memory = HostMemory.UNKNOWN
        for process, start, end, device, stream, correlation, short, full, *shape in self._rows(
            KERNELS,
            *("deviceId", "streamId", "correlationId", "shortName", "demangledName"),
            *("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"),
        ):
            key = (short, full, *shape)
            if key not in known:
                name = self._name(full, "") or self._name(short, "unnamed kernel")
                launch = "" if None in shape else name_launch(tuple(shape[:3]), tuple(shape[3:]))
                known[key] = lane_of_kernel(name), name, launch
            lane, name, launch = known[key]
            asked = -1 if correlation is None else correlation
            number = device or 0
            add(
                Work(process, number, lane, name, start, end, 0, str(stream), memory, asked, launch)
            )

    def _read_copies(self) -> None:
        lanes = self._copy_kinds()
        memories = self._memory_kinds()
        for process, start, end, device, stream, correlation, size, kind, src, dst in self._rows(
            COPIES,
            *("deviceId", "streamId", "correlationId", "bytes", "copyKind", "srcKind", "dstKind"),
        ):
            lane = lanes.get(kind)
            if lane is None:
                self._builder.add_unknown(f"copyKind {kind}")
                continue
            host = dst if lane is Lane.COPY_OUT else src if lane is Lane.COPY_IN else None
            self._builder.add_work(
                Work(
                    process=process,
                    device=device or 0,
                    lane=lane,
                    name=_COPY_NAMES[lane],
                    start_ns=start,
                    end_ns=end,
                    num_bytes=max(size or 0, 0),
                    stream=str(stream),
                    host_memory=memories.get(host, HostMemory.UNKNOWN),
                    correlation=-1 if correlation is None else correlation,
                )
            )

    def _read_sets(self) -> None:
        self._read_plain(SETS, "Memset")

    def _read_graphs(self) -> None:
        self._read_plain(GRAPHS, "CUDA graph")
        if GRAPHS in self._tables:
            self._builder.note(
                "CUDA graphs were recorded as a whole: kernels and copies inside them are not told "
                "apart, and all counts as compute. Record with --cuda-graph-trace=node."
            )

    def _read_plain(self, table: str, name: str) -> None:
        for process, start, end, device, stream, correlation in self._rows(
            table, "deviceId", "streamId", "correlationId"
        ):
            self._builder.add_work(
                Work(
                    process=process,
                    device=device or 0,
                    lane=Lane.COMPUTE,
                    name=name,
                    start_ns=start,
                    end_ns=end,
                    stream=str(stream),
                    correlation=-1 if correlation is None else correlation,
                )
            )

    def _read_calls(self) -> None:
        add, strings = self._builder.add_call, self._strings
        for process, start, end, thread, correlation, name in self._rows(
            CALLS, "globalTid", "correlationId", "nameId"
        ):
            number = -1 if correlation is None else correlation
            add(process, thread, strings.get(name, ""), start, end, number)

    def _read_ranges(self) -> None:
        num_open = 0
        for process, start, end, kind, text, text_id, thread in self._rows(
            RANGES, "eventType", "text", "textId", "globalTid"
        ):
            if kind is not None and kind not in _RANGE_TYPES:
                continue
            if not isinstance(end, int):
                num_open += 1
            else:
                name = str(text or self._name(text_id, ""))
                self._builder.add_annotation(process, thread, name, start, end)
        if num_open:
            self._builder.note(f"{num_open} NVTX ranges start and never end; they were left out")

    def _copy_kinds(self) -> dict[int, Lane]:
        lanes = dict(_COPY_KINDS)
        for number, label in self._enum("ENUM_CUDA_MEMCPY_OPER"):
            for words, lane in _ENUM_LANES:
                if any(word in label.replace(" ", "-").replace("_", "-") for word in words):
                    lanes[number] = lane
        return lanes

    def _memory_kinds(self) -> dict[object, HostMemory]:
        memories: dict[object, HostMemory] = {**_MEMORY_KINDS}
        for number, label in self._enum("ENUM_CUDA_MEM_KIND"):
            memories[number] = memory_of(label)
        return memories

    def _enum(self, table: str) -> Iterator[tuple[int, str]]:
        if table in self._tables:
            try:
                for number, label in self._database.execute(
                    f"SELECT id, label FROM {table} WHERE typeof(id) = 'integer'"
                ):
                    yield number, str(label).lower()
            except _FAULTS:
                self._builder.note(f"{table} cannot be read; CUPTI's numbers were taken")


def _as_text(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


_COPY_NAMES: Final = {
    Lane.COPY_OUT: "Memcpy DtoH",
    Lane.COPY_IN: "Memcpy HtoD",
    Lane.COMPUTE: "Memcpy DtoD",
    Lane.COLLECTIVE: "Memcpy PtoP",
}
