"""ebbtide in `transformers.Trainer`, and in the trainers of TRL that are made of it.

    trainer = SFTTrainer(model, args=args, callbacks=[EbbtideCallback(budget="40GiB")])

A trainer tells its callbacks neither who it is nor that training raised. So the first callback that
is made puts a wrapper around `Trainer.train`, which tells both; a trainer without an
`EbbtideCallback` is not touched by it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from torch import nn
from torch.distributed import ProcessGroup
from transformers import Trainer, TrainerCallback

from ebbtide.errors import RuntimeStateError
from ebbtide.integrations.figures import figures_of
from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import MIN_BYTES
from ebbtide.supported import check_versions
from ebbtide.torch import Tide, attach

log = logging.getLogger("ebbtide")

CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Two names of one setting; versions of transformers differ in which of them they have."""


class EbbtideCallback(TrainerCallback):
    """Attaches ebbtide when a trainer's training begins, and closes it when that ends.

    It takes the arguments of `ebbtide.torch.attach`, but for the model: that is the one which the
    trainer trains, on its device, with its adapters. Losses and weights have the same bits as
    without it wherever torch itself is deterministic. Evaluation is left alone, checkpoints hold
    the same names and values, and each try of `auto_find_batch_size` is attached anew. It is closed
    too when training raises or is interrupted.

    What `ebbtide.integrations.figures.figures_of` returns is logged through the trainer each time
    the trainer logs its loss, as an entry of its own in `log_history`.

    One callback serves one trainer at a time. `tide` is the handle of the last training, closed
    once that ended; its `statistics()` and `plan` can still be read.

    Args:
        plan: As in `attach`, like all that follow.
        budget: Most device memory of a step.
        host: Most pinned host memory.
        disk: `"FOLDER:SIZE"`, or several of them.
        disk_checksums: Compare what is read from disk with what was written.
        blocks: Module paths of the blocks, in the model that is trained: with LoRA, in PEFT's.
        decide: Decisions to keep to, by pattern.
        planner: Which planner serves the budget.
        disk_write_per_day: Most bytes that a day may write to disk.
        min_bytes: Smaller activations are never moved.
        compile: Compile each block.
        sanitize: Compare everything that comes back with what was saved.
        ranks: With a budget: a process group whose ranks get one plan.

    Raises:
        ValueError: From the trainer's constructor, or from `train()` where the callback was added
            later: the trainer's own settings already decide what becomes of activations
            (`gradient_checkpointing`, `activation_checkpointing`, TRL's `activation_offloading`,
            FSDP's `activation_checkpointing`), compile the whole model (`torch_compile`), or run it
            in several threads of one process. What `attach` raises comes from `train()`.
    """

    def __init__(
        self,
        plan: str | Plan | None = None,
        *,
        budget: str | int | None = None,
        host: str | int | None = None,
        disk: str | Sequence[str] | None = None,
        disk_checksums: bool = False,
        blocks: str | Sequence[str] | None = None,
        decide: Mapping[str, str | Decision] | None = None,
        planner: str | None = None,
        disk_write_per_day: str | int | None = None,
        min_bytes: int = MIN_BYTES,
        compile: bool | str = False,
        sanitize: bool = False,
        ranks: ProcessGroup | None = None,
    ) -> None:
        check_versions("transformers", transformers.__version__)
        self.tide: Tide | None = None
        self._plan = plan
        self._options: dict[str, Any] = {
            "budget": budget,
            "host": host,
            "disk": disk,
            "disk_checksums": disk_checksums,
            "blocks": blocks,
            "decide": decide,
            "planner": planner,
            "disk_write_per_day": disk_write_per_day,
            "min_bytes": min_bytes,
            "compile": compile,
            "sanitize": sanitize,
            "ranks": ranks,
        }
        self._trainer: Trainer | None = None
        _watch_training()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse settings that cannot go together, as early as they are known."""
        refuse_conflicts(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the model that is trained."""
        refuse_conflicts(args)
        if self._trainer is None:
            raise RuntimeStateError(
                "EbbtideCallback was told that training begins, but not by transformers' "
                "Trainer.train(): it would not learn when training raises. Let your trainer's "
                "train() call that of transformers.Trainer, or call ebbtide.torch.attach yourself."
            )
        model: nn.Module = kwargs["model"]
        if self.tide is not None:
            self.tide.close()  # a try of auto_find_batch_size that ran out of memory
        self.tide = attach(model, self._plan, **self._options)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log ebbtide's figures beside the trainer's loss."""
        logs: Mapping[str, object] = kwargs.get("logs") or {}
        if "loss" not in logs or self.tide is None or self._trainer is None:
            return
        figures = figures_of(self.tide)
        if figures:
            # The base class's: TRL's would add its own metrics to these a second time.
            Trainer.log(self._trainer, figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close."""
        self.end_training()

    def start_training(self, trainer: Trainer) -> None:
        """Note which trainer starts; called by what is around `Trainer.train`.

        Raises:
            RuntimeStateError: Another one is being served.
        """
        if self._trainer is not None:
            raise RuntimeStateError(
                "this EbbtideCallback serves another training that has not ended; make a callback "
                "for each trainer."
            )
        self._trainer = trainer

    def end_training(self) -> None:
        """Take everything off the model; a second call does nothing."""
        if self._trainer is not None and self.tide is not None:
            log.info("%s", self.tide.report())
            self.tide.close()
        self._trainer = None


def refuse_conflicts(args: Any) -> None:
    """Refuse a trainer's settings beside which ebbtide would be wrong or useless.

    Args:
        args: `transformers.TrainingArguments`, or a class made of it.

    Raises:
        ValueError: Names the trainer's setting, ebbtide's, and what to set.
    """
    # Both names may be there, and a deprecated one follows the other.
    name = next((n for n in CHECKPOINTING if getattr(args, n, False)), None)
    if name is not None:
        deprecated = " (SFTConfig and TRL's other configs turn it on by default)"
        hint = deprecated if hasattr(args, "activation_offloading") else ""
        raise ValueError(
            f"{name}=True{hint} and EbbtideCallback both decide what becomes of activations: each "
            f"block would be recomputed twice. Set {_spelling(args)}=False, or leave "
            "EbbtideCallback out."
        )
    if getattr(args, "activation_offloading", False):
        raise ValueError(
            "activation_offloading=True and EbbtideCallback would both move activations to the "
            "host. Set activation_offloading=False, or leave EbbtideCallback out."
        )
    fsdp_config = getattr(args, "fsdp_config", None)
    if isinstance(fsdp_config, Mapping) and _is_on(fsdp_config.get("activation_checkpointing")):
        raise ValueError(
            "fsdp_config={'activation_checkpointing': True} and EbbtideCallback both decide what "
            "becomes of activations: each block would be recomputed twice. Set it to False, or "
            "leave EbbtideCallback out."
        )
    if getattr(args, "torch_compile", False):
        raise ValueError(
            "torch_compile=True compiles the model as a whole, and inside a compiled region "
            "EbbtideCallback cannot see where blocks start and end. Set torch_compile=False and "
            "EbbtideCallback(compile=True), which compiles each block."
        )
    num_devices = getattr(args, "n_gpu", 1)
    if num_devices > 1:
        raise ValueError(
            f"the trainer would run the model on {num_devices} GPUs in threads of one process "
            "(nn.DataParallel), and EbbtideCallback serves one device a process. Start it with "
            f"`torchrun --nproc-per-node {num_devices}`, or set CUDA_VISIBLE_DEVICES to one GPU."
        )


def _spelling(args: Any) -> str:
    """The name under which the setting is to be turned off."""
    # TRL's configs declare a default of their own under the old name.
    has_own = hasattr(args, "activation_offloading") or not hasattr(args, CHECKPOINTING[0])
    return CHECKPOINTING[1] if has_own else CHECKPOINTING[0]


def _is_on(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes")


@functools.cache
def _watch_training() -> None:
    """Have `Trainer.train` tell our callbacks whose training starts, and that it is over."""
    train = Trainer.train

    @functools.wraps(train)
    def watched(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        callbacks = self.callback_handler.callbacks
        ours = [callback for callback in callbacks if isinstance(callback, EbbtideCallback)]
        for callback in ours:
            callback.start_training(self)
        try:
            return train(self, *args, **kwargs)
        finally:
            for callback in ours:
                callback.end_training()

    Trainer.train = watched
