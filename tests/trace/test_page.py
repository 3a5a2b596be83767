"""The examples of docs/overlap.md: the numbers on the page are those of the analysis."""

import re
from pathlib import Path

from ebbtide.commands.trace_json import describe_trace
from ebbtide.timeline import Lane, Span, Timeline
from ebbtide.trace.builder import DeviceTrace, Trace
from ebbtide.trace.findings import Code
from ebbtide.trace.overlap import Analysis, Reason, analyse

PAGE = (Path(__file__).parents[2] / "docs" / "overlap.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"~~~trace\n(.*?)~~~.*?\| figure \| ns \|\n\| --- \| --- \|\n(.*?)\n\n", re.S)


def read_timeline(text: str) -> Timeline:
    spans: list[Span] = []
    for line in text.splitlines():
        lane, start, end, name, *more = line.split()
        asked = int(more[2]) if more[1:2] == ["asked"] else int(start)
        spans.append(
            Span(
                lane=Lane(lane),
                name=name,
                start_ns=int(start),
                end_ns=int(end),
                num_bytes=int(more[0]) if more else 0,
                queued_ns=int(start) - asked,
            )
        )
    return Timeline(source="the page", spans=tuple(spans), peak_bytes=0)


def figures_of(found: Analysis) -> dict[str, int]:
    figures = {
        "compute busy": found.compute_busy_ns,
        "idle": found.idle_ns,
        "collective busy": found.collective_busy_ns,
        "collective exposed": found.collective_exposed_ns,
    }
    for word, copies in (("out", found.copy_out), ("in", found.copy_in)):
        figures[f"{word} busy"] = copies.busy_ns
        figures[f"{word} hidden"] = copies.hidden_ns
        figures[f"{word} exposed"] = copies.exposed_ns
        figures[f"{word} beside collectives"] = copies.beside_collectives_ns
    figures.update({f"idle: {r.value}": ns for r, ns in found.idle_by_reason_ns.items()})
    return figures


def test_each_example_has_the_figures_that_stand_under_it() -> None:
    examples = EXAMPLE.findall(PAGE)
    assert len(examples) == 2
    for spans, table in examples:
        found = analyse(read_timeline(spans))
        figures = figures_of(found)
        written = dict(re.findall(r"^\| (.+?) \| (\d+) \|$", table, re.M))
        assert len(written) >= 10
        assert {name: int(ns) for name, ns in written.items()} == {
            name: figures[name] for name in written
        }
        assert sum(found.idle_by_reason_ns.values()) == found.idle_ns


def test_all_reasons_lanes_and_findings_are_on_the_page() -> None:
    named = set(re.findall(r"`([\w-]+)`", PAGE))
    assert {code.value for code in Code} <= named
    assert {reason.value for reason in Reason} <= named


def test_all_keys_of_the_json_form_are_on_the_page() -> None:
    (spans, _), *_ = EXAMPLE.findall(PAGE)
    timeline = read_timeline(spans)
    device = DeviceTrace(name="GPU 0", timeline=timeline)
    trace = Trace(file="", kind="", num_events=4, devices=(device,), notes=())
    found = describe_trace(trace, [analyse(timeline)], [], [])
    gpus = found["gpus"]
    assert isinstance(gpus, list)
    keys = {*found, *gpus[0], *gpus[0]["copy_out"]}
    assert keys <= set(re.findall(r"`(\w+)`", PAGE))
