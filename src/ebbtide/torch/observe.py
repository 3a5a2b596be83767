"""`observe`: what one training step keeps, takes and holds, as planning with a budget needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ebbtide.errors import RuntimeStateError
from ebbtide.torch.attach import attach_to_measure
from ebbtide.workload import Workload


def observe(
    model: nn.Module, step: Callable[[], None], *, blocks: str | Sequence[str] | None = None
) -> Workload:
    """Measure a training step of `model`, and return its workload with times and memory.

    `step` is called twice: the first call is observed and checked, the second is measured; both
    run under the most frugal decisions, as full checkpointing would. They are real steps: they
    leave gradients and update parameters as `step` does, with the bits that they have without
    ebbtide. Of a step with several micro-batches the first one is measured.

    On a GPU times are those of the device, bytes those of torch's allocator, whose peak is reset.
    On the CPU no allocator counts, and memory is estimated: parameters, buffers and gradients
    stay all through the step, backward holds twice a block's largest activation, and the turn
    three times what the model's forward returns.

    Args:
        model: The model, already on its device, and not attached.
        step: Runs forward, backward and, if there is one, the optimizer.
        blocks: As for `attach`.

    Raises:
        ModelError: The model cannot be attached.
        RuntimeStateError: It is attached already, or `step` ran no backward through its blocks.
    """
    with attach_to_measure(model, blocks) as tide:
        runtime = tide.runtime
        assert runtime is not None and runtime.stopwatch is not None, "bug in ebbtide"
        runtime.stopwatch.is_paused = True  # a second micro-batch comes before any optimizer
        step()
        runtime.stopwatch.is_paused = False
        step()
        runtime.finish_measuring()
        if runtime.workload is None:
            raise RuntimeStateError(
                f"step() ran no forward and backward through all blocks of "
                f"{type(model).__name__}, so there is nothing to measure. Let it run the model "
                "with gradients and call backward() on the loss."
            )
        return runtime.workload
