"""`plan_step`: the peak of a whole training step, as XLA plans its memory.

The step is compiled with full rematerialisation first. What XLA plans for it, less what the plan's
model says of its blocks, is what all else takes: parameters, gradients, optimizer, logits, and
what XLA needs beside them. Plans are made with that, and the step is compiled with each; where it
is over the budget, the next plan gets that much less, and after some tries everything is
recomputed, where that keeps to the budget. The step is never run.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any

import jax

from ebbtide.budget import parse_budget
from ebbtide.errors import BudgetError, ModelError
from ebbtide.jax.clock import measure
from ebbtide.jax.internals import refuse_ignored_names
from ebbtide.jax.observe import Pace, Rates, observe
from ebbtide.jax.processes import take_first, take_first_machine, take_first_pace
from ebbtide.jax.stacking import charge_moves
from ebbtide.jax.tide import SCAN_PLANNER, Tide, check_tide, plan_workload, resolve_machine
from ebbtide.machine import Machine
from ebbtide.plan import Decision
from ebbtide.planner.named import MIN_BYTES, named_plan
from ebbtide.simulate import simulate
from ebbtide.supported import check_versions
from ebbtide.units import format_bytes, parse_bytes
from ebbtide.workload import Workload

log = logging.getLogger("ebbtide")

NUM_TRIES = 4
"""Plans that are compiled until one is within the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What XLA plans for a compiled program, on one device."""

    device_bytes: int
    """Arguments, results and temporary memory, without what results share with arguments."""
    temp_bytes: int
    """The temporary part of it."""
    host_bytes: int
    """Temporary memory of the host; 0 on a CPU, where it is a part of `device_bytes`."""

    @classmethod
    def of(cls, compiled: Any) -> "StepMemory":
        """Read `compiled.memory_analysis()`.

        Raises:
            ModelError: The backend gives none.
        """
        analysis = compiled.memory_analysis()
        if analysis is None:
            raise ModelError(
                f"{jax.default_backend()} does not say what memory a compiled program takes, so a "
                "step's peak cannot be planned. Use plan_for, whose budget is of activations."
            )
        return cls(
            device_bytes=analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            + analysis.temp_size_in_bytes
            - analysis.alias_size_in_bytes,
            temp_bytes=analysis.temp_size_in_bytes,
            host_bytes=analysis.host_temp_size_in_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A plan for a step, and what XLA plans for it."""

    tide: Tide
    """The plan; `tide.checkpoint(block)` is the block to train with."""
    recomputed: StepMemory
    """With everything recomputed."""
    planned: StepMemory
    """With the plan. On a CPU the bytes on the host are taken off: XLA keeps them in the same
    memory there."""
    budget_bytes: int
    """What the step may take."""
    host_bytes: int
    """In host memory between forward and backward: of this plan and of those `before` it."""
    compiled: Any = field(repr=False)
    """The step as it was compiled with the plan, called as `compiled(*args)`: compiling it again
    would take as long."""
    compile_ns: int
    """What lowering and compiling it took."""

    def report(self) -> str:
        """Return a few lines for people."""
        return (
            f"{self.tide.report()}\n"
            f"the whole step, as compiled for {jax.default_backend()}: "
            f"{format_bytes(self.planned.device_bytes)} of a budget of "
            f"{format_bytes(self.budget_bytes)}; with everything recomputed "
            f"{format_bytes(self.recomputed.device_bytes)}"
        )


def plan_step(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    block: Callable[..., Any],
    layers: int,
    budget: str | int,
    decide: Mapping[str, str | Decision] | None = None,
    machine: Machine | str | None = None,
    rates: Rates | None = None,
    host: str | int | None = None,
    scan: bool = True,
    min_bytes: int = MIN_BYTES,
    donate: Sequence[int] = (),
    before: StepPlan | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> StepPlan:
    """Plan a stack of blocks so that the whole step keeps to a budget of device memory.

    Args:
        step: `step(block, *args)`: forward, backward and the optimizer, with the block to use as
            its first argument. It calls it as `block(params, x, *rest)`.
        args: The step's other arguments: arrays, or shapes and dtypes.
        block: The block.
        layers: How often the step runs it.
        budget: Most device memory of the step by `compiled.memory_analysis()`, arguments and
            results included: a size, or a share of the device.
        decide: As in `plan_for`.
        machine: As in `plan_for`.
        rates: As in `plan_for`; the step is compiled in any case.
        host: As in `plan_for`.
        scan: The step scans over the layers. False: it unrolls them. They have one decision in
            both cases, since the step is given one block.
        min_bytes: As in `plan_for`.
        donate: Which of `args` the step may overwrite, by place; as `donate_argnums` of a jit of
            which they are all the arguments.
        before: For a step with several stacks: the plan of the one that was planned before, with
            a `step` that recomputed this one's block in full. That program need not be compiled
            again, and `step` here uses the other's plan.
        compiler_options: As of jax.jit.

    Returns:
        The plan with what XLA plans for it.

    Raises:
        BudgetError: No plan keeps to the budget, or none that was compiled.
        ModelError: The step calls the block never, or with several shapes; or the backend does
            not tell of memory.
        PlanError: As in `plan_for`.
        RuntimeStateError: As in `plan_for`.
        ValueError: As in `plan_for`.
    """
    check_versions("jax", jax.__version__)
    refuse_ignored_names()
    link = take_first_machine(resolve_machine(machine))
    budget_bytes = parse_budget(budget, link.device_bytes)
    arguments = _arguments_of_block(step, args, block)
    observation = observe(block, *arguments)
    pace = (
        measure(observation, block, *arguments)
        if rates is None
        else Pace(rates=rates, forward_ns=0, backward_ns=0)
    )
    pace = take_first_pace(pace)
    workload = observation.to_workload(layers, pace, is_scanned=scan)
    if scan:
        link = charge_moves(link, pace.rates.memory_bytes_per_s)

    def compile_with(checkpointed: Callable[..., Any]) -> Any:
        program = jax.jit(
            lambda *given: step(checkpointed, *given),
            donate_argnums=tuple(donate),
            compiler_options=None if compiler_options is None else dict(compiler_options),
        )
        return program.lower(*args).compile()

    frugal = Tide(
        plan=named_plan("recompute", workload),
        workload=workload,
        observation=observation,
        machine=link,
        is_scanned=scan,
        message="everything is recomputed",
    )
    if before is None:
        start = perf_counter_ns()
        frugal_compiled = compile_with(frugal.checkpoint(block))
        frugal_ns = perf_counter_ns() - start
        recomputed = StepMemory.of(frugal_compiled)
    else:
        frugal_compiled, frugal_ns = before.compiled, before.compile_ns
        recomputed = before.planned
    host_before = 0 if before is None else before.host_bytes
    workload = calibrate(workload, take_first(recomputed.device_bytes), link)
    less_bytes, over = 0, 0
    for _ in range(NUM_TRIES):
        tide = plan_workload(
            workload,
            observation,
            link,
            budget_bytes=max(0, budget_bytes - less_bytes),
            decide=decide,
            host_bytes=None if host is None else parse_bytes(host),
            scan=scan,
            planner=SCAN_PLANNER,
            min_bytes=min_bytes,
        )
        check_tide(tide, block, *arguments)
        start = perf_counter_ns()
        compiled = compile_with(tide.checkpoint(block))
        compile_ns = perf_counter_ns() - start
        planned = StepMemory.of(compiled)
        host_bytes = host_before + tide.plan.host_bytes
        if jax.default_backend() == "cpu":
            planned = replace(
                planned,
                device_bytes=planned.device_bytes - host_bytes,
                temp_bytes=planned.temp_bytes - host_bytes,
            )
        over = take_first(planned.device_bytes) - budget_bytes
        if over <= 0:
            return StepPlan(
                tide=tide,
                recomputed=recomputed,
                planned=planned,
                budget_bytes=budget_bytes,
                host_bytes=host_bytes,
                compiled=compiled,
                compile_ns=compile_ns,
            )
        less_bytes += over
        log.info("a plan takes %s more than the budget; planning for less", format_bytes(over))
    if recomputed.device_bytes <= budget_bytes and not decide:
        # XLA's buffers do not shrink byte for byte with what a plan stores.
        return StepPlan(
            tide=replace(frugal, workload=workload),
            recomputed=recomputed,
            planned=recomputed,
            budget_bytes=budget_bytes,
            host_bytes=host_before,
            compiled=frugal_compiled,
            compile_ns=frugal_ns,
        )
    raise BudgetError(
        f"no plan of {NUM_TRIES} that were compiled keeps to {format_bytes(budget_bytes)}: the "
        f"last takes {format_bytes(budget_bytes + over)}, and with everything recomputed the step "
        f"takes {format_bytes(recomputed.device_bytes)}. Give a budget of that or more."
    )


def calibrate(workload: Workload, recomputed_bytes: int, machine: Machine) -> Workload:
    """Return the workload with the rest of the step, so that full recomputation takes what it did.

    What one block works with in backward is counted in the turn as well, since which of the two
    holds the peak of the compiled step is not known: no prediction is then less than it.

    Args:
        workload: The stack alone.
        recomputed_bytes: Of the whole step with everything recomputed.
        machine: For the simulation.
    """
    outside = workload.outside
    assert outside is not None, "bug in ebbtide: an observed stack has an outside"
    plan = named_plan("recompute", workload)
    stack_bytes = simulate(plan, workload, machine).peak_bytes
    stored_bytes = sum(
        a.num_bytes
        for block in workload.blocks
        for a in block.activations
        if plan.decision(a.name) is Decision.KEEP
    )
    return replace(
        workload,
        outside=replace(
            outside,
            resident_bytes=max(0, recomputed_bytes - stack_bytes),
            turn_bytes=stack_bytes - stored_bytes,
        ),
    )


def _arguments_of_block(
    step: Callable[..., Any], args: Sequence[Any], block: Callable[..., Any]
) -> tuple[Any, ...]:
    """Trace the step and return the shapes and dtypes that it gives the block."""
    seen: list[tuple[Any, Any]] = []

    def spy(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        avals = [jax.typeof(leaf) for leaf in leaves]
        seen.append(([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals], tree))
        return block(*arguments)

    jax.eval_shape(lambda *given: step(spy, *given), *args)
    if not seen:
        raise ModelError(
            "the step never called its block: step(block, *args) must use the block that it is "
            "given, and not one that it knows by itself."
        )
    if any(other != seen[0] for other in seen[1:]):
        raise ModelError(
            "the step calls its block with several sets of shapes, and one plan is for equal "
            "blocks. Give the blocks of one kind to the plan, and call the others by themselves."
        )
    leaves, tree = seen[0]
    return jax.tree.unflatten(tree, leaves)
