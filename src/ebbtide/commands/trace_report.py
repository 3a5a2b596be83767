"""A trace in words and columns, for people."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ebbtide.commands.columns import align_columns
from ebbtide.trace.builder import Trace
from ebbtide.trace.findings import Finding
from ebbtide.trace.names import HOW_STEPS, plain_kernel
from ebbtide.trace.overlap import Analysis, CopyFigures
from ebbtide.trace.predicted import Comparison
from ebbtide.units import format_bytes

NUM_WINDOWS: Final = 5
NUM_MOVED: Final = 10
NUM_SLOWDOWNS: Final = 3
NUM_STEPS: Final = 10
WIDEST_NAME: Final = 64
LEAST_NS: Final = 5000
"""What is less is 0.00 ms."""


def write_trace(
    trace: Trace,
    analyses: Sequence[Analysis],
    findings: Sequence[Finding],
    comparisons: Sequence[Comparison],
) -> Iterator[str]:
    """Yield the lines for one file; `comparisons` has one for each device, or none at all."""
    yield f"{trace.file}: {trace.kind}, {trace.num_events} events, {len(trace.devices)} GPUs"
    for number, (device, analysis) in enumerate(zip(trace.devices, analyses, strict=True)):
        yield ""
        yield from _write_device(device.name, analysis)
        if comparisons:
            yield ""
            yield from _write_comparison(comparisons[number])
    if trace.devices:
        yield ""
        yield from _write_findings(findings)


def _write_device(name: str, analysis: Analysis) -> Iterator[str]:
    whole_ns = analysis.end_ns - analysis.start_ns
    yield (
        f"{name}: {_ms(whole_ns)} ms recorded, compute busy {_ms(analysis.compute_busy_ns)}, "
        f"idle {_ms(analysis.idle_ns)}"
    )
    yield from align_columns(
        [
            ["copies", "bytes", "GB/s", "of link", "busy ms", "hidden", "exposed", "pinned",
             "pageable"],
            _copy_row("out", analysis.copy_out),
            _copy_row("in", analysis.copy_in),
        ]
    )  # fmt: skip
    reasons = ", ".join(
        f"{_ms(ns)} {reason.value}" for reason, ns in analysis.idle_by_reason_ns.items() if ns
    )
    if reasons:
        yield f"idle ms by what was waited for: {reasons}"
    if analysis.collective_busy_ns:
        beside = analysis.copy_out.beside_collectives_ns, analysis.copy_in.beside_collectives_ns
        yield (
            f"collectives: {_ms(analysis.collective_busy_ns)} ms, exposed "
            f"{_ms(analysis.collective_exposed_ns)}; beside copies out {_ms(beside[0])}, in "
            f"{_ms(beside[1])}"
        )
    if analysis.slowdowns:
        most = ", ".join(
            f"{_ms(s.extra_ns)} {_short(plain_kernel(s.name))}"
            for s in analysis.slowdowns[:NUM_SLOWDOWNS]
            if s.extra_ns >= LEAST_NS
        )
        yield (
            f"compute beside copies took {more_or_less(analysis.compute_lost_ns)}"
            f"{f', most of all: {most}' if most and analysis.compute_lost_ns > 0 else ''}"
        )
    if analysis.steps:
        yield from _write_steps(analysis)
    else:
        yield HOW_STEPS
    if analysis.windows:
        yield "longest idle windows:"
        for w in analysis.windows[:NUM_WINDOWS]:
            waited = f", {_short(plain_kernel(w.waited_for))}" if w.waited_for else ""
            yield (
                f"  at {_ms(w.start_ns)} ms for {_ms(w.end_ns - w.start_ns)}: "
                f"{w.reason.value}{waited}"
            )
    if analysis.moved:
        yield from align_columns(
            [
                ["moved", "way", "copies", "bytes", "busy ms", "hidden", "exposed"],
                *(
                    [_short(m.name), m.lane.value, str(m.num_copies), format_bytes(m.num_bytes),
                     _ms(m.busy_ns), _ms(m.hidden_ns), _ms(m.exposed_ns)]
                    for m in analysis.moved[:NUM_MOVED]
                ),
            ]
        )  # fmt: skip
        if len(analysis.moved) > NUM_MOVED:
            yield f"and {len(analysis.moved) - NUM_MOVED} more, with less exposed; all: --json"


def _write_steps(analysis: Analysis) -> Iterator[str]:
    yield from align_columns(
        [
            ["step", "ms", "compute", "out", "exposed", "in", "exposed"],
            *(
                [_short(s.name), _ms(s.end_ns - s.start_ns), _ms(s.compute_busy_ns),
                 format_bytes(s.out_bytes), _ms(s.out_exposed_ns), format_bytes(s.in_bytes),
                 _ms(s.in_exposed_ns)]
                for s in analysis.steps[:NUM_STEPS]
            ),
        ]
    )  # fmt: skip
    if len(analysis.steps) > NUM_STEPS:
        yield f"and {len(analysis.steps) - NUM_STEPS} more steps; all: --json"


def _copy_row(title: str, figures: CopyFigures) -> list[str]:
    share = "-" if figures.link_share is None else f"{100 * figures.link_share:.0f} %"
    return [
        *(title, format_bytes(figures.num_bytes), f"{figures.gb_per_s:.1f}", share),
        *(_ms(figures.busy_ns), _ms(figures.hidden_ns), _ms(figures.exposed_ns)),
        *(format_bytes(figures.pinned_bytes), format_bytes(figures.pageable_bytes)),
    ]


COMPARED: Final[tuple[tuple[str, Callable[[Analysis], str]], ...]] = (
    ("step ms", lambda a: _ms(a.end_ns - a.start_ns)),
    ("compute busy ms", lambda a: _ms(a.compute_busy_ns)),
    ("idle ms", lambda a: _ms(a.idle_ns)),
    ("out bytes", lambda a: format_bytes(a.copy_out.num_bytes)),
    ("out GB/s", lambda a: f"{a.copy_out.gb_per_s:.1f}"),
    ("out hidden ms", lambda a: _ms(a.copy_out.hidden_ns)),
    ("out exposed ms", lambda a: _ms(a.copy_out.exposed_ns)),
    ("in bytes", lambda a: format_bytes(a.copy_in.num_bytes)),
    ("in GB/s", lambda a: f"{a.copy_in.gb_per_s:.1f}"),
    ("in hidden ms", lambda a: _ms(a.copy_in.hidden_ns)),
    ("in exposed ms", lambda a: _ms(a.copy_in.exposed_ns)),
)


def _write_comparison(comparison: Comparison) -> Iterator[str]:
    yield from align_columns(
        [
            [f"the plan against {comparison.step}", "predicted", "measured"],
            *(
                [title, figure(comparison.predicted), figure(comparison.measured)]
                for title, figure in COMPARED
            ),
        ]
    )
    if comparison.partings:
        yield "where they part most (exposed ms, predicted and measured):"
        for p in comparison.partings:
            yield (
                f"  {p.name} {p.lane.value}: {_ms(p.predicted_exposed_ns)}, "
                f"{_ms(p.measured_exposed_ns)}"
            )
    if comparison.num_unnamed:
        yield f"{comparison.num_unnamed} measured copies carry no activation's name"


def _write_findings(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        yield "findings: none"
        return
    yield "findings:"
    for finding in findings:
        cost = f", {_ms(finding.cost_ns)} ms" if finding.cost_ns else ""
        yield f"  {finding.code.value} ({finding.device}{cost}): {finding.evidence}."
        yield f"    {finding.advice}"


def more_or_less(ns: int) -> str:
    """Return a difference in ms, in words."""
    return f"{_ms(abs(ns))} ms {'less' if ns < 0 else 'more'}"


def _short(name: str) -> str:
    return name if len(name) <= WIDEST_NAME else name[: WIDEST_NAME - 3] + "..."


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f}"
