"""A trace as one HTML file: it opens without a network, on a telephone and in the dark.

Whatever comes from a trace is escaped, and a content security policy lets the file load nothing.
"""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final

from ebbtide.commands.trace_plot import COLORS, EXPOSED_COLOR, TITLES, Drawing, draw_trace
from ebbtide.commands.trace_report import COMPARED, LEAST_NS, more_or_less
from ebbtide.timeline import Lane
from ebbtide.trace.builder import Trace
from ebbtide.trace.findings import Finding
from ebbtide.trace.names import HOW_STEPS, plain_kernel
from ebbtide.trace.overlap import Analysis, CopyFigures
from ebbtide.trace.predicted import Comparison
from ebbtide.units import format_bytes
from ebbtide.version import __version__

MAX_GPUS: Final = 64
"""More would make a page that no browser scrolls through."""
NUM_STEPS: Final = 50
NUM_WINDOWS: Final = 5
NUM_SLOWDOWNS: Final = 10
NUM_NOTES: Final = 50
WIDEST_TEXT: Final = 2000
"""Of what comes from the trace in one place."""
WIDEST_CELL: Final = 120
"""A name of C++ may have thousands of characters; `--json` has all."""


def write_page(
    path: Path,
    trace: Trace,
    analyses: Sequence[Analysis],
    findings: Sequence[Finding],
    comparisons: Sequence[Comparison],
) -> None:
    """Write the page for a trace with one device or more.

    Args:
        path: What is there is replaced.
        trace: As read.
        analyses: One for each device.
        findings: Of all devices.
        comparisons: One for each device, or none at all.

    Raises:
        MissingExtraError: bokeh is not installed.
        OSError: The file cannot be written.
    """
    drawing = draw_trace(trace.devices[:MAX_GPUS], analyses[:MAX_GPUS])
    text = "\n".join(_page(trace, analyses, findings, comparisons, drawing))
    # A name may hold half a surrogate pair, which no file in UTF-8 can.
    path.write_bytes(text.encode("utf-8", errors="replace"))


def _page(
    trace: Trace,
    analyses: Sequence[Analysis],
    findings: Sequence[Finding],
    comparisons: Sequence[Comparison],
    drawing: Drawing,
) -> Iterator[str]:
    yield _HEAD.format(
        title=_text(f"{Path(trace.file).name}: copies and compute"), style=_STYLE.strip()
    )
    yield drawing.library
    yield "</head>\n<body>\n<header>"
    yield "<h1>Is the copy hidden?</h1>"
    num_gpus = len(trace.devices)
    yield (
        f"<p>{_text(Path(trace.file).name)}: {_text(trace.kind)}, {trace.num_events} events, "
        f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}. Times are in ms, GB are 10<sup>9</sup> "
        "bytes. <b>Hidden</b>: a copy ran, and compute too. <b>Exposed</b>: a copy ran, and "
        "compute did not.</p></header>\n<main>"
    )
    yield _section("figures", "Figures", _figures(trace, analyses))
    yield _section("findings", "What to change", _findings(findings))
    yield _section("timeline", "Timeline", _timeline(trace, analyses, drawing))
    yield _section("memory", "Memory", [_memory(drawing)])
    yield _section("moved", "By tensor", [_moved(drawing)])
    if comparisons:
        yield _section("predicted", "Predicted and measured", _compared(trace, comparisons))
    yield _section("steps", "Steps", _steps(trace, analyses))
    yield _section("idle", "Where compute waited", _idle(trace, analyses))
    notes = [*trace.notes[:NUM_NOTES], *drawing.remarks[:NUM_NOTES]]
    if notes:
        items = "".join(f"<li>{_text(note)}</li>" for note in notes)
        yield _section("notes", "What is not shown", [f"<ul>{items}</ul>"])
    yield f"</main>\n<footer>ebbtide {__version__}</footer>"
    yield drawing.script
    yield "</body>\n</html>"


def _section(name: str, title: str, parts: Sequence[str] | Iterator[str]) -> str:
    return "\n".join([f'<section id="{name}"><h2>{title}</h2>', *parts, "</section>"])


def _figures(trace: Trace, analyses: Sequence[Analysis]) -> Iterator[str]:
    for device, analysis in list(zip(trace.devices, analyses, strict=True))[:MAX_GPUS]:
        whole_ns = analysis.end_ns - analysis.start_ns
        yield f"<h3>{_text(device.name)}</h3>"
        out, back = analysis.copy_out, analysis.copy_in
        tiles = [
            ("recorded", _ms(whole_ns), "ms", ""),
            ("compute busy", _ms(analysis.compute_busy_ns), "ms",
             _of(analysis.compute_busy_ns, whole_ns, "the time")),
            ("compute idle", _ms(analysis.idle_ns), "ms",
             _of(analysis.idle_ns, whole_ns, "the time")),
            ("out exposed", _ms(out.exposed_ns), "ms",
             _of(out.exposed_ns, out.busy_ns, "the copying")),
            ("in exposed", _ms(back.exposed_ns), "ms",
             _of(back.exposed_ns, back.busy_ns, "the copying")),
        ]  # fmt: skip
        if device.timeline.peak_bytes:
            number, unit = format_bytes(device.timeline.peak_bytes).split(" ")
            tiles.append(("peak allocated", number, unit, ""))
        yield "<dl>" + "".join(
            f"<div><dt>{title}</dt><dd><b>{value}</b> {unit} <i>{share}</i></dd></div>"
            for title, value, unit, share in tiles
        ) + "</dl>"  # fmt: skip
        yield _table(
            ["copies", "number", "bytes", "GB/s", "of link", "busy ms", "hidden ms", "exposed ms",
             "pinned", "pageable"],
            [_copy_row("out", analysis.copy_out), _copy_row("in", analysis.copy_in)],
        )  # fmt: skip
        if analysis.collective_busy_ns:
            yield (
                f"<p>Collectives: {_ms(analysis.collective_busy_ns)} ms, exposed "
                f"{_ms(analysis.collective_exposed_ns)}; beside copies out "
                f"{_ms(analysis.copy_out.beside_collectives_ns)}, in "
                f"{_ms(analysis.copy_in.beside_collectives_ns)}.</p>"
            )
    if len(trace.devices) > MAX_GPUS:
        yield f"<p>Of {len(trace.devices)} GPUs the first {MAX_GPUS} are shown.</p>"


def _copy_row(title: str, figures: CopyFigures) -> list[str]:
    share = "-" if figures.link_share is None else f"{100 * figures.link_share:.0f} %"
    return [
        *(title, str(figures.num_copies), format_bytes(figures.num_bytes)),
        *(f"{figures.gb_per_s:.1f}", share),
        *(_ms(figures.busy_ns), _ms(figures.hidden_ns), _ms(figures.exposed_ns)),
        *(format_bytes(figures.pinned_bytes), format_bytes(figures.pageable_bytes)),
    ]


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        yield "<p>Nothing was found that costs 1 % of the time or more.</p>"
    for finding in findings:
        cost = f", {_ms(finding.cost_ns)} ms" if finding.cost_ns else ""
        yield (
            f"<article><h3>{finding.code.value} <small>{_text(finding.device)}{cost}</small></h3>"
            f"<p>{_text(_sentence(finding.evidence))}</p>"
            f'<p class="advice">{_text(finding.advice)}</p></article>'
        )


def _timeline(trace: Trace, analyses: Sequence[Analysis], drawing: Drawing) -> Iterator[str]:
    seen = {span.lane for device in trace.devices for span in device.timeline.spans}
    keys = [(COLORS[lane], title) for lane, title in TITLES.items() if lane in seen]
    keys = [key for key in keys if key[1] != TITLES[Lane.STEP]]
    if any(a.copy_out.exposed_ns or a.copy_in.exposed_ns or a.collective_exposed_ns
           for a in analyses):  # fmt: skip
        keys.append((EXPOSED_COLOR, "exposed: compute is idle"))
    yield _legend(keys)
    yield drawing.timeline
    yield (
        '<p class="hint">Zoom with Ctrl and the wheel, two fingers, or the magnifiers above the '
        "plot; drag to move (on a touch screen tap on the arrows above first). Point at a mark, or "
        "tap on it, to see its name.</p>"
    )


def _legend(keys: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><i style="background:{color}"></i>{_text(title)}</li>' for color, title in keys
    )
    return f'<ul class="legend">{items}</ul>'


def _memory(drawing: Drawing) -> str:
    if drawing.memory:
        keys = _legend(drawing.memory_keys) if len(drawing.memory_keys) > 1 else ""
        return (
            "<p>What the framework's allocator had given out, and dashed what it held, at the "
            f"CPU's times.</p>{keys}{drawing.memory}"
        )
    return (
        "<p>The trace has no memory events. torch's profiler writes them with "
        "<code>profile_memory=True</code>.</p>"
    )


def _moved(drawing: Drawing) -> str:
    if drawing.table:
        return f'<p>A click on a column sorts by it.</p><div class="scroll">{drawing.table}</div>'
    return "<p>Nothing was copied between the GPU and the host.</p>"


def _compared(trace: Trace, comparisons: Sequence[Comparison]) -> Iterator[str]:
    for device, comparison in list(zip(trace.devices, comparisons, strict=True))[:MAX_GPUS]:
        yield f"<h3>{_text(device.name)}: the plan against {_text(comparison.step)}</h3>"
        yield _table(
            ["", "predicted", "measured"],
            [
                [title, figure(comparison.predicted), figure(comparison.measured)]
                for title, figure in COMPARED
            ],
        )
        if comparison.partings:
            yield "<p>Where they part most:</p>"
            yield _table(
                ["tensor", "way", "predicted exposed ms", "measured exposed ms"],
                [
                    [p.name, TITLES[p.lane].removeprefix("copy "), _ms(p.predicted_exposed_ns),
                     _ms(p.measured_exposed_ns)]
                    for p in comparison.partings
                ],
            )  # fmt: skip
        if comparison.num_unnamed:
            yield f"<p>{comparison.num_unnamed} measured copies carry no activation's name.</p>"


def _steps(trace: Trace, analyses: Sequence[Analysis]) -> Iterator[str]:
    if not any(analysis.steps for analysis in analyses[:MAX_GPUS]):
        yield f"<p>{_text(_sentence(HOW_STEPS))}</p>"
    for device, analysis in list(zip(trace.devices, analyses, strict=True))[:MAX_GPUS]:
        if not analysis.steps:
            continue
        yield f"<h3>{_text(device.name)}</h3>"
        yield _table(
            ["step", "ms", "compute ms", "out", "out exposed ms", "in", "in exposed ms"],
            [
                [s.name, _ms(s.end_ns - s.start_ns), _ms(s.compute_busy_ns),
                 format_bytes(s.out_bytes), _ms(s.out_exposed_ns), format_bytes(s.in_bytes),
                 _ms(s.in_exposed_ns)]
                for s in analysis.steps[:NUM_STEPS]
            ],
        )  # fmt: skip
        if len(analysis.steps) > NUM_STEPS:
            yield f"<p>And {len(analysis.steps) - NUM_STEPS} more steps.</p>"


def _idle(trace: Trace, analyses: Sequence[Analysis]) -> Iterator[str]:
    for device, analysis in list(zip(trace.devices, analyses, strict=True))[:MAX_GPUS]:
        reasons = ", ".join(
            f"{_ms(ns)} {reason.value}" for reason, ns in analysis.idle_by_reason_ns.items() if ns
        )
        yield f"<h3>{_text(device.name)}</h3>"
        yield f"<p>Idle ms by what was waited for: {reasons or 'none'}.</p>"
        if analysis.windows:
            yield _table(
                ["longest, at ms", "for ms", "mostly", "waited for"],
                [
                    [
                        _ms(w.start_ns),
                        _ms(w.end_ns - w.start_ns),
                        w.reason.value,
                        plain_kernel(w.waited_for),
                    ]
                    for w in analysis.windows[:NUM_WINDOWS]
                ],
                num_words=2,
            )
        slowdowns = [s for s in analysis.slowdowns if abs(s.extra_ns) >= LEAST_NS]
        if slowdowns:
            yield f"<p>Compute beside copies took {more_or_less(analysis.compute_lost_ns)}.</p>"
            yield _table(
                ["kernel", "more ms", "median alone ms", "runs beside copies", "runs alone",
                 "launch"],
                [
                    [plain_kernel(s.name), _ms(s.extra_ns), f"{s.median_alone_ns / 1e6:.3f}",
                     str(s.num_beside), str(s.num_alone), s.launch or "-"]
                    for s in slowdowns[:NUM_SLOWDOWNS]
                ],
            )  # fmt: skip


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, num_words: int = 0) -> str:
    """Return a table that scrolls by itself; the last `num_words` columns are no numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        first_word = len(headers) - num_words
        made = (
            f'<{tag} class="word">{_text(cell, WIDEST_CELL)}</{tag}>'
            if (i == 0 and not num_words) or i >= first_word
            else f"<{tag}>{_text(cell, WIDEST_CELL)}</{tag}>"
            for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="scroll"><table><thead>{row(headers, "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _text(text: str, widest: int = WIDEST_TEXT) -> str:
    """Escape what may come from a trace."""
    short = text if len(text) <= widest else text[: widest - 3] + "..."
    return escape(short)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _of(part: int, whole: int, of_what: str) -> str:
    return f"{100 * part / whole:.1f} % of {of_what}" if whole else ""


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f}"


# bokeh makes functions of text, hence 'unsafe-eval'; nothing else may load or run.
_HEAD: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' \
'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:">
<title>{title}</title>
<style>
{style}
</style>"""

_STYLE: Final = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --raised: #f3f5f7; --line: #d5dae0; --text: #1c2329; --faint: #5b6670;
  --accent: #c8401a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14181c; --raised: #1e242a; --line: #3a434c; --text: #e4e9ee; --faint: #9aa7b3;
    --accent: #ff8a66;
  }
}
:root {
  --bk-text-color: var(--text); --bk-major-label-text-color: var(--text);
  --bk-axis-label-text-color: var(--faint); --bk-axis-line-color: var(--line);
  --bk-major-tick-line-color: var(--line); --bk-minor-tick-line-color: var(--line);
  --bk-grid-line-color: var(--line); --bk-background-fill-color: var(--ground);
  --bk-border-fill-color: var(--ground); --bokeh-font-size: 13px;
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 76rem; padding: 0 1rem 2rem; background: var(--ground);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.6rem; margin: 1.2rem 0 0.2rem; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1rem 0 0.3rem; }
header p, .hint, footer, small, dt { color: var(--faint); }
p { margin: 0.3rem 0; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.7rem; text-align: right; white-space: nowrap; }
th { color: var(--faint); font-weight: 600; border-bottom: 1px solid var(--line); }
tbody tr:nth-child(even) { background: var(--raised); }
.word { text-align: left; }
td.word { white-space: normal; min-width: 9rem; max-width: 40rem; overflow-wrap: break-word; }
dl { display: flex; flex-wrap: wrap; gap: 0.5rem; margin: 0.5rem 0; }
dl div {
  background: var(--raised); border-radius: 6px; padding: 0.4rem 0.8rem; flex: 1 1 8.5rem;
}
dd { margin: 0; }
dd b { font-size: 1.25rem; font-variant-numeric: tabular-nums; }
dd i { color: var(--faint); font-style: normal; font-size: 0.85rem; display: block; }
article {
  border-left: 4px solid var(--accent); background: var(--raised); border-radius: 0 6px 6px 0;
  padding: 0.4rem 0.9rem; margin: 0.6rem 0;
}
article h3 { margin: 0; }
small { font-weight: 400; font-size: 0.85rem; }
.advice::before { content: "What to do: "; font-weight: 600; }
.legend {
  list-style: none; display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; padding: 0; margin: 0;
}
.legend i {
  display: inline-block; width: 0.9em; height: 0.9em; border-radius: 2px; margin-right: 0.35em;
  vertical-align: -0.08em;
}
.bk-Tooltip {
  --tooltip-color: var(--raised); --tooltip-text: var(--text); --tooltip-border: var(--line);
  max-width: 90vw;
}
footer { margin-top: 2rem; }
"""
