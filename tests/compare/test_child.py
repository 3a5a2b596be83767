import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from ebbtide.compare.child import (
    PLAN_PASSES_BEFORE,
    count_passes_before,
    describe_prediction,
    is_out_of_memory,
    main,
    measure_perplexity,
    run_task,
)
from ebbtide.compare.loss import LossKind
from ebbtide.compare.results import Row, Status
from ebbtide.compare.task import Optimizer, Task, write_task
from ebbtide.compare.workloads import ModelSource, Weights, load_model
from ebbtide.errors import MemoryTierError
from ebbtide.plan import Decision, Plan
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
        disks=(f"{tmp_path / 'disk'}:1GiB",),
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


def test_several_disks_hold_what_none_of_them_could(kept: Row, task: Task) -> None:
    plan = "ebbtide:offload-inputs"
    alone = run(replace(task, strategy=plan))
    assert alone.disk_bytes is not None
    cap_bytes = (alone.disk_bytes // 2 // 4096 + 1) * 4096
    folders = [Path(task.result).parent / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    disks = tuple(f"{folder}:{cap_bytes}" for folder in folders)
    row = run(replace(task, strategy=plan, disks=disks))
    assert (row.disk_bytes, row.moved_out_bytes) == (alone.disk_bytes, alone.moved_out_bytes)
    assert row.grad_equal is True
    with pytest.raises(MemoryTierError, match="the cap is"):
        run(replace(task, strategy=plan, disks=disks[:1]))


@pytest.mark.parametrize("strategy", ["checkpoint", "save-on-cpu", "ebbtide:recompute"])
def test_other_strategies_have_the_bits_of_keep(kept: Row, task: Task, strategy: str) -> None:
    row = run(replace(task, strategy=strategy))
    assert (row.grad_equal, row.grad_largest_difference) == (True, 0.0)
    assert (row.loss, row.perplexity_after) == (kept.loss, kept.perplexity_after)
    assert (row.moved_out_bytes, row.disk_bytes) == (0, 0)


def test_passes_are_timed_under_other_kernels_and_leave_training_as_it_was(
    kept: Row, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict: list[bool] = []
    forward = LlamaForCausalLM.forward

    def noted(self: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            strict.append(torch.are_deterministic_algorithms_enabled())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", noted)
    row = run(replace(task, strategy="ebbtide:recompute", num_passes=3))
    assert strict == [False] * (PLAN_PASSES_BEFORE + 3) + [True] * 3
    assert (len(row.step_ns), len(row.forward_ns)) == (3, 3)
    assert all(0 < f < s for f, s in zip(row.forward_ns, row.step_ns, strict=True))
    assert (row.peak_bytes or 0) > 0
    assert (row.grad_equal, row.loss) == (True, kept.loss)
    assert row.perplexity_after == kept.perplexity_after


def test_a_budget_has_the_most_passes_before_the_timed_ones() -> None:
    names = ("keep", "compile-budget:0", "ebbtide:balanced", "ebbtide")
    assert [count_passes_before(make_task(strategy=name)) for name in names] == [2, 3, 6, 12]


def test_without_held_out_windows_there_is_no_perplexity(task: Task) -> None:
    tokens = load_file(task.tokens)
    save_file({**tokens, "held_out": tokens["held_out"][:0].clone()}, task.tokens)
    row = run(replace(task, gradients=None))
    assert (row.perplexity_before, row.perplexity_after) == (None, None)
    assert row.loss is not None


def test_an_offloading_plan_moves_bytes_to_disk_and_keeps_the_bits(kept: Row, task: Task) -> None:
    row = run(replace(task, strategy="ebbtide:offload-inputs"))
    # Four blocks' inputs of 2 x 512 tokens x 64 channels x 4 bytes.
    inputs_bytes = 4 * 2 * CONTEXT * 64 * 4
    assert row.moved_out_bytes is not None and row.moved_in_bytes is not None
    assert 0 < row.moved_in_bytes <= row.moved_out_bytes
    assert inputs_bytes // 2 <= row.moved_out_bytes <= 2 * inputs_bytes
    assert (row.disk_bytes or 0) > 0
    assert (row.grad_equal, row.loss) == (True, kept.loss)


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="needs torch's own chunked loss"
)
def test_rows_with_the_chunked_loss_have_the_bits_of_keep_with_it(kept: Row, task: Task) -> None:
    chunked = replace(task, loss=LossKind.TORCH, gradients=f"{task.gradients}-chunked")
    reference = run(replace(chunked, is_reference=True))
    assert reference.loss == pytest.approx(kept.loss, rel=1e-5)
    assert reference.perplexity_after == pytest.approx(kept.perplexity_after, rel=1e-5)
    row = run(replace(chunked, strategy="ebbtide:balanced"))
    assert (row.grad_equal, row.loss) == (True, reference.loss)
    assert (row.moved_out_bytes or 0) > 0


@pytest.fixture
def budget_task(task: Task) -> Task:
    """The same run, with a budget and the windows for one more warm-up step."""
    tokens = load_file(task.tokens)
    train = torch.cat([tokens["train"], tokens["train"][:2].flip(1)])
    save_file({**tokens, "train": train}, task.tokens)
    return replace(task, num_warm_up_steps=3, budget="20MiB")


def test_the_plan_for_a_budget_is_counted_and_keeps_the_bits(budget_task: Task) -> None:
    kept = run(replace(budget_task, is_reference=True))
    row = run(replace(budget_task, strategy="ebbtide"))
    assert (row.status, len(row.step_ns)) == (Status.OK, 1)
    assert (row.grad_equal, row.loss) == (True, kept.loss)
    assert row.note.startswith("planned for 20.0 MiB: forward and backward ")
    assert row.bound_ns is not None and row.bound_ns > 0
    assert kept.bound_ns is None
    assert "corrected" not in row.note


def test_a_budget_that_nothing_fits_is_an_error_that_names_the_smallest(
    budget_task: Task, tmp_path: Path
) -> None:
    small = replace(budget_task, strategy="ebbtide", budget="1KiB", gradients=None)
    write_task(small, tmp_path / "task.json")
    main(tmp_path / "task.json")
    written = json.loads(Path(small.result).read_text())
    assert (written["status"], written["step_ns"]) == ("error", [])
    assert "the smallest that fits is " in written["note"]


def test_a_prediction_is_told_with_its_correction() -> None:
    first = Plan(
        name="lp",
        model="Tiny",
        fingerprint="",
        host_bytes=0,
        disk_bytes=0,
        max_out_bytes_in_flight=0,
        max_in_bytes_in_flight=0,
        decisions={"a": Decision.KEEP},
        budget_bytes=2 << 30,
        peak_bytes=1 << 30,
        predicted_step_ns=3_000_000,
        bound_step_ns=2_000_000,
    )
    told = (
        "planned for 2.0 GiB: forward and backward 3.0 ms predicted, 2.0 ms at least under any "
        "plan; peak 1.0 GiB planned"
    )
    assert describe_prediction(None, None) == []
    assert describe_prediction(replace(first, budget_bytes=0), first) == []
    assert describe_prediction(first, first) == [told]
    slower = replace(first, predicted_step_ns=4_000_000)
    other = replace(slower, decisions={"a": Decision.RECOMPUTE})
    for last, what in ((slower, "the same plan"), (other, "another plan")):
        begin = f"corrected by measured steps while counting: {what}, forward and backward 4.0 ms"
        assert describe_prediction(first, last)[1].startswith(begin)


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
