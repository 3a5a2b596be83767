from pathlib import Path

import pytest
import torch
import transformers

from ebbtide.compare import strategy
from ebbtide.compare.names import DEFAULT_STRATEGIES
from ebbtide.compare.results import Status
from ebbtide.compare.strategies import make_strategy
from ebbtide.compare.workloads import ModelSource, Weights, load_model

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")


@pytest.fixture
def model(tiny_model: Path) -> transformers.PreTrainedModel:
    source = ModelSource(
        weights=Weights.FOLDER, location=str(tiny_model), num_layers=None, title="tiny"
    )
    return load_model(source, context=64, dtype=torch.float32, device=CPU, seed=0)


def count_block_forwards(model: transformers.PreTrainedModel, name: str, disk: str | None) -> int:
    """How often the first block's Python runs in one step under a strategy."""
    calls: list[int] = []
    block: torch.nn.Module = model.get_submodule("model.layers.0.mlp")
    # Checkpointing stops inside the last module that it needs, before its forward hooks.
    handle = block.register_forward_pre_hook(lambda *arguments: calls.append(1))
    ids = torch.arange(64).view(1, 64)
    with make_strategy(name, host=None, disk=disk).apply(model, CPU) as applied:
        with applied.forward():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    handle.remove()
    return len(calls)


def test_every_default_name_makes_a_strategy() -> None:
    kinds = [type(make_strategy(name, host=None, disk=None)) for name in DEFAULT_STRATEGIES]
    assert [kind.__name__ for kind in kinds] == [
        *("Keep", "Checkpoint", "CheckpointOffload", "SaveOnCpu", "TrlOffload"),
        *("EbbtidePlan",) * 5,
    ]


def test_a_gpu_can_run_every_strategy_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "find_spec", lambda name: object())
    for name in DEFAULT_STRATEGIES:
        assert make_strategy(name, host=None, disk=None).find_refusal(CUDA) is None


@pytest.mark.parametrize("name", ["checkpoint-offload", "trl"])
def test_moving_to_host_memory_does_not_apply_to_a_cpu(name: str) -> None:
    refusal = make_strategy(name, host=None, disk=None).find_refusal(CPU)
    assert refusal is not None
    assert refusal.status is Status.NOT_APPLICABLE
    assert "where a CPU run has them already" in refusal.reason


def test_a_missing_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "find_spec", lambda name: None)
    refusal = make_strategy("trl", host=None, disk=None).find_refusal(CUDA)
    assert refusal is not None
    assert (refusal.status, refusal.reason) == (
        Status.NOT_INSTALLED,
        "the package trl is not installed",
    )


def test_an_old_transformers_cannot_offload_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    def switch_of_5_16(model: object, gradient_checkpointing_kwargs: object = None) -> None: ...

    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "activation_checkpointing_enable",
        switch_of_5_16,
        raising=False,
    )
    refusal = make_strategy("checkpoint-offload", host=None, disk=None).find_refusal(CUDA)
    assert refusal is not None
    assert refusal.status is Status.NOT_INSTALLED
    assert "5.17 and later can" in refusal.reason


def test_checkpointing_runs_blocks_twice_and_is_switched_off_again(
    model: transformers.PreTrainedModel,
) -> None:
    assert count_block_forwards(model, "keep", None) == 1
    assert count_block_forwards(model, "checkpoint", None) == 2
    assert count_block_forwards(model, "keep", None) == 1


def test_the_hooks_of_save_on_cpu_cover_the_forward_pass_alone(
    model: transformers.PreTrainedModel,
) -> None:
    with make_strategy("save-on-cpu", host=None, disk=None).apply(model, CPU) as applied:
        weight = torch.ones(3, requires_grad=True)
        outside = (weight * weight).grad_fn
        with applied.forward():
            inside = (weight * weight).grad_fn
    assert outside is not None and inside is not None
    # Without hooks autograd gives back the very tensor; save_on_cpu gives back a copy's view.
    assert outside._saved_self is weight  # pyright: ignore[reportAttributeAccessIssue]
    assert inside._saved_self is not weight  # pyright: ignore[reportAttributeAccessIssue]
    assert applied.note == "saved tensors are on the CPU already, so nothing moves"


def test_a_plan_that_moves_needs_the_disk_that_it_is_given(
    model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    disk = f"{tmp_path}:1GiB"
    with make_strategy("ebbtide:balanced", host=None, disk=disk).apply(model, CPU) as applied:
        assert applied.tide is not None
        assert applied.tide.statistics().moved_out_bytes == 0
    with pytest.raises(Exception, match="disk"):
        make_strategy("ebbtide:balanced", host=None, disk=None).apply(model, CPU).__enter__()


def test_the_plan_for_a_budget_needs_one(
    model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="the strategy ebbtide needs a budget"):
        make_strategy("ebbtide", host=None, disk=None)
    chosen = make_strategy("ebbtide", host=None, disk=f"{tmp_path}:1GiB", budget="50%")
    assert chosen.find_refusal(CPU) is chosen.find_refusal(CUDA) is None
    with chosen.apply(model, CPU) as applied:
        assert applied.tide is not None
        assert applied.tide.runtime is not None


def test_a_plan_that_moves_nothing_takes_no_disk(model: transformers.PreTrainedModel) -> None:
    disk = "/no/such/folder:1GiB"
    assert count_block_forwards(model, "ebbtide:recompute", disk) >= 1
