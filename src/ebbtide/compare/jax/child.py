"""One row's run in JAX, in a process of its own: `python -m ebbtide.compare.jax.child TASK.json`.

The parent reads lines on stdout that say how far the run is, the outcome in the task's `result`
file, and the exit status. A crash leaves no outcome, and its last words on stderr.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import perf_counter_ns
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ebbtide.compare.jax.gradients import Agreement, compare_gradients, write_gradients
from ebbtide.compare.jax.layers import AttentionKind
from ebbtide.compare.jax.model import Block, LanguageModel, Params
from ebbtide.compare.jax.policies import ChosenBlocks, choose_blocks
from ebbtide.compare.jax.shapes import LlamaShape, count_model_flops, find_shape
from ebbtide.compare.jax.task import (
    LEARNING_RATE,
    OUTCOME_AGAIN,
    OUTCOME_ROW,
    JaxTask,
    read_task,
)
from ebbtide.compare.jax.weights import load_llama
from ebbtide.compare.processes import PROGRESS_PREFIX
from ebbtide.compare.results import JaxFigures, Row, Status, write_row
from ebbtide.errors import EbbtideError
from ebbtide.jax import StepMemory, check_engagement
from ebbtide.jax.engagement import Fault

# B batch, T tokens, S steps, W held-out windows

CPU_MACHINE = "h200-pcie5"
"""Whose link a plan on a CPU is made for: a CPU has none."""

EXACT: Mapping[str, bool | int] = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
}
"""XLA for CPUs otherwise fuses each row in its own way; so it rounds the same, or nearly so."""

DONATED = (0, 1)
"""The step overwrites parameters and optimizer state."""

VERIFIED_TOKENS = 512
"""Of the first batch: enough for every token to matter, and little memory."""

OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")

MAX_REASON_CHARS = 300
"""Of a note; XLA's own words go on for pages."""


class StartAgain(Exception):
    """The plan moves nothing, so it runs faster with command buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the steps of a run gave."""

    step_ns: tuple[int, ...]
    """Of each counted step."""
    loss: float
    """Of the last step."""
    agreement: Agreement | None
    """Of the first step's gradients; `None` if they were not compared."""
    params: Params
    """After the last step."""


def run_task(task: JaxTask, say_step: Callable[[int], None]) -> Row:
    """Train the task's model under its policy and return what was measured.

    Args:
        task: The run.
        say_step: Called with each step's number, from 1, before the step.

    Raises:
        StartAgain: The plan moves nothing to the host, and the task allows another process.
        EbbtideError: No plan keeps to the budget, or a gradient is wrong.
    """
    is_gpu = jax.default_backend() == "gpu"
    dtype = jnp.dtype(task.dtype)
    shape = find_shape(task.source)
    model = LanguageModel(shape, attention=choose_attention(task.dtype), dtype=dtype)
    tokens: dict[str, Any] = dict(np.load(task.tokens))
    train_SBT = tokens["train"].reshape(-1, task.batch, task.context)
    params = load_params(task, model, dtype)
    optimizer = optax.adamw(LEARNING_RATE)
    measure_perplexity = make_perplexity(model, tokens["held_out"])
    perplexity_before = measure_perplexity(params)
    compiler_options = None if is_gpu else dict(EXACT)
    step = make_step(model, optimizer)
    args = (params, optimizer.init(params), jnp.asarray(train_SBT[0]))
    chosen = choose_blocks(
        task.strategy,
        model,
        params,
        jax.eval_shape(model.embed, params, args[2]),
        step=step,
        args=args,
        donate=DONATED,
        budget=task.budget,
        machine=None if is_gpu else CPU_MACHINE,
        host=task.host,
        compiler_options=compiler_options,
    )
    if chosen.plans and not chosen.host_bytes and task.may_start_again:
        raise StartAgain
    notes = list(chosen.notes)
    if chosen.plans:
        notes += verify_plans(chosen, model, params, args[2])
    if chosen.plans:
        compiled, compile_ns = chosen.plans[-1].compiled, chosen.plans[-1].compile_ns
    else:
        start = perf_counter_ns()
        program = jax.jit(
            lambda *given: step(chosen.blocks, *given),
            donate_argnums=DONATED,
            compiler_options=compiler_options,
        )
        compiled = program.lower(*args).compile()
        compile_ns = perf_counter_ns() - start
    memory = StepMemory.of(compiled)
    notes += describe_copies(compiled, chosen.host_bytes)
    if task.gradients is not None and task.is_reference:
        del params

        def make_args() -> tuple[Any, ...]:
            fresh = load_params(task, model, dtype)
            return fresh, optimizer.init(fresh), jnp.asarray(train_SBT[0])

        notes.append(write_reference(compiled, args, make_args, Path(task.gradients)))
        args = make_args()
    taken = take_steps(task, compiled, args, train_SBT, say_step)
    if not math.isfinite(taken.loss):
        notes.append("the loss is not finite")
    if taken.agreement is not None and not taken.agreement.is_equal:
        notes.append(f"gradients differ most in {taken.agreement.worst}")
    agreement = taken.agreement
    return Row(
        strategy=task.strategy,
        status=Status.OK,
        step_ns=taken.step_ns,
        peak_bytes=memory.device_bytes,
        reserved_bytes=read_device_peak(),
        host_bytes=memory.host_bytes,
        loss=take_finite(taken.loss),
        perplexity_before=perplexity_before,
        perplexity_after=measure_perplexity(taken.params),
        grad_equal=None if agreement is None else agreement.is_equal,
        grad_largest_difference=None
        if agreement is None
        else take_finite(agreement.largest_difference),
        note="; ".join(notes),
        jax=JaxFigures(
            micro_batch=task.batch,
            global_batch=task.batch,
            model_flops=count_model_flops(shape, batch=task.batch, context=task.context),
            compile_ns=compile_ns,
            xla_flags=task.xla_flags,
            grad_relative_difference=None
            if agreement is None
            else take_finite(agreement.relative_difference),
        ),
    )


def choose_attention(dtype: str) -> AttentionKind:
    """Return the kernel for the device and type at hand."""
    is_fused = jax.default_backend() == "gpu" and dtype == "bfloat16"
    return AttentionKind.CUDNN if is_fused else AttentionKind.REFERENCE


def load_params(task: JaxTask, model: LanguageModel, dtype: Any) -> Params:
    """Return the weights: pre-trained ones of a folder, or random ones of the seed."""
    if not task.source.folder:
        return model.draw_params(task.seed)
    assert isinstance(model.shape, LlamaShape), "bug in ebbtide: a folder has a Llama"
    return load_llama(Path(task.source.folder), model.shape, dtype)


def make_step(model: LanguageModel, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Return `step(blocks, params, state, ids [B, T])`, forward, backward and optimizer.

    It returns parameters, state, loss and gradients: those that are compared are then of the very
    program that is timed. They are all there when backward ends in any case.
    """

    def step(blocks: Mapping[str, Block], params: Params, state: Any, ids_BT: Any) -> Any:
        def find_loss(params: Params) -> Any:
            return model.find_loss(blocks, params, ids_BT)

        loss, gradients = jax.value_and_grad(find_loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, gradients

    return step


def make_perplexity(model: LanguageModel, held_out_WT: Any) -> Callable[[Params], float | None]:
    """Return what measures the perplexity on the held-out windows: `None` if it is not finite.

    One program for all calls: compiling it takes longer than running it.
    """

    def find_loss(params: Params, ids_BT: Any) -> Any:
        return model.find_loss(model.plain_blocks, params, ids_BT)

    run = jax.jit(find_loss)

    def measure(params: Params) -> float | None:
        losses = [float(run(params, jnp.asarray(window[None]))) for window in held_out_WT]
        return take_finite(math.exp(fmean(losses)))

    return measure


def write_reference(
    compiled: Any, args: tuple[Any, ...], make_args: Callable[[], tuple[Any, ...]], folder: Path
) -> str:
    """Write the first step's gradients, take that step again, and say how far these are apart.

    Sums whose order a device leaves open, as that of an embedding's gradient, differ from run to
    run: what other rows differ by is to be read beside it. The arguments are given away.
    """
    write_gradients(compiled(*args)[-1], folder)
    del args
    again = compare_gradients(compiled(*make_args())[-1], folder)
    if again.is_equal:
        return "the same step taken again has the same gradients, bit for bit"
    return (
        f"the same step taken again has gradients that differ by {again.largest_difference:.1e}, "
        f"{again.relative_difference:.1e} of the largest, most in {again.worst}: differences of "
        "that size are noise"
    )


def take_steps(
    task: JaxTask,
    compiled: Any,
    args: tuple[Any, ...],
    train_SBT: Any,
    say_step: Callable[[int], None],
) -> Taken:
    """Take all steps; the clock stands still while gradients are compared."""
    params, state, _ = args
    spent_ns: list[int] = []
    loss = math.nan
    agreement: Agreement | None = None
    for number, ids_BT in enumerate(train_SBT, start=1):
        say_step(number)
        given = jax.block_until_ready(jnp.asarray(ids_BT))
        start = perf_counter_ns()
        params, state, loss, gradients = jax.block_until_ready(compiled(params, state, given))
        spent_ns.append(perf_counter_ns() - start)
        if number == 1 and task.gradients is not None and not task.is_reference:
            # Only the first step's: from the second on weights have the roundings of the first.
            agreement = compare_gradients(gradients, Path(task.gradients))
        del gradients
    return Taken(
        step_ns=tuple(spent_ns[task.num_warm_up_steps :]),
        loss=float(loss),
        agreement=agreement,
        params=params,
    )


def verify_plans(
    chosen: ChosenBlocks, model: LanguageModel, params: Params, ids_BT: Any
) -> list[str]:
    """Refuse plans whose gradients are wrong on this backend; return notes on what was shown.

    A stack whose plan moves nothing has nothing that could be read in the wrong order: it is left
    out, since each of the programs to compare is compiled.

    Raises:
        PlanError: A stack's gradients are wrong, or too noisy to tell.
    """
    notes: list[str] = []
    x_BTD = model.embed(params, ids_BT[:1, :VERIFIED_TOKENS])
    for stack, plan in zip(
        sorted(model.stacks, key=lambda stack: -stack.layers), chosen.plans, strict=True
    ):
        if not plan.tide.plan.host_bytes:
            notes.append(f"{stack.name}: not verified, since nothing of it is moved")
            continue
        one = jax.tree.map(lambda leaf: leaf[0], params[stack.name])
        found = plan.tide.verify(stack.block, one, x_BTD)
        found.refuse_if_different()
        bits = "the same bits" if found.is_bit_equal else "equal but for rounding and noise"
        notes.append(f"{stack.name}: verified on {found.platform}, gradients {bits}")
    return notes


def describe_copies(compiled: Any, host_bytes: int) -> list[str]:
    """Say what of the offloading did not happen as planned."""
    if not host_bytes:
        return []
    findings = check_engagement(compiled, predicted_host_bytes=host_bytes).findings
    if any(finding.fault is Fault.NO_HOST_ON_BACKEND for finding in findings):
        return ["on a CPU nothing moves: XLA has one memory there"]
    return [str(finding) for finding in findings]


def read_device_peak() -> int | None:
    """Return the most that the process had allocated on the device; `None` on a CPU."""
    statistics: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("peak_bytes_in_use")


def take_finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the host had no memory left."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and any(
        words in str(error) for words in OUT_OF_MEMORY
    )


def main(task_path: Path) -> None:
    """Run the task in the file, and write its outcome."""
    task = read_task(task_path)

    def say_step(step: int) -> None:
        print(f"{PROGRESS_PREFIX}{step}", flush=True)

    outcome: dict[str, Any]
    try:
        outcome = {OUTCOME_ROW: write_row(run_task(task, say_step))}
    except StartAgain:
        outcome = {OUTCOME_AGAIN: "lhs"}
    except EbbtideError as error:
        # Its message names the next step, so it must not be cut.
        failed = Row(strategy=task.strategy, status=Status.ERROR, note=" ".join(str(error).split()))
        outcome = {OUTCOME_ROW: write_row(failed)}
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        full = Row(strategy=task.strategy, status=Status.OOM, note=reason[0][:MAX_REASON_CHARS])
        outcome = {OUTCOME_ROW: write_row(full)}
    Path(task.result).write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
