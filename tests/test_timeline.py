import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from ebbtide.errors import PlanError
from ebbtide.timeline import HostMemory, Lane, Span, Timeline


def a_timeline() -> Timeline:
    return Timeline(
        source="simulated",
        spans=(
            Span(lane=Lane.COMPUTE, name="up", start_ns=0, end_ns=10),
            Span(lane=Lane.COPY_OUT, name="up", start_ns=10, end_ns=40, num_bytes=7),
            Span(lane=Lane.STALL, name="up", start_ns=10, end_ns=13),
            Span(lane=Lane.COMPUTE, name="down", start_ns=13, end_ns=20),
            Span(lane=Lane.STALL, name="up", start_ns=20, end_ns=25),
        ),
        peak_bytes=99,
    )


def form_with(change: Callable[[dict[str, Any]], None]) -> str:
    form = cast(dict[str, Any], json.loads(a_timeline().to_json()))
    change(form)
    return json.dumps(form)


def message_of(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        Timeline.from_json(text)
    return str(caught.value)


def test_a_step_ends_with_its_last_compute() -> None:
    assert a_timeline().step_ns == 20


def test_stalls_add_up() -> None:
    assert a_timeline().stall_ns == 3 + 5


def test_a_lane_is_busy_for_the_sum_of_its_spans() -> None:
    timeline = a_timeline()
    busy = {lane: timeline.busy_ns(lane) for lane in Lane}
    assert busy == {
        Lane.COMPUTE: 17,
        Lane.STALL: 8,
        Lane.COPY_OUT: 30,
        Lane.COPY_IN: 0,
        Lane.DISK_WRITE: 0,
        Lane.DISK_READ: 0,
        Lane.COLLECTIVE: 0,
        Lane.HOST: 0,
        Lane.STEP: 0,
    }


def test_an_empty_timeline_takes_no_time() -> None:
    timeline = Timeline(source="nothing", spans=(), peak_bytes=0)
    assert (timeline.step_ns, timeline.stall_ns) == (0, 0)
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_json_form_reads_back_equal_and_writes_the_same_bytes() -> None:
    text = a_timeline().to_json()
    assert Timeline.from_json(text) == a_timeline()
    assert Timeline.from_json(text).to_json() == text
    assert text.endswith("}\n")


def test_json_form_names_its_format_version_and_lanes() -> None:
    form = json.loads(a_timeline().to_json())
    spans = form.pop("spans")
    assert form == {
        "format": "ebbtide-timeline",
        "version": 3,
        "source": "simulated",
        "peak_bytes": 99,
    }
    assert spans[1] == {
        "lane": "copy-out",
        "name": "up",
        "start_ns": 10,
        "end_ns": 40,
        "num_bytes": 7,
        "stream": "",
        "host_memory": "",
        "queued_ns": 0,
        "launch": "",
    }


@pytest.mark.parametrize("lane", Lane)
def test_every_lane_reads_back(lane: Lane) -> None:
    span = Span(lane=lane, name="up", start_ns=1, end_ns=1)
    timeline = Timeline(source="", spans=(span,), peak_bytes=0)
    assert Timeline.from_json(timeline.to_json()).spans == (span,)


@pytest.mark.parametrize("field", ["start_ns", "num_bytes", "queued_ns"])
def test_a_negative_number_of_a_span_is_refused(field: str) -> None:
    message = message_of(form_with(lambda form: form["spans"][1].update({field: -1})))
    assert message == (
        f"span 'up' has {field} -1; times and sizes are 0 or more. Measure it again."
    )


def test_version_1_knew_neither_streams_nor_host_memory() -> None:
    def age(form: dict[str, Any]) -> None:
        form["version"] = 1
        for span in form["spans"]:
            for field in ("stream", "host_memory", "queued_ns", "launch"):
                del span[field]

    assert Timeline.from_json(form_with(age)) == a_timeline()
    aged_wrongly = form_with(lambda form: form.update(version=1))
    assert message_of(aged_wrongly).startswith("spans[0]: unknown field 'host_memory'; valid names")


def test_version_2_knew_no_launches() -> None:
    def age(form: dict[str, Any]) -> None:
        form["version"] = 2
        for span in form["spans"]:
            del span["launch"]

    assert Timeline.from_json(form_with(age)) == a_timeline()
    aged_wrongly = form_with(lambda form: form.update(version=2))
    assert message_of(aged_wrongly).startswith("spans[0]: unknown field 'launch'; valid names")


def test_what_a_trace_knows_reads_back() -> None:
    span = Span(
        lane=Lane.COPY_OUT,
        name="up",
        start_ns=9,
        end_ns=12,
        stream="7",
        host_memory=HostMemory.PINNED,
        queued_ns=4,
        launch="8x1x1 blocks of 128x1x1",
    )
    timeline = Timeline(source="", spans=(span,), peak_bytes=0)
    assert Timeline.from_json(timeline.to_json()).spans == (span,)


def test_an_unknown_kind_of_host_memory_is_refused() -> None:
    message = message_of(form_with(lambda form: form["spans"][1].update(host_memory="pined")))
    assert message.startswith("spans[1]: unknown host_memory 'pined'; valid names, nearest first: ")


def test_a_span_that_ends_before_it_starts_is_refused() -> None:
    message = message_of(form_with(lambda form: form["spans"][1].update(end_ns=4)))
    assert message == (
        "span 'up' has a length of -6; times and sizes are 0 or more. Measure it again."
    )


def test_a_negative_peak_is_refused() -> None:
    assert message_of(form_with(lambda form: form.update(peak_bytes=-1))) == (
        "the timeline has peak_bytes -1; times and sizes are 0 or more. Measure it again."
    )


def test_an_unknown_lane_lists_the_valid_ones_nearest_first() -> None:
    message = message_of(form_with(lambda form: form["spans"][1].update(lane="copy_out")))
    assert message.startswith(
        "spans[1]: unknown lane 'copy_out'; valid names, nearest first: copy-out, "
    )


def test_another_format_is_refused() -> None:
    assert message_of(form_with(lambda form: form.update(format="ebbtide-plan"))) == (
        "the file's format is 'ebbtide-plan'; this reader takes 'ebbtide-timeline' only. "
        "Pass a file of that format."
    )


@pytest.mark.parametrize("version", [4, 0, "1", True, None])
def test_another_version_is_refused(version: object) -> None:
    assert message_of(form_with(lambda form: form.update(version=version))) == (
        f"the file's version is {version!r}; this ebbtide reads versions 1 to 3 of "
        "'ebbtide-timeline' only. Write the file again with this ebbtide."
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda form: form.pop("spans"), "timeline has no field 'spans'; it is required."),
        (lambda form: form.pop("source"), "timeline has no field 'source'; it is required."),
        (lambda form: form.pop("peak_bytes"), "timeline has no field 'peak_bytes'; it is"),
        (lambda form: form.update(span=[]), "timeline: unknown field 'span'; valid names,"),
        (lambda form: form.update(spans={}), "timeline: spans is {}; it must be a list."),
        (lambda form: form.update(source=3), "timeline: source is 3; it must be a text."),
        (lambda form: form.update(peak_bytes=0.5), "timeline: peak_bytes is 0.5; it must be a"),
        (lambda form: form.update(spans=[3]), "spans[0] is 3; it must be an object with named"),
        (lambda form: form["spans"][2].pop("lane"), "spans[2] has no field 'lane'; it is"),
        (lambda form: form["spans"][2].pop("name"), "spans[2] has no field 'name'; it is"),
        (lambda form: form["spans"][2].pop("end_ns"), "spans[2] has no field 'end_ns'; it is"),
        (lambda form: form["spans"][2].pop("num_bytes"), "spans[2] has no field 'num_bytes';"),
        (lambda form: form["spans"][2].update(end=1), "spans[2]: unknown field 'end'; valid"),
        (lambda form: form["spans"][2].update(lane=1), "spans[2]: lane is 1; it must be a text."),
        (lambda form: form["spans"][2].update(start_ns="1"), 'spans[2]: start_ns is "1"; it must'),
    ],
)
def test_a_missing_unknown_or_mistyped_field_is_refused(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    assert message_of(form_with(change)).startswith(message)
