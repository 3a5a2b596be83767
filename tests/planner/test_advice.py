from ebbtide.planner.advice import (
    CHUNKED_LOSS,
    advise_on_allocator,
    advise_on_logits,
    advise_on_time,
)
from ebbtide.workload import Outside

MIB = 2**20
OUTSIDE = Outside(resident_bytes=100 * MIB, turn_bytes=30 * MIB, turn_ns=0, ends_bytes=0, ends_ns=0)


def test_logits_that_hold_most_of_the_rest_bring_the_advice() -> None:
    assert advise_on_logits(OUTSIDE, 150 * MIB) == (
        "logits and loss hold 30.0 MiB of the peak's 50.0 MiB beyond weights, gradients and "
        f"optimizer state, and no plan lowers that: {CHUNKED_LOSS}"
    )


def test_logits_that_hold_half_or_less_bring_none() -> None:
    assert advise_on_logits(OUTSIDE, 160 * MIB) is None
    assert advise_on_logits(OUTSIDE, 159 * MIB) is not None


def test_an_allocator_that_holds_much_more_than_is_used_brings_a_setting() -> None:
    assert advise_on_allocator(100 * MIB, 119 * MIB, 0) is None
    assert advise_on_allocator(0, 64 * MIB, 0) is None
    assert advise_on_allocator(100 * MIB, 120 * MIB, 0) == (
        "the allocator held 120.0 MiB for a peak of 100.0 MiB in use: set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    retried = advise_on_allocator(100 * MIB, 100 * MIB, 2)
    assert retried is not None and "gave its cache back 2 times" in retried


def test_steps_that_take_much_longer_than_predicted_bring_a_trace() -> None:
    assert advise_on_time(0, 100) is None
    assert advise_on_time(100, 110) is None
    late = advise_on_time(100, 125)
    assert late is not None and late.startswith("steps took 25% longer than was predicted")
