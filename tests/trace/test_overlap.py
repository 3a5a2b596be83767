"""The analysis against a brute-force count of single nanoseconds, and worked examples."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planner import named_plan
from ebbtide.simulate import simulate
from ebbtide.timeline import HostMemory, Lane, Span, Timeline
from ebbtide.trace.overlap import Analysis, Reason, Slowdown, StepFigures, analyse, clip
from tests.two_blocks import MACHINE, two_blocks

LANES = (Lane.COMPUTE, Lane.COPY_OUT, Lane.COPY_IN, Lane.COLLECTIVE, Lane.HOST, Lane.STEP)


def span(lane: Lane, start: int, end: int, name: str = "x", **more: Any) -> Span:
    return Span(lane=lane, name=name, start_ns=start, end_ns=end, **more)


def timeline(*spans: Span) -> Timeline:
    return Timeline(source="by hand", spans=spans, peak_bytes=0)


SPANS = st.builds(
    lambda lane, start, length, name, num_bytes, queued: Span(
        lane=lane,
        name=name,
        start_ns=start,
        end_ns=start + length,
        num_bytes=num_bytes if lane in (Lane.COPY_OUT, Lane.COPY_IN) else 0,
        queued_ns=queued,
    ),
    st.sampled_from(LANES),
    st.integers(0, 60),
    st.integers(0, 15),
    st.sampled_from("abc"),
    st.integers(0, 9),
    st.integers(0, 30),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Every nanosecond by itself."""

    spans: list[Span]

    def runs(self, ns: int, *lanes: Lane) -> list[Span]:
        return [s for s in self.spans if s.lane in lanes and s.start_ns <= ns < s.end_ns]

    def count(self, start: int, end: int, lane: Lane, *, under: Lane | None = None) -> int:
        """Nanoseconds with the lane busy, and with `under` busy as well if it is given."""
        return sum(
            bool(self.runs(ns, lane)) and (under is None or bool(self.runs(ns, under)))
            for ns in range(start, end)
        )

    def reason(self, ns: int) -> Reason:
        later = [s for s in self.spans if s.lane is Lane.COMPUTE and s.start_ns > ns]
        kernel = min(later, key=lambda s: s.start_ns, default=None)
        is_asked_for = kernel is None or ns >= kernel.start_ns - kernel.queued_ns
        is_known = kernel is not None and kernel.queued_ns > 0
        if is_known and not is_asked_for and not self.runs(ns, Lane.HOST):
            return Reason.LAUNCH
        for lane, reason in (
            (Lane.COPY_IN, Reason.COPY_IN),
            (Lane.COPY_OUT, Reason.COPY_OUT),
            (Lane.COLLECTIVE, Reason.COLLECTIVE),
        ):
            if self.runs(ns, lane):
                return reason
        return Reason.UNKNOWN


@settings(max_examples=50, deadline=None)
@given(st.lists(SPANS, max_size=14))
def test_figures_are_those_of_counting_single_nanoseconds(spans: list[Span]) -> None:
    found = analyse(timeline(*spans))
    oracle = Oracle(spans=spans)
    on_device = [s for s in spans if s.lane not in (Lane.HOST, Lane.STEP)]
    start = min((s.start_ns for s in on_device), default=0)
    end = max((s.end_ns for s in on_device), default=0)
    assert (found.start_ns, found.end_ns) == (start, end)
    busy = oracle.count(start, end, Lane.COMPUTE)
    assert (found.compute_busy_ns, found.idle_ns) == (busy, end - start - busy)
    for lane, figures in ((Lane.COPY_OUT, found.copy_out), (Lane.COPY_IN, found.copy_in)):
        assert figures.busy_ns == oracle.count(start, end, lane)
        assert figures.hidden_ns == oracle.count(start, end, lane, under=Lane.COMPUTE)
        assert figures.exposed_ns == figures.busy_ns - figures.hidden_ns
        assert figures.beside_collectives_ns == oracle.count(
            start, end, lane, under=Lane.COLLECTIVE
        )
        assert figures.num_bytes == sum(s.num_bytes for s in spans if s.lane is lane)
        for moved in found.moved:
            if moved.lane is lane:
                own = Oracle(spans=[s for s in spans if s.lane is not lane or s.name == moved.name])
                assert moved.busy_ns == own.count(start, end, lane)
                assert moved.hidden_ns == own.count(start, end, lane, under=Lane.COMPUTE)
    assert found.collective_busy_ns == oracle.count(start, end, Lane.COLLECTIVE)
    assert found.collective_exposed_ns == found.collective_busy_ns - oracle.count(
        start, end, Lane.COLLECTIVE, under=Lane.COMPUTE
    )
    for step in found.steps:
        assert step.compute_busy_ns == oracle.count(step.start_ns, step.end_ns, Lane.COMPUTE)
        for lane, exposed_ns in (
            (Lane.COPY_OUT, step.out_exposed_ns),
            (Lane.COPY_IN, step.in_exposed_ns),
        ):
            within = step.start_ns, step.end_ns, lane
            hidden_ns = oracle.count(*within, under=Lane.COMPUTE)
            assert exposed_ns == oracle.count(*within) - hidden_ns


@settings(max_examples=50, deadline=None)
@given(st.lists(SPANS.filter(lambda s: s.end_ns > s.start_ns), max_size=14))
def test_each_idle_nanosecond_has_the_first_reason_that_holds(spans: list[Span]) -> None:
    # Kernels that start together may have been asked for at different times: one of each start.
    starts: set[int] = set()
    spans = [
        s
        for s in spans
        if s.lane is not Lane.COMPUTE or not (s.start_ns in starts or starts.add(s.start_ns))
    ]
    found = analyse(timeline(*spans))
    oracle = Oracle(spans=spans)
    counts = dict.fromkeys(Reason, 0)
    for ns in range(found.start_ns, found.end_ns):
        if not oracle.runs(ns, Lane.COMPUTE):
            counts[oracle.reason(ns)] += 1
    assert found.idle_by_reason_ns == counts
    assert sum(found.idle_by_reason_ns.values()) == found.idle_ns


@settings(max_examples=50, deadline=None)
@given(st.lists(SPANS, max_size=10), st.integers(0, 40), st.integers(0, 40))
def test_a_clipped_timeline_has_the_same_nanoseconds(
    spans: list[Span], start: int, length: int
) -> None:
    clipped = clip(timeline(*spans), start, start + length)
    before, after = Oracle(spans=spans), Oracle(spans=list(clipped.spans))
    for lane in LANES:
        wanted = [bool(before.runs(ns, lane)) for ns in range(start, start + length)]
        assert [bool(after.runs(ns, lane)) for ns in range(length)] == wanted
    inside = [s.num_bytes for s in spans if start <= s.start_ns < start + length]
    assert sum(s.num_bytes for s in clipped.spans) == sum(inside)


def worked_example() -> Timeline:
    """Two kernels, one copy each way: the first example of docs/overlap.md."""
    return timeline(
        span(Lane.COMPUTE, 0, 40, "forward"),
        span(Lane.COPY_OUT, 30, 60, "h.0", num_bytes=1200),
        span(Lane.COPY_IN, 50, 70, "h.0", num_bytes=1000),
        span(Lane.COMPUTE, 70, 100, "backward"),
    )


def test_the_example_of_the_page() -> None:
    found = analyse(worked_example(), replace(MACHINE, out_bytes_per_s=80 * 10**9))
    assert (found.compute_busy_ns, found.idle_ns) == (70, 30)
    out, back = found.copy_out, found.copy_in
    assert (out.busy_ns, out.hidden_ns, out.exposed_ns, out.gb_per_s) == (30, 10, 20, 40.0)
    assert (back.busy_ns, back.hidden_ns, back.exposed_ns, back.gb_per_s) == (20, 0, 20, 50.0)
    # In [50, 60) both run: exposed in both directions, and idle only once.
    assert found.idle_by_reason_ns == {
        Reason.LAUNCH: 0,
        Reason.COPY_IN: 20,
        Reason.COPY_OUT: 10,
        Reason.COLLECTIVE: 0,
        Reason.UNKNOWN: 0,
    }
    (window,) = found.windows
    assert (window.start_ns, window.end_ns, window.reason, window.waited_for) == (
        *(40, 70),
        *(Reason.COPY_IN, "h.0"),
    )


def test_the_links_share_counts_half_of_both_directions_where_both_run() -> None:
    machine = replace(
        MACHINE, out_bytes_per_s=60 * 10**9, in_bytes_per_s=80 * 10**9, both_bytes_per_s=60 * 10**9
    )
    found = analyse(worked_example(), machine)
    # Out: 20 ns alone at 60 bytes a ns and 10 ns at 30. In: 10 at 80 and 10 at 30.
    assert found.copy_out.link_share == 1200 / 1500
    assert found.copy_in.link_share == 1000 / 1100
    assert analyse(worked_example()).copy_out.link_share is None


def test_streams_that_overlap_count_once() -> None:
    found = analyse(
        timeline(
            span(Lane.COMPUTE, 0, 10),
            span(Lane.COMPUTE, 5, 15),
            span(Lane.COPY_IN, 10, 20, num_bytes=5),
            span(Lane.COPY_IN, 12, 18, num_bytes=5),
        )
    )
    assert found.compute_busy_ns == 15
    assert (found.copy_in.busy_ns, found.copy_in.hidden_ns) == (10, 5)
    assert found.copy_in.gb_per_s == 1.0


def test_collectives_hide_no_copy() -> None:
    found = analyse(
        timeline(
            span(Lane.COMPUTE, 0, 10),
            span(Lane.COLLECTIVE, 5, 30),
            span(Lane.COPY_OUT, 20, 40),
            span(Lane.COMPUTE, 40, 50),
        )
    )
    assert (found.copy_out.exposed_ns, found.copy_out.beside_collectives_ns) == (20, 10)
    assert (found.collective_busy_ns, found.collective_exposed_ns) == (25, 20)
    assert found.idle_by_reason_ns[Reason.COPY_OUT] == 20
    assert found.idle_by_reason_ns[Reason.COLLECTIVE] == 10


def test_the_cpu_is_waited_for_until_it_asks_unless_it_waits_itself() -> None:
    found = analyse(
        timeline(
            span(Lane.COMPUTE, 0, 10),
            span(Lane.HOST, 12, 30, "cudaStreamSynchronize"),
            span(Lane.COPY_OUT, 10, 30, "loss"),
            # Asked for at 45, starts at 50.
            span(Lane.COMPUTE, 50, 60, "next", queued_ns=5),
        )
    )
    assert found.idle_by_reason_ns == {
        Reason.LAUNCH: 2 + 15,
        Reason.COPY_IN: 0,
        Reason.COPY_OUT: 18,
        Reason.COLLECTIVE: 0,
        Reason.UNKNOWN: 5,
    }


def test_kernels_are_held_against_their_median_alone() -> None:
    found = analyse(
        timeline(
            *(span(Lane.COMPUTE, at, at + 10, "gemm") for at in (0, 10, 20)),
            span(Lane.COMPUTE, 30, 42, "gemm"),
            span(Lane.COMPUTE, 42, 55, "gemm"),
            span(Lane.COPY_OUT, 32, 53),
            span(Lane.COMPUTE, 60, 65, "rare"),
        )
    )
    assert found.slowdowns == (
        Slowdown(
            name="gemm", launch="", num_beside=2, num_alone=3, median_alone_ns=10, beside_ns=25
        ),
    )
    assert found.compute_lost_ns == 5


def test_products_of_several_sizes_under_one_name_are_not_held_against_each_other() -> None:
    """All run alone, and one of each beside a copy; long ones are 5 times the short ones."""
    short, long = [(0, 20), (20, 41), (41, 60)], [(100, 200), (200, 301), (301, 400)]
    found = analyse(
        timeline(
            *(span(Lane.COMPUTE, *run, "gemm", launch="a") for run in (*short, *long)),
            span(Lane.COPY_OUT, 500, 700),
            span(Lane.COMPUTE, 500, 522, "gemm", launch="a"),
            span(Lane.COMPUTE, 550, 655, "gemm", launch="a"),
            # As long as the short ones, but launched otherwise: it has no runs alone.
            span(Lane.COMPUTE, 660, 680, "gemm", launch="b"),
        )
    )
    about: dict[str, Any] = {"name": "gemm", "launch": "a", "num_beside": 1, "num_alone": 3}
    assert found.slowdowns == (
        Slowdown(**about, median_alone_ns=100, beside_ns=105),
        Slowdown(**about, median_alone_ns=20, beside_ns=22),
    )
    assert found.compute_lost_ns == 5 + 2


def test_a_run_of_half_more_than_the_next_shorter_is_of_its_kind_and_one_longer_is_not() -> None:
    def beside_ns(length: int) -> list[int]:
        spans = [span(Lane.COMPUTE, at, at + 10, "gemm") for at in (0, 10, 20)]
        copied = span(Lane.COPY_IN, 30, 60), span(Lane.COMPUTE, 30, 30 + length, "gemm")
        return [s.beside_ns for s in analyse(timeline(*spans, *copied)).slowdowns]

    assert beside_ns(15) == [15]
    assert beside_ns(16) == []


def test_steps_have_their_own_figures() -> None:
    found = analyse(
        timeline(
            span(Lane.STEP, 0, 50, "step 1"),
            span(Lane.COMPUTE, 0, 30),
            span(Lane.COPY_OUT, 20, 60, num_bytes=8),
            span(Lane.COMPUTE, 55, 90),
            span(Lane.STEP, 50, 90, "step 2"),
        )
    )
    assert found.steps == (
        StepFigures(
            name="step 1",
            start_ns=0,
            end_ns=50,
            compute_busy_ns=30,
            out_bytes=8,
            out_exposed_ns=20,
            in_bytes=0,
            in_exposed_ns=0,
        ),
        StepFigures(
            name="step 2",
            start_ns=50,
            end_ns=90,
            compute_busy_ns=35,
            out_bytes=0,
            out_exposed_ns=5,
            in_bytes=0,
            in_exposed_ns=0,
        ),
    )


def test_bytes_are_told_apart_by_their_host_memory() -> None:
    copy = span(Lane.COPY_OUT, 0, 4, num_bytes=3)
    pinned = replace(copy, host_memory=HostMemory.PINNED, num_bytes=5)
    pageable = replace(copy, host_memory=HostMemory.PAGEABLE, num_bytes=7)
    out = analyse(timeline(copy, pinned, pageable)).copy_out
    assert (out.num_bytes, out.pinned_bytes, out.pageable_bytes) == (15, 5, 7)


def test_nothing_ran() -> None:
    found: Analysis = analyse(timeline(), MACHINE)
    assert (found.start_ns, found.end_ns, found.idle_ns, found.windows) == (0, 0, 0, ())
    assert found.copy_in.gb_per_s == 0.0
    assert found.copy_in.link_share is None


def test_a_simulated_step_is_analysed_alike() -> None:
    slow = replace(MACHINE, out_bytes_per_s=10**8, in_bytes_per_s=10**8, both_bytes_per_s=10**8)
    step = simulate(named_plan("offload-inputs", two_blocks(), min_bytes=1), two_blocks(), slow)
    found = analyse(step)
    stalls = [s for s in step.spans if s.lane is Lane.STALL]
    assert stalls
    # Compute is idle where it stalls, and the simulated CPU never keeps it waiting.
    assert found.copy_out.num_bytes == sum(
        s.num_bytes for s in step.spans if s.lane is Lane.COPY_OUT
    )
    assert found.idle_by_reason_ns[Reason.LAUNCH] == 0
    assert found.idle_ns == step.stall_ns
