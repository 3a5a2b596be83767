"""Traces for Perfetto: what is on which track, and that reading them back loses nothing."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.make_trace import write_steps
from ebbtide.commands.trace_json import describe_trace
from ebbtide.timeline import HostMemory, Lane, Span, Timeline
from ebbtide.trace.annotated import write_annotated
from ebbtide.trace.builder import DeviceTrace, MemorySeries, Trace
from ebbtide.trace.findings import find
from ebbtide.trace.overlap import analyse
from ebbtide.trace.read import read_trace
from tests.trace.chrome import a_step, moment, write

Event = dict[str, Any]


def annotate(trace: Trace, path: Path) -> Path:
    write_annotated(path, trace, [analyse(device.timeline) for device in trace.devices])
    return path


def there_and_back(trace: Trace, folder: Path) -> Trace:
    return read_trace(annotate(trace, folder / "out.json.gz"))


def trace_of(*timelines: tuple[Span, ...], notes: tuple[str, ...] = ()) -> Trace:
    devices = tuple(
        DeviceTrace(
            name=f"GPU {number}",
            timeline=Timeline(source=f"by hand: GPU {number}", spans=spans, peak_bytes=number),
            reserved_bytes=2 * number,
        )
        for number, spans in enumerate(timelines)
    )
    return Trace(file="a.json", kind="by hand", num_events=99, devices=devices, notes=notes)


def events_of(path: Path) -> list[Event]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def tracks_of(events: list[Event], process: int) -> dict[str, list[Event]]:
    """The complete events of a process, by the name of their track."""
    named = {
        e["tid"]: e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == process
    }
    tracks: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == process:
            tracks[named[event["tid"]]].append(event)
    return tracks


def describe(trace: Trace) -> dict[str, object]:
    analyses = [analyse(device.timeline) for device in trace.devices]
    findings = [f for pair in zip(trace.devices, analyses, strict=True) for f in find(*pair)]
    return {**describe_trace(trace, analyses, findings, []), "file": ""}


def test_the_tracks_of_a_step(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.json", *a_step()))
    events = events_of(annotate(trace, tmp_path / "out.json.gz"))
    tracks = tracks_of(events, 1)
    assert {name: [(e["name"], e["ts"], e["dur"]) for e in on] for name, on in tracks.items()} == {
        "step": [("ProfilerStep#3", 0, 100)],
        "compute, stream 7": [("gemm", 0, 40), ("gemm_backward", 70, 30)],
        "compute idle": [("waits: copy-in", 40, 30)],
        "copy-out, stream 20": [("h.0.input", 30, 30)],
        "copy-out exposed": [("copy-out exposed", 40, 20)],
        "copy-in, stream 21": [("h.0.input", 50, 20)],
        "copy-in exposed": [("copy-in exposed", 50, 20)],
    }
    assert tracks["compute idle"][0]["args"] == {"waited_for": "h.0.input"}
    assert tracks["copy-out, stream 20"][0]["args"] == {
        "lane": "copy-out",
        "stream": "20",
        "bytes": 1_200_000,
        "host_memory": "pinned",
        "queued_ns": 32_000,
    }
    (process,) = [e for e in events if e["name"] == "process_name"]
    assert (process["pid"], process["args"]) == (1, {"name": "GPU 0"})


def test_the_numbers_are_the_same_when_it_is_read_back(tmp_path: Path) -> None:
    one = write(tmp_path / "a.json", *a_step(), moment(3, 10, 20), moment(9, 5, 20))
    write_steps(tmp_path / "two.json", num_gpus=2)
    for path in (one, tmp_path / "two.json"):
        trace = read_trace(path)
        back = there_and_back(trace, tmp_path)
        assert describe(back) == describe(trace)
        for before, after in zip(trace.devices, back.devices, strict=True):
            assert after.timeline == before.timeline
            assert before.memory is not None
            assert after.memory is not None
            assert after.memory.times_ns.tolist() == before.memory.times_ns.tolist()
            assert after.memory.allocated_bytes.tolist() == before.memory.allocated_bytes.tolist()
            assert after.memory.reserved_bytes.tolist() == before.memory.reserved_bytes.tolist()


spans = st.builds(
    lambda lane, name, start, length, size, stream, memory, queued, launch: Span(
        lane=lane, name=name, start_ns=start, end_ns=start + length, num_bytes=size,
        stream=stream, host_memory=memory, queued_ns=queued,
        launch=launch,
    ),
    st.sampled_from(Lane),
    st.text(max_size=5),
    st.integers(0, 10**13),
    st.integers(0, 10**7),
    st.integers(0, 2**40),
    st.sampled_from(["", "7", "exposed", "a b"]),
    st.sampled_from(HostMemory),
    st.integers(0, 10**6),
    st.sampled_from(["", "8x1x1 blocks of 128x1x1"]),
)  # fmt: skip


@settings(max_examples=40)
@given(st.lists(spans, min_size=1, max_size=30))
def test_any_span_comes_back_and_no_track_has_two_at_once(
    tmp_path_factory: pytest.TempPathFactory, found: list[Span]
) -> None:
    found.sort(key=lambda span: span.start_ns)
    trace = trace_of(tuple(found))
    path = annotate(trace, tmp_path_factory.mktemp("any") / "out.json.gz")
    assert read_trace(path).devices == trace.devices
    by_track: dict[int, list[Event]] = defaultdict(list)
    for event in events_of(path):
        if event["ph"] == "X":
            by_track[event["tid"]].append(event)
    for on in by_track.values():
        for one, other in pairwise(on):
            ends = round(1000 * one["ts"]) + round(1000 * one["dur"])
            assert ends <= round(1000 * other["ts"])


def test_devices_keep_their_names_steps_and_notes(tmp_path: Path) -> None:
    first = Span(lane=Lane.COMPUTE, name="a", start_ns=0, end_ns=5)
    second = Span(lane=Lane.STEP, name="step 2", start_ns=3, end_ns=9)
    trace = trace_of((first,), (first, second), notes=("the file is not whole",))
    back = there_and_back(trace, tmp_path)
    assert back.devices == trace.devices
    assert (back.kind, back.num_events, back.notes) == (trace.kind, 99, trace.notes)


def test_memory_is_a_counter(tmp_path: Path) -> None:
    series = MemorySeries(
        times_ns=np.array([0, 1500]),
        allocated_bytes=np.array([1, 2]),
        reserved_bytes=np.array([3, 4]),
    )
    (device,) = trace_of((Span(lane=Lane.COMPUTE, name="a", start_ns=0, end_ns=9),)).devices
    device = DeviceTrace(name=device.name, timeline=device.timeline, memory=series)
    trace = Trace(file="", kind="by hand", num_events=1, devices=(device,), notes=())
    counters = [
        (e["name"], e["ts"], e["args"])
        for e in events_of(annotate(trace, tmp_path / "out.json.gz"))
        if e["ph"] == "C"
    ]
    assert counters == [
        ("memory", 0, {"allocated": 1, "reserved": 3}),
        ("memory", 1.5, {"allocated": 2, "reserved": 4}),
    ]


def test_the_same_trace_gives_the_same_bytes_packed_or_plain(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.json", *a_step()))
    one, two = annotate(trace, tmp_path / "1.json.gz"), annotate(trace, tmp_path / "2.json.gz")
    plain = annotate(trace, tmp_path / "3.json")
    assert one.read_bytes() == two.read_bytes()
    assert gzip.decompress(one.read_bytes()) == plain.read_bytes()
    assert describe(read_trace(plain)) == describe(trace)


# Bad input.


def edited(tmp_path: Path, old: str, new: str) -> Trace:
    trace = read_trace(write(tmp_path / "a.json", *a_step()))
    path = annotate(trace, tmp_path / "out.json")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return read_trace(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"lane": "copy-out"', '"lane": "copy-over"'),
        ('"lane": "copy-out"', '"lane": ["copy-out"]'),
        ('"host_memory": "pinned"', '"host_memory": "pined"'),
        ('"bytes": 1200000', '"bytes": -1'),
        ('"bytes": 1200000', '"bytes": 1e9'),
        ('"bytes": 1200000', f'"bytes": {1 << 70}'),
        ('"queued_ns": 32000', '"queued_ns": null'),
        ('"ts":30.000', '"ts":-30.000'),
        ('"name":"h.0.input"', '"name":7'),
    ],
)
def test_an_event_that_lacks_something_is_left_out(tmp_path: Path, old: str, new: str) -> None:
    back = edited(tmp_path, old, new)
    lanes = [span.lane for span in back.devices[0].timeline.spans]
    assert Lane.COPY_OUT not in lanes
    assert Lane.COPY_IN in lanes
    assert back.notes == ("1 events lack what they were written with; left out",)


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ('"version": 1', '"version": 2', "it was not annotated by this version of ebbtide (form 2"),
        ('"ebbtide": {', '"other": {', "it was not annotated by this version of ebbtide (form Non"),
        ('"devices": [', '"devices": 3, "x": [', ""),
        ('"kind": "PyTorch profiler"', '"kind": {}', ""),
    ],
)
def test_a_header_that_is_not_ours(tmp_path: Path, old: str, new: str, note: str) -> None:
    back = edited(tmp_path, old, new)
    (device,) = back.devices
    assert device.name == "GPU 0"
    assert len(device.timeline.spans) == 5
    assert [found[: len(note)] for found in back.notes] == ([note] if note else [])


def test_a_file_that_is_cut_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.json", *a_step()))
    path = annotate(trace, tmp_path / "out.json")
    text = path.read_text()
    path.write_text(text[: text.index('"gemm_backward"')])
    back = read_trace(path)
    assert back.kind == "PyTorch profiler"
    assert len(back.devices[0].timeline.spans) == 4
    assert back.notes[0].startswith("the file is not whole: it ends in the middle of an event")
