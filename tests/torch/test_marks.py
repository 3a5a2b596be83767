"""The ranges around copies: a profiler's trace names each copy after its activation."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from ebbtide.plan import Decision
from ebbtide.torch import attach
from ebbtide.trace.names import activation_of
from tests.torch.models import Gated, Stack
from tests.torch.training import feature_step


def marks_of(path: Path) -> list[str]:
    """The names of our ranges, in the order in which they began."""
    events = json.loads(path.read_text())["traceEvents"]
    ours = [e for e in events if str(e.get("name")).startswith("ebbtide:")]
    return [e["name"] for e in sorted(ours, key=lambda e: e["ts"])]


def test_each_copy_is_in_a_range_with_its_activations_name(tmp_path: Path) -> None:
    model = Stack(Gated)
    with attach(model, "offload", disk=f"{tmp_path}:64MiB", min_bytes=1) as tide:
        for index in range(2):
            feature_step(model, index)
        before = tide.statistics()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            feature_step(model, 2)
        after = tide.statistics()
        assert tide.plan is not None
        decisions = tide.plan.decisions
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    marks = marks_of(path)
    verbs = Counter(mark.split()[1] for mark in marks)
    assert verbs["evict"] == after.num_evictions - before.num_evictions > 0
    assert verbs["fetch"] == after.num_fetches - before.num_fetches > 0
    names = {activation_of(mark) for mark in marks}
    assert names == {name for name, decision in decisions.items() if decision is Decision.DISK}
    # Fetched for backward in the opposite order: the first to leave is the last to return.
    assert activation_of(marks[0]) == activation_of(marks[-1])
