"""Prices of single activations, on a block that can be worked out by hand."""

import pytest

from ebbtide.block import Activation, Block, OpKind
from ebbtide.errors import PlanError
from ebbtide.plan import Decision
from ebbtide.planner.explain import explain
from ebbtide.workload import BackwardEvent, Outside, Workload
from tests.planner.exhaustive import plan_with
from tests.two_blocks import MACHINE

KEEP, HOST, RECOMPUTE = Decision.KEEP, Decision.HOST, Decision.RECOMPUTE
MIB = 2**20


def made(name: str, num_mib: int, make_ns: int, *inputs: str, is_saved: bool = True) -> Activation:
    return Activation(
        name=name,
        op="aten.mm",
        kind=OpKind.MATMUL if inputs else OpKind.INPUT,
        num_bytes=num_mib * MIB,
        inputs=inputs,
        is_saved=is_saved,
        is_replayable=bool(inputs),
        group=name,
        make_ns=make_ns,
    )


def a_block(name: str) -> Block:
    """From x come a dear h and a cheap n; y is made from h and nobody needs it."""
    x, h, n, y = (f"{name}.{local}" for local in "xhny")
    return Block(
        name=name,
        class_name="Layer",
        activations=(
            made(x, 1, 0),
            made(h, 2, 9_000_000, x),
            made(n, 2, 1000, h),
            made(y, 1, 7, h, is_saved=False),
        ),
        backward=tuple(BackwardEvent(uses=(u,), compute_ns=10, held_bytes=0) for u in (n, h, x)),
    )


WORKLOAD = Workload(
    model="Model",
    blocks=(a_block("a"), a_block("b")),
    outside=Outside(resident_bytes=0, turn_bytes=0, turn_ns=0, ends_bytes=0, ends_ns=0),
)
PLAN = plan_with(
    WORKLOAD,
    {"a.x": HOST, "a.h": HOST, "a.n": RECOMPUTE, "b.x": KEEP, "b.h": KEEP, "b.n": KEEP},
)


def test_a_price_is_what_recomputing_takes_and_frees() -> None:
    dear = explain(PLAN, WORKLOAD, MACHINE, "a.h")
    # One byte a nanosecond over the link.
    assert (dear.num_bytes, dear.recompute_ns, dear.copy_ns) == (2 * MIB, 9_000_000, 2 * MIB)
    assert (dear.freed_bytes, dear.decision) == (2 * MIB, HOST)
    assert dear.reason == "It is dear to recompute, and it leaves while the forward goes on."
    cheap = explain(PLAN, WORKLOAD, MACHINE, "a.n")
    assert (cheap.recompute_ns, cheap.freed_bytes) == (1000, 2 * MIB)
    assert cheap.reason == "Recomputing costs less than the link's time for the same bytes."
    assert "a.n: RECOMPUTE, 2.0 MiB; recomputing it takes 0.001 ms and frees 2.0 MiB" in str(cheap)


def test_an_input_has_no_price() -> None:
    found = explain(PLAN, WORKLOAD, MACHINE, "a.x")
    assert not found.may_run_again
    assert "it cannot be recomputed" in str(found)


def test_what_is_kept_and_what_is_not_needed_say_so() -> None:
    assert "it would be wanted back at once" in explain(PLAN, WORKLOAD, MACHINE, "b.h").reason
    unneeded = explain(PLAN, WORKLOAD, MACHINE, "a.y")
    assert unneeded.decision is None
    assert unneeded.reason == "Neither backward nor what it recomputes needs it."


def test_an_unknown_activation_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"Model has no activation 'a.k'; the nearest are a\."):
        explain(PLAN, WORKLOAD, MACHINE, "a.k")
