"""The lower bound in closed form: no plan is faster, whatever it does.

Bytes must leave the device by the turn, over the link or by not being stored. With E bytes too many
and rho(x) the least time to recompute x of them (a fractional knapsack over the hulls of all menus,
which is convex), a step takes at least base + min over delay d >= 0 of d + rho(E - out x (window +
d)), and the same for the way back. Copies as a fluid and free splits only relax what is real, so
the bound holds. Known weakness: it looks at the turn alone.
"""

from itertools import pairwise

from ebbtide.machine import Machine
from ebbtide.planner.caps import Caps, link_rates
from ebbtide.planner.chain import Chain
from ebbtide.planner.menu import Option


def closed_form_ns(
    chain: Chain, menus: tuple[tuple[Option, ...], ...], machine: Machine, caps: Caps
) -> int:
    """Return a time in ns below which no plan comes."""
    outside = chain.outside
    room = caps.device_bytes - outside.resident_bytes - outside.constant_bytes - outside.turn_bytes
    stored = sum(menus[c][0].num_bytes for c in chain.class_of)
    excess = max(0, stored - room)
    out_rate, in_rate = link_rates(machine, caps)
    tiers = caps.host_bytes + caps.disk_bytes
    # What every plan spends beside, and the most that storing adds to backward's window.
    least_ns = sum(min(option.spent_ns for option in menus[c]) for c in chain.class_of)
    stored_ns = sum(max(option.store_ns for option in menus[c]) for c in chain.class_of)
    # In bytes a ns, and the free window; recomputing lengthens backward's.
    sides = (
        (out_rate * 1e-9, chain.forward_ns, False),
        (in_rate * 1e-9, chain.backward_ns + least_ns + stored_ns, True),
    )
    delay = max(
        _least_delay_ns(chain, menus, excess, tiers, rate, window, is_backward)
        for rate, window, is_backward in sides
    )
    return chain.base_ns + least_ns + int(delay)


def steps_by_price(chain: Chain, menus: tuple[tuple[Option, ...], ...]) -> list[tuple[float, int]]:
    """Return (ns a byte, bytes) of all steps down all menus, cheapest first."""
    steps: list[tuple[float, int]] = []
    for c, menu in enumerate(menus):
        count = chain.class_of.count(c)
        for left, right in pairwise(menu):
            freed = left.num_bytes - right.num_bytes
            # Where storing costs time a step down may save some: the floor has that already.
            price = max(0, right.spent_ns - left.spent_ns) / freed
            steps.append((price, freed * count))
    return sorted(steps)


def _least_delay_ns(
    chain: Chain,
    menus: tuple[tuple[Option, ...], ...],
    excess: int,
    tiers: int,
    rate: float,
    window_ns: int,
    is_backward: bool,
) -> float:
    """Return the least stall and recomputation that get rid of `excess` bytes."""
    # Each byte either is moved, up to what the tiers hold and the time lets through, or is
    # recomputed at a price that only rises: stall as soon as that costs less than recomputing.
    moved = min(tiers, rate * window_ns)
    left = excess - moved
    delay = 0.0
    for price, num_bytes in steps_by_price(chain, menus):
        if left <= 0:
            break
        stall = 1 / rate if rate > 0 else float("inf")
        may_stall = moved + left <= tiers
        if may_stall and stall <= price:
            break
        # Where recomputation itself gives the link time, each byte recomputed lets more through.
        gain = 1.0 + (rate * price if is_backward else 0.0)
        taken = min(num_bytes, left / gain)
        delay += taken * price
        extra = taken * rate * price if is_backward else 0.0
        left -= taken + extra
        moved += extra
    if left > 0 and rate > 0:
        delay += left / rate
    return delay
