"""Read a profiler's file, and say what its copies cost: `docs/overlap.md`."""

from ebbtide.trace.builder import DeviceTrace, Trace
from ebbtide.trace.overlap import Analysis, analyse, clip
from ebbtide.trace.read import read_trace

__all__ = ["Analysis", "DeviceTrace", "Trace", "analyse", "clip", "read_trace"]
