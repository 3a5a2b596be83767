"""torchtune and DeepSpeed, which need a GPU, by stand-ins that count their calls."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ebbtide.compare import strategy
from ebbtide.compare.results import Status
from ebbtide.compare.strategies import make_strategy
from tests.compare.test_selective import CPU, IDS, list_gradients, make_model

CUDA = torch.device("cuda:0")


def take_step(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of one step under keep, and under a strategy."""
    model = make_model()
    both: list[list[torch.Tensor]] = []
    for each in ("keep", name):
        model.zero_grad()
        with make_strategy(each, host=None, disk=None).apply(model, CPU) as applied:
            with applied.forward():
                loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
        both.append(list_gradients(model))
    return both[0], both[1]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the stand-ins were asked; the two packages are them."""
    asked: list[Any] = []

    def run_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
        asked.append(("checkpoint", len(args)))
        return checkpoint(function, *args, use_reentrant=False)

    deepspeed = ModuleType("deepspeed.runtime.activation_checkpointing.checkpointing")
    vars(deepspeed).update(
        configure=lambda mpu, **given: asked.append(("configure", given)),
        checkpoint=run_checkpoint,
    )
    whole = ModuleType("deepspeed")
    vars(whole).update(init_distributed=lambda **given: asked.append("init"))

    def make_hooks(tag: str) -> Callable[[], Any]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            asked.append((tag, tuple(tensor.shape)))
            return tensor

        return lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    torchtune = ModuleType("torchtune.training")
    vars(torchtune).update(OffloadActivations=make_hooks("offload"), NoOpManager=make_hooks("skip"))
    for name, module in {
        "deepspeed": whole,
        "deepspeed.runtime": ModuleType("deepspeed.runtime"),
        "deepspeed.runtime.activation_checkpointing": ModuleType("x"),
        deepspeed.__name__: deepspeed,
        "torchtune": ModuleType("torchtune"),
        torchtune.__name__: torchtune,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return asked


def test_deepspeed_checkpoints_every_block_with_its_input_alone(calls: list[Any]) -> None:
    expected, found = take_step("deepspeed")
    assert calls == [
        "init",
        ("configure", {"checkpoint_in_cpu": True}),
        *[("checkpoint", 1)] * 4,
    ]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.distributed.is_initialized()


def test_torchtune_offloads_what_is_saved_but_for_the_head(calls: list[Any]) -> None:
    expected, found = take_step("torchtune")
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    skipped = [shape for tag, shape in calls if tag == "skip"]
    # The head's input and its weight, transposed.
    assert sorted(skipped) == [(32, 32), (32, 64)]
    assert sum(tag == "offload" for tag, _ in calls) > 4 * len(skipped)


@pytest.mark.parametrize("name", ["torchtune", "deepspeed"])
def test_a_package_that_does_not_import_is_not_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = make_strategy(name, host=None, disk=None).find_refusal(CUDA)
    assert absent is not None
    assert (absent.status, absent.reason) == (
        Status.NOT_INSTALLED,
        f"the package {name} is not installed",
    )
    monkeypatch.setattr(strategy, "find_spec", lambda package: SimpleNamespace())
    broken = make_strategy(name, host=None, disk=None).find_refusal(CUDA)
    assert broken is not None and broken.status is Status.NOT_INSTALLED
    assert f"cannot be imported here: No module named '{name}'" in broken.reason
    on_cpu = make_strategy(name, host=None, disk=None).find_refusal(CPU)
    assert on_cpu is not None and on_cpu.status is Status.NOT_APPLICABLE
