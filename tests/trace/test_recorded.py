"""A step recorded on an H200, with figures worked out by hand; `tests/data/README.md` says how."""

import gzip
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from ebbtide.timeline import Lane
from ebbtide.trace.builder import Trace
from ebbtide.trace.findings import Code, find
from ebbtide.trace.overlap import Analysis, IdleWindow, Reason, analyse
from ebbtide.trace.read import read_trace

TORCH = Path(__file__).parents[1] / "data" / "torch-h200.json.gz"

# T tokens, D width, K width of keys and values, F width of the MLP, H heads; all but the
# log-sum-exp are bf16.
T, D, K, F, H = 2048, 4096, 1024, 14336, 32
BLOCK_BYTES = {
    ":input": 2 * T * D,
    ".self_attn:add": 2 * T * D,
    ".self_attn:add#2": 2 * T * K,
    ".self_attn.v_proj": 2 * T * K,
    ".self_attn:scaled_dot_product_cudnn_attention.0": 2 * T * D,
    ".self_attn:scaled_dot_product_cudnn_attention.1": 4 * T * H,
    ":add": 2 * T * D,
    ".mlp.gate_proj": 2 * T * F,
}
"""What `balanced` moves of a block: queries and keys are named after the last step of rotary."""
MOVED_BYTES = 7 * sum(BLOCK_BYTES.values()) + BLOCK_BYTES[":input"]
"""Of the last of eight blocks only the input."""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(TORCH)


@pytest.fixture(scope="module")
def found(trace: Trace) -> Analysis:
    return analyse(trace.devices[0].timeline)


def test_it_shows_one_gpu_and_nothing_that_could_not_be_read(trace: Trace) -> None:
    assert (trace.kind, trace.notes) == ("PyTorch profiler", ())
    assert [device.name for device in trace.devices] == ["GPU 0"]


def test_its_bytes_are_those_of_the_models_shape(found: Analysis) -> None:
    out, back = found.copy_out, found.copy_in
    assert MOVED_BYTES == 958_136_320
    # Out also goes one byte of the model's own, for `is_nonzero`.
    assert (out.num_copies, out.num_bytes) == (7 * 8 + 1 + 1, MOVED_BYTES + 1)
    assert (back.num_copies, back.num_bytes) == (7 * 8 + 1, MOVED_BYTES)
    assert (out.pinned_bytes, back.pinned_bytes) == (out.num_bytes, back.num_bytes)


def test_each_copy_has_its_activations_name(found: Analysis) -> None:
    expected = {
        f"model.layers.{block}{name}": num_bytes
        for block in range(7)
        for name, num_bytes in BLOCK_BYTES.items()
    } | {"model.layers.7:input": BLOCK_BYTES[":input"]}
    for lane in (Lane.COPY_OUT, Lane.COPY_IN):
        named = {m.name: m.num_bytes for m in found.moved if m.lane is lane and m.num_bytes > 1}
        assert named == expected
    assert all(m.num_copies == 1 for m in found.moved)


def test_copies_that_compute_covers_in_part_or_not_at_all(found: Analysis) -> None:
    by_name = {(m.name, m.lane): m for m in found.moved}

    def times(name: str, lane: Lane) -> tuple[int, int, int]:
        moved = by_name[f"model.layers.{name}", lane]
        return moved.busy_ns, moved.hidden_ns, moved.exposed_ns

    # Runs in [2030177, 2335105) after the first kernel of the step; kernels beside it in
    # [2139425, 2162369) and [2289409, 2304353).
    assert times("0:input", Lane.COPY_OUT) == (304_928, 22_944 + 14_944, 267_040)
    # [65141774, 65446703) and [65448015, 66513200): no kernel in [65138831, 66632432).
    assert times("7:input", Lane.COPY_IN) == (304_929, 0, 304_929)
    assert times("6.mlp.gate_proj", Lane.COPY_IN) == (1_065_185, 0, 1_065_185)
    # [66514512, 66820944), and three kernels in it.
    assert times("6:add", Lane.COPY_IN) == (306_432, 26_176 + 15_616 + 18_912, 245_728)


def test_its_longest_idle_window_is_between_two_kernels_of_backward(found: Analysis) -> None:
    window = found.windows[0]
    assert window == IdleWindow(
        start_ns=65_138_831,
        end_ns=66_632_432,
        reason=Reason.LAUNCH,
        waited_for=window.waited_for,
    )
    assert window.waited_for.startswith("void at::native::unrolled_elementwise_kernel")
    assert sum(found.idle_by_reason_ns.values()) == found.idle_ns


def test_its_totals_are_those_of_a_count_from_one_event_to_the_next(found: Analysis) -> None:
    counted = _count(json.loads(gzip.decompress(TORCH.read_bytes()), parse_float=Decimal))
    assert found.compute_busy_ns == counted["compute"] == 52_476_878
    for lane, figures in (("out", found.copy_out), ("in", found.copy_in)):
        assert figures.hidden_ns == counted[f"{lane} hidden"]
        assert figures.busy_ns == counted[lane]
        assert figures.exposed_ns == counted[lane] - counted[f"{lane} hidden"]
    assert found.end_ns - found.start_ns == 139_565_221
    assert round(found.copy_out.gb_per_s, 2) == 54.78
    assert round(found.copy_in.gb_per_s, 2) == 54.82


def test_copies_did_not_slow_its_kernels_down(found: Analysis) -> None:
    """Products of several sizes share a name, and some ran only beside copies."""
    assert found.slowdowns
    assert abs(found.compute_lost_ns) < found.compute_busy_ns // 200


def test_what_it_lost_was_the_cpus(trace: Trace, found: Analysis) -> None:
    (finding,) = find(trace.devices[0], found)
    assert finding.code is Code.CPU_BOUND
    assert finding.cost_ns == found.idle_by_reason_ns[Reason.LAUNCH] == 76_881_979


def _count(form: dict[str, Any]) -> Counter[str]:
    """Go through the starts and ends, and add up the time between two of them by what ran."""
    marks: list[tuple[int, int, str]] = []
    for event in form["traceEvents"]:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        lane = {"Memcpy DtoH": "out", "Memcpy HtoD": "in"}.get(event["name"][:11], "compute")
        start, took = int(event["ts"] * 1000), int(event["dur"] * 1000)
        marks += [(start, 1, lane), (start + took, -1, lane)]
    running = {"compute": 0, "out": 0, "in": 0}
    counted: Counter[str] = Counter()
    before = 0
    for time, change, lane in sorted(marks):
        for name, number in running.items():
            if number:
                counted[name] += time - before
                if name != "compute" and running["compute"]:
                    counted[f"{name} hidden"] += time - before
        before = time
        running[lane] += change
    return counted
