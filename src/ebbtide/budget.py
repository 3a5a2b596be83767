"""A memory budget as people write it, and the bytes that it means on one device."""

import re
from fractions import Fraction

from ebbtide.naming import shorten
from ebbtide.units import format_bytes, parse_bytes

# What "auto" leaves to the allocator: its cache is cut into pieces, and the driver's context and
# the workspaces of libraries lie beside it. An assumption, not measured.
RESERVE_FRACTION = Fraction(6, 100)
MIN_RESERVE_BYTES = 2**30

AUTO = "auto"

_PERCENT = re.compile(r"(?P<number>[0-9]{1,20}(?:\.[0-9]{1,20})?)\s*%")
_RULE = 'a budget is a size such as "40GiB", a share of the device such as "50%", or "auto"'


def parse_budget(text: str | int, total_bytes: int) -> int:
    """Return the bytes of a budget such as "40GiB", "50%", "auto" or 123.

    "auto" is the device's memory without a reserve for the allocator: 6 % of it, and at least
    1 GiB. A fraction of a byte is dropped, so the result never exceeds what was asked.

    Args:
        text: The budget.
        total_bytes: The device's memory. A size may be larger than it: nothing is capped.

    Raises:
        ValueError: It is no size, no share of at most 100 %, and not "auto"; or "auto" is more
            than the device has.
    """
    if isinstance(text, int):
        return parse_bytes(text)
    written = text.strip()
    if written.lower() == AUTO:
        reserve_bytes = max(int(total_bytes * RESERVE_FRACTION), MIN_RESERVE_BYTES)
        if reserve_bytes > total_bytes:
            raise ValueError(
                f"budget 'auto' leaves {format_bytes(reserve_bytes)} to the allocator, and the "
                f"device has {format_bytes(total_bytes)}; give a size or a share, such as '50%'"
            )
        return total_bytes - reserve_bytes
    share = _PERCENT.fullmatch(written)
    if share is not None:
        percent = Fraction(share["number"])
        if percent > 100:
            raise ValueError(
                f"budget {shorten(text)!r} is more than the device has; a share is 0 to 100 %; "
                f"{_RULE}"
            )
        return int(total_bytes * percent / 100)
    try:
        return parse_bytes(written)
    except ValueError as error:
        raise ValueError(f"cannot read {shorten(text)!r} as a budget: {error}; {_RULE}") from error
