"""Chrome traces: torch's, cut and broken ones, and those of other programs."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ebbtide.timeline import HostMemory, Lane, Span
from ebbtide.trace.builder import Trace
from ebbtide.trace.chrome_json import nanoseconds
from ebbtide.trace.overlap import Reason, analyse
from ebbtide.trace.read import read_trace
from tests.trace.chrome import (
    OUT,
    START_US,
    Event,
    a_step,
    call,
    complete,
    copy,
    kernel,
    mark,
    moment,
    text_of,
    write,
)


def spans_of(trace: Trace, lane: Lane, device: int = 0) -> list[Span]:
    return [span for span in trace.devices[device].timeline.spans if span.lane is lane]


def times_of(trace: Trace, lane: Lane, device: int = 0) -> list[tuple[str, int, int]]:
    return [(s.name, s.start_ns, s.end_ns) for s in spans_of(trace, lane, device)]


def read(tmp_path: Path, *events: Event) -> Trace:
    return read_trace(write(tmp_path / "trace.json", *events))


def test_a_step_of_torch_becomes_lanes(tmp_path: Path) -> None:
    trace = read(tmp_path, *a_step())
    assert (trace.kind, trace.num_events, trace.notes) == ("PyTorch profiler", 13, ())
    (device,) = trace.devices
    assert device.name == "GPU 0"
    assert spans_of(trace, Lane.COMPUTE) == [
        Span(
            lane=Lane.COMPUTE,
            name="gemm",
            start_ns=0,
            end_ns=40_000,
            stream="7",
            queued_ns=5_000,
        ),
        Span(
            lane=Lane.COMPUTE,
            name="gemm_backward",
            start_ns=70_000,
            end_ns=100_000,
            stream="7",
            queued_ns=66_000,
        ),
    ]
    assert spans_of(trace, Lane.COPY_OUT) == [
        Span(
            lane=Lane.COPY_OUT,
            name="h.0.input",
            start_ns=30_000,
            end_ns=60_000,
            num_bytes=1_200_000,
            stream="20",
            host_memory=HostMemory.PINNED,
            queued_ns=32_000,
        )
    ]
    # The step is what the device did of it, not when the CPU was in it.
    assert times_of(trace, Lane.STEP) == [("ProfilerStep#3", 0, 100_000)]


@pytest.mark.parametrize(
    ("said", "launch"),
    [
        ({"grid": [2, 66, 1], "block": [384, 1, 1]}, "2x66x1 blocks of 384x1x1"),
        ({"grid": [2, 66, 1]}, ""),
        ({"grid": [2, 66], "block": [384, 1, 1]}, ""),
        ({"grid": [2, {}, 1], "block": [384, 1, 1]}, ""),
        ({"grid": "2", "block": 384}, ""),
    ],
)
def test_a_kernel_has_the_shape_that_it_was_launched_with(
    tmp_path: Path, said: dict[str, Any], launch: str
) -> None:
    trace = read(tmp_path, kernel("gemm", 0, 10, **said))
    assert [span.launch for span in spans_of(trace, Lane.COMPUTE)] == [launch]


def test_its_figures_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    found = analyse(read(tmp_path, *a_step()).devices[0].timeline)
    assert (found.compute_busy_ns, found.idle_ns) == (70_000, 30_000)
    out, back = found.copy_out, found.copy_in
    assert (out.busy_ns, out.hidden_ns, out.exposed_ns) == (30_000, 10_000, 20_000)
    assert (back.busy_ns, back.hidden_ns, back.exposed_ns) == (20_000, 0, 20_000)
    assert (out.num_bytes, out.pinned_bytes, out.gb_per_s) == (1_200_000, 1_200_000, 40.0)
    assert found.idle_by_reason_ns[Reason.COPY_IN] == 20_000
    assert found.idle_by_reason_ns[Reason.COPY_OUT] == 10_000
    assert [(m.name, m.lane, m.exposed_ns) for m in found.moved] == [
        ("h.0.input", Lane.COPY_IN, 20_000),
        ("h.0.input", Lane.COPY_OUT, 20_000),
    ]


@pytest.mark.parametrize(
    ("written", "ns"),
    [
        (5, 5000),
        ("1764000000000000.123", 1_764_000_000_000_000_123),
        ("0.5", 500),
        ("-2.25", -2250),
        ("1e3", 1_000_000),
        ("7.1239", 7123),
        ("soon", None),
        ("1e999999999", None),
        (None, None),
        (True, None),
    ],
)
def test_times_are_exact(written: object, ns: int | None) -> None:
    assert nanoseconds(written) == ns


def test_single_nanoseconds_since_1970_survive(tmp_path: Path) -> None:
    trace = read(tmp_path, kernel("a", 0, 1), kernel("b", 2, 5))
    assert times_of(trace, Lane.COMPUTE) == [("a", 0, 1), ("b", 2, 5)]


def test_gzip_reads_alike(tmp_path: Path) -> None:
    packed = tmp_path / "trace.json.gz"
    # Two members, as a file that was appended to has.
    text = text_of(*a_step()).encode()
    packed.write_bytes(gzip.compress(text[:500]) + gzip.compress(text[500:]))
    assert read_trace(packed).devices == read(tmp_path, *a_step()).devices


def test_a_list_of_events_alone_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    text = text_of(*a_step())
    path.write_text(text[text.index('"traceEvents": ') + 15 : text.rindex("}")])
    assert read_trace(path).devices == read(tmp_path, *a_step()).devices


def test_windows_of_text_may_cut_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(tmp_path, *a_step())
    for num_bytes in (64, 65, 97, 1024):
        monkeypatch.setattr("ebbtide.trace.chrome_json._CHUNK_BYTES", num_bytes)
        assert read(tmp_path, *a_step()) == whole


def test_collectives_and_other_copies_are_told_by_their_names(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 9),
        copy("Memcpy DtoD (Device -> Device)", 10, 19, 7),
        copy("Memcpy PtoP (Device -> Device)", 20, 29, 7),
        copy("Memcpy HtoD (Pageable -> Device)", 30, 39, 7),
        complete("gpu_memset", "Memset (Device)", 40, 49, stream=7),
    )
    assert [s.start_ns for s in spans_of(trace, Lane.COLLECTIVE)] == [0, 20]
    assert [s.start_ns for s in spans_of(trace, Lane.COMPUTE)] == [10, 40]
    (back,) = spans_of(trace, Lane.COPY_IN)
    assert (back.host_memory, back.num_bytes) == (HostMemory.PAGEABLE, 7)


def test_each_gpu_has_a_timeline_with_one_start(tmp_path: Path) -> None:
    trace = read(tmp_path, kernel("a", 100, 110), kernel("b", 130, 140, device=1))
    assert [device.name for device in trace.devices] == ["GPU 0", "GPU 1"]
    assert times_of(trace, Lane.COMPUTE, 1) == [("b", 30, 40)]


def test_copies_have_the_name_that_surrounds_their_launch_on_their_thread(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        complete("cpu_op", "ebbtide: evict h.1.mlp", 0, 10, tid=5),
        mark("forward", 0, 100, tid=6),
        call("cudaMemcpyAsync", 4, 5, 1, tid=5),
        call("cudaMemcpyAsync", 4, 5, 2, tid=6),
        call("cudaMemcpyAsync", 11, 12, 3, tid=5),
        *(copy(OUT, 20 * n, 20 * n + 5, 3, correlation=n) for n in (1, 2, 3)),
    )
    assert [s.name for s in spans_of(trace, Lane.COPY_OUT)] == ["h.1.mlp", OUT, OUT]


def test_steps_end_where_the_device_starts_the_next(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        mark("ProfilerStep#1", 0, 50),
        mark("ProfilerStep#2", 50, 60),
        call("cudaLaunchKernel", 10, 11, 1),
        call("cudaLaunchKernel", 55, 56, 2),
        kernel("a", 40, 80, correlation=1),
        kernel("b", 90, 95, correlation=2),
    )
    assert times_of(trace, Lane.STEP) == [("ProfilerStep#1", 0, 50), ("ProfilerStep#2", 50, 55)]


def test_without_launches_steps_are_the_cpus(tmp_path: Path) -> None:
    trace = read(tmp_path, mark("ProfilerStep#1", 0, 50), kernel("a", 40, 80))
    assert times_of(trace, Lane.STEP) == [("ProfilerStep#1", 0, 50)]
    assert times_of(trace, Lane.COMPUTE) == [("a", 40, 80)]


def test_waiting_and_memory_calls_are_kept(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        kernel("a", 0, 90),
        call("cudaStreamSynchronize", 5, 20, 1),
        call("cudaMalloc", 30, 40, 2),
        call("cudaLaunchKernel", 50, 60, 3),
    )
    assert times_of(trace, Lane.HOST) == [("cudaStreamSynchronize", 5, 20), ("cudaMalloc", 30, 40)]


def test_memory_events_give_the_peak(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        kernel("a", 0, 9),
        moment(5, 70, 80),
        moment(2, 60, 90),
        moment(1, 999, 999, kind=0),
    )
    (device,) = trace.devices
    assert (device.timeline.peak_bytes, device.reserved_bytes) == (70, 90)


def test_memory_over_time_is_sorted_and_starts_with_the_device(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        moment(-9, 10, 40),
        moment(-5, 20, 40),
        kernel("a", 0, 9),
        moment(7, 30, 40),
        moment(3, 25, 40),
    )
    memory = trace.devices[0].memory
    assert memory is not None
    assert memory.times_ns.tolist() == [0, 3, 7]
    assert memory.allocated_bytes.tolist() == [20, 25, 30]
    assert memory.reserved_bytes.tolist() == [40, 40, 40]


def test_without_memory_events_there_is_no_series(tmp_path: Path) -> None:
    impossible = moment(1, -5, 40)
    trace = read(tmp_path, kernel("a", 0, 9), impossible)
    assert trace.devices[0].memory is None
    assert trace.notes == ("the allocator is said to hold impossible numbers of bytes; left out",)


# Bad input: what could be read is there, and a note says what was wrong.


def test_json_that_is_cut_in_the_middle(tmp_path: Path) -> None:
    text = text_of(*a_step())
    path = tmp_path / "cut.json"
    path.write_text(text[: text.index("gemm_backward") + 4])
    trace = read_trace(path)
    assert trace.num_events == 12
    assert [s.name for s in spans_of(trace, Lane.COMPUTE)] == ["gemm"]
    assert trace.notes == (
        "the file is not whole: it ends in the middle of an event. 12 events before that were "
        "read. Let the program end, or the profiler stop, before copying the file.",
    )


def test_gzip_that_is_cut_in_the_middle(tmp_path: Path) -> None:
    events = [kernel(f"kernel_{n * 7919 % 10007}", 10 * n, 10 * n + 5) for n in range(3000)]
    packed = gzip.compress(text_of(*events).encode())
    path = tmp_path / "cut.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    trace = read_trace(path)
    assert 500 < len(spans_of(trace, Lane.COMPUTE)) < 2500
    assert trace.notes[0].startswith("the file is not whole: its gzip stream ends in the middle. ")


def test_gzip_with_a_broken_byte(tmp_path: Path) -> None:
    events = [kernel(f"kernel_{n * 7919 % 10007}", 10 * n, 10 * n + 5) for n in range(3000)]
    packed = bytearray(gzip.compress(text_of(*events).encode()))
    packed[-8] ^= 1  # of the checksum
    path = tmp_path / "broken.json.gz"
    path.write_bytes(packed)
    trace = read_trace(path)
    assert trace.notes[0].startswith("the file is not whole: its gzip stream is broken (")
    assert trace.num_events > 2500


def test_a_small_gzip_that_unpacks_to_much_fills_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(text_of(*a_step()).encode()[:-1].rstrip() + b", ")
        for _ in range(40):
            file.write(b" " * (1 << 20))
        file.write(b'"end": 1}')
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    trace = read_trace(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trace.num_events == 13
    assert peak_bytes < 20 << 20


def test_one_endless_string_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.trace.chrome_json._MAX_VALUE_CHARS", 100_000)
    monkeypatch.setattr("ebbtide.trace.chrome_json._CHUNK_BYTES", 4096)
    path = tmp_path / "string.json"
    path.write_text(text_of(kernel("a", 0, 5))[:-2].rstrip("] \n") + ', {"ph": "' + "x" * 400_000)
    trace = read_trace(path)
    assert len(spans_of(trace, Lane.COMPUTE)) == 1
    assert "longer than 64 million characters" in trace.notes[0]


def test_a_broken_event_between_others_is_left_out(tmp_path: Path) -> None:
    text = text_of(
        kernel("a", 0, 5), kernel("bad", 10, 15), *(kernel("c", n, n + 1) for n in range(20, 40))
    )
    path = tmp_path / "trace.json"
    path.write_text(text.replace('"bad"', '"C:\\q"'))
    trace = read_trace(path)
    assert [s.name for s in spans_of(trace, Lane.COMPUTE)] == ["a", *["c"] * 20]
    assert trace.notes == ("1 events are broken JSON and were left out",)


def test_events_that_end_before_they_start(tmp_path: Path) -> None:
    trace = read(tmp_path, kernel("a", 0, 5), kernel("b", 20, 15), call("cudaFree", 9, 1, 1))
    assert times_of(trace, Lane.COMPUTE) == [("a", 0, 5)]
    assert trace.notes[0].startswith("2 events end before they start, or have times that no clock")


def test_spans_without_length_and_spans_that_overlap(tmp_path: Path) -> None:
    trace = read(tmp_path, kernel("a", 0, 9), kernel("b", 5, 12), kernel("c", 20, 20))
    found = analyse(trace.devices[0].timeline)
    assert len(spans_of(trace, Lane.COMPUTE)) == 3
    assert (found.compute_busy_ns, found.end_ns) == (12, 20)


def test_unknown_categories_are_named(tmp_path: Path) -> None:
    trace = read(tmp_path, kernel("a", 0, 9), *(complete("tpu", "x", 1, 2) for _ in range(3)))
    assert trace.notes == ("events of kinds that are not known were passed over: 'tpu' (3)",)


def test_events_of_odd_types_do_no_harm(tmp_path: Path) -> None:
    odd = [
        {"ph": "X", "cat": ["kernel"], "name": "x", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": None, "ts": [], "dur": {}, "args": []},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy ???", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "y", "ts": 1, "args": {"device": "one"}},
        {"ph": 3},
        {"ph": "M", "name": "process_name"},
        {"ph": "E", "pid": 1, "tid": 1},
        {"ph": "B", "pid": 1, "tid": 1, "ts": 1},
        {},
    ]
    trace = read(tmp_path, kernel("a", 0, 9), *odd)
    assert trace.num_events == 1 + len(odd)
    assert [note.split(";")[0] for note in trace.notes if "copy is named" in note] == [
        "a copy is named 'Memcpy ???', which says no direction"
    ]
    assert "1 events have no time that can be read; left out" in trace.notes
    assert "1 events start and never end; they were left out" in trace.notes


def test_json_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"format": "ebbtide-plan", "version": 2}')
    trace = read_trace(path)
    assert trace.devices == ()
    assert trace.notes[0].startswith("it is JSON without a list traceEvents, so it is no trace; ")


# Traces of others.


def jax_events() -> list[Event]:
    """What JAX's own viewer file has: places by name, no categories, and lines said twice."""
    name_of = {(3, 1): "Stream #14(Compute)", (3, 2): "Stream #70(MemcpyD2H)", (3, 9): "XLA Ops"}
    names = [
        {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": "/device:GPU:1"}},
        {"ph": "M", "pid": 8, "name": "process_name", "args": {"name": "/host:CPU"}},
        *(
            {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for (pid, tid), name in name_of.items()
        ),
    ]
    details = "kind_src:device kind_dst:pinned size:134217728 dest:0 async:1"
    ran = [
        {"ph": "X", "pid": 3, "tid": 1, "ts": 1, "dur": 4, "name": "loop_fusion"},
        {"ph": "X", "pid": 3, "tid": 9, "ts": 1, "dur": 4, "name": "fusion.3"},
        {
            **{"ph": "X", "pid": 3, "tid": 2, "ts": 3, "dur": 4, "name": "MemcpyD2H"},
            "args": {"memcpy_details": details},
        },
        {"ph": "X", "pid": 8, "tid": 1, "ts": 0, "dur": 9, "name": "step 5"},
    ]
    return [*ran, *names]


def test_a_trace_of_jaxs_viewer(tmp_path: Path) -> None:
    path = tmp_path / "jax.json"
    path.write_text(json.dumps({"traceEvents": jax_events()}))
    trace = read_trace(path)
    assert trace.kind == "Chrome trace"
    (device,) = trace.devices
    assert device.name == "GPU 1"
    assert times_of(trace, Lane.COMPUTE) == [("loop_fusion", 1000, 5000)]
    (out,) = spans_of(trace, Lane.COPY_OUT)
    assert (out.start_ns, out.num_bytes, out.host_memory) == (3000, 2**27, HostMemory.PINNED)
    assert times_of(trace, Lane.STEP) == [("step 5", 0, 9000)]


def test_events_with_a_start_and_an_end_of_their_own(tmp_path: Path) -> None:
    gpu = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "GPU 0"}}
    events = [
        gpu,
        {"ph": "B", "pid": 1, "tid": 1, "ts": START_US, "name": "outer"},
        {"ph": "B", "pid": 1, "tid": 1, "ts": START_US + 2, "name": "MemcpyH2D"},
        {"ph": "E", "pid": 1, "tid": 1, "ts": START_US + 5, "args": {"bytes": 10}},
        {"ph": "E", "pid": 1, "tid": 1, "ts": START_US + 9},
    ]
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(events))
    trace = read_trace(path)
    assert times_of(trace, Lane.COMPUTE) == [("outer", 0, 9000)]
    assert times_of(trace, Lane.COPY_IN) == [("MemcpyH2D", 2000, 5000)]
    assert spans_of(trace, Lane.COPY_IN)[0].num_bytes == 10
