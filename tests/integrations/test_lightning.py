"""The callback for Lightning: the same weights, bytes that moved, figures in its loggers."""

# Not among what the tests are run with, so that there may be no types.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning.pytorch")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from ebbtide.errors import ModelError
from ebbtide.integrations.lightning import EbbtideCallback
from ebbtide.torch import attach
from tests.torch.models import WIDTH, Gated, Stack
from tests.torch.training import learn_at_once

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]


class Module(LightningModule):
    """Trains a stack towards small outputs."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stack = Stack(Gated, 4)
        self.fails_at = fails_at

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == self.fails_at:
            raise ZeroDivisionError
        return self.stack(batch).square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        del index
        self.log("validation", self.stack(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Logger(DummyLogger):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append({**metrics, "step": step or 0})


def batches() -> Any:
    generator = torch.Generator().manual_seed(5)
    rows: Any = list(torch.randn(12, 16, WIDTH, generator=generator))
    return DataLoader(rows, batch_size=2)


def fit(folder: Path, callback: EbbtideCallback | None, module: Module, **settings: Any) -> Logger:
    logger = Logger()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[] if callback is None else [callback],
        logger=logger,
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
        **settings,
    )
    with learn_at_once():
        trainer.fit(module, batches(), batches())
    return logger


def callback(folder: Path) -> EbbtideCallback:
    return EbbtideCallback("offload", disk=f"{folder}:16MiB", min_bytes=256)


def assert_nothing_is_left(model: nn.Module) -> None:
    for module in model.modules():
        assert not vars(module)["_forward_hooks"]
        assert not vars(module)["_forward_pre_hooks"]
    attach(model, "keep").close()


def test_it_takes_what_attach_takes() -> None:
    wanted = list(inspect.signature(attach).parameters.values())[1:]
    got = list(inspect.signature(EbbtideCallback).parameters.values())
    assert [(p.name, p.kind, p.default) for p in got] == [
        (p.name, p.kind, p.default) for p in wanted
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}]
)
def test_the_weights_are_those_of_plain_training(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain, ours, ebbtide = Module(), Module(), callback(tmp_path)
    fit(tmp_path, None, plain, **settings)
    logger = fit(tmp_path, ebbtide, ours, **settings)
    for name, parameter in plain.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    assert ebbtide.tide is not None and ebbtide.tide.plan is not None
    counts = ebbtide.tide.statistics()
    # Of six batches the first is observed.
    assert counts.moved_out_bytes == 5 * ebbtide.tide.plan.disk_bytes > 0
    logged = [e for e in logger.seen if "ebbtide/moved_out_bytes" in e]
    assert [e["ebbtide/moved_out_bytes"] for e in logged] == [
        n * ebbtide.tide.plan.disk_bytes for n in (1, 3, 5)
    ]
    assert_nothing_is_left(ours)


def test_it_is_closed_when_fitting_raises(tmp_path: Path) -> None:
    module, ebbtide = Module(fails_at=3), callback(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, ebbtide, module)
    assert ebbtide.tide is not None and ebbtide.tide.statistics().moved_in_bytes > 0
    assert ebbtide.tide.statistics().disk.held_bytes == 0
    assert_nothing_is_left(module)


def test_a_model_that_checkpoints_itself_is_refused(tmp_path: Path) -> None:
    module = Module()
    vars(module.stack)["gradient_checkpointing"] = True
    with pytest.raises(ModelError, match=r"checkpoints itself .* would be recomputed twice"):
        fit(tmp_path, callback(tmp_path), module)
