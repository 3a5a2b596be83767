"""From which context on offloading is free: a layer's copies take no longer than its forward.

Bytes grow with the tokens and so do matrix products, attention with their square: long sequences
have time to copy, large batches have no more than small ones.
"""

from dataclasses import dataclass, replace

from ebbtide.catalog.calls import Rates, make_block
from ebbtide.catalog.layers import Implementation, make_layer
from ebbtide.estimate.setup import MOST_TOKENS, Setup
from ebbtide.machine import Machine
from ebbtide.plan import Decision
from ebbtide.planner import named_plan
from ebbtide.workload import Workload

MOST_CONTEXT = 2**24
"""Above it the answer is that offloading is never free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Contexts; 0: at any context; None: at none up to `MOST_CONTEXT`."""

    everything: int | None
    """From which on all that is saved can be copied for nothing."""
    dear: int | None
    """The same if what is cheap to make again (norms, elementwise ops) is made again."""


def break_even(setup: Setup, machine: Machine, rates: Rates) -> BreakEven:
    """Return from which context on offloading costs no time on this machine."""
    return BreakEven(
        everything=_search(setup, machine, rates, is_lean=False),
        dear=_search(setup, machine, rates, is_lean=True),
    )


def _search(setup: Setup, machine: Machine, rates: Rates, *, is_lean: bool) -> int | None:
    step = setup.degrees.cp * (setup.degrees.tp if setup.degrees.sp else 1)
    # The layer's own ranks see no fewer tokens than one each.
    least, most = 16, MOST_CONTEXT // step
    most = min(most, MOST_TOKENS)

    def is_free(number: int) -> bool:
        return _is_free(replace(setup, context=number * step, batch=1), machine, rates, is_lean)

    if is_free(least):
        return 0
    if not is_free(most):
        return None
    low, high = least, most
    while high - low > max(1, high >> 8):
        middle = (low + high) // 2
        if is_free(middle):
            high = middle
        else:
            low = middle
    return high * step


def _is_free(setup: Setup, machine: Machine, rates: Rates, is_lean: bool) -> bool:
    num_bytes = forward_ns = 0
    kinds: dict[bool, int] = {}
    for layer in range(setup.shape.num_layers):
        kind = setup.shape.has_experts(layer)
        kinds[kind] = kinds.get(kind, 0) + 1
    for kind, count in kinds.items():
        layer = setup.shape.num_layers - 1 if kind else 0
        calls = make_layer(setup.shape, layer, setup.form(is_rerun=False)).calls
        is_fused = setup.implementation is Implementation.COMPILED
        blocks = tuple(
            make_block(name, "Layer", calls, rates, is_fused=is_fused) for name in ("a", "b")
        )
        forward_ns += count * blocks[0].forward_ns
        if not is_lean:
            num_bytes += count * blocks[0].num_bytes_saved
            continue
        plan = named_plan("offload", Workload(model="", blocks=blocks), min_bytes=0)
        num_bytes += count * sum(
            a.num_bytes for a in blocks[0].activations if plan.decision(a.name) is Decision.HOST
        )
    if not machine.out_bytes_per_s:
        return False
    return num_bytes * 1_000_000_000 <= forward_ns * machine.out_bytes_per_s
