"""One strategy's run, in a process of its own: `python -m ebbtide.compare.child TASK.json`.

The parent reads three things: lines on stdout that say how far the run is, the row in the
task's `result` file, and the exit status. A crash leaves no row, and its last words on stderr.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, assert_never

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ebbtide.compare.gradients import (
    Agreement,
    choose_compared_steps,
    compare_gradients,
    write_gradients,
)
from ebbtide.compare.loss import chunked_loss
from ebbtide.compare.meter import (
    AbstractMemoryMeter,
    Peak,
    StepTimer,
    StepTimes,
    TransferCounter,
    Transfers,
    is_counter_compiled_around,
    make_meter,
    read_pinned_peak,
)
from ebbtide.compare.names import BUDGET_STRATEGY, is_ours, runs_compiled
from ebbtide.compare.processes import PROGRESS_PREFIX, WAITS
from ebbtide.compare.results import Row, Status, write_row
from ebbtide.compare.routing import describe_routing
from ebbtide.compare.strategies import make_strategy
from ebbtide.compare.strategy import Applied
from ebbtide.compare.task import (
    ADAMW_LEARNING_RATE,
    SGD_LEARNING_RATE,
    Optimizer,
    Task,
    read_task,
)
from ebbtide.compare.workloads import load_model
from ebbtide.errors import BudgetError
from ebbtide.plan import Plan
from ebbtide.units import format_bytes

# Shapes: S steps, W held-out windows, B batch, T tokens.


# Passes before the timed ones. By then a budget's plan was made and corrected once, and blocks that
# the correction compiles anew have run; a named plan was observed, checked and has its scripts.
BUDGET_PASSES_BEFORE = 12
PLAN_PASSES_BEFORE = 6
PEER_PASSES_BEFORE = 2
# Compiling takes the first pass, and the allocator is filled by what is compiled in the second.
COMPILED_PASSES_BEFORE = 3
NOT_DETERMINISTIC = "does not have a deterministic implementation"
"""Part of torch's message where only a kernel is there whose bits vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A model under its strategy, ready for steps."""

    task: Task
    device: torch.device
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    meter: AbstractMemoryMeter
    applied: Applied


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one optimizer step gave."""

    times: StepTimes
    loss: float
    agreement: Agreement | None
    """How the gradients compare with the reference's; `None` if they were not compared."""
    transfers: Transfers | None
    """What a peer moved; `None` where it was not counted, which is in all steps but the first."""


def run_task(task: Task, say_step: Callable[[int], None], *, is_strict: bool = True) -> Row:
    """Train the task's model under its strategy and return what was measured.

    Switches deterministic algorithms on for the whole process. `is_strict`: an operator that has
    none is an error; else it may give other bits each time.

    Args:
        task: The run.
        say_step: Called with each step's number, from 1, before the step.
    """
    device = torch.device(task.device)
    make_deterministic(is_strict=is_strict)
    model = load_model(
        task.source,
        context=task.context,
        dtype=getattr(torch, task.dtype),
        device=device,
        seed=task.seed,
    )
    with chunked_loss(model, task.loss):
        return _train(task, model, device, say_step)


def _train(
    task: Task, model: PreTrainedModel, device: torch.device, say_step: Callable[[int], None]
) -> Row:
    tokens = load_file(task.tokens)
    train_SBT = tokens["train"].view(-1, task.batch, task.context)
    # The experts' loads are the model's, so one row has them.
    routing = describe_routing(model, train_SBT[0].to(device)) if task.is_reference else ""
    perplexity_before = measure_perplexity(model, tokens["held_out"], device)
    if device.type == "cuda":
        # What evaluation took and freed must not count as the steps' reserved memory.
        torch.cuda.empty_cache()
    strategy = make_strategy(
        task.strategy,
        host=task.host,
        disk=task.disks or None,
        budget=task.budget,
        is_compiled=task.is_compiled,
    )
    with strategy.apply(model, device) as applied:
        bench = Bench(
            task=task,
            device=device,
            model=model,
            optimizer=make_optimizer(model, task.optimizer),
            meter=make_meter(device),
            applied=applied,
        )
        records: list[StepRecord] = []
        plan: Plan | None = None
        timed = time_passes(bench, train_SBT[0].to(device)) if task.num_passes else None
        for step, ids_BT in enumerate(train_SBT, start=1):
            say_step(step)
            if step == task.num_warm_up_steps + 1:
                bench.meter.reset()
                if applied.tide:
                    plan = applied.tide.plan
                    applied.tide.reset_statistics()
            records.append(take_step(bench, ids_BT.to(device), step))
        row = summarise_steps(bench, records, plan)
    if timed is not None:
        row = replace(
            row,
            step_ns=tuple(times.step_ns for times in timed.times),
            forward_ns=tuple(times.forward_ns for times in timed.times),
            peak_bytes=timed.peak.peak_bytes,
            reserved_bytes=timed.peak.reserved_bytes,
        )
    return replace(
        row,
        perplexity_before=perplexity_before,
        perplexity_after=measure_perplexity(model, tokens["held_out"], device),
        note="; ".join(filter(None, (routing, row.note))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPasses:
    """Forward and backward passes under torch's default kernels, but for cuDNN's attention."""

    times: tuple[StepTimes, ...]
    peak: Peak


def time_passes(bench: Bench, ids_BT: torch.Tensor) -> TimedPasses:
    """Time passes on one batch with torch's default kernels; the weights stay as they are.

    But for cuDNN's attention, which stays off: a plan is then for what the training steps run.
    """
    is_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    times: list[StepTimes] = []
    try:
        num_before = count_passes_before(bench.task)
        for index in range(num_before + bench.task.num_passes):
            if index == num_before:
                bench.meter.reset()
                times.clear()
            torch.manual_seed(bench.task.seed)
            timer = StepTimer(bench.device)
            with bench.meter.watch():
                timer.begin()
                with bench.applied.forward():
                    loss = bench.model(input_ids=ids_BT, labels=ids_BT).loss
                timer.end_forward()
                loss.backward()
                timer.pause()
            del loss
            timer.resume()
            times.append(timer.finish())
            bench.optimizer.zero_grad(set_to_none=True)
        return TimedPasses(times=tuple(times), peak=bench.meter.read())
    finally:
        torch.use_deterministic_algorithms(True, warn_only=is_warn_only)


def count_passes_before(task: Task) -> int:
    """Return how many passes run before the timed ones."""
    if task.strategy == BUDGET_STRATEGY:
        return BUDGET_PASSES_BEFORE
    if is_ours(task.strategy):
        return PLAN_PASSES_BEFORE
    is_compiled = runs_compiled(task.strategy, is_compiled=task.is_compiled)
    return COMPILED_PASSES_BEFORE if is_compiled else PEER_PASSES_BEFORE


def measure_perplexity(
    model: PreTrainedModel, held_out_WT: torch.Tensor, device: torch.device
) -> float | None:
    """Return the perplexity on the held-out windows; `None` without any, or if it is not finite.

    The model is in training mode afterwards.
    """
    if not len(held_out_WT):
        return None
    model.eval()
    with torch.no_grad():
        losses = [
            model(input_ids=window_BT, labels=window_BT).loss.double().item()
            for window_BT in held_out_WT.to(device).split(1)
        ]
    model.train()
    return _take_finite(torch.tensor(fmean(losses)).exp().item())


def take_step(bench: Bench, ids_BT: torch.Tensor, step: int) -> StepRecord:
    """Take one optimizer step, numbered from 1, and measure it.

    The clock and the meter stand still while gradients are compared or written.
    """
    # Strategies may draw differently; each step starts from the same random state.
    torch.manual_seed(bench.task.seed + step)
    timer = StepTimer(bench.device)
    counter = TransferCounter()
    is_counting = step == 1 and can_count_transfers(bench)
    with bench.meter.watch(), counter if is_counting else nullcontext():
        timer.begin()
        with bench.applied.forward():
            loss = bench.model(input_ids=ids_BT, labels=ids_BT).loss
        timer.end_forward()
        loss.backward()
        timer.pause()
    agreement = _check_gradients(bench, step)
    with bench.meter.watch():
        timer.resume()
        bench.optimizer.step()
        bench.optimizer.zero_grad(set_to_none=True)
        times = timer.finish()
    return StepRecord(
        times=times,
        loss=loss.item(),
        agreement=agreement,
        transfers=counter.read() if is_counting else None,
    )


def can_count_transfers(bench: Bench) -> bool:
    """Whether copies of this run can be counted without changing what it does.

    On a CPU there are none, and ebbtide counts its own. On compiled blocks an older torch runs
    eagerly whenever a dispatch mode is on, and other tensors would be copied.
    """
    if bench.device.type != "cuda" or bench.applied.tide is not None:
        return False
    is_compiled = runs_compiled(bench.task.strategy, is_compiled=bench.task.is_compiled)
    return not is_compiled or is_counter_compiled_around()


def summarise_steps(bench: Bench, records: list[StepRecord], plan: Plan | None = None) -> Row:
    """Make the row of a run whose steps are all done.

    Args:
        bench: The model, with its strategy still in force.
        records: What each step gave.
        plan: The plan of ebbtide's that the first counted step ran under.
    """
    counted = records[bench.task.num_warm_up_steps :]
    peak = bench.meter.read()
    traffic = _read_traffic(bench, records[0].transfers, num_counted_steps=len(counted))
    agreements = [record.agreement for record in records if record.agreement]
    worst = next((agreement for agreement in agreements if not agreement.is_equal), None)
    notes = [bench.applied.note] if bench.applied.note else []
    if bench.applied.tide:
        notes += describe_prediction(plan, bench.applied.tide.plan)
    if worst:
        first_step = 1 + [record.agreement for record in records].index(worst)
        notes.append(f"gradients differ first in step {first_step}, most in {worst.worst}")
    if not all(math.isfinite(record.loss) for record in records):
        notes.append("a loss is not finite")
    return Row(
        strategy=bench.task.strategy,
        status=Status.OK,
        step_ns=tuple(record.times.step_ns for record in counted),
        forward_ns=tuple(record.times.forward_ns for record in counted),
        peak_bytes=peak.peak_bytes,
        reserved_bytes=peak.reserved_bytes,
        moved_out_bytes=traffic.moved_out_bytes,
        moved_in_bytes=traffic.moved_in_bytes,
        host_bytes=traffic.host_bytes,
        disk_bytes=traffic.disk_bytes,
        loss=_take_finite(records[-1].loss),
        grad_equal=worst is None if agreements else None,
        grad_largest_difference=_take_finite(
            max(agreement.largest_difference for agreement in agreements)
        )
        if agreements
        else None,
        bound_ns=plan.bound_step_ns if plan is not None and plan.budget_bytes else None,
        note="; ".join(notes),
    )


def describe_prediction(first: Plan | None, last: Plan | None) -> list[str]:
    """Say what a plan for a budget foretold; nothing of a named plan, which foretells nothing.

    Args:
        first: The plan that the first counted step ran under.
        last: The plan after the last step: another one if its times were corrected meanwhile.
    """
    if first is None or not first.budget_bytes:
        return []
    notes = [f"planned for {format_bytes(first.budget_bytes)}: {_write_prediction(first)}"]
    if last is not None and last is not first:
        is_same = last.decisions == first.decisions and last.fetch_at == first.fetch_at
        what = "the same plan" if is_same else "another plan"
        notes.append(
            f"corrected by measured steps while counting: {what}, {_write_prediction(last)}"
        )
    return notes


def make_optimizer(model: torch.nn.Module, kind: Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer; fused, since an unfused step needs a copy of the gradients."""
    match kind:
        case Optimizer.ADAMW:
            return torch.optim.AdamW(model.parameters(), lr=ADAMW_LEARNING_RATE, fused=True)
        case Optimizer.SGD:
            return torch.optim.SGD(model.parameters(), lr=SGD_LEARNING_RATE, fused=True)
        case _:
            assert_never(kind)


def make_deterministic(*, is_strict: bool) -> None:
    """Let the same step give the same bits, in this process from now on."""
    # Where torch may only warn, the backward of FlashAttention and of the memory-efficient kernel
    # adds up in varying order.
    torch.use_deterministic_algorithms(True, warn_only=not is_strict)
    # cuDNN's does in any case.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Filling every new tensor with NaN would be timed as if training did it.
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch reports a failed host allocation as a plain RuntimeError.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def main(task_path: Path) -> None:
    """Run the task in the file, and write its row."""
    transformers_logging.disable_progress_bar()
    task = read_task(task_path)

    def say_step(step: int) -> None:
        print(f"{PROGRESS_PREFIX}{step}", flush=True)

    try:
        try:
            row = run_task(task, say_step)
        except RuntimeError as error:
            if NOT_DETERMINISTIC not in str(error):
                raise
            row = run_task(task, say_step, is_strict=False)
            operator = str(error).split(" ", 1)[0]
            note = f"{operator} gives other bits each time: gradients may differ for that alone"
            row = replace(row, note="; ".join(filter(None, (row.note, note))))
    except BudgetError as error:
        # Its message names the smallest budget that would do, so it must not be cut.
        row = Row(strategy=task.strategy, status=Status.ERROR, note=" ".join(str(error).split()))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        row = Row(strategy=task.strategy, status=Status.OOM, note=reason[0])
    Path(task.result).write_text(json.dumps(write_row(row)), encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    """Bytes moved in one step, and the most that lay on each tier."""

    moved_out_bytes: int | None
    moved_in_bytes: int | None
    host_bytes: int | None
    disk_bytes: int


def _read_traffic(bench: Bench, peer: Transfers | None, *, num_counted_steps: int) -> _Traffic:
    tide = bench.applied.tide
    if tide is None:
        if peer is None and bench.device.type != "cuda":
            peer = Transfers(out_bytes=0, in_bytes=0)
        return _Traffic(
            moved_out_bytes=peer.out_bytes if peer else None,
            moved_in_bytes=peer.in_bytes if peer else None,
            host_bytes=read_pinned_peak() if bench.device.type == "cuda" else 0,
            disk_bytes=0,
        )
    statistics = tide.statistics()
    return _Traffic(
        moved_out_bytes=statistics.moved_out_bytes // num_counted_steps,
        moved_in_bytes=statistics.moved_in_bytes // num_counted_steps,
        host_bytes=tide.host_taken_bytes,
        disk_bytes=statistics.disk.peak_held_bytes,
    )


def _write_prediction(plan: Plan) -> str:
    return (
        f"forward and backward {plan.predicted_step_ns / 1e6:.1f} ms predicted, "
        f"{plan.bound_step_ns / 1e6:.1f} ms at least under any plan; peak "
        f"{format_bytes(plan.peak_bytes)} planned"
    )


def _check_gradients(bench: Bench, step: int) -> Agreement | None:
    task = bench.task
    num_steps = task.num_warm_up_steps + task.num_counted_steps
    if task.gradients is None or step not in choose_compared_steps(num_steps, task.num_parameters):
        return None
    if task.is_reference:
        write_gradients(bench.model, Path(task.gradients), step)
        return None
    return compare_gradients(bench.model, Path(task.gradients), step)


def _take_finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    given = sys.argv[1] if sys.argv[1] != WAITS else sys.stdin.readline().strip()
    # Without a path nobody had a task for it.
    if given:
        main(Path(given))
