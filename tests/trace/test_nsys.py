"""SQLite exports of Nsight Systems, made here in its documented schema."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import TraceError
from ebbtide.timeline import HostMemory, Lane
from ebbtide.trace.builder import Trace
from ebbtide.trace.overlap import analyse
from ebbtide.trace.read import read_trace
from tests.trace.test_kineto import spans_of, times_of

FILE = Path(__file__).parents[1] / "data" / "nsys-synthetic.sqlite"

PID = 4242 << 24
TID = PID + 7

SCHEMA = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,"
    " streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER,"
    " shortName INTEGER, graphNodeId INTEGER, gridX INTEGER, gridY INTEGER,"
    " gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,"
    " streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER,"
    " srcKind INTEGER, dstKind INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,"
    " streamId INTEGER, correlationId INTEGER, globalPid INTEGER, value INTEGER, bytes INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER, end INTEGER, deviceId INTEGER,"
    " contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER,"
    " graphId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER,"
    " correlationId INTEGER, nameId INTEGER, returnValue INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER,"
    " globalTid INTEGER",
    "ENUM_CUDA_MEMCPY_OPER": "id INTEGER PRIMARY KEY, name TEXT, label TEXT",
    "ENUM_CUDA_MEM_KIND": "id INTEGER PRIMARY KEY, name TEXT, label TEXT",
}

KERNEL, COPY, CALL, RANGE = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
)
STRINGS = ["gemm", "ncclDevKernel_AllGather", "cudaLaunchKernel_v7000", "cudaMemcpyAsync_v3020",
           "step 4", "cudaStreamSynchronize_v3020"]  # fmt: skip

Rows = Sequence[Sequence[Any]]


def make(path: Path, **tables: Rows) -> Path:
    """Write an export with only these tables, and the strings."""
    database = sqlite3.connect(path)
    for table, rows in {"StringIds": list(enumerate(STRINGS)), **tables}.items():
        database.execute(f"CREATE TABLE {table} ({SCHEMA[table]})")
        for row in rows:
            database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    database.commit()
    database.close()
    return path


def kernel(start: int, end: int, name: int = 0, *, device: int = 0, pid: int = PID, asked: int = 0,
           node: int | None = None) -> list[Any]:  # fmt: skip
    return [start, end, device, 1, 7, asked, pid, name, name, node, 66, 2, 1, 384, 1, 1]


def copy(
    start: int, end: int, size: int, kind: int, src: int, dst: int, asked: int = 0
) -> list[Any]:
    return [start, end, 0, 1, 20, asked, PID, size, kind, src, dst, None]


def read(tmp_path: Path, **tables: Rows) -> Trace:
    return read_trace(make(tmp_path / "trace.sqlite", **tables))


def a_step() -> dict[str, Rows]:
    """The worked example of docs/overlap.md."""
    return {
        KERNEL: [kernel(1000, 1040, asked=1), kernel(1070, 1100, asked=4)],
        COPY: [copy(1030, 1060, 1200, 2, 3, 2, 2), copy(1050, 1070, 1000, 1, 1, 3, 3)],
        CALL: [
            [990, 991, TID, 1, 2, 0],
            [992, 993, TID, 2, 3, 0],
            [994, 995, TID, 3, 3, 0],
            [1045, 1046, TID, 4, 2, 0],
            [1047, 1050, TID, 5, 5, 0],
        ],
        RANGE: [
            [980, 1090, 59, None, 4, TID],
            [991, 994, 59, "ebbtide: evict h.0.input", None, TID],
            [1, None, 59, "open", None, TID],
            [985, 985, 34, "a mark, no range", None, TID],
        ],
    }


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_step_becomes_lanes_with_the_figures_worked_out_by_hand(
    is_kept: bool, tmp_path: Path
) -> None:
    """Of a file made now, and of the one that is kept."""
    trace = read_trace(FILE) if is_kept else read(tmp_path, **a_step())
    assert trace.kind == "Nsight Systems"
    assert trace.notes == ("1 NVTX ranges start and never end; they were left out",)
    (device,) = trace.devices
    assert times_of(trace, Lane.COMPUTE) == [("gemm", 0, 40), ("gemm", 70, 100)]
    assert [s.queued_ns for s in spans_of(trace, Lane.COMPUTE)] == [10, 25]
    assert {s.launch for s in spans_of(trace, Lane.COMPUTE)} == {"66x2x1 blocks of 384x1x1"}
    (out,), (back,) = spans_of(trace, Lane.COPY_OUT), spans_of(trace, Lane.COPY_IN)
    assert (out.name, out.num_bytes, out.host_memory) == ("h.0.input", 1200, HostMemory.PINNED)
    assert (back.name, back.num_bytes, back.host_memory) == (
        *("Memcpy HtoD", 1000),
        HostMemory.PAGEABLE,
    )
    assert times_of(trace, Lane.STEP) == [("step 4", 0, 100)]
    assert times_of(trace, Lane.HOST) == [("cudaStreamSynchronize", 47, 50)]
    found = analyse(device.timeline)
    assert (found.copy_out.hidden_ns, found.copy_out.exposed_ns) == (10, 20)
    assert (found.copy_in.hidden_ns, found.copy_in.exposed_ns) == (0, 20)


def test_tables_may_be_absent(tmp_path: Path) -> None:
    trace = read(tmp_path, CUPTI_ACTIVITY_KIND_KERNEL=[kernel(0, 9)])
    assert times_of(trace, Lane.COMPUTE) == [("gemm", 0, 9)]
    assert trace.notes[0].startswith(
        "the export has no CUPTI_ACTIVITY_KIND_RUNTIME and no NVTX_EVENTS: "
    )


def test_columns_may_be_absent(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    database = sqlite3.connect(path)
    database.execute(f"CREATE TABLE {KERNEL} (start INTEGER, end INTEGER, deviceId INTEGER)")
    database.execute(f"INSERT INTO {KERNEL} VALUES (5, 9, 1)")
    database.commit()
    database.close()
    trace = read_trace(path)
    assert trace.devices[0].name == "GPU 1"
    assert times_of(trace, Lane.COMPUTE) == [("unnamed kernel", 0, 4)]


def test_kernels_of_nccl_memsets_and_unknown_copies(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        CUPTI_ACTIVITY_KIND_KERNEL=[kernel(0, 9, 1)],
        CUPTI_ACTIVITY_KIND_MEMSET=[[10, 12, 0, 1, 7, 0, PID, 0, 64]],
        CUPTI_ACTIVITY_KIND_MEMCPY=[copy(20, 22, 5, 8, 3, 3), copy(30, 32, 5, 99, 3, 3)],
    )
    assert times_of(trace, Lane.COLLECTIVE) == [("ncclDevKernel_AllGather", 0, 9)]
    assert times_of(trace, Lane.COMPUTE) == [("Memset", 10, 12), ("Memcpy DtoD", 20, 22)]
    assert "events of kinds that are not known were passed over: 'copyKind 99' (1)" in trace.notes


def test_the_files_own_enumerations_win(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        CUPTI_ACTIVITY_KIND_MEMCPY=[copy(0, 2, 5, 1, 3, 40)],
        ENUM_CUDA_MEMCPY_OPER=[(1, "CUDA_MEMCPY_OPER_DTOH", "Device-to-Host")],
        ENUM_CUDA_MEM_KIND=[(40, "CUDA_MEMKIND_PINNED", "Pinned"), (3, "X", "Device")],
    )
    (out,) = spans_of(trace, Lane.COPY_OUT)
    assert out.host_memory is HostMemory.PINNED


def test_nodes_of_cuda_graphs_are_kernels(tmp_path: Path) -> None:
    # All nodes of one graph have the correlation of its launch.
    trace = read(
        tmp_path,
        CUPTI_ACTIVITY_KIND_KERNEL=[kernel(10 * n, 10 * n + 5, asked=1, node=n) for n in range(3)],
        CUPTI_ACTIVITY_KIND_RUNTIME=[[-9, -8, TID, 1, 2, 0]],
    )
    assert [s.queued_ns for s in spans_of(trace, Lane.COMPUTE)] == [9, 19, 29]


def test_graphs_that_were_recorded_as_a_whole_count_as_compute(tmp_path: Path) -> None:
    trace = read(tmp_path, CUPTI_ACTIVITY_KIND_GRAPH_TRACE=[[0, 50, 0, 1, 7, 1, PID, 3]])
    assert times_of(trace, Lane.COMPUTE) == [("CUDA graph", 0, 50)]
    assert "Record with --cuda-graph-trace=node." in trace.notes[0]


def test_each_process_has_its_gpus(tmp_path: Path) -> None:
    other = 77 << 24
    trace = read(
        tmp_path,
        CUPTI_ACTIVITY_KIND_KERNEL=[
            kernel(0, 5, asked=1),
            kernel(100, 105, asked=1, pid=other),
            kernel(200, 205, device=1),
        ],
        CUPTI_ACTIVITY_KIND_RUNTIME=[[-4, -3, TID, 1, 2, 0], [90, 91, other + 1, 1, 2, 0]],
    )
    assert [device.name for device in trace.devices] == [
        "GPU 0 of process 77",
        "GPU 0 of process 4242",
        "GPU 1 of process 4242",
    ]
    assert [s.queued_ns for s in spans_of(trace, Lane.COMPUTE, 0)] == [10]
    assert [s.queued_ns for s in spans_of(trace, Lane.COMPUTE, 1)] == [4]


def test_rows_without_times_are_left_out(tmp_path: Path) -> None:
    rows = [kernel(0, 5), [None, *kernel(0, 5)[1:]], kernel(9, 7)]
    trace = read(tmp_path, CUPTI_ACTIVITY_KIND_KERNEL=rows)
    assert times_of(trace, Lane.COMPUTE) == [("gemm", 0, 5)]
    assert trace.notes[0] == "rows without a start or an end were left out"
    assert trace.notes[-1].startswith("1 events end before they start, ")


def test_a_database_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE notes (text TEXT)")
    database.commit()
    database.close()
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(
        f"{path}: it is an SQLite file, but no export of Nsight Systems: it has none of its tables "
        "(tables here: notes). To make one, record with nsys profile "
    )


def test_an_export_that_is_cut_says_so(tmp_path: Path) -> None:
    path = make(tmp_path / "x.sqlite", **{KERNEL: [kernel(n, n + 1) for n in range(9000)]})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(TraceError, match=r"that cannot be read \(database disk image is malf"):
        read_trace(path)


def test_an_export_with_a_broken_page_is_read_up_to_it(tmp_path: Path) -> None:
    path = make(tmp_path / "x.sqlite", **{KERNEL: [kernel(n, n + 1) for n in range(9000)]})
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(b"\xff" * 4096)
    trace = read_trace(path)
    assert any(note.startswith("the file is damaged (") for note in trace.notes)
    assert 0 < len(spans_of(trace, Lane.COMPUTE)) < 9000


def test_a_file_with_only_sqlites_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(b"SQLite format 3\0" + b"x" * 500)
    with pytest.raises(TraceError, match="it is an SQLite file that cannot be read"):
        read_trace(path)


def test_an_export_without_work_on_a_gpu(tmp_path: Path) -> None:
    trace = read(tmp_path, NVTX_EVENTS=[[0, 9, 59, "step 1", None, TID]])
    assert trace.devices == ()
    assert trace.notes[-1].startswith(
        "none of the 1 events ran on a GPU, so there is nothing to measure; record with nsys "
    )


def test_the_file_is_not_written_to(tmp_path: Path) -> None:
    path = make(tmp_path / "trace.sqlite", **a_step())
    before = path.read_bytes()
    read_trace(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["trace.sqlite"]
