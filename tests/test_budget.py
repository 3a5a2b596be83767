import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.budget import parse_budget

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "budget_bytes"),
    [
        ("40GiB", 40 * GIB),
        (" 40 GB ", 40 * 10**9),
        ("200GiB", 200 * GIB),
        (123, 123),
        ("50%", 50 * GIB),
        (" 12.5 % ", 12 * GIB + GIB // 2),
        ("100%", 100 * GIB),
        ("0%", 0),
        ("auto", 94 * GIB),
        ("AUTO ", 94 * GIB),
    ],
)
def test_a_budget_is_read_as_bytes_of_a_device(text: str | int, budget_bytes: int) -> None:
    assert parse_budget(text, 100 * GIB) == budget_bytes


def test_auto_leaves_at_least_one_gib() -> None:
    assert parse_budget("auto", 8 * GIB) == 7 * GIB
    assert parse_budget("auto", GIB) == 0


@given(st.integers(min_value=0, max_value=2**50), st.integers(min_value=0, max_value=100))
def test_a_share_is_never_more_than_was_asked(total_bytes: int, percent: int) -> None:
    budget_bytes = parse_budget(f"{percent}%", total_bytes)
    assert 0 <= total_bytes * percent - budget_bytes * 100 < 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("101%", "budget '101%' is more than the device has; a share is 0 to 100 %"),
        ("-1%", "cannot read '-1%' as a budget"),
        ("half", "cannot read 'half' as a budget: cannot read 'half' as a size"),
        ("40Gb", "unknown unit 'Gb'"),
        (-1, "size -1 is negative"),
    ],
)
def test_what_is_no_budget_is_refused(text: str | int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_budget(text, 100 * GIB)


def test_auto_is_refused_where_nothing_would_be_left() -> None:
    message = "budget 'auto' leaves 1.0 GiB to the allocator, and the device has 512.0 MiB"
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_budget("auto", GIB // 2)
