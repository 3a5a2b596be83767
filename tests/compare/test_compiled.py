from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config

from ebbtide.compare import compiled, strategies
from ebbtide.compare.compiled import compiled_blocks
from ebbtide.compare.strategies import make_strategy
from ebbtide.torch import attach
from tests.compare.test_selective import CPU, IDS, list_gradients, make_model

# torch's compiler warns of its own code, and its guards do not hold where warnings are errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# Partitions as inductor does, and needs no C++ compiler.
BACKEND = "aot_eager_decomp_partition"


@pytest.fixture(autouse=True)
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    original = compiled.compiled_blocks
    monkeypatch.setattr(compiled, "compiled_blocks", lambda model: original(model, backend=BACKEND))


def count_saved_bytes(name: str, *, is_compiled: bool = False) -> int:
    """Bytes that autograd saves in one step under a strategy, parameters left out."""
    model = make_model()
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    strategy = make_strategy(name, host=None, disk=None, is_compiled=is_compiled)
    with strategy.apply(model, CPU):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids=IDS, labels=IDS).loss
        total_bytes = sum(saved.values())
        loss.backward()
    assert len(list_gradients(model)) == len(list(model.parameters()))
    return total_bytes


def test_a_smaller_share_saves_fewer_bytes() -> None:
    nothing, half, full = (
        count_saved_bytes(name)
        for name in ("compile-budget:0", "compile-budget:0.5", "compile-keep")
    )
    # Of four blocks the input, 32 tokens x 32 channels x 4 bytes, and little else.
    assert nothing < half < full < count_saved_bytes("keep")
    config: Any = torch._functorch.config  # pyright: ignore[reportPrivateUsage]
    assert config.activation_memory_budget == 1.0


def test_keep_with_compile_is_compile_keep() -> None:
    assert count_saved_bytes("keep", is_compiled=True) == count_saved_bytes("compile-keep")


def test_selective_checkpointing_is_compiled_with_its_block() -> None:
    selected = count_saved_bytes("torch-sac:op", is_compiled=True)
    assert selected < count_saved_bytes("compile-keep")


def test_blocks_are_eager_again_afterwards() -> None:
    model = make_model()
    block: Any = model.model.layers[0]
    with compiled_blocks(model, backend=BACKEND):
        assert block._compiled_call_impl is not None
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert block._compiled_call_impl is None


@pytest.mark.parametrize("plan", ["recompute", "balanced"])
def test_plans_of_ours_compile_the_blocks_themselves(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def attach_quickly(model: Any, *, compile: bool, **options: Any) -> Any:
        asked.append(compile)
        return attach(model, compile="aot_eager", min_bytes=1, **options)

    monkeypatch.setattr(strategies, "attach", attach_quickly)
    gradients: list[list[torch.Tensor]] = []
    moved_bytes: list[int] = []
    for name in ("ebbtide:keep", f"ebbtide:{plan}"):
        model = make_model()
        strategy = make_strategy(name, host=None, disk=f"{tmp_path}:64MiB", is_compiled=True)
        assert strategy.find_refusal(CPU) is None
        with strategy.apply(model, CPU) as applied:
            for _ in range(3):
                model.zero_grad()
                model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append(list_gradients(model))
        assert applied.tide is not None
        moved_bytes.append(applied.tide.statistics().moved_out_bytes)
    assert asked == [True, True]
    assert [bool(moved) for moved in moved_bytes] == [False, plan == "balanced"]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_budget_compiles_the_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def attach_quickly(model: Any, **options: Any) -> Any:
        asked.append(options)
        quick: dict[str, Any] = {**options, "compile": "aot_eager"}
        return attach(model, **quick)

    monkeypatch.setattr(strategies, "attach", attach_quickly)
    strategy = make_strategy("ebbtide", host=None, disk=None, budget="1GiB", is_compiled=True)
    assert strategy.find_refusal(CPU) is None
    model = make_model()
    with strategy.apply(model, CPU) as applied:
        for _ in range(4):
            model.zero_grad()
            model(input_ids=IDS, labels=IDS).loss.backward()
    assert asked == [{"budget": "1GiB", "host": None, "disk": None, "compile": True}]
    assert applied.tide is not None and applied.tide.workload is not None
    assert all(block.is_fused for block in applied.tide.workload.blocks)
    assert applied.tide.plan is not None and applied.tide.plan.budget_bytes == 2**30
