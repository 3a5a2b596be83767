"""The exact planner: the relaxation's shares, made whole, and improved block by block.

The relaxation (`ebbtide.planner.relax`) says how much each block should store and evict. Going
down the chain, each block takes the whole state that keeps the running sums closest to the
relaxation's; several roundings and greedy's candidates compete, and the best is improved one block
at a time for as long as that helps. Integral decisions cost little over the relaxation: a vertex
has only a few split blocks. Known weakness: no proof beyond the bound, which each plan carries.
"""

import numpy as np

from ebbtide.machine import Machine
from ebbtide.planner.candidate import Found, best_layout, tighten
from ebbtide.planner.caps import Caps
from ebbtide.planner.greedy import NUM_TIGHTENED, plan_greedily, search
from ebbtide.planner.relax import Relaxed
from ebbtide.planner.space import Floats, Ints, Space

ROUNDINGS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the largest step by which running sums may fall behind the relaxation's."""
NUM_LAID_OUT = 6
"""Candidates that are laid out exactly."""
NUM_ESTIMATES = 4000
"""Block states that improving may estimate, divided by the blocks: its time is bounded."""


def plan_by_lp(space: Space, machine: Machine, caps: Caps, relaxed: Relaxed) -> Found | None:
    """Return the best candidate that keeps to the caps, or None."""
    candidates, seconds = search(space, machine, caps)
    rounded = np.array([_round(space, relaxed, share) for share in ROUNDINGS], dtype=np.int64)
    candidates = np.concatenate([candidates, rounded])
    seconds = np.concatenate([seconds, space.estimate(rounded, machine, caps)])
    better, better_seconds = _improve(space, candidates, seconds, machine, caps)
    found = best_layout(
        space,
        np.concatenate([candidates, better]),
        np.concatenate([seconds, better_seconds]),
        machine,
        caps,
        num=NUM_LAID_OUT,
    )
    if found is None:
        return plan_greedily(space, machine, caps)
    return tighten(space, found, machine, caps, num=NUM_TIGHTENED)


def _round(space: Space, relaxed: Relaxed, share: float) -> list[int]:
    """Return whole states whose running sums stay near the relaxation's."""
    kept_debt = evicted_debt = 0.0
    row: list[int] = []
    for block, c in enumerate(space.chain.class_of):
        kept_debt += relaxed.stored_bytes[block] - relaxed.evicted_bytes[block]
        evicted_debt += relaxed.evicted_bytes[block]
        states = np.concatenate(space.rows[c])
        kept, evicted = space.kept_bytes[states], space.evicted_bytes[states]
        # What is kept may not run ahead of the relaxation, or the device is full.
        slack = share * float(kept.max())
        miss = np.abs(kept - kept_debt) + np.abs(evicted - evicted_debt)
        miss = miss + np.where(kept > kept_debt + slack + 1.0, 1e15, 0.0)
        chosen = int(states[int(np.argmin(miss))])
        row.append(chosen)
        kept_debt -= space.kept_bytes[chosen]
        evicted_debt -= space.evicted_bytes[chosen]
    return row


def _improve(
    space: Space, candidates: Ints, seconds: Floats, machine: Machine, caps: Caps
) -> tuple[Ints, Floats]:
    """Change one block at a time, always the one that helps most; return all the steps."""
    k = int(np.argmin(seconds))
    row, best = candidates[k].copy(), float(seconds[k])
    rows, times = [row.copy()], [best]
    neighbours = _neighbours(space)
    left = NUM_ESTIMATES
    while np.isfinite(best) and left > 0:
        changes = [(block, s) for block in range(len(row)) for s in neighbours[row[block]]]
        tried = np.repeat(row[None, :], len(changes), axis=0)
        for k, (block, state) in enumerate(changes):
            tried[k, block] = state
        found = space.estimate(tried, machine, caps)
        left -= len(changes)
        k = int(np.argmin(found))
        if found[k] >= best * (1 - 1e-7):
            break
        row, best = tried[k].copy(), float(found[k])
        rows.append(row)
        times.append(best)
    return np.array(rows), np.array(times)


def _neighbours(space: Space) -> dict[int, tuple[int, ...]]:
    """Return, for each state, those with one eviction or one menu step more or less."""
    result: dict[int, tuple[int, ...]] = {}
    for options in space.rows:
        for step, row in enumerate(options):
            for count, state in enumerate(row):
                near = [row[n] for n in (count - 1, count + 1) if 0 <= n < len(row)]
                for other in (step - 1, step + 1):
                    if 0 <= other < len(options):
                        target = space.evicted_bytes[state]
                        moved = space.evicted_bytes[options[other]]
                        near.append(options[other][int(np.argmin(np.abs(moved - target)))])
                        near.append(options[other][0])
                        near.append(options[other][-1])
                result[state] = tuple(dict.fromkeys(near))
    return result
