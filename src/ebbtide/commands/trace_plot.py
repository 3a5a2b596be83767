"""Draw a trace with bokeh: lanes, memory over time and a table that sorts, for a page.

The numbers of marks are bounded, whatever the trace has. Colours of text and lines are the page's:
bokeh reads them from its style sheet, which knows of dark mode.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from ebbtide.errors import MissingExtraError
from ebbtide.timeline import Lane
from ebbtide.trace.builder import DeviceTrace, MemorySeries
from ebbtide.trace.drawn import DrawnLane, Marks, draw_lanes, draw_memory
from ebbtide.trace.overlap import Analysis

Model = Any
"""One of bokeh's, which is imported late: it may not be there."""

NUM_MARKS: Final = 60_000
"""On all lanes of all devices. Each takes 45 bytes of the page, so 2.7 MB."""
NUM_MOMENTS: Final = 20_000
"""Of all devices' memory; 32 bytes each."""
NUM_NAMES: Final = 8000
"""Different names of marks; one may take 700 bytes."""
NUM_ROWS: Final = 4000
"""Of the table, those exposed longest."""
NUM_STEP_LABELS: Final = 20
"""More would lie on each other on a telephone."""
WIDEST_NAME: Final = 120
LETTER_PX: Final = 7.5
WIDEST_NAME_PX: Final = 560
"""Of the column of names beside the figures, which take 476."""
WIDEST_GPU: Final = 40

_ROW_PX: Final = 26
_AROUND_PX: Final = 90
"""Of the axis below and the tools above."""
_MEMORY_PX: Final = 230
_LEFT_PX: Final = 78
"""For the names of lanes; the same on all plots, so that times lie below each other."""

EXPOSED_COLOR: Final = "#e4572e"
COLORS: Final = {
    Lane.STEP: "#8d99a6",
    Lane.COMPUTE: "#8d99a6",
    Lane.STALL: "#e4572e",
    Lane.COPY_OUT: "#2a9d8f",
    Lane.COPY_IN: "#3a86c8",
    Lane.DISK_WRITE: "#7a6c5d",
    Lane.DISK_READ: "#a39382",
    Lane.COLLECTIVE: "#c79a00",
    Lane.HOST: "#a78bba",
}
"""Told apart in light and dark, and by people who see no red or no green."""
TITLES: Final = {
    Lane.STEP: "step",
    Lane.COMPUTE: "compute",
    Lane.STALL: "stall",
    Lane.COPY_OUT: "copy out",
    Lane.COPY_IN: "copy in",
    Lane.DISK_WRITE: "disk write",
    Lane.DISK_READ: "disk read",
    Lane.COLLECTIVE: "collective",
    Lane.HOST: "CPU waits",
}
_NO_ROOM: Final = "(there are too many names)"
_MEMORY_COLORS: Final = ("#3a86c8", "#c79a00", "#2a9d8f", "#a78bba")
_ALWAYS: Final = (Lane.COMPUTE, Lane.COPY_OUT, Lane.COPY_IN)
"""Shown also where nothing is in them: that there are no copies is worth seeing."""

_HOVER: Final = """
if (format == "lane") { return titles[special_vars.name]; }
const data = sources[special_vars.name].data;
const i = special_vars.index;
const took = data.right[i] - data.left[i];
const ms = (value) => value.toLocaleString("en", {maximumFractionDigits: 6}) + " ms";
if (format == "what") {
  const more = data.spans[i] - 1;
  return names[value] + (more > 0 ? ` and ${more} more, drawn as one` : "");
}
if (format == "when") { return `${ms(data.left[i])}, for ${ms(took)}`; }
const bytes = data.bytes[i];
return bytes > 0 ? `${(bytes / 2 ** 20).toFixed(2)} MiB` : "-";
"""
_WIDEN: Final = """
// A telephone shows the figures beside the start of a name; where there is room, all of it.
const [column] = table.columns;
const names = table.source.data.name;
const needed = 16 + em * names.reduce((most, name) => Math.max(most, name.length), 0);
const more = Math.min(needed, most) - column.width;
if (window.innerWidth >= 800 && more > 0) {
  table.max_width += more;
  column.width += more;
}
"""
_TOUCH: Final = """
// A finger on the plot is to scroll the page. Who wants to drag the plot taps on the tool first.
if (window.matchMedia("(pointer: coarse)").matches) {
  for (const toolbar of toolbars) { toolbar.active_drag = null; }
}
// bokeh tells names where a mouse moves, and a finger that taps moves nothing.
document.addEventListener("click", (event) => {
  if (event.pointerType == "touch") {
    const {clientX, clientY, pageX, pageY} = event;
    const place = {clientX, clientY, isPrimary: true, bubbles: true, composed: true};
    const move = new PointerEvent("pointermove", place);
    // A made event knows nothing of how far the page is scrolled.
    Object.defineProperties(move, {pageX: {value: pageX}, pageY: {value: pageY}});
    event.composedPath()[0].dispatchEvent(move);
  }
});
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Parts of a page, as HTML that needs nothing from anywhere else."""

    library: str
    """bokeh's own scripts, whole."""
    script: str
    timeline: str
    memory: str
    """Empty if no device has any."""
    memory_keys: tuple[tuple[str, str], ...]
    """Colour and device of each line, plain text."""
    table: str
    """Empty if nothing was moved."""
    remarks: tuple[str, ...]
    """What was merged or left out, plain text."""


def check_can_draw() -> None:
    """Refuse before anything is read.

    Raises:
        MissingExtraError: bokeh is not installed.
    """
    if find_spec("bokeh") is None:
        raise MissingExtraError.for_extra("report", needed_by="ebbtide trace --html")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strip:
    """Marks of one colour on one row."""

    key: str
    color: str
    line_color: str | None
    """A line shows marks that are narrower than a pixel, but makes a row of them look wider."""
    alpha: float
    marks: Marks
    names: Sequence[str]
    bottom: float
    top: float


def draw_trace(devices: Sequence[DeviceTrace], analyses: Sequence[Analysis]) -> Drawing:
    """Draw at least one device.

    Raises:
        MissingExtraError: bokeh is not installed.
    """
    check_can_draw()
    from bokeh.document import Document
    from bokeh.embed import components
    from bokeh.models import CustomJS, Range1d
    from bokeh.resources import Resources

    lanes = draw_lanes([device.timeline for device in devices], NUM_MARKS)
    end_ms = max((int(lane.marks.ends_ns.max()) for of in lanes for lane in of), default=0) / 1e6
    end_ms = max(end_ms, 1e-3)
    times = Range1d(start=0, end=end_ms, bounds=(0, end_ms), min_interval=1e-5, name="times")
    timeline = _draw_timeline(devices, lanes, times)
    having = [(device.name, device.memory) for device in devices if device.memory is not None]
    colors = [_MEMORY_COLORS[i % len(_MEMORY_COLORS)] for i in range(len(having))]
    memory_remarks: list[str] = []
    memory = None
    if having:
        memory, memory_remarks = _draw_memory(having, colors, times)
    table = _draw_table(devices, analyses)
    plots = [timeline] if memory is None else [timeline, memory]
    parts: list[Any] = plots if table is None else [*plots, table]
    document = Document()
    for part in parts:
        document.add_root(part)
    toolbars = [plot.toolbar for plot in plots]
    document.js_on_event("document_ready", CustomJS(args={"toolbars": toolbars}, code=_TOUCH))
    if table is not None:
        facts = {"table": table, "most": WIDEST_NAME_PX, "em": LETTER_PX}
        document.js_on_event("document_ready", CustomJS(args=facts, code=_WIDEN))
    script, found = components(parts)
    divs = list(found)
    resources = Resources(mode="inline", components=["bokeh", "bokeh-widgets", "bokeh-tables"])
    return Drawing(
        library=resources.render_js(),
        script=script,
        timeline=divs[0],
        memory=divs[1] if memory is not None else "",
        memory_keys=tuple(zip(colors, (name for name, _ in having), strict=True)),
        table=divs[-1] if table is not None else "",
        remarks=(
            *_merged(devices, lanes),
            *memory_remarks,
            *_left_out(analyses),
        ),
    )


def _draw_timeline(
    devices: Sequence[DeviceTrace], lanes: Sequence[Sequence[DrawnLane]], times: Model
) -> Model:
    from bokeh.models import (
        ColumnDataSource,
        CustomJSHover,
        FixedTicker,
        HoverTool,
        Label,
        PlainText,
        Range1d,
    )

    numbers: dict[str, int] = {}
    sources: dict[str, ColumnDataSource] = {}
    titles: dict[str, str] = {}
    rows: list[tuple[str, float]] = []
    headings: list[tuple[str, float]] = []
    strips: list[_Strip] = []
    labels: list[tuple[DrawnLane, float]] = []
    at = 0.0
    for number, (device, of) in enumerate(zip(devices, lanes, strict=True)):
        headings.append((device.name, at))
        at -= 1
        by_lane = {lane.lane: lane for lane in of}
        for lane in TITLES:
            if lane not in by_lane and lane not in _ALWAYS:
                continue
            rows.append((TITLES[lane], at))
            drawn = by_lane.get(lane)
            if drawn is not None:
                key = f"{number}/{lane.value}"
                titles[key] = TITLES[lane]
                alpha = 0.35 if lane is Lane.STEP else 1.0
                strips.append(
                    _Strip(
                        key=key, color=COLORS[lane], line_color=COLORS[lane], alpha=alpha,
                        marks=drawn.marks, names=drawn.names, bottom=at - 0.4, top=at + 0.4,
                    )
                )  # fmt: skip
                if lane is Lane.STEP:
                    labels.append((drawn, at))
                if len(drawn.exposed.starts_ns):
                    key += "/exposed"
                    titles[key] = f"{TITLES[lane]}, exposed"
                    names = ("compute is idle",) * len(drawn.exposed.starts_ns)
                    strips.append(
                        _Strip(
                            key=key, color=EXPOSED_COLOR, line_color=None, alpha=1.0,
                            marks=drawn.exposed, names=names, bottom=at - 0.4, top=at - 0.02,
                        )
                    )  # fmt: skip
            at -= 1
        at -= 0.3
    plot = _figure(
        times, Range1d(start=at + 0.4, end=0.6), round(-at * _ROW_PX) + _AROUND_PX, "timeline"
    )
    renderers: list[Any] = []
    # Kernels have most names: those of all else come first, lest there be no room for them.
    for strip in sorted(strips, key=lambda strip: strip.color == COLORS[Lane.COMPUTE]):
        source = _source(strip.marks, strip.names, numbers)
        sources[strip.key] = source
        renderers.append(
            plot.quad(
                left="left", right="right", bottom=strip.bottom, top=strip.top, source=source,
                name=strip.key, fill_color=strip.color, fill_alpha=strip.alpha,
                line_color=strip.line_color, line_width=0.5, line_alpha=strip.alpha,
            )
        )  # fmt: skip
    for drawn, row in labels:
        _label_steps(plot, drawn, row)
    for name, row in headings:
        plot.add_layout(
            Label(
                x=4, x_units="screen", y=row - 0.32, text=PlainText(text=_short(name)),
                text_font_size="13px", text_font_style="bold", text_baseline="bottom",
                background_fill_alpha=0.0,
            )
        )  # fmt: skip
    plot.yaxis.ticker = FixedTicker(ticks=[row for _, row in rows])
    plot.yaxis.major_label_overrides = {row: title for title, row in rows}
    plot.ygrid.visible = False
    shown = CustomJSHover(
        args={"names": list(numbers), "sources": sources, "titles": titles}, code=_HOVER
    )
    plot.add_tools(
        HoverTool(
            renderers=renderers,
            tooltips=[
                ("lane", "@name{lane}"),
                ("what", "@name{what}"),
                ("at", "@name{when}"),
                ("bytes", "@name{size}"),
            ],
            formatters={"@name": shown},
            visible=False,
        )
    )
    return plot


def _figure(times: Model, values: Model, height_px: int, name: str) -> Model:
    from bokeh.models import (
        BoxZoomTool,
        PanTool,
        ResetTool,
        WheelZoomTool,
        ZoomInTool,
        ZoomOutTool,
    )
    from bokeh.plotting import figure

    pan = PanTool(dimensions="width")
    wheel = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    plot = figure(
        x_range=times,
        y_range=values,
        height=height_px,
        sizing_mode="stretch_width",
        min_width=240,
        min_border_left=_LEFT_PX,
        min_border_right=12,
        tools=[
            pan,
            BoxZoomTool(dimensions="width"),
            wheel,
            ZoomInTool(dimensions="width", factor=0.5),
            ZoomOutTool(dimensions="width", factor=0.5),
            ResetTool(),
        ],
        active_drag=pan,
        active_scroll=wheel,
        toolbar_location="above",
        name=name,
        outline_line_color=None,
    )
    plot.toolbar.logo = None
    plot.xaxis.axis_label = "ms since the first thing on a GPU"
    plot.xaxis.axis_label_text_font_style = "normal"
    plot.yaxis.axis_label_text_font_style = "normal"
    plot.yaxis.major_tick_line_alpha = 0
    plot.yaxis.minor_tick_line_alpha = 0
    return plot


def _source(marks: Marks, names: Sequence[str], numbers: dict[str, int]) -> Model:
    """Return the columns of marks; names are numbers, as most repeat."""
    from bokeh.models import ColumnDataSource

    of_mark: list[int] = []
    for name in names:
        short = _short(name)
        if short not in numbers and len(numbers) >= NUM_NAMES:
            short = _NO_ROOM
        of_mark.append(numbers.setdefault(short, len(numbers)))
    return ColumnDataSource(
        {
            "left": marks.starts_ns / 1e6,
            "right": marks.ends_ns / 1e6,
            "name": np.array(of_mark, np.int32),
            "spans": marks.num_spans.astype(np.int32),
            "bytes": marks.num_bytes.astype(np.float64),
        }
    )


def _label_steps(plot: Model, drawn: DrawnLane, row: float) -> None:
    """Write the steps' numbers on them, and draw a line where each begins."""
    from bokeh.models import Label, PlainText

    starts, ends = drawn.marks.starts_ns / 1e6, drawn.marks.ends_ns / 1e6
    if len(starts) > NUM_STEP_LABELS:
        return
    for start, end, name in zip(starts.tolist(), ends.tolist(), drawn.names, strict=True):
        number = re.findall(r"\d+", name)[-1:]
        plot.add_layout(
            Label(
                x=(start + end) / 2, y=row, text=PlainText(text="".join(number)),
                text_align="center", text_baseline="middle", text_font_size="11px",
                background_fill_alpha=0.0,
            )
        )  # fmt: skip
    plot.vspan(x=[*starts, ends[-1]], line_color=COLORS[Lane.STEP], line_alpha=0.5, line_width=1)


def _draw_memory(
    having: Sequence[tuple[str, MemorySeries]], colors: Sequence[str], times: Model
) -> tuple[Model, list[str]]:
    from bokeh.models import ColumnDataSource, HoverTool, Range1d

    remarks: list[str] = []
    most = max(int(series.reserved_bytes.max()) for _, series in having)
    most = max(most, *(int(series.allocated_bytes.max()) for _, series in having), 1)
    plot = _figure(times, Range1d(start=0, end=most / 2**30 * 1.05), _MEMORY_PX, "memory")
    plot.yaxis.axis_label = "GiB"
    for number, ((name, series), color) in enumerate(zip(having, colors, strict=True)):
        drawn = draw_memory(series, max(NUM_MOMENTS // len(having), 6))
        if drawn.num_moments > len(drawn.times_ns):
            remarks.append(
                f"{name}: of {drawn.num_moments} moments of memory {len(drawn.times_ns)} are "
                "drawn, the highest and the lowest of each stretch among them"
            )
        source = ColumnDataSource(
            {
                "ms": drawn.times_ns / 1e6,
                "allocated": drawn.allocated_bytes / 2**30,
                "reserved": drawn.reserved_bytes / 2**30,
            }
        )
        line = plot.step(
            "ms", "allocated", source=source, mode="after", color=color, line_width=2,
            name=f"{number}/allocated",
        )  # fmt: skip
        plot.step(
            "ms", "reserved", source=source, mode="after", color=color, line_dash="dashed",
            name=f"{number}/reserved",
        )  # fmt: skip
        plot.add_tools(
            HoverTool(
                renderers=[line],
                mode="vline",
                tooltips=[
                    ("allocated", "@allocated{0.000} GiB"),
                    ("reserved", "@reserved{0.000} GiB"),
                    ("at", "@ms{0.000} ms"),
                ],
                visible=False,
            )
        )
    return plot, remarks


def _draw_table(devices: Sequence[DeviceTrace], analyses: Sequence[Analysis]) -> Model:
    from bokeh.models import (
        ColumnDataSource,
        DataTable,
        InlineStyleSheet,
        NumberFormatter,
        StringFormatter,
        TableColumn,
    )

    moved = [
        (device.name, figures)
        for device, analysis in zip(devices, analyses, strict=True)
        for figures in analysis.moved
    ]
    if not moved:
        return None
    moved.sort(key=lambda row: -row[1].exposed_ns)
    moved = moved[:NUM_ROWS]
    figures = [row for _, row in moved]
    source = ColumnDataSource(
        {
            "name": [_short(row.name) for row in figures],
            "gpu": [name[:WIDEST_GPU] for name, _ in moved],
            "way": [TITLES[row.lane].removeprefix("copy ") for row in figures],
            "copies": [row.num_copies for row in figures],
            "mib": [row.num_bytes / 2**20 for row in figures],
            "busy": [row.busy_ns / 1e6 for row in figures],
            "hidden": [row.hidden_ns / 1e6 for row in figures],
            "exposed": [row.exposed_ns / 1e6 for row in figures],
        }
    )
    whole = NumberFormatter(format="0,0", text_align="right")
    tenths = NumberFormatter(format="0,0.0", text_align="right")
    hundredths = NumberFormatter(format="0,0.00", text_align="right")
    # What is asked first stands first: a telephone shows four columns, and scrolls to the others.
    columns = [
        TableColumn(field="name", title="tensor", formatter=StringFormatter(), width=190),
        TableColumn(field="way", title="way", formatter=StringFormatter(), width=44),
        TableColumn(field="exposed", title="exposed ms", formatter=hundredths, width=100),
        TableColumn(field="hidden", title="hidden ms", formatter=hundredths, width=92),
        TableColumn(field="busy", title="busy ms", formatter=hundredths, width=80),
        TableColumn(field="mib", title="MiB", formatter=tenths, width=90),
        TableColumn(field="copies", title="copies", formatter=whole, width=70),
    ]
    if len(devices) > 1:
        columns.insert(
            1, TableColumn(field="gpu", title="GPU", formatter=StringFormatter(), width=90)
        )
    return DataTable(
        source=source,
        max_width=sum(column.width for column in columns) + 4,
        columns=columns,
        index_position=None,
        reorderable=False,
        sizing_mode="stretch_width",
        autosize_mode="none",
        height=min(len(moved), 14) * 25 + 30,
        name="tensors",
        stylesheets=[InlineStyleSheet(css=_TABLE_CSS)],
    )


# The variables are the page's.
_TABLE_CSS: Final = """
.slick-header, .slick-header-columns, .slick-header-column.ui-state-default {
  background: var(--raised); color: var(--text); font-weight: 600;
}
.slick-row, .slick-row.odd, .slick-cell { background: var(--ground); color: var(--text); }
.slick-row.odd .slick-cell { background: var(--raised); }
.slick-cell.selected, .slick-row.active .slick-cell { background: var(--line); }
.slick-viewport, .slick-pane { background: var(--ground); }
"""


def _merged(devices: Sequence[DeviceTrace], lanes: Sequence[Sequence[DrawnLane]]) -> list[str]:
    remarks: list[str] = []
    for device, of in zip(devices, lanes, strict=True):
        for lane in of:
            for marks, what in (
                (lane.marks, "spans"),
                (lane.exposed, "exposed times"),
            ):
                if marks.num_merged:
                    remarks.append(
                        f"{device.name}, {TITLES[lane.lane]}: {marks.num_merged} of "
                        f"{int(marks.num_spans.sum())} {what} are shorter than "
                        f"{marks.cell_ns / 1e6:.3f} ms and were merged with their neighbours; "
                        "the gaps between them are painted over. All figures are of the whole "
                        "trace."
                    )
    return remarks


def _left_out(analyses: Sequence[Analysis]) -> list[str]:
    count = sum(len(analysis.moved) for analysis in analyses)
    if count <= NUM_ROWS:
        return []
    return [f"of {count} rows by tensor those {NUM_ROWS} are shown that are exposed longest"]


def _short(name: str) -> str:
    return name if len(name) <= WIDEST_NAME else name[: WIDEST_NAME - 3] + "..."
