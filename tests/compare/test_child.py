import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ebbtide.compare.child import is_out_of_memory, main, measure_perplexity, run_task
from ebbtide.compare.results import Row, Status
from ebbtide.compare.task import Optimizer, Task, write_task
from ebbtide.compare.workloads import ModelSource, Weights, load_model
from tests.compare.test_task import make_task

CPU = torch.device("cpu")
CONTEXT = 512


@pytest.fixture(autouse=True)
def restored_determinism() -> Iterator[None]:
    """A run switches deterministic algorithms on for its process; the tests share one."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def task(tiny_model: Path, tmp_path: Path) -> Task:
    generator = torch.Generator().manual_seed(3)
    save_file(
        {
            "train": torch.randint(256, (6, CONTEXT), generator=generator),
            "held_out": torch.randint(256, (2, CONTEXT), generator=generator),
        },
        tmp_path / "tokens.safetensors",
    )
    (tmp_path / "disk").mkdir()
    return make_task(
        source=ModelSource(
            weights=Weights.FOLDER, location=str(tiny_model), num_layers=None, title="tiny"
        ),
        context=CONTEXT,
        batch=2,
        optimizer=Optimizer.ADAMW,
        disk=f"{tmp_path / 'disk'}:1GiB",
        tokens=str(tmp_path / "tokens.safetensors"),
        gradients=str(tmp_path / "gradients"),
        result=str(tmp_path / "row.json"),
    )


def run(task: Task) -> Row:
    return run_task(task, lambda step: None)


@pytest.fixture
def kept(task: Task) -> Row:
    return run(replace(task, is_reference=True))


def test_keep_trains_and_moves_nothing(kept: Row, task: Task) -> None:
    assert kept.status is Status.OK
    assert len(kept.step_ns) == 1 and 0 < kept.forward_ns[0] < kept.step_ns[0]
    assert (kept.moved_out_bytes, kept.moved_in_bytes) == (0, 0)
    assert (kept.host_bytes, kept.disk_bytes, kept.grad_equal) == (0, 0, None)
    assert kept.perplexity_before != kept.perplexity_after
    assert len(list(Path(task.gradients or "").iterdir())) == 3


@pytest.mark.parametrize("strategy", ["checkpoint", "save-on-cpu", "ebbtide:recompute"])
def test_other_strategies_have_the_bits_of_keep(kept: Row, task: Task, strategy: str) -> None:
    row = run(replace(task, strategy=strategy))
    assert (row.grad_equal, row.grad_largest_difference) == (True, 0.0)
    assert (row.loss, row.perplexity_after) == (kept.loss, kept.perplexity_after)
    assert (row.moved_out_bytes, row.disk_bytes) == (0, 0)


def test_an_offloading_plan_moves_bytes_to_disk_and_keeps_the_bits(kept: Row, task: Task) -> None:
    row = run(replace(task, strategy="ebbtide:offload-inputs"))
    # Four blocks' inputs of 2 x 512 tokens x 64 channels x 4 bytes.
    inputs_bytes = 4 * 2 * CONTEXT * 64 * 4
    assert row.moved_out_bytes is not None and row.moved_in_bytes is not None
    assert 0 < row.moved_in_bytes <= row.moved_out_bytes
    assert inputs_bytes // 2 <= row.moved_out_bytes <= 2 * inputs_bytes
    assert (row.disk_bytes or 0) > 0
    assert (row.grad_equal, row.loss) == (True, kept.loss)


def test_other_data_is_reported_as_other_gradients(kept: Row, task: Task) -> None:
    tokens = load_file(task.tokens)
    save_file({**tokens, "train": tokens["train"].flip(0)}, task.tokens)
    row = run(task)
    assert row.grad_equal is False
    assert (row.grad_largest_difference or 0.0) > 0.0
    assert row.note.startswith("gradients differ first in step 1, most in ")


def test_every_step_is_announced_before_it_is_taken(task: Task) -> None:
    steps: list[int] = []
    run_task(replace(task, gradients=None), steps.append)
    assert steps == [1, 2, 3]


def test_the_row_is_written_and_the_steps_are_printed(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(replace(task, gradients=None), tmp_path / "task.json")
    main(tmp_path / "task.json")
    assert capsys.readouterr().out.splitlines() == [f"ebbtide-step {step}" for step in (1, 2, 3)]
    assert json.loads(Path(task.result).read_text())["status"] == "ok"


def test_perplexity_is_the_exponential_of_the_mean_loss(task: Task) -> None:
    model = load_model(task.source, context=CONTEXT, dtype=torch.float32, device=CPU, seed=0)
    windows_WT = torch.arange(2 * CONTEXT).remainder(251).view(2, CONTEXT)
    with torch.no_grad():
        losses = [model(input_ids=w, labels=w).loss.item() for w in windows_WT.split(1)]
    measured = measure_perplexity(model, windows_WT, CPU)
    assert measured == pytest.approx(math.exp(sum(losses) / 2), rel=1e-6)
    assert model.training


def test_only_lack_of_memory_counts_as_such() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator"))
