"""Uniform: all equal blocks get one decision, as a scanned stack of layers needs.

All states of a class are tried, for all classes together where that is few, and else one class
after another from the best pure strategy on. Recomputing everything is always looked at exactly:
no plan is slower than that where it fits. Known weakness: the last blocks cannot be kept, and
what fits only in parts does not fit: a free plan is faster, and may exist where this does not.
"""

from itertools import product

import numpy as np

from ebbtide.machine import Machine
from ebbtide.planner.baselines import Baseline, plan_baseline
from ebbtide.planner.candidate import Found, best_layout, order
from ebbtide.planner.caps import Caps
from ebbtide.planner.space import Floats, Ints, Space

MAX_TOGETHER = 2048
"""Combinations of states that are tried at once."""
NUM_LAID_OUT = 4
"""Candidates that are laid out exactly."""


def plan_uniformly(space: Space, machine: Machine, caps: Caps) -> Found | None:
    """Return the best candidate that treats equal blocks alike, or None."""
    tried = (_plan(space, machine, caps), plan_baseline(space, Baseline.RECOMPUTE, machine, caps))
    return min((found for found in tried if found is not None), key=order, default=None)


def _plan(space: Space, machine: Machine, caps: Caps) -> Found | None:
    class_of = np.array(space.chain.class_of)
    states = [[s for row in options for s in row] for options in space.rows]

    def rate(choices: list[tuple[int, ...]]) -> tuple[Ints, Floats]:
        rows = np.array(choices, dtype=np.int64)[:, class_of]
        return rows, space.estimate(rows, machine, caps)

    if np.prod([len(s) for s in states]) <= MAX_TOGETHER:
        rows, seconds = rate(list(product(*states)))
        return best_layout(space, rows, seconds, machine, caps, num=NUM_LAID_OUT)
    tried: list[Ints] = []
    times: list[Floats] = []
    most_options = max(len(options) for options in space.rows)
    starts = [
        tuple(options[min(step, len(options) - 1)][end] for options in space.rows)
        for step in range(most_options)
        for end in (0, -1)
    ]
    rows, seconds = rate(starts)
    best = starts[int(np.argmin(seconds))]
    for c in [*range(len(states)), *range(len(states))]:
        choices = [(*best[:c], s, *best[c + 1 :]) for s in states[c]]
        rows, seconds = rate(choices)
        tried.append(rows)
        times.append(seconds)
        best = choices[int(np.argmin(seconds))]
    return best_layout(
        space, np.concatenate(tried), np.concatenate(times), machine, caps, num=NUM_LAID_OUT
    )
