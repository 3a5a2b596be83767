"""What is drawn of a trace: bounded, and said where something was merged or left out."""

from pathlib import Path

import numpy as np
import pytest

from ebbtide.commands import trace_plot
from ebbtide.commands.trace_page import write_page
from ebbtide.commands.trace_plot import NUM_MARKS, NUM_ROWS, draw_trace
from ebbtide.errors import MissingExtraError
from ebbtide.timeline import Lane, Span, Timeline
from ebbtide.trace.builder import DeviceTrace, MemorySeries, Trace
from ebbtide.trace.overlap import analyse
from tests.commands.test_trace import run
from tests.trace.chrome import a_step, write

LONG = "\u6f6e" * 200
"""A character that JSON may write with six."""

needs_bokeh = pytest.mark.skipif(
    trace_plot.find_spec("bokeh") is None, reason="the extra report is not installed"
)


def device_of(*spans: Span, memory: MemorySeries | None = None) -> DeviceTrace:
    timeline = Timeline(source="by hand", spans=spans, peak_bytes=0)
    return DeviceTrace(name="GPU 0", timeline=timeline, memory=memory)


def test_without_bokeh_the_extra_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_plot, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as error:
        run(write(tmp_path / "a.json", *a_step()), "--html", tmp_path / "a.html")
    assert str(error.value) == (
        "ebbtide trace --html needs packages that are not installed. "
        "Install them with: pip install 'ebbtide[report]'"
    )


@needs_bokeh
def test_what_is_small_is_drawn_without_remarks() -> None:
    device = device_of(
        Span(lane=Lane.COMPUTE, name="a", start_ns=0, end_ns=10),
        Span(lane=Lane.COPY_OUT, name="b", start_ns=5, end_ns=20, num_bytes=3),
    )
    drawing = draw_trace([device], [analyse(device.timeline)])
    assert drawing.remarks == ()
    assert drawing.memory == ""
    assert drawing.table != ""


@needs_bokeh
@pytest.mark.slow
def test_a_million_moments_and_many_spans_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    count = 3 * NUM_MARKS
    kernels = [
        Span(lane=Lane.COMPUTE, name=f"kernel {i} {LONG}", start_ns=100 * i,
             end_ns=100 * i + 60)
        for i in range(count)
    ]  # fmt: skip
    copies = [
        Span(lane=Lane.COPY_OUT, name=f"h.{i} {LONG}", start_ns=100 * i, end_ns=100 * i + 90,
             num_bytes=9)
        for i in range(NUM_ROWS + 1000)
    ]  # fmt: skip
    ramp = np.arange(1_000_000)
    memory = MemorySeries(times_ns=ramp * 18, allocated_bytes=ramp, reserved_bytes=ramp)
    device = device_of(*kernels, *copies, memory=memory)
    analysis = analyse(device.timeline)
    trace = Trace(file="big.json", kind="test", num_events=count, devices=(device,), notes=())
    page = tmp_path / "big.html"
    write_page(page, trace, [analysis], [], [])
    assert page.stat().st_size < 15_000_000
    text = page.read_text(encoding="utf-8")
    assert f"GPU 0, compute: {count} of {count} spans are shorter than" in text
    assert f"of {NUM_ROWS + 1000} rows by tensor those {NUM_ROWS} are shown" in text
    assert "GPU 0: of 1000000 moments of memory " in text
    assert "(there are too many names)" in text
    assert 0 < text.count("h.17 ") < 10
