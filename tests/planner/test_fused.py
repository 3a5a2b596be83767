"""Plans for compiled blocks, whose forward is one moment and whose backward is one event."""

from dataclasses import replace

import pytest

from ebbtide.block import BackwardEvent, Block, OpKind
from ebbtide.check import check_plan
from ebbtide.plan import Decision, Plan
from ebbtide.planner.solve import plan_for_budget
from ebbtide.simulate import simulate
from ebbtide.workload import Workload
from tests.corpus import CORPUS
from tests.corpus.machines import budget_of, machine_with

SAVED = frozenset({OpKind.MATMUL, OpKind.ATTENTION, OpKind.INPUT})
"""What a compiled block may save: all that is cheap is made again in its backward."""


def fused(block: Block) -> Block:
    """Return the block as if it were compiled."""
    inputs_of = {a.name: a.inputs for a in block.activations}
    saved = {a.name for a in block.activations if a.kind in SAVED}

    def made_from(name: str) -> set[str]:
        found: set[str] = set()
        waiting = list(inputs_of[name])
        while waiting:
            read = waiting.pop()
            if read in saved:
                found.add(read)
            else:
                waiting += inputs_of[read]
        return found

    activations = tuple(
        replace(a, is_saved=True, inputs=tuple(n for n in inputs_of if n in made_from(a.name)))
        for a in block.activations
        if a.name in saved
    )
    made_ns = sum({a.group: a.make_ns for a in activations}.values())
    event = BackwardEvent(
        uses=tuple(a.name for a in activations),
        compute_ns=block.backward_ns,
        held_bytes=max(event.held_bytes for event in block.backward),
    )
    return replace(
        block,
        activations=activations,
        backward=(event,),
        rest_ns=block.forward_ns - made_ns,
        is_fused=True,
    )


def made_again(plan: Plan, block: Block) -> frozenset[str]:
    """Return the local names of what the block's backward makes again: what is compiled for it."""
    return frozenset(
        a.name.removeprefix(block.name)
        for a in block.activations
        if a.is_replayable and plan.decision(a.name) in (None, Decision.RECOMPUTE)
    )


@pytest.mark.parametrize("link_gb_per_s", [25, 50])
@pytest.mark.parametrize("share", [0.5, 0.25, 0.12])
@pytest.mark.parametrize("name", ["llama-8b-x8/8k", "llama-8b/32k", "llama-70b/32k", "gpt2/8k"])
def test_plans_are_near_the_bound_and_take_few_kinds_of_compiled_code(
    name: str, share: float, link_gb_per_s: int
) -> None:
    workload: Workload = replace(
        CORPUS[name], blocks=tuple(fused(block) for block in CORPUS[name].blocks)
    )
    machine = machine_with(link_gb_per_s)
    budget = budget_of(workload, share)
    outcome = plan_for_budget(workload, machine, budget_bytes=budget)
    plan = outcome.plan
    assert plan is not None and outcome.planner == "lp"
    report = check_plan(plan, workload, machine, budget_bytes=budget)
    assert report.faults == ()
    timeline = simulate(plan, workload, machine)
    assert timeline.step_ns == plan.predicted_step_ns
    assert timeline.peak_bytes == report.peak_bytes == plan.peak_bytes
    # With 8 to 12 blocks a whole block is much of the step.
    most = 0.001 if len(workload.blocks) >= 32 else 0.005
    assert plan.bound_step_ns <= plan.predicted_step_ns <= (1 + most) * plan.bound_step_ns
    assert len({made_again(plan, block) for block in workload.blocks}) <= 4
