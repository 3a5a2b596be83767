"""From a row's name to the blocks that are trained: each stack's, under its policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ebbtide.compare.jax.model import Block, LanguageModel, Params, Stack, shapes_of_one
from ebbtide.compare.jax.names import BY_HAND, EBBTIDE, FULL_REMAT, NO_REMAT, NamedRow, policy_of
from ebbtide.errors import PlanError
from ebbtide.jax import NamedPolicy, StepPlan, names_of, plan_step, residuals_of
from ebbtide.machine import Machine
from ebbtide.units import format_bytes

Step = Callable[..., Any]
"""`step(blocks, *args)`: one training step with the form of each stack's block to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBlocks:
    """The blocks of one row."""

    blocks: dict[str, Block]
    """By the stack's name."""
    host_bytes: int
    """What should lie in host memory between forward and backward, over all layers."""
    notes: tuple[str, ...]
    """What a reader must know."""
    plans: tuple[StepPlan, ...] = ()
    """Of `ebbtide`: one for each stack; the last one has the compiled step."""


def choose_blocks(
    strategy: str,
    model: LanguageModel,
    params: Params,
    x_BTD: Any,
    *,
    step: Step,
    args: Sequence[Any],
    donate: Sequence[int],
    budget: str | None,
    machine: Machine | str | None,
    host: str | None,
    compiler_options: Mapping[str, Any] | None = None,
) -> ChosenBlocks:
    """Put each stack's block under the row's policy.

    Args:
        strategy: A row's name.
        model: The model.
        params: Its weights, or shapes and dtypes.
        x_BTD: What goes into the first block, or shape and dtype.
        step: For `ebbtide`: what the budget is of.
        args: The step's other arguments.
        donate: Which of them it overwrites.
        budget: For `ebbtide`.
        machine: For `ebbtide`: its link; `None` to measure it.
        host: For `ebbtide`: most pinned host memory.
        compiler_options: For `ebbtide`: what the step is compiled with.

    Raises:
        BudgetError: No plan keeps to the budget.
        PlanError: The model has none of the policy's names.
    """
    policy = policy_of(strategy)
    if policy == NO_REMAT:
        return ChosenBlocks(blocks=model.plain_blocks, host_bytes=0, notes=())
    if policy == FULL_REMAT:
        return ChosenBlocks(blocks=_recompute(model), host_bytes=0, notes=())
    if policy == EBBTIDE:
        assert budget is not None, "bug in ebbtide: a plan without a budget"
        return _plan_stacks(
            model,
            step,
            args,
            donate=donate,
            budget=budget,
            machine=machine,
            host=host,
            compiler_options=compiler_options,
        )
    return _name_by_hand(policy, BY_HAND[policy], model, params, x_BTD)


def _recompute(model: LanguageModel) -> dict[str, Block]:
    return {
        name: jax.checkpoint(block, prevent_cse=False) for name, block in model.plain_blocks.items()
    }


def _name_by_hand(
    policy: str, row: NamedRow, model: LanguageModel, params: Params, x_BTD: Any
) -> ChosenBlocks:
    blocks: dict[str, Block] = {}
    notes: list[str] = []
    host_bytes = 0
    for stack in model.stacks:
        one = shapes_of_one(params[stack.name])
        there = frozenset(names_of(stack.block, one, x_BTD))
        named = NamedPolicy(
            saved=tuple(name for name in row.saved if name in there),
            offloaded=tuple(name for name in row.offloaded if name in there),
        )
        if not named.names:
            wanted = ", ".join((*row.saved, *row.offloaded))
            raise PlanError(f"no block of {stack.name} has a name of {policy} ({wanted}).")
        # The model places the names itself: nothing is put around the block.
        block = jax.checkpoint(stack.block, policy=named.to_jax(), prevent_cse=False)
        kept = {r.name: r for r in residuals_of(block, one, x_BTD) if r.name in named.names}
        on_host = [r for r in kept.values() if r.is_on_host]
        host_bytes += stack.layers * sum(r.num_bytes for r in on_host)
        blocks[stack.name] = block
        notes.append(_describe_names(stack, named, tuple(kept)))
    return ChosenBlocks(blocks=blocks, host_bytes=host_bytes, notes=tuple(notes))


def _describe_names(stack: Stack, named: NamedPolicy, kept: tuple[str, ...]) -> str:
    """Say what a policy by hand does to a stack, and which of its names do nothing."""
    parts: list[str] = []
    for what, names in (("saved", named.saved), ("offloaded", named.offloaded)):
        used = [name for name in names if name in kept]
        if used:
            parts.append(f"{what} {', '.join(used)}")
    unused = [name for name in named.names if name not in kept]
    if unused:
        parts.append(f"backward does without {', '.join(unused)}")
    return f"{stack.name}: {'; '.join(parts)}"


def _plan_stacks(
    model: LanguageModel,
    step: Step,
    args: Sequence[Any],
    *,
    donate: Sequence[int],
    budget: str,
    machine: Machine | str | None,
    host: str | None,
    compiler_options: Mapping[str, Any] | None,
) -> ChosenBlocks:
    """Plan the stacks one after another, the one with the most layers first.

    While one is planned those after it are recomputed in full, so that its plan is sound with what
    comes later, and each later one has what is left of the budget.
    """
    blocks = _recompute(model)
    plans: list[StepPlan] = []
    notes: list[str] = []
    for stack in sorted(model.stacks, key=lambda stack: -stack.layers):
        others = {name: block for name, block in blocks.items() if name != stack.name}

        def step_with(
            block: Block, *given: Any, name: str = stack.name, others: dict[str, Block] = others
        ) -> Any:
            return step({**others, name: block}, *given)

        plan = plan_step(
            step_with,
            args,
            block=stack.block,
            layers=stack.layers,
            budget=budget,
            machine=machine,
            host=host,
            donate=donate,
            before=plans[-1] if plans else None,
            compiler_options=compiler_options,
        )
        blocks[stack.name] = plan.tide.checkpoint(stack.block)
        plans.append(plan)
        notes.append(f"{stack.name}: {_describe_plan(plan)}")
    return ChosenBlocks(
        blocks=blocks,
        host_bytes=plans[-1].host_bytes,
        notes=tuple(notes),
        plans=tuple(plans),
    )


def _describe_plan(plan: StepPlan) -> str:
    named = plan.tide.named_policy()
    made = plan.tide.plan
    parts = [f"planned for {format_bytes(plan.budget_bytes)}"]
    if plan.tide.keeps_everything:
        parts.append("everything kept")
    else:
        for what, names in (("saved", named.saved), ("offloaded", named.offloaded)):
            if names:
                parts.append(f"{what} {', '.join(names)}")
        if not named.names:
            parts.append("everything recomputed")
    parts.append(
        f"stack predicted {made.predicted_step_ns / 1e6:.1f} ms, "
        f"{made.bound_step_ns / 1e6:.1f} ms at least under any plan"
    )
    parts.append(f"step planned {format_bytes(plan.planned.device_bytes)}")
    return "; ".join(parts)
