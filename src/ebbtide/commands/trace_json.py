"""What `ebbtide trace --json` prints: sizes in bytes, times in ms, rates in GB/s (10**9 bytes)."""

from collections.abc import Sequence

from ebbtide.trace.builder import DeviceTrace, Trace
from ebbtide.trace.findings import Finding
from ebbtide.trace.overlap import Analysis, CopyFigures
from ebbtide.trace.predicted import Comparison


def describe_trace(
    trace: Trace,
    analyses: Sequence[Analysis],
    findings: Sequence[Finding],
    comparisons: Sequence[Comparison],
) -> dict[str, object]:
    """Return the object for one file; `comparisons` has one for each device, or none at all."""
    gpus: list[dict[str, object]] = []
    for number, (device, analysis) in enumerate(zip(trace.devices, analyses, strict=True)):
        gpu = _describe_device(device, analysis)
        if comparisons:
            gpu["predicted"] = _describe_comparison(comparisons[number])
        gpus.append(gpu)
    return {
        "file": trace.file,
        "kind": trace.kind,
        "num_events": trace.num_events,
        "gpus": gpus,
        "findings": [
            {
                "code": finding.code.value,
                "gpu": finding.device,
                "evidence": finding.evidence,
                "advice": finding.advice,
                "cost_ms": _ms(finding.cost_ns),
            }
            for finding in findings
        ],
        "notes": list(trace.notes),
    }


def _describe_device(device: DeviceTrace, analysis: Analysis) -> dict[str, object]:
    return {
        "name": device.name,
        **_describe_figures(analysis),
        "peak_bytes": device.timeline.peak_bytes,
        "reserved_bytes": device.reserved_bytes,
        "compute_lost_ms": _ms(analysis.compute_lost_ns),
        "idle_windows": [
            {
                "start_ms": _ms(window.start_ns),
                "end_ms": _ms(window.end_ns),
                "reason": window.reason.value,
                "waited_for": window.waited_for,
            }
            for window in analysis.windows
        ],
        "slowdowns": [
            {
                "kernel": slowdown.name,
                "launch": slowdown.launch,
                "num_beside": slowdown.num_beside,
                "num_alone": slowdown.num_alone,
                "median_alone_ms": _ms(slowdown.median_alone_ns),
                "beside_ms": _ms(slowdown.beside_ns),
                "extra_ms": _ms(slowdown.extra_ns),
            }
            for slowdown in analysis.slowdowns
        ],
        "steps": [
            {
                "name": step.name,
                "start_ms": _ms(step.start_ns),
                "end_ms": _ms(step.end_ns),
                "compute_busy_ms": _ms(step.compute_busy_ns),
                "out_bytes": step.out_bytes,
                "out_exposed_ms": _ms(step.out_exposed_ns),
                "in_bytes": step.in_bytes,
                "in_exposed_ms": _ms(step.in_exposed_ns),
            }
            for step in analysis.steps
        ],
        "moved": [
            {
                "name": moved.name,
                "lane": moved.lane.value,
                "num_copies": moved.num_copies,
                "bytes": moved.num_bytes,
                "busy_ms": _ms(moved.busy_ns),
                "hidden_ms": _ms(moved.hidden_ns),
                "exposed_ms": _ms(moved.exposed_ns),
            }
            for moved in analysis.moved
        ],
    }


def _describe_figures(analysis: Analysis) -> dict[str, object]:
    return {
        "window_ms": _ms(analysis.end_ns - analysis.start_ns),
        "compute_busy_ms": _ms(analysis.compute_busy_ns),
        "idle_ms": _ms(analysis.idle_ns),
        "idle_by_reason_ms": {
            reason.value: _ms(ns) for reason, ns in analysis.idle_by_reason_ns.items()
        },
        "collective_busy_ms": _ms(analysis.collective_busy_ns),
        "collective_exposed_ms": _ms(analysis.collective_exposed_ns),
        "copy_out": _describe_copies(analysis.copy_out),
        "copy_in": _describe_copies(analysis.copy_in),
    }


def _describe_copies(figures: CopyFigures) -> dict[str, object]:
    return {
        "num_copies": figures.num_copies,
        "bytes": figures.num_bytes,
        "pinned_bytes": figures.pinned_bytes,
        "pageable_bytes": figures.pageable_bytes,
        "busy_ms": _ms(figures.busy_ns),
        "hidden_ms": _ms(figures.hidden_ns),
        "exposed_ms": _ms(figures.exposed_ns),
        "beside_collectives_ms": _ms(figures.beside_collectives_ns),
        "gb_per_s": figures.gb_per_s,
        "link_share": figures.link_share,
    }


def _describe_comparison(comparison: Comparison) -> dict[str, object]:
    return {
        "step": comparison.step,
        "predicted": _describe_figures(comparison.predicted),
        "measured": _describe_figures(comparison.measured),
        "partings": [
            {
                "name": parting.name,
                "lane": parting.lane.value,
                "predicted_exposed_ms": _ms(parting.predicted_exposed_ns),
                "measured_exposed_ms": _ms(parting.measured_exposed_ns),
            }
            for parting in comparison.partings
        ],
        "num_unnamed": comparison.num_unnamed,
    }


def _ms(ns: int) -> float:
    return ns / 1e6
