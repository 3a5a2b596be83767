"""ebbtide in `lightning.pytorch.Trainer`.

trainer = Trainer(callbacks=[EbbtideCallback(budget="40GiB")])
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]
from torch import nn
from torch.distributed import ProcessGroup

from ebbtide.integrations.figures import figures_of
from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import MIN_BYTES
from ebbtide.torch import Tide, attach

log = logging.getLogger("ebbtide")


class EbbtideCallback(Callback):  # pyright: ignore[reportUntypedBaseClass]
    """Attaches ebbtide to a LightningModule while it is fitted.

    It takes the arguments of `ebbtide.torch.attach`, but for the model. Validation is left alone,
    checkpoints hold the same names and values, and it is closed too when fitting raises. Every
    `log_every_n_steps` steps, what `ebbtide.integrations.figures.figures_of` returns goes to the
    trainer's loggers. `tide` is the handle of the last fit, closed once that ended.

    Args:
        plan: As in `attach`, like all that follow.
        budget: Most device memory of a step.
        host: Most pinned host memory.
        disk: `"FOLDER:SIZE"`, or several of them.
        disk_checksums: Compare what is read from disk with what was written.
        blocks: Module paths of the blocks, in the LightningModule.
        decide: Decisions to keep to, by pattern.
        planner: Which planner serves the budget.
        disk_write_per_day: Most bytes that a day may write to disk.
        min_bytes: Smaller activations are never moved.
        compile: Compile each block.
        sanitize: Compare everything that comes back with what was saved.
        ranks: With a budget: a process group whose ranks get one plan.

    Raises:
        EbbtideError: From `fit`, where `attach` raises it: a model that checkpoints itself or is
            compiled as a whole, or has no repeated blocks.
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
        self.tide: Tide | None = None
        self._is_open = False
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

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Attach, once the model is on its device and wrapped."""
        self.tide = attach(pl_module, self._plan, **self._options)
        self._is_open = True

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Log the figures."""
        # The next batch already: this one's backward and step are over.
        num_batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if self.tide is None or num_batches % trainer.log_every_n_steps:
            return
        figures = figures_of(self.tide)
        for logger in trainer.loggers if figures else ():
            logger.log_metrics(figures, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Close."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Close after an error or an interrupt."""
        self._close()

    def _close(self) -> None:
        if self._is_open and self.tide is not None:
            log.info("%s", self.tide.report())
            self.tide.close()
        self._is_open = False
