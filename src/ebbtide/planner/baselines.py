"""The pure strategies, each one decision for everything; what the other planners are set beside."""

import enum

from ebbtide.machine import Machine
from ebbtide.planner.candidate import Found, lay_out_states
from ebbtide.planner.caps import Caps
from ebbtide.planner.space import Space


@enum.unique
class Baseline(enum.Enum):
    """A pure strategy."""

    KEEP = "keep"
    """Keep all that autograd saves."""
    RECOMPUTE = "recompute"
    """Full checkpointing: store least, keep it."""
    OFFLOAD = "offload"
    """Evict all that autograd saves."""
    OFFLOAD_INPUTS = "offload-inputs"
    """Full checkpointing whose stored activations are evicted."""


def plan_baseline(space: Space, baseline: Baseline, machine: Machine, caps: Caps) -> Found | None:
    """Return the strategy's layout, or None if it does not keep to the caps."""
    option = 0 if baseline in (Baseline.KEEP, Baseline.OFFLOAD) else -1
    evicted = 0 if baseline in (Baseline.KEEP, Baseline.RECOMPUTE) else -1
    states = [space.states[space.rows[c][option][evicted]] for c in space.chain.class_of]
    return lay_out_states(space, states, machine, caps)
