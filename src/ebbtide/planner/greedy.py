"""Greedy: by price per byte into the free window of the link; needs no solver.

The steps and bytes of `ebbtide.planner.family` are searched over a coarse grid of the whole plane,
then over finer ones around the best of it. The best few by estimate are laid out exactly. Sources:
Capuchin (ASPLOS 2020) swaps what is hidden first and then recomputes by price; what differs is
that every candidate is a whole step with its peak, so an early choice is never stuck. Known
weakness: all blocks of a class take their steps in one order.
"""

import numpy as np

from ebbtide.machine import Machine
from ebbtide.planner.candidate import Found, best_layout, tighten
from ebbtide.planner.caps import Caps
from ebbtide.planner.family import Family
from ebbtide.planner.space import Floats, Ints, Space

NUM_STEPS, NUM_AMOUNTS = 10, 3
"""Points of each grid: in steps down the menus, and in bytes evicted."""
NUM_GRIDS = 4
"""One over the whole plane, then ever finer ones around the best point."""
MOMENTS_LAID_OUT = 1200
"""Forward moments of all candidates that are laid out exactly; one candidate at least."""
NUM_TIGHTENED = 6
"""Tries to lower the peak of the plan without making it slower."""


def plan_greedily(space: Space, machine: Machine, caps: Caps) -> Found | None:
    """Return the best candidate that keeps to the caps, or None."""
    candidates, seconds = search(space, machine, caps)
    chain = space.chain
    num_moments = sum(len(chain.classes[c].moments) for c in chain.class_of)
    num = max(1, MOMENTS_LAID_OUT // num_moments)
    found = best_layout(space, candidates, seconds, machine, caps, num=num)
    if found is None:
        # Estimates are careful: near the least budget the pure strategies may fit all the same.
        pure = Family(space, max_evicted_bytes=caps.host_bytes + caps.disk_bytes).uniform()
        return best_layout(space, pure, np.zeros(len(pure)), machine, caps, num=len(pure))
    return found if num == 1 else tighten(space, found, machine, caps, num=NUM_TIGHTENED)


def search(space: Space, machine: Machine, caps: Caps) -> tuple[Ints, Floats]:
    """Return the candidates of all grids and their estimated seconds."""
    family = Family(space, max_evicted_bytes=caps.host_bytes + caps.disk_bytes)
    outside = space.chain.outside
    held = outside.resident_bytes + outside.constant_bytes + outside.turn_bytes
    room = float(caps.device_bytes - held)
    low, high = 0, family.num_steps
    centre = spread = 0.0
    pure = family.uniform()
    rows = [pure]
    times = [space.estimate(pure, machine, caps)]
    for turn in range(NUM_GRIDS):
        steps = np.unique(np.linspace(low, high, NUM_STEPS).round().astype(np.int64))
        most = family.evictable_bytes(steps)[:, None]
        least = np.clip(family.stored_bytes(steps)[:, None] - room, 0.0, most)
        if turn == 0:
            # Denser near the least: more than is needed only makes room for fetches.
            evicted = least + (most - least) * np.linspace(0.0, 1.0, NUM_AMOUNTS) ** 2
        else:
            offset = np.linspace(-1.0, 1.0, NUM_AMOUNTS) * spread
            evicted = np.clip(least + centre + offset, least, most)
        candidates = family.candidates(steps, evicted)
        seconds = space.estimate(candidates, machine, caps)
        rows.append(candidates)
        times.append(seconds)
        k, amount = np.unravel_index(int(np.argmin(seconds)), evicted.shape)
        if not np.isfinite(seconds.min()):
            break
        width, centre_steps = max(1, (high - low) // (NUM_STEPS - 1)), int(steps[k])
        low, high = max(0, centre_steps - width), min(family.num_steps, centre_steps + width)
        centre = float(evicted[k, amount] - least[k, 0])
        spread = float(most[k, 0] - least[k, 0]) / NUM_AMOUNTS if turn == 0 else spread / 3
    return np.concatenate(rows), np.concatenate(times)
