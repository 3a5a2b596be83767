"""From which context on offloading is free: a layer's copies take no longer than its forward.

Bytes grow with the tokens and so do matrix products, attention with their square: long sequences
have time to copy, large batches have no more than small ones.
"""

from dataclasses import dataclass, replace

from ebbtide.block import Block
from ebbtide.catalog.calls import Rates, make_block
from ebbtide.catalog.form import Implementation
from ebbtide.catalog.layers import make_layer
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

    asked = replace(setup, context=least * step, batch=1)
    kinds = _kinds(asked, rates, is_lean)

    def is_free(number: int) -> bool:
        at = replace(setup, context=number * step, batch=1)
        return _is_free(at, machine, rates, kinds)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Layers that are alike."""

    layer: int
    """One of them."""
    count: int
    """Of them."""
    moved: frozenset[str]
    """Local names of what is to be copied."""


def _kinds(setup: Setup, rates: Rates, is_lean: bool) -> tuple[_Kind, ...]:
    shape = setup.shape
    found: list[_Kind] = []
    for has_experts in (False, True):
        layers = [i for i in range(shape.num_layers) if shape.has_experts(i) is has_experts]
        if not layers:
            continue
        # Two, since nothing of a last block is moved.
        blocks = tuple(_block(setup, rates, layers[0], name) for name in ("a", "b"))
        moved = frozenset(a.name[1:] for a in blocks[0].activations if a.is_saved)
        if is_lean:
            plan = named_plan("offload", Workload(model="", blocks=blocks), min_bytes=0)
            moved = frozenset(
                a.name[1:] for a in blocks[0].activations if plan.decision(a.name) is Decision.HOST
            )
        found.append(_Kind(layer=layers[0], count=len(layers), moved=moved))
    return tuple(found)


def _block(setup: Setup, rates: Rates, layer: int, name: str) -> Block:
    calls = make_layer(setup.shape, layer, setup.form(is_rerun=False)).calls
    is_fused = setup.implementation is Implementation.COMPILED
    return make_block(name, "Layer", calls, rates, is_fused=is_fused)


def _is_free(setup: Setup, machine: Machine, rates: Rates, kinds: tuple[_Kind, ...]) -> bool:
    num_bytes = forward_ns = 0
    for kind in kinds:
        block = _block(setup, rates, kind.layer, "a")
        forward_ns += kind.count * block.forward_ns
        sizes = (a.num_bytes for a in block.activations if a.name[1:] in kind.moved)
        num_bytes += kind.count * sum(sizes)
    if not machine.out_bytes_per_s:
        return False
    return num_bytes * 1_000_000_000 <= forward_ns * machine.out_bytes_per_s
