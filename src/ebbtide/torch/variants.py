"""Compile a model's blocks, once for each set of things that a plan makes again.

Blocks of one class and one variant share their compiled code: the block is an argument of the
function that is compiled, and dynamo guards on how it is built, not on which one it is. Each
variant has a code object of its own, so that none counts as a recompilation of another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import nn

from ebbtide.plan import Decision, Plan
from ebbtide.torch.graphs import GraphFacts, running
from ebbtide.torch.internals import (
    compile_by_inductor,
    compile_to_eager,
    compiled_call_of,
    hooks_in,
    new_block_call,
    set_compiled_call,
)
from ebbtide.torch.partition import LEAN, MINIMAL, Variant, cut
from ebbtide.workload import Block

BACKENDS: Final = ("inductor", "aot_eager")
"""What compiles a block: code generation, or the traced graph run as it is, for tests."""


class BlockCall:
    """Calls one compiled block, in the variant that the plan of now asks for.

    Args:
        block: The block.
        path: Its module path.
        backend: One of `BACKENDS`.
    """

    def __init__(self, block: nn.Module, path: str, backend: str) -> None:
        self._block = weakref.ref(block)
        self._path = path
        self._backend = backend
        self.variant = MINIMAL
        """What it runs with gradients."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block()
        assert block is not None, "bug in ebbtide: a block is called that is gone"
        # Without gradients there is nothing to save, so one variant serves.
        variant = self.variant if torch.is_grad_enabled() else MINIMAL
        # Dynamo does not guard on hooks: without the key, blocks with other hooks would be served
        # by code that has none.
        call = compiled_call(self._backend, variant, type(block), hooks_in(block))
        return call(block, args, kwargs)

    def take_plan(self, plan: Plan, block: Block) -> None:
        """Run the variant for a plan from the next call on; it is compiled then.

        Args:
            plan: The plan.
            block: The block as it was observed.
        """
        again = {a.name for a in block.activations if a.is_replayable}
        asked = {n for n in again if plan.decision(n) in (Decision.RECOMPUTE, None)}
        local = frozenset(name.removeprefix(self._path) for name in asked)
        self.variant = MINIMAL if again and asked == again else Variant(recomputed=local)


class Compilation:
    """The compiled calls of a model's blocks; `close` takes them off again.

    Args:
        blocks: By module path; none is compiled yet.
        backend: One of `BACKENDS`.
        is_planned: Let plans choose what is made again. Else it is torch's partitioner that does.
    """

    def __init__(
        self, blocks: Mapping[str, nn.Module], backend: str, *, is_planned: bool = True
    ) -> None:
        self._planned: dict[str, BlockCall] = {}
        self._calls: list[tuple[weakref.ref[nn.Module], Callable[..., Any] | None]] = []
        for path, block in blocks.items():
            if is_planned:
                call = self._planned[path] = BlockCall(block, path, backend)
                set_compiled_call(block, call)
            else:
                block.compile(backend=backend)
            self._calls.append((weakref.ref(block), compiled_call_of(block)))

    def take_plan(self, plan: Plan, blocks: tuple[Block, ...]) -> None:
        """Let every block run the variant for its plan."""
        for block in blocks:
            self._planned[block.name].take_plan(plan, block)

    def save_all(self, path: str) -> None:
        """Let a block save all that is dear, to measure it, until there is a plan."""
        self._planned[path].variant = LEAN

    def close(self) -> None:
        """Leave the blocks uncompiled, as they were, unless somebody compiled one anew since."""
        for known, call in self._calls:
            block = known()
            if block is not None and compiled_call_of(block) is call:
                set_compiled_call(block, None)


@cache
def compiled_call(
    backend: str, variant: Variant, kind: type[nn.Module], hooks: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return the compiled call of blocks of one class, with the same hooks, in one variant."""
    own = new_block_call(f"call_{kind.__name__}")
    return torch.compile(own, backend=_backend_of(backend, variant))


def _backend_of(name: str, variant: Variant) -> Callable[..., Any]:
    compile_graph = compile_by_inductor if name == "inductor" else compile_to_eager

    def compile_variant(graph: Any, inputs: Any) -> Callable[..., Any]:
        facts: list[GraphFacts] = []

        def partition(joint: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
            halves = cut(joint, joint_inputs, variant, **options)
            facts.append(halves.facts)
            return halves.forward, halves.backward

        compiled = compile_graph(graph, inputs, partition)
        found = facts[-1] if facts else None  # nothing to cut: no gradients are wanted

        def run(*arguments: Any) -> Any:
            if found is not None and running.listener is not None:
                running.listener.start_graph(found)
            return compiled(*arguments)

        return run

    return compile_variant
