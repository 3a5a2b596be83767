from dataclasses import replace

import pytest

from ebbtide.catalog.calls import Rates
from ebbtide.catalog.machines import find_machine
from ebbtide.catalog.models import MODELS
from ebbtide.estimate.breakeven import BreakEven, break_even
from ebbtide.estimate.setup import Degrees, Setup

# Elementwise ops take nothing, products and attention 400 TFLOP/s.
RATES = Rates(flops_per_ns=400_000, attention_flops_per_ns=400_000, moved_bytes_per_ns=10**12)
SETUP = Setup(shape=MODELS["llama-2-7b"], context=4096, batch=1)


def at(gb_per_s: float, setup: Setup = SETUP) -> BreakEven:
    machine = replace(find_machine("h200-pcie5"), out_bytes_per_s=int(gb_per_s * 1e9))
    return break_even(setup, machine, RATES)


def test_it_is_where_the_formula_has_it() -> None:
    # h 4096, f 11008, no groups: (12 + 4) h + 6 f bytes a token and 4 for each of 32 heads;
    # 2 (4 h h + 3 h f) + 2 s h operations.
    num_bytes = 16 * 4096 + 6 * 11_008 + 4 * 32
    products = 2 * (4 * 4096**2 + 3 * 4096 * 11_008)
    context = (num_bytes * 400e12 / 50e9 - products) / (2 * 4096)
    assert context > 0
    assert at(50).everything == pytest.approx(context, rel=0.01)


def test_a_link_of_half_the_speed_needs_more_context_and_a_fast_one_none() -> None:
    slow, fast = at(25), at(50)
    assert slow.everything is not None and fast.everything is not None
    assert slow.everything > 2 * fast.everything
    assert at(5000) == BreakEven(everything=0, dear=0)


def test_a_link_that_is_too_slow_never_is_free() -> None:
    assert at(0.01) == BreakEven(everything=None, dear=None)


def test_what_is_dear_alone_is_free_sooner() -> None:
    found = at(50)
    assert found.dear is not None and found.everything is not None
    assert found.dear < found.everything


def test_the_batch_and_the_context_that_were_asked_for_do_not_matter() -> None:
    assert at(50, replace(SETUP, batch=7, context=128)) == at(50)


def test_context_parallel_ranks_see_a_part_of_the_tokens_and_all_the_keys() -> None:
    split = at(50, replace(SETUP, degrees=Degrees(cp=4)))
    # Bytes and operations of a rank both fall to a quarter: the context is the same.
    assert split.everything == pytest.approx(at(50).everything, rel=0.01)


def test_without_a_link_nothing_is_free() -> None:
    bare = replace(
        find_machine("h200-pcie5"),
        host_bytes=0,
        out_bytes_per_s=0,
        in_bytes_per_s=0,
        both_bytes_per_s=0,
    )
    assert break_even(SETUP, bare, RATES) == BreakEven(everything=None, dear=None)
