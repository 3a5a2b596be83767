"""From a candidate's states to decisions with tiers, and to the best exact layout among several."""

from collections.abc import Iterator, Sequence
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


def deal_out(
    space: Space, states: Sequence[State], host_bytes: int
) -> Iterator[tuple[Treatment, ...]]:
    """Yield ways to give what is evicted a tier: host memory, and what does not fit there the disk.

    Either the earliest activations go to the disk, which are away longest, or every so many of
    them, so that the disk writes all through forward and reads all through backward. Which is
    faster depends on where the device has room for what is leaving and for what comes ahead.
    """
    over = sum(state.evicted_bytes for state in states) - host_bytes
    yield _deal_out_earliest(space, states, over)
    if over > 0 and host_bytes > 0:
        yield _deal_out_evenly(space, states, over, host_bytes)


def _deal_out_earliest(space: Space, states: Sequence[State], over: int) -> tuple[Treatment, ...]:
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


def _deal_out_evenly(
    space: Space, states: Sequence[State], over: int, host_bytes: int
) -> tuple[Treatment, ...]:
    evicted_bytes, passed_bytes, disk_bytes = over + host_bytes, 0, 0
    treatments: list[Treatment] = []
    for c, state in zip(space.chain.class_of, states, strict=True):
        pins = space.chain.classes[c].pins
        tiers: dict[int, Decision] = {}
        for i in state.evicted:
            num_bytes = state.program.num_bytes[i]
            host_left_bytes = host_bytes - (passed_bytes - disk_bytes)
            passed_bytes += num_bytes
            # The disk's share of all so far, to half an activation.
            is_due = (2 * disk_bytes + num_bytes) * evicted_bytes <= 2 * over * passed_bytes
            to_disk = is_due or num_bytes > host_left_bytes
            tiers[i] = pins[i] or (Decision.DISK if to_disk else Decision.HOST)
            disk_bytes += num_bytes if tiers[i] is Decision.DISK else 0
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
        if found is not None and (best is None or order(found) < order(best)):
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
    best: Found | None = None
    for treatments in deal_out(space, states, caps.host_bytes):
        tiers = ((Decision.HOST, caps.host_bytes), (Decision.DISK, caps.disk_bytes))
        if any(sum(t.bytes_on(tier) for t in treatments) > most for tier, most in tiers):
            continue
        layout = lay_out(space.chain, treatments, machine, cap_bytes=caps.device_bytes)
        if layout is None:
            continue
        found = Found(treatments=treatments, layout=layout)
        if best is None or order(found) < order(best):
            best = found
    return best


def order(found: Found) -> tuple[int, int]:
    """Return what is compared of two: the time, and of equal times the peak."""
    return found.layout.step_ns, found.layout.peak_bytes
