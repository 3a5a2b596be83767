"""`attach(model, budget=...)`: the plan keeps to the budget, and what it predicts comes true."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.check import check_plan
from ebbtide.errors import BudgetError, PlanError, RuntimeStateError
from ebbtide.machine import Machine
from ebbtide.plan import Decision, Plan
from ebbtide.torch import Tide, attach
from ebbtide.torch.budgets import BudgetPlanner, Shape, bucket
from ebbtide.torch.devices.fake import FakeMeter
from ebbtide.torch.pace import NUM_SKIPPED, NUM_STEPS
from ebbtide.torch.record import Record
from ebbtide.torch.runtime import MAX_CORRECTIONS
from tests.torch import models
from tests.torch.models import Gated, Stack, features
from tests.torch.test_observe import Allocator
from tests.torch.training import (
    Trace,
    differences,
    feature_step,
    language_step,
    run_step,
    seeded,
    sgd,
    train,
)

MACHINE = Machine(
    name="a test",
    device_bytes=2**40,
    host_bytes=0,
    out_bytes_per_s=0,
    in_bytes_per_s=0,
    both_bytes_per_s=0,
    disk_bytes=2**30,
    disk_write_bytes_per_s=100_000_000,
    disk_read_bytes_per_s=100_000_000,
)

# Modules, not the functions that the package gives the same names.
_attach: Any = import_module("ebbtide.torch.attach")
_budgets: Any = import_module("ebbtide.torch.budgets")


@pytest.fixture(autouse=True)
def machine_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test depend on how fast this machine's disk is."""

    def probe(*_: Any, **__: Any) -> Machine:
        return MACHINE

    monkeypatch.setattr(_budgets, "probe_machine", probe)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Let torch refuse every kernel whose bits vary."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a training under a budget left."""

    trace: Trace
    peak_bytes: int
    """Of the last step, counted."""
    largest_bytes: list[int]
    """The peak of each step."""
    tide: Tide


def test_a_limit_on_what_a_day_writes_is_the_machines_and_needs_a_disk(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(Gated, 4))
    with pytest.raises(ValueError, match=r"^disk_write_per_day= was given without a budget"):
        attach(model, "recompute", disk_write_per_day="1TB")
    with pytest.raises(ValueError, match=r"'1TB' was given without a disk to write to. Give disk="):
        attach(model, budget="1GiB", disk_write_per_day="1TB")
    disk = f"{tmp_path}:200MiB"
    with pytest.raises(ValueError, match="disk_write_per_day=0 lets nothing be written; leave"):
        attach(model, budget="1GiB", disk=disk, disk_write_per_day=0)
    planner = BudgetPlanner(
        "1GiB",
        device=torch.device("cpu"),
        host_bytes=None,
        disks=(),
        decide=None,
        min_bytes=0,
        planner="lp",
        written_bytes_per_day=10**12,
    )
    assert planner.machine == replace(MACHINE, disk_write_bytes_per_day=10**12)


def test_a_day_that_may_write_little_has_no_room_for_what_is_pinned_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(lambda: Stack(Gated, 4))
    count_allocations(model, monkeypatch)
    options: dict[str, Any] = {"disk": f"{tmp_path}:200MiB", "decide": {"*": "DISK"}}
    for daily, is_disk_used in ((None, True), ("1MB", False)):
        with attach(model, budget="1GiB", min_bytes=1, disk_write_per_day=daily, **options) as tide:
            for index in range(2):
                run_step(model, feature_step, index, Trace(), sgd(model))
            if is_disk_used:
                run_step(model, feature_step, 2, Trace(), sgd(model))
                assert tide.plan is not None and tide.plan.disk_bytes > 0
            else:
                with pytest.raises(
                    BudgetError, match="a step may go to disk, since a day may write"
                ):
                    run_step(model, feature_step, 2, Trace(), sgd(model))


def count_allocations(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """Let `attach` measure with a counted allocator, every op taking the same time."""
    allocator = Allocator(model)
    meter = FakeMeter(
        allocated=allocator.allocated_bytes, take_peak=allocator.take_peak_bytes, tick_ns=100_000
    )

    def meter_of(device: torch.device) -> FakeMeter:
        del device
        return meter

    monkeypatch.setattr(_attach, "meter_of", meter_of)
    return allocator


def run_counted(
    build: Any,
    step: Any,
    budget: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_steps: int = 6,
    decide: dict[str, str] | None = None,
    drops_gradients: int = 0,
) -> Run:
    """Train with a counted allocator, every op taking the same time; the tide is closed.

    Args:
        drops_gradients: So many steps set gradients to None; the others zero them.
    """
    model = seeded(build)
    allocator = count_allocations(model, monkeypatch)
    trace, optimizer = Trace(), sgd(model)
    peak_bytes = 0
    largest_bytes: list[int] = []
    disk = f"{folder}:200MiB"
    with attach(model, budget=budget, disk=disk, min_bytes=1024, decide=decide) as tide:
        for index in range(num_steps):
            torch.manual_seed(1000 + index)
            with allocator:
                allocator.take_peak_bytes()
                allocator.largest_bytes = 0
                loss = step(model, index)
                peak_bytes = allocator.take_peak_bytes()
                largest_bytes.append(allocator.largest_bytes)
            trace.add(f"{index}: loss", loss)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    trace.add(f"{index}: gradient of {name}", parameter.grad)
            optimizer.step()
            optimizer.zero_grad(set_to_none=index < drops_gradients)
    return Run(trace=trace, peak_bytes=peak_bytes, largest_bytes=largest_bytes, tide=tide)


def plain(build: Any, step: Any, *, num_steps: int = 6) -> Trace:
    """Train without ebbtide, noting the same."""
    trace = train(seeded(build), step, num_steps=num_steps)
    kept = {k: v for k, v in trace.tensors.items() if "state" not in k and "buffer" not in k}
    return Trace(tensors=kept)


def smallest_budget(
    build: Any, step: Any, folder: Path, patch: pytest.MonkeyPatch, *, drops_gradients: int = 0
) -> int:
    """Return the smallest budget that the refusal names, a little up: times vary with it."""
    with pytest.raises(BudgetError) as refused:
        run_counted(build, step, 1, folder, patch, drops_gradients=drops_gradients)
    words = str(refused.value).split("the smallest that fits is ")[1].split()
    return int(Fraction(words[0]) * {"KiB": 2**10, "MiB": 2**20}[words[1].rstrip(".")] * 101 // 100)


def test_the_optimizers_state_counts_also_where_it_comes_after_the_measured_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two micro-batches the second is measured, before the optimizer has taken a step."""
    model = seeded(lambda: Stack(Gated, 6))
    allocator = count_allocations(model, monkeypatch)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    num_parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    peak_bytes = 0
    with attach(model, budget="20MiB", disk=f"{tmp_path}:200MiB", min_bytes=1024) as tide:
        for index in range(4):
            with allocator:
                for micro_batch in range(2):
                    allocator.take_peak_bytes()
                    feature_step(model, index)
                    peak_bytes = allocator.take_peak_bytes()
                    if index == 0 and micro_batch == 1:
                        assert tide.plan is None
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        assert tide.plan is not None and tide.workload is not None
        assert tide.workload.outside is not None
        # Parameters, their gradients and AdamW's two averages.
        assert tide.workload.outside.resident_bytes >= 4 * num_parameter_bytes
        assert peak_bytes <= tide.plan.peak_bytes <= 1.1 * peak_bytes


@pytest.mark.parametrize("drops_gradients", [0, 99])
@pytest.mark.parametrize("name", ["llama", "stack"])
def test_the_peak_of_a_step_is_the_planned_one_and_within_the_budget(
    name: str, drops_gradients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, from the least budget to where everything fits; and no gradient changes."""
    build, step = {
        "llama": (lambda: models.llama().to(torch.bfloat16), language_step),
        "stack": (lambda: Stack(Gated, 6), feature_step),
    }[name]
    wanted = plain(build, step)
    options: dict[str, Any] = {"drops_gradients": drops_gradients}
    least = smallest_budget(build, step, tmp_path, monkeypatch, **options)
    plans: set[str] = set()
    for share in (100, 115, 140):
        run = run_counted(build, step, least * share // 100, tmp_path, monkeypatch, **options)
        plan, workload = run.tide.plan, run.tide.workload
        assert plan is not None and workload is not None
        assert differences(run.trace, wanted) == []
        assert run.peak_bytes <= plan.peak_bytes <= plan.budget_bytes
        report = check_plan(plan, workload, MACHINE)
        assert report.is_sound, report.faults
        assert report.peak_bytes == plan.peak_bytes
        if plan.disk_bytes:
            # A plan that moves nothing leaves whole blocks to torch, which frees each activation
            # at its last use, before the block's end.
            assert run.peak_bytes >= 0.97 * plan.peak_bytes
            assert run.tide.statistics().moved_out_bytes > 0
        assert run.tide.statistics().num_kept_not_understood == ()
        plans.add(plan.to_json())
    assert len(plans) == 3


def wide_head_step(model: nn.Module, index: int) -> Tensor:
    """With a turn that holds more than all gradients together."""
    del index
    output_BTD = model(features())
    loss = output_BTD.repeat(40, 1, 1).square().mean()
    loss.backward()
    return loss


def test_gradients_that_are_not_there_at_the_turn_leave_their_room_to_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        return Stack(Gated, 6)

    gradient_bytes = sum(p.numel() * 4 for p in build().parameters())
    there = smallest_budget(build, wide_head_step, tmp_path, monkeypatch)
    none = smallest_budget(build, wide_head_step, tmp_path, monkeypatch, drops_gradients=99)
    assert there - none >= 0.9 * gradient_bytes
    run = run_counted(build, wide_head_step, none, tmp_path, monkeypatch, drops_gradients=99)
    assert run.tide.workload is not None
    assert run.tide.workload.gradient_bytes == gradient_bytes
    assert max(run.largest_bytes[2:]) <= none


def test_once_gradients_stay_the_plan_has_room_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step before which they are there."""

    def build() -> nn.Module:
        return Stack(Gated, 6)

    budget = smallest_budget(build, wide_head_step, tmp_path, monkeypatch) * 105 // 100
    options: dict[str, Any] = {"num_steps": 8}
    run = run_counted(build, wide_head_step, budget, tmp_path, monkeypatch, **options,
                      drops_gradients=4)  # fmt: skip
    before = run_counted(build, wide_head_step, budget, tmp_path, monkeypatch, **options,
                         drops_gradients=99)  # fmt: skip
    assert run.tide.workload is not None and before.tide.workload is not None
    gradient_bytes = before.tide.workload.gradient_bytes
    assert gradient_bytes == sum(p.numel() * 4 for p in build().parameters())
    assert run.tide.workload.gradient_bytes == 0
    assert run.tide.workload.outside is not None and before.tide.workload.outside is not None
    more_bytes = run.tide.workload.outside.resident_bytes
    assert more_bytes - before.tide.workload.outside.resident_bytes == gradient_bytes
    assert run.tide.plan is not None and before.tide.plan is not None
    assert run.tide.plan.peak_bytes == run.peak_bytes
    assert before.tide.plan.peak_bytes == before.peak_bytes
    assert run.peak_bytes > before.peak_bytes
    assert max(run.largest_bytes) <= budget
    assert differences(run.trace, plain(build, wide_head_step, num_steps=8)) == []


def grown_bytes(model: nn.Module, folder: Path, change: Callable[[], None]) -> int:
    """Return what counts as resting more, after a change between planned steps."""
    with attach(model, budget="1GiB", disk=f"{folder}:200MiB", decide={"*": "RECOMPUTE"}) as tide:
        for _ in range(4):
            feature_step(model, 0)
            model.zero_grad()
        assert tide.workload is not None and tide.workload.outside is not None
        before = tide.workload.outside.resident_bytes
        change()
        feature_step(model, 0)
        feature_step(model, 0)  # the plan is made again as it starts
        assert tide.workload.outside is not None
        return tide.workload.outside.resident_bytes - before


def test_gradients_that_hooks_stop_to_give_up_count_from_then_on(tmp_path: Path) -> None:
    """As where the optimizer steps in backward of some micro-batches only."""
    model = seeded(lambda: Stack(Gated, 4))
    gives_up = [True]

    def give_up(parameter: Tensor) -> None:
        if gives_up[0]:
            parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(give_up)
    parameter_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert grown_bytes(model, tmp_path, lambda: gives_up.__setitem__(0, False)) == parameter_bytes


def test_gradients_of_what_is_unfrozen_count_from_then_on(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(Gated, 4))
    weights = [module.weight for module in model.modules() if isinstance(module, nn.LayerNorm)]
    for weight in weights:
        weight.requires_grad_(False)

    def unfreeze() -> None:
        for weight in weights:
            weight.requires_grad_(True)

    # Gradients that stay until the next step count as well then.
    others = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    unfrozen = sum(weight.numel() * 4 for weight in weights)
    assert grown_bytes(model, tmp_path, unfreeze) == others + unfrozen


class Headed(Stack):
    """Layers of another class come after the blocks."""

    def __init__(self) -> None:
        super().__init__(Gated, 2)
        # As many parameters as a block, and fewer modules of one class than there are blocks.
        self.head = nn.Linear(models.WIDTH, 6 * models.WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        return self.head(super().forward(h_BTD))


def test_gradients_that_stay_for_the_blocks_alone_leave_those_of_the_head_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with two optimizers, one of which zeroes in place."""
    model = seeded(Headed)
    allocator = count_allocations(model, monkeypatch)
    head_bytes = sum(p.numel() * 4 for p in model.get_submodule("head").parameters())
    with attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", decide={"*": "RECOMPUTE"}) as tide:
        for _ in range(5):
            with allocator:
                allocator.largest_bytes = 0
                model(features(1, 2, models.WIDTH)).square().mean().backward()
            for parameter in model.get_submodule("head").parameters():
                parameter.grad = None
            for parameter in model.get_submodule("blocks").parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()
        assert tide.plan is not None and tide.workload is not None
        assert tide.workload.outside is not None
        assert tide.workload.outside.turn_gradient_bytes == head_bytes
        assert allocator.largest_bytes <= tide.plan.peak_bytes


@pytest.mark.parametrize("name", ["llama", "stack"])
def test_no_step_takes_more_than_a_budget_that_full_recomputation_keeps_to(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that observe, measure and check included; the disk is slow, so that much is kept."""
    slow = replace(MACHINE, disk_write_bytes_per_s=10**6, disk_read_bytes_per_s=10**6)

    def probe(*_: Any, **__: Any) -> Machine:
        return slow

    monkeypatch.setattr(_budgets, "probe_machine", probe)
    build, step = {
        "llama": (lambda: models.llama(num_layers=6).to(torch.bfloat16), language_step),
        "stack": (lambda: Stack(Gated, 8), feature_step),
    }[name]
    pins = {"*": "RECOMPUTE"}
    run = run_counted(build, step, 2**30, tmp_path, monkeypatch, decide=pins)
    recomputed_bytes = run.largest_bytes[-1]
    for share in (100, 103, 106, 115, 130):
        budget = recomputed_bytes * share // 100
        run = run_counted(build, step, budget, tmp_path, monkeypatch)
        assert max(run.largest_bytes) <= budget, share


def test_a_budget_that_nothing_keeps_to_is_refused_before_a_planned_step(tmp_path: Path) -> None:
    model = seeded(models.llama)
    tide = attach(model, budget="1KiB", disk=f"{tmp_path}:200MiB")
    language_step(model, 0)
    language_step(model, 1)
    with pytest.raises(
        BudgetError, match=r"the smallest that fits is .*The rest of the step holds"
    ):
        language_step(model, 2)
    assert tide.plan is None
    model.zero_grad()
    # The model is as it was, and trains on.
    assert (
        differences(train(model, language_step), train(seeded(models.llama), language_step)) == []
    )


def hooks_of_a_step(model: nn.Module) -> list[int]:
    """Count the hooks on the outputs of a model's blocks, in a forward pass."""
    found: list[int] = []

    def count(module: nn.Module, args: Any, output: Tensor) -> None:
        found.append(len(output._backward_hooks or ()))  # pyright: ignore[reportPrivateUsage]

    blocks = [*model.get_submodule("blocks").children()][1:]
    handles = [block.register_forward_hook(count) for block in blocks]
    model(features())
    for handle in handles:
        handle.remove()
    return found


def modules_with_hooks(model: nn.Module) -> list[str]:
    return [
        path
        for path, module in model.named_modules()
        for table in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
        for _ in getattr(module, table)
    ]


def test_where_everything_fits_nothing_is_recorded(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(Gated, 4))
    with attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB") as tide:
        got = train(model, feature_step, num_steps=5)
        num_hooks = hooks_of_a_step(model)
        # Before and after the model, and where its first block starts: they see the next batch.
        assert modules_with_hooks(model) == ["", "", "blocks.0"]
        tide.reset_statistics()
        train(model, feature_step, num_steps=1)
        counts, plan = tide.statistics(), tide.plan
    assert plan is not None and set(plan.decisions.values()) == {Decision.KEEP}
    assert num_hooks == [0, 0, 0]
    assert modules_with_hooks(model) == []
    assert counts.moved_out_bytes == counts.num_recomputed_ops == 0
    assert differences(got, train(seeded(lambda: Stack(Gated, 4)), feature_step, num_steps=5)) == []


def growing_step(model: nn.Module, index: int) -> Tensor:
    """Train on batches of which all but some fit."""
    num_tokens = 40 if index in (4, 5, 7) else 8
    loss = model(features(2, num_tokens, 32)).square().mean()
    loss.backward()
    return loss


def test_a_batch_that_does_not_fit_gets_its_hooks_back(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Stack(Gated, 4)

    num_bytes = sum(p.numel() * p.element_size() for p in build().parameters())
    model = seeded(build)
    trace, optimizer = Trace(), sgd(model)
    num_hooked: list[int] = []
    moved: list[int] = []
    budget, disk = 2 * num_bytes + 2**17, f"{tmp_path}:200MiB"
    with attach(model, budget=budget, disk=disk, min_bytes=1) as tide:
        for index in range(9):
            tide.reset_statistics()
            run_step(model, growing_step, index, trace, optimizer)
            counts = tide.statistics()
            moved.append(counts.moved_out_bytes + counts.num_recomputed_ops)
            num_hooked.append(len(modules_with_hooks(model)))
    assert differences(trace, train(seeded(build), growing_step, num_steps=9)) == []
    assert [n == 3 for n in num_hooked] == [i in (2, 3, 6, 8) for i in range(9)]
    assert [m > 0 for m in moved] == [i in (0, 1, 4, 5, 7) for i in range(9)]


def varying_step(model: nn.Module, index: int) -> Tensor:
    """Train on batches of several lengths, some longer than the one that was measured."""
    tokens = (16, 16, 16, 16, 24, 24, 9, 16, 24)[index]
    loss = model(features(2, tokens, 32)).square().mean()
    loss.backward()
    return loss


def test_each_shape_gets_a_plan_without_being_observed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> nn.Module:
        return Stack(Gated, 4)

    model = seeded(build)
    trace, optimizer = Trace(), sgd(model)
    plans: list[str] = []
    with (
        caplog.at_level(logging.INFO, logger="ebbtide"),
        attach(model, budget="auto", disk=f"{tmp_path}:200MiB", min_bytes=1) as tide,
    ):
        for index in range(9):
            run_step(model, varying_step, index, trace, optimizer)
            plans.append("" if tide.plan is None else str(tide.plan.peak_bytes))
    assert differences(trace, train(seeded(build), varying_step, num_steps=9)) == []
    assert plans[:2] == ["", ""]
    assert plans[3] == plans[7] and plans[4] == plans[5] == plans[8]
    assert int(plans[6]) < int(plans[3]) < int(plans[4])
    measured = [r.message for r in caplog.records if r.message.startswith("measured")]
    assert len(measured) == 1


def test_shapes_share_a_bucket_an_eighth_of_an_octave_wide() -> None:
    assert [bucket(Shape(rows=2, length=n)).length for n in (1, 100, 104, 105, 128, 129, 144)] == [
        1, 104, 104, 112, 128, 144, 144,
    ]  # fmt: skip


def two_graphs_step(model: nn.Module, index: int) -> Tensor:
    """Run two forwards before the first backward, as a pipeline's stage does."""
    del index
    losses = [model(features()).square().mean() for _ in range(2)]
    for loss in losses:
        loss.backward()
    return losses[0]


def test_what_all_graphs_keep_counts_where_several_are_alive_at_once() -> None:
    """Each keeps all of its blocks, and the budget has to hold it twice."""
    peaks: list[int] = []
    kept_bytes = 0
    for step in (feature_step, two_graphs_step):
        model = seeded(lambda: Stack(Gated, 4))
        with attach(model, budget=2**30, decide={"*": "KEEP"}) as tide:
            train(model, step)
            assert tide.plan is not None and tide.workload is not None
            assert tide.num_graphs == (1 if step is feature_step else 2)
            peaks.append(tide.plan.peak_bytes)
            activations = [a for block in tide.workload.blocks for a in block.activations]
            kept_bytes = sum(
                a.num_bytes for a in activations if tide.plan.decision(a.name) is Decision.KEEP
            )
    # The second backward of a step finds the gradients of the first one: they rest on the device.
    assert peaks[1] >= peaks[0] + kept_bytes > peaks[0]
    model = seeded(lambda: Stack(Gated, 4))
    with (
        attach(model, budget=peaks[1] - 1, decide={"*": "KEEP"}),
        pytest.raises(BudgetError, match="2 forwards before the first one's backward"),
    ):
        train(model, two_graphs_step)


def test_pins_are_kept_to_and_explained(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(Gated, 4))
    decide = {"*.gate": "RECOMPUTE", "blocks.0.*": Decision.KEEP}
    with attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", decide=decide) as tide:
        with pytest.raises(RuntimeStateError, match="train three steps"):
            tide.explain("blocks.1.gate")
        train(model, feature_step, num_steps=3)
        assert tide.plan is not None and tide.workload is not None
        pinned = {n: d for n, d in tide.plan.decisions.items() if n.startswith("blocks.0.")}
        assert set(pinned.values()) <= {Decision.KEEP}
        names = [a.name for a in tide.workload.blocks[1].activations if a.name.endswith(".gate")]
        assert names and all(tide.plan.decision(n) is Decision.RECOMPUTE for n in names)
        text = str(tide.explain(names[0]))
        assert names[0] in text and "RECOMPUTE" in text
        with pytest.raises(PlanError, match="no activation 'nonsense'; the nearest are"):
            tide.explain("nonsense")
        report = tide.report()
    assert "predicted: forward and backward" in report and "of a budget of 1.0 GiB" in report


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(Gated, 4))
    attach(model, budget="1GiB", disk=f"{tmp_path}:200MiB", decide={"*.nothing": "KEEP"})
    train(model, feature_step, num_steps=2)
    with pytest.raises(PlanError, match="matches no activation of Stack"):
        train(model, feature_step, num_steps=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plan": "offload", "budget": "1GiB"}, "were both given; a budget makes the plan"),
        ({"budget": "1 parsec"}, "cannot read '1 parsec' as a budget"),
        ({"budget": "101%"}, "more than the device has"),
        ({"plan": "recompute", "decide": {"*": "KEEP"}}, "decide= was given without a budget"),
        ({"plan": "recompute", "planner": "greedy"}, "planner= was given without a budget"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    model = seeded(lambda: Stack(Gated, 4))
    with pytest.raises(ValueError, match=message):
        attach(model, **arguments)
    with attach(model, "recompute"):  # nothing was left behind
        train(model, feature_step, num_steps=1)


def test_an_unknown_planner_lists_the_valid_ones() -> None:
    with pytest.raises(PlanError, match="unknown planner 'lpp'; valid names, nearest first: lp"):
        attach(seeded(lambda: Stack(Gated, 4)), budget="1GiB", planner="lpp")


def test_the_prediction_is_corrected_by_what_steps_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the measured step each op takes one tick; whole steps have far fewer marks."""

    def build() -> nn.Module:
        return Stack(Gated, 6)

    def run(num_steps: int) -> Run:
        return run_counted(
            build, feature_step, 2**30, tmp_path, monkeypatch,
            num_steps=num_steps, decide={"*": "RECOMPUTE"},
        )  # fmt: skip

    before = run(4)
    num_steps = 3 + NUM_SKIPPED + NUM_STEPS + 1  # the plan is made within the third
    after = run(num_steps)
    assert before.tide.plan is not None and after.tide.plan is not None
    assert before.tide.plan.predicted_step_ns > 1_000_000
    # Between the two marks of a step lies one tick of the meter.
    assert after.tide.plan.predicted_step_ns == pytest.approx(100_000, rel=0.02)
    assert after.tide.plan.decisions == before.tide.plan.decisions


def test_after_running_out_of_memory_the_next_plan_takes_less(tmp_path: Path) -> None:
    planner = BudgetPlanner(
        "100MiB",
        device=torch.device("cpu"),
        host_bytes=None,
        disks=(),
        decide=None,
        min_bytes=1024,
        planner="greedy",
    )
    model = seeded(lambda: Stack(Gated, 4))
    with attach(model, budget="100MiB", disk=f"{tmp_path}:200MiB") as tide:
        train(model, feature_step, num_steps=3)
        assert tide.plan is not None
        text = planner.shrink(tide.plan, tide.plan.peak_bytes + 2**20)
    assert "ebbtide predicted a peak of" in text and "The next step is planned for 94.0 MiB" in text
    assert planner.budget_bytes == 100 * 2**20 - 2**20 - 5 * 2**20


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_plan_is_corrected_once_and_one_that_comes_out_otherwise_a_few_times(
    is_changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each correction plans anew within a step."""
    correct = BudgetPlanner.correct
    plans: list[Plan] = []

    def count(planner: Any, workload: Any, plan: Plan, measured_ns: int) -> tuple[Any, Plan]:
        plans.append(plan)
        paced, better = correct(planner, workload, plan, measured_ns)
        if is_changed:
            name = next(iter(better.decisions))
            decisions = {**better.decisions, name: Decision.KEEP}
            if len(plans) % 2 == 0:
                decisions[name] = plans[0].decisions[name]
            better = replace(better, decisions=decisions)
        return paced, better

    monkeypatch.setattr(BudgetPlanner, "correct", count)
    run_counted(
        lambda: Stack(Gated, 4), feature_step, 2**30, tmp_path, monkeypatch,
        num_steps=3 + 5 * (NUM_SKIPPED + NUM_STEPS + 1), decide={"*": "RECOMPUTE"},
    )  # fmt: skip
    assert len(plans) == (MAX_CORRECTIONS if is_changed else 1)


class Exhausted(nn.Module):
    """A block that runs out of memory when it is told to."""

    is_full = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, h_BTD: Tensor) -> Tensor:
        if Exhausted.is_full:
            raise torch.OutOfMemoryError("told to run out")
        return h_BTD + torch.tanh(self.linear(h_BTD))


def exhausted_step(model: nn.Module) -> Tensor:
    loss = model(features(2, 64, 16)).square().mean()
    loss.backward(retain_graph=True)
    return loss


def attach_exhausted(model: nn.Module, folder: Path) -> Tide:
    disk = f"{folder}:200MiB"
    tide = attach(model, budget="10MiB", disk=disk, min_bytes=1024, decide={"*": "DISK"})
    for _ in range(4):
        exhausted_step(model)
    return tide


def test_a_forward_that_ran_out_of_memory_holds_nothing_and_the_next_plan_is_another(
    tmp_path: Path,
) -> None:
    """Also while its error, and with it the graph, is alive; a whole forward before it stays."""
    model = seeded(lambda: Stack(Exhausted, 4))
    with attach_exhausted(model, tmp_path) as tide:
        before = tide.plan
        loss = model(features(2, 64, 16)).square().mean()
        held_bytes = tide.statistics().disk.held_bytes
        handle = model.get_submodule("blocks.2").register_forward_pre_hook(fill_up)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model(features(2, 64, 16))
        handle.remove()
        Exhausted.is_full = False
        assert "ebbtide predicted a peak of" in "".join(caught.value.__notes__)
        assert tide.statistics().disk.held_bytes == held_bytes > 0
        loss.backward()
        del loss
        assert tide.statistics().disk.held_bytes == 0
        exhausted_step(model)
        assert_is_more_frugal(tide, before)


def test_a_forward_before_it_is_left_alone_where_the_first_block_is_not_recorded(
    tmp_path: Path,
) -> None:
    model = seeded(lambda: Stack(Exhausted, 4))
    disk, decide = f"{tmp_path}:200MiB", {"blocks.0*": "KEEP", "blocks.[123]*": "DISK"}
    with attach(model, budget="10MiB", disk=disk, min_bytes=1024, decide=decide) as tide:
        for _ in range(5):
            exhausted_step(model)
        loss = model(features(2, 64, 16)).square().mean()
        held_bytes = tide.statistics().disk.held_bytes
        handle = model.get_submodule("blocks.2").register_forward_pre_hook(fill_up)
        with pytest.raises(torch.OutOfMemoryError):
            model(features(2, 64, 16))
        handle.remove()
        Exhausted.is_full = False
        assert tide.statistics().disk.held_bytes == held_bytes > 0
        loss.backward()


def fill_up(*_: Any) -> None:
    Exhausted.is_full = True


def test_a_backward_that_ran_out_of_memory_holds_nothing_and_the_next_plan_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(lambda: Stack(Exhausted, 4))
    with attach_exhausted(model, tmp_path) as tide:
        before = tide.plan
        loss = model(features(2, 64, 16)).square().mean()
        assert tide.statistics().disk.held_bytes > 0

        def run_out(*_: Any) -> Tensor:
            raise torch.OutOfMemoryError("told to run out")

        with monkeypatch.context() as patch:
            patch.setattr(Record, "_storage_of", run_out)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                loss.backward(retain_graph=True)
        assert "ebbtide predicted a peak of" in "".join(caught.value.__notes__)
        assert tide.statistics().disk.held_bytes == 0
        with pytest.raises(RuntimeStateError, match="was let go, because its step ran out"):
            loss.backward()
        exhausted_step(model)
        assert_is_more_frugal(tide, before)


def assert_is_more_frugal(tide: Tide, before: Plan | None) -> None:
    assert tide.plan is not None and before is not None
    assert tide.plan.budget_bytes < before.budget_bytes
