"""A plan's simulated step beside recorded ones."""

from dataclasses import replace

import pytest

from ebbtide.errors import PlanError
from ebbtide.plan import Decision
from ebbtide.planner import named_plan
from ebbtide.simulate import simulate
from ebbtide.timeline import Lane, Span, Timeline
from ebbtide.trace.predicted import Parting, compare_with_plan
from tests.two_blocks import MACHINE, two_blocks

SLOW = replace(MACHINE, out_bytes_per_s=10**8, in_bytes_per_s=10**8, both_bytes_per_s=10**8)
WORKLOAD = two_blocks()
PLAN = named_plan("offload-inputs", WORKLOAD, min_bytes=1)


def test_a_step_that_went_as_predicted_parts_nowhere() -> None:
    step = simulate(PLAN, WORKLOAD, SLOW)
    compared = compare_with_plan(step, PLAN, WORKLOAD, SLOW)
    assert compared.step == "the whole trace"
    assert compared.predicted == compared.measured
    assert compared.predicted.copy_out.num_bytes == 10
    assert (compared.partings, compared.num_unnamed) == ((), 0)


def shifted(spans: tuple[Span, ...], by_ns: int) -> list[Span]:
    return [replace(s, start_ns=s.start_ns + by_ns, end_ns=s.end_ns + by_ns) for s in spans]


def test_of_several_steps_the_one_of_the_median_time_is_taken() -> None:
    step = simulate(PLAN, WORKLOAD, SLOW)
    length = max(s.end_ns for s in step.spans)
    spans: list[Span] = []
    at = 0
    for number, extra in enumerate((50, 0, 900)):
        end = at + length + extra
        mark = Span(lane=Lane.STEP, name=f"step {number}", start_ns=at, end_ns=end)
        spans += [mark, *shifted(step.spans, at)]
        at = end
    traced = Timeline(source="by hand", spans=tuple(spans), peak_bytes=0)
    compared = compare_with_plan(traced, PLAN, WORKLOAD, SLOW)
    assert compared.step == "step 0"
    assert compared.measured.copy_out == compared.predicted.copy_out
    assert compared.measured.copy_in == compared.predicted.copy_in
    assert compared.partings == ()


def test_where_they_part_the_activation_is_named() -> None:
    step = simulate(PLAN, WORKLOAD, SLOW)
    (fetch,) = (s for s in step.spans if s.lane is Lane.COPY_IN)
    predicted = compare_with_plan(step, PLAN, WORKLOAD, SLOW).predicted
    exposed_ns = predicted.copy_in.exposed_ns
    # Measured, the fetch was fully exposed, after all compute.
    end = max(s.end_ns for s in step.spans)
    others = [s for s in step.spans if s is not fetch]
    late = replace(fetch, start_ns=end, end_ns=end + 77)
    unnamed = replace(late, name="Memcpy HtoD", num_bytes=5)
    traced = Timeline(source="by hand", spans=(*others, late, unnamed), peak_bytes=0)
    compared = compare_with_plan(traced, PLAN, WORKLOAD, SLOW)
    assert compared.partings == (
        Parting(
            name="a.x",
            lane=Lane.COPY_IN,
            predicted_exposed_ns=exposed_ns,
            measured_exposed_ns=77,
        ),
    )
    assert compared.num_unnamed == 1


def test_names_without_a_block_stand_for_all_blocks() -> None:
    """A scan's copies cannot be told by layer."""
    offload = named_plan("offload", WORKLOAD, min_bytes=1)
    # The last block's too, whose input has the same name within its block.
    plan = replace(offload, decisions=dict.fromkeys(offload.decisions, Decision.HOST))
    step = simulate(plan, WORKLOAD, SLOW)
    moved = {s.name for s in step.spans if s.lane is Lane.COPY_IN}
    assert {"a.x", "b.x"} <= moved
    spans = tuple(
        replace(s, name=s.name.partition(".")[2]) if s.lane in (Lane.COPY_IN, Lane.COPY_OUT) else s
        for s in step.spans
    )
    traced = Timeline(source="by hand", spans=spans, peak_bytes=0)
    compared = compare_with_plan(traced, plan, WORKLOAD, SLOW)
    assert (compared.partings, compared.num_unnamed) == ((), 0)
    fetch = next(s for s in spans if s.name == "x" and s.lane is Lane.COPY_IN)
    end = max(s.end_ns for s in spans)
    late = replace(fetch, start_ns=end, end_ns=end + 77)
    again = replace(traced, spans=(*spans, late))
    (parting,) = compare_with_plan(again, plan, WORKLOAD, SLOW).partings
    assert (parting.name, parting.lane) == ("x", Lane.COPY_IN)
    assert parting.measured_exposed_ns == parting.predicted_exposed_ns + 77


def test_a_plan_for_another_model_is_refused() -> None:
    other = replace(PLAN, fingerprint="0" * 16)
    with pytest.raises(PlanError):
        compare_with_plan(simulate(PLAN, WORKLOAD, SLOW), other, WORKLOAD, SLOW)
