"""From a candidate's states to decisions with tiers, and to the best exact layout among several."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.machine import Machine
from ebbtide.plan import Decision
from ebbtide.planner.caps import Caps
from ebbtide.planner.layout import Layout, Treatment, lay_out
from ebbtide.planner.space import Floats, Ints, Space, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A candidate that keeps to the caps."""

    treatments: tuple[Treatment, ...]
    """One for each block."""
    layout: Layout
    """Its times and copies."""


def treat(space: Space, states: Sequence[State], host_bytes: int) -> tuple[Treatment, ...]:
    """Give what is evicted a tier: host memory, and what does not fit there the disk.

    The earliest blocks go to the disk, the deepest tier: they are away longest.
    """
    over = sum(state.evicted_bytes for state in states) - host_bytes
    treatments: list[Treatment] = []
    for c, state in zip(space.chain.class_of, states, strict=True):
        pins = space.chain.classes[c].pins
        tiers: dict[int, Decision] = {}
        for i in state.evicted:
            tiers[i] = pins[i] or (Decision.DISK if over > 0 else Decision.HOST)
            if tiers[i] is Decision.DISK:
                over -= state.program.num_bytes[i]
        treatments.append(Treatment(program=state.program, tiers=tiers))
    return tuple(treatments)


def best_layout(
    space: Space, candidates: Ints, seconds: Floats, machine: Machine, caps: Caps, *, num: int
) -> Found | None:
    """Lay out the best candidates by estimate, and return the best of them by exact time.

    Args:
        space: What the candidates are of.
        candidates: A state for each candidate (row) and block (column).
        seconds: Estimated time of each; infinite where it does not fit.
        machine: Its links.
        caps: What the step may take.
        num: How many are laid out, and found to keep to the caps.
    """
    best: Found | None = None
    seen: set[bytes] = set()
    num_found = 0
    # Of equal times, what keeps least.
    kept = space.kept_bytes[candidates].sum(axis=1)
    for k in np.lexsort((kept, seconds)):
        if not np.isfinite(seconds[k]) or num_found == num:
            break
        key = candidates[k].tobytes()
        if key in seen:
            continue
        seen.add(key)
        found = lay_out_states(space, [space.states[s] for s in candidates[k]], machine, caps)
        num_found += found is not None
        if found is not None and (best is None or _order(found) < _order(best)):
            best = found
    return best


def tighten(space: Space, found: Found, machine: Machine, caps: Caps, *, num: int) -> Found:
    """Return the same decisions with the least peak that costs no time, in `num` tries."""
    low, high = 0, found.layout.peak_bytes
    for _ in range(num):
        middle = (low + high) // 2 if low else high - high // 16
        layout = lay_out(space.chain, found.treatments, machine, cap_bytes=middle)
        if layout is None or layout.step_ns > found.layout.step_ns:
            low = middle
        else:
            high = layout.peak_bytes
            found = Found(treatments=found.treatments, layout=layout)
    return found


def lay_out_states(
    space: Space, states: Sequence[State], machine: Machine, caps: Caps
) -> Found | None:
    """Return the exact layout of one candidate, or None if it does not keep to the caps."""
    treatments = treat(space, states, caps.host_bytes)
    for tier, most in ((Decision.HOST, caps.host_bytes), (Decision.DISK, caps.disk_bytes)):
        if sum(treatment.bytes_on(tier) for treatment in treatments) > most:
            return None
    layout = lay_out(space.chain, treatments, machine, cap_bytes=caps.device_bytes)
    return None if layout is None else Found(treatments=treatments, layout=layout)


def _order(found: Found) -> tuple[int, int]:
    return found.layout.step_ns, found.layout.peak_bytes
