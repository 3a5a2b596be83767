from ebbtide.planner.advice import CHUNKED_LOSS, advise_on_logits
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
