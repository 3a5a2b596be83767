"""Three steps of a plan in JAX recorded on an H200, with figures worked out by hand."""

from pathlib import Path

import pytest

from ebbtide.timeline import Lane
from ebbtide.trace.builder import Trace
from ebbtide.trace.findings import Code, find
from ebbtide.trace.overlap import Analysis, analyse
from ebbtide.trace.read import read_trace

FILE = Path(__file__).parents[1] / "data" / "jax-h200.xplane.pb"

# T tokens, D width; bf16. Of each layer its input and a product of four times its width.
T, D = 8192, 2048
NUM_STEPS, NUM_LAYERS = 3, 4
INPUT_BYTES, PRODUCT_BYTES = 2 * T * D, 2 * T * 4 * D


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(FILE)


@pytest.fixture(scope="module")
def found(trace: Trace) -> Analysis:
    return analyse(trace.devices[0].timeline)


def test_the_steps_are_those_that_the_program_marked(trace: Trace, found: Analysis) -> None:
    assert trace.notes == ()
    assert len(trace.devices) == 1
    assert [step.name for step in found.steps] == ["step 0", "step 1", "step 2"]


def test_three_of_four_layers_are_moved_by_copies(found: Analysis) -> None:
    """The pass that XLA took out of the loop is moved by kernels."""
    num_moved = NUM_STEPS * (NUM_LAYERS - 1)
    for figures in (found.copy_out, found.copy_in):
        assert figures.num_copies == 2 * num_moved == 18
        assert figures.num_bytes == num_moved * (INPUT_BYTES + PRODUCT_BYTES) == 1_509_949_440
        assert figures.pinned_bytes == figures.num_bytes


def test_every_copy_has_the_name_that_the_plan_gave_it(found: Analysis) -> None:
    num_moved = NUM_STEPS * (NUM_LAYERS - 1)
    seen = sorted((m.lane.value, m.name, m.num_copies, m.num_bytes) for m in found.moved)
    assert seen == sorted(
        (lane.value, name, num_moved, num_moved * num_bytes)
        for lane in (Lane.COPY_IN, Lane.COPY_OUT)
        for name, num_bytes in (("input", INPUT_BYTES), ("mlp.dot_general.0", PRODUCT_BYTES))
    )


def test_the_fourth_is_moved_by_kernels_and_said_to_be(trace: Trace, found: Analysis) -> None:
    finding = next(f for f in find(trace.devices[0], found) if f.code is Code.COPIES_BY_KERNELS)
    # In each step two slices out and two back.
    assert finding.evidence.startswith(f"{NUM_STEPS * 4} kernels that move slices ran ")
    # At 50 to 55 GB/s a step's 168 MB take 3.0 to 3.4 ms in each direction.
    assert 3 * 6.0e6 <= finding.cost_ns <= 3 * 7.6e6
