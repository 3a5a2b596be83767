"""`attach` takes hold of a model, or says why not and leaves it as it was."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.errors import EbbtideError, MemoryTierError, ModelError, PlanError, RuntimeStateError
from ebbtide.memory.ledger import Statistics, TierStatistics
from ebbtide.plan import Decision, Plan
from ebbtide.torch import Tide, attach
from ebbtide.units import format_bytes
from tests.torch import models
from tests.torch.models import NUM_BLOCKS, NUM_TOKENS, WIDTH, Gated, Stack, features
from tests.torch.training import (
    PLANS,
    assert_plan_was_run,
    attach_here,
    differences,
    feature_step,
    language_step,
    seeded,
    train,
    train_attached,
)

# One activation of the model width; `Gated` has two of twice the width.
ROW_BYTES = 4 * models.BATCH * NUM_TOKENS * WIDTH


def gated_stack() -> nn.Module:
    return Stack(Gated)


def hooks_of(model: nn.Module) -> dict[str, list[Any]]:
    """Return every hook of every module, with the flags that they were registered with."""
    found: dict[str, list[Any]] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if "_hooks" in name and isinstance(value, dict):
                found[f"{path}: {name}"] = list(value.items())
    assert any(name.endswith("_forward_hooks_always_called") for name in found)
    return found


def assert_trains_as_before(model: nn.Module, plain: nn.Module) -> None:
    """Check that a model has no hook left, and the gradients of a model that never had one."""
    assert hooks_of(model) == hooks_of(plain)
    assert differences(train(model, feature_step), train(plain, feature_step)) == []


def refusal(
    kind: type[Exception], build: Callable[[], nn.Module] = gated_stack, **arguments: Any
) -> str:
    """Attach, which must fail and leave the model as it was; return the message."""
    model = seeded(build)
    hooks = hooks_of(model)
    with pytest.raises(kind) as caught:
        attach(model, **arguments)
    assert hooks_of(model) == hooks
    if build is gated_stack:
        assert_trains_as_before(model, seeded(build))
        # A refused attach is forgotten: the next one is judged on its own.
        attach(model, "recompute").close()
    return str(caught.value)


# -- refused at once -----------------------------------------------------------------------------


class Lone(nn.Module):
    """A model without repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)


def test_a_model_without_repeated_blocks_is_refused() -> None:
    assert refusal(ModelError, Lone, plan="recompute") == (
        "Lone has no repeated blocks: no ModuleList or Sequential holds two or more modules of "
        "one class side by side. Name the blocks: "
        "attach(model, blocks=['encoder.first', 'encoder.second'])."
    )


def test_an_unknown_plan_lists_the_valid_ones() -> None:
    assert refusal(PlanError, plan="ballanced") == (
        "unknown plan 'ballanced'; valid names, nearest first: balanced, offload, "
        "offload-inputs, offload-last:K, keep, recompute"
    )


def test_more_last_blocks_than_there_are_are_refused(tmp_path: Path) -> None:
    assert refusal(PlanError, plan="offload-last:4", disk=f"{tmp_path}:1MiB") == (
        "plan 'offload-last:4' names 4 blocks, but Stack has 3. Name at most as many."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host": "12 parsecs"}, "cannot read '12 parsecs' as a size: unknown unit 'parsecs'"),
        ({"host": -5}, "size -5 is negative; a size is a number, zero or more, and a unit"),
        ({"disk": "/nowhere"}, "disk '/nowhere' has no cap; write a directory, a colon and a cap"),
        ({"disk": "/nowhere:many"}, "disk '/nowhere:many' has a cap that is not a size"),
        ({"disk": ":1GiB"}, "disk ':1GiB' has no directory"),
        ({"min_bytes": -1}, "min_bytes is -1; it must be 0 or more"),
    ],
)
def test_a_malformed_size_is_refused(arguments: dict[str, Any], message: str) -> None:
    assert refusal(ValueError, plan="offload", **arguments).startswith(message)


def test_host_memory_on_the_cpu_is_refused() -> None:
    assert refusal(MemoryTierError, plan="offload", host="1.5GiB") == (
        "host=1.5 GiB was given, but the model is on 'cpu': there, host memory is the device's "
        "own memory. Leave host= out; use disk='FOLDER:SIZE' to move activations out of memory."
    )


@pytest.mark.parametrize("plan", ["offload-inputs", "offload", "balanced", "offload-last:2"])
def test_an_evicting_plan_on_the_cpu_needs_a_disk(plan: str) -> None:
    assert refusal(MemoryTierError, plan=plan) == (
        f"plan '{plan}' moves activations off the device, but the model is on 'cpu' and has no "
        "other memory. Give a disk: attach(model, disk='/path/to/folder:20GiB'), or use "
        "plan='recompute'."
    )


def test_a_disk_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    assert refusal(MemoryTierError, plan="offload", disk=f"{folder}:1MiB") == (
        f"disk folder '{folder}' does not exist; ebbtide makes a file in it, but never the "
        "folder. Create it, or name another one."
    )
    assert not folder.exists()


def test_a_disk_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("not a folder", encoding="utf-8")
    assert refusal(MemoryTierError, plan="offload", disk=f"{path}:1MiB") == (
        f"disk folder '{path}' is not a folder; ebbtide makes a file of its own in a folder. "
        f"Name a folder, for example '{tmp_path}'."
    )
    assert path.read_text(encoding="utf-8") == "not a folder"


def test_a_disk_folder_that_is_read_only_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    assert refusal(MemoryTierError, plan="offload", disk=f"{folder}:1MiB") == (
        f"disk folder '{folder}': no file can be made in it (Permission denied); ebbtide needs "
        "to write there. Give yourself permission to write, or name another folder."
    )


def test_a_model_that_checkpoints_itself_is_refused() -> None:
    def build() -> nn.Module:
        model = models.llama()
        layer: Any = model.get_submodule("model.layers.1")
        layer.gradient_checkpointing = True
        return model

    assert refusal(ModelError, build, plan="recompute") == (
        "model.layers.1 checkpoints itself (gradient_checkpointing is on): its blocks would be "
        "recomputed twice. Turn it off: model.gradient_checkpointing_disable()."
    )


def test_a_model_on_the_meta_device_is_refused() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return Stack(Gated)

    assert refusal(ModelError, build, plan="recompute") == (
        "the model is on the meta device. Materialise it, then attach."
    )


def test_blocks_on_several_devices_are_refused() -> None:
    def build() -> nn.Module:
        model = Stack(Gated)
        model.blocks[1].to("meta")
        return model

    assert refusal(ModelError, build, plan="recompute") == (
        "the blocks are on several devices (cpu, meta); one plan is for one device. "
        "Name the blocks of one device: attach(model, blocks=[...])."
    )


def test_a_second_attach_is_refused_until_the_first_is_closed() -> None:
    message = (
        "Stack is attached already; a model has one plan at a time. Call close() on what "
        "attach() returned before."
    )
    model = gated_stack()
    outer = nn.Sequential(model, nn.Linear(WIDTH, WIDTH))
    with attach(model, "recompute"):
        hooks = hooks_of(model)
        for again in (model, outer):
            with pytest.raises(RuntimeStateError) as caught:
                attach(again, "recompute")
            assert str(caught.value) == message
        assert hooks_of(model) == hooks
    with (
        attach(outer, "recompute", blocks="0.blocks.*"),
        pytest.raises(RuntimeStateError, match="Sequential is attached already"),
    ):
        attach(model, "recompute")
    attach(model, "recompute").close()


# -- plans of one's own --------------------------------------------------------------------------


def plan_of(build: Callable[[], nn.Module], name: str, folder: Path) -> Plan:
    model = seeded(build)
    with attach_here(model, name, folder) as tide:
        train(model, feature_step, num_steps=2)
        assert tide.plan is not None
        return tide.plan


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_was_saved_and_read_back_decides_the_same(name: str, tmp_path: Path) -> None:
    plan = plan_of(gated_stack, name, tmp_path)
    again = Plan.from_json(plan.to_json())
    model = seeded(gated_stack)
    with attach_here(model, again, tmp_path) as tide:
        trace = train_attached(tide, model, feature_step)
        assert tide.plan == plan
        assert_plan_was_run(tide)
    assert differences(trace, train(seeded(gated_stack), feature_step)) == []


def test_a_plan_for_other_blocks_is_refused_at_once(tmp_path: Path) -> None:
    plan = plan_of(lambda: Stack(Gated, 12), "recompute", tmp_path)
    assert refusal(PlanError, plan=plan) == (
        "plan 'recompute' was made for Stack, and decides for blocks.10.gate, which is in no "
        "block of this Stack. Make a plan for this model, or name its blocks: "
        "attach(model, blocks=[...])."
    )


def test_a_plan_for_another_model_is_refused_when_the_model_was_observed(tmp_path: Path) -> None:
    plan = plan_of(lambda: Stack(models.Custom), "offload", tmp_path)
    model, plain = seeded(gated_stack), seeded(gated_stack)
    attach_here(model, plan, tmp_path)
    assert (
        differences(
            train(model, feature_step, num_steps=1), train(plain, feature_step, num_steps=1)
        )
        == []
    )
    with pytest.raises(PlanError) as caught:
        feature_step(model, 1)
    message = str(caught.value)
    assert message.startswith(f"plan 'offload' is for Stack (fingerprint {plan.fingerprint}), but")
    assert "only the plan has blocks.0" in message
    assert message.endswith(
        "Make a plan for this workload, for example with "
        "ebbtide.planner.named_plan('balanced', workload)."
    )
    assert_trains_as_before(model, plain)


def test_a_plan_with_a_disk_needs_a_disk(tmp_path: Path) -> None:
    plan = plan_of(gated_stack, "offload-inputs", tmp_path)
    assert refusal(MemoryTierError, plan=plan) == (
        f"plan 'offload-inputs' evicts {plan.disk_bytes / 1024} KiB to disk, but no disk was "
        "given. Give one: attach(model, disk='/path/to/folder:20GiB')."
    )


def test_a_plan_with_host_memory_is_refused_on_the_cpu(tmp_path: Path) -> None:
    plan = plan_of(gated_stack, "offload-inputs", tmp_path)
    text = plan.to_json().replace('"disk"', '"host"')
    bytes_on_disk = f'"disk_bytes": {plan.disk_bytes}'
    text = text.replace(bytes_on_disk, bytes_on_disk.replace("disk", "host"))
    text = text.replace('"host_bytes": 0', '"disk_bytes": 0')
    message = refusal(MemoryTierError, plan=Plan.from_json(text), disk=f"{tmp_path}:1MiB")
    assert message == (
        f"plan 'offload-inputs' evicts {plan.disk_bytes / 1024} KiB to host memory, but the model "
        "is on 'cpu': there, that is the device's own memory. Make the plan again on this device, "
        "with disk='FOLDER:SIZE'."
    )


def test_a_disk_that_is_too_small_is_refused_when_the_plan_is_made(tmp_path: Path) -> None:
    model, plain = seeded(gated_stack), seeded(gated_stack)
    attach_here(model, "offload", tmp_path, disk=f"{tmp_path}:4KiB")
    assert (
        differences(
            train(model, feature_step, num_steps=1), train(plain, feature_step, num_steps=1)
        )
        == []
    )
    with pytest.raises(MemoryTierError) as caught:
        feature_step(model, 1)
    message = str(caught.value)
    assert message.startswith(f"disk folder '{tmp_path}': the plan needs ")
    assert message.endswith(
        "but the cap is 4.0 KiB (4096 bytes); the cap is never exceeded. Raise the cap, or use a "
        "plan that moves less."
    )
    assert_trains_as_before(model, plain)


# -- naming blocks -------------------------------------------------------------------------------


def test_blocks_may_be_named_by_path_or_by_pattern(tmp_path: Path) -> None:
    for blocks in ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"], ["blocks.[01]", "blocks.2"]):
        model = seeded(gated_stack)
        with attach_here(model, "offload", tmp_path, blocks=blocks) as tide:
            trace = train_attached(tide, model, feature_step)
            assert tide.workload is not None
            assert [b.name for b in tide.workload.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
            assert_plan_was_run(tide)
        assert differences(trace, train(seeded(gated_stack), feature_step)) == []


def test_only_the_blocks_that_are_named_are_touched(tmp_path: Path) -> None:
    model, plain = seeded(gated_stack), seeded(gated_stack)
    with attach_here(model, "offload", tmp_path, blocks=["blocks.0", "blocks.2"]) as tide:
        changed = {n.split(":")[0] for n, h in hooks_of(model).items() if h != hooks_of(plain)[n]}
        assert {path.split(".")[1] for path in changed} == {"0", "2"}
        trace = train_attached(tide, model, feature_step)
        assert tide.plan is not None
        assert {name.split(".")[1][0] for name in tide.plan.decisions} == {"0", "2"}
    assert differences(trace, train(plain, feature_step)) == []


def test_an_unknown_block_lists_the_nearest_paths() -> None:
    message = refusal(ModelError, plan="recompute", blocks="block.1")
    assert message.startswith("unknown block 'block.1'; valid names, nearest first: blocks.1, ")


def test_blocks_inside_blocks_are_refused() -> None:
    assert refusal(ModelError, plan="recompute", blocks=["blocks.*", "blocks.1.up"]) == (
        "block blocks.1.up lies inside another block that was named; blocks must not overlap. "
        "Name the outer or the inner ones only."
    )


# -- what it leaves, and what it says ------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_close_restores_the_model_exactly_and_twice_is_fine(plan: str, tmp_path: Path) -> None:
    model, plain = seeded(gated_stack), seeded(gated_stack)
    kept = model.get_submodule("blocks.1").register_forward_hook(lambda *_: None)
    plain.get_submodule("blocks.1").register_forward_hook(lambda *_: None)
    before = hooks_of(model)
    tide = attach_here(model, plan, tmp_path)
    assert hooks_of(model) != before
    trace = train_attached(tide, model, feature_step)
    tide.close()
    assert hooks_of(model) == before
    assert list(tmp_path.iterdir()) == []
    tide.close()
    assert hooks_of(model) == before
    kept.remove()
    assert differences(trace, train(plain, feature_step)) == []
    assert differences(train(model, feature_step), train(plain, feature_step)) == []


def test_an_error_inside_with_closes_too() -> None:
    model = gated_stack()
    before = hooks_of(model)
    with pytest.raises(ArithmeticError), attach(model, "recompute"):
        raise ArithmeticError
    assert hooks_of(model) == before


def test_a_graph_that_outlives_close_says_so_or_runs(tmp_path: Path) -> None:
    for plan in ("recompute", "offload"):
        model, plain = seeded(gated_stack), seeded(gated_stack)
        tide = attach_here(model, plan, tmp_path)
        train_attached(tide, model, feature_step)
        train(plain, feature_step)
        inputs = features()
        loss = model(inputs).square().mean()
        tide.close()
        if plan == "offload":
            with pytest.raises(RuntimeStateError, match=r"was evicted, and .* given back by close"):
                loss.backward()
            del loss
            tide.close()
            assert tide.statistics().held_device_bytes == 0
            continue
        loss.backward()
        plain(inputs).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)


def test_a_model_may_die_without_being_closed(tmp_path: Path) -> None:
    model = gated_stack()
    attach_here(model, "offload", tmp_path)
    for index in range(3):
        feature_step(model, index)
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None


def test_plan_keep_installs_no_hook() -> None:
    model = seeded(gated_stack)
    before = hooks_of(model)
    with attach(model, "keep") as tide:
        assert hooks_of(model) == before
        trace = train(model, feature_step)
        assert hooks_of(model) == before
        assert tide.plan is None
        assert tide.statistics() == EMPTY
        assert tide.report() == "ebbtide keeps everything: no hook is installed"
        with pytest.raises(RuntimeStateError, match="Stack is attached already"):
            attach(model, "keep")
    assert differences(trace, train(seeded(gated_stack), feature_step)) == []
    attach(model, "keep").close()


EMPTY = Statistics(
    host=TierStatistics(),
    disk=TierStatistics(),
    held_device_bytes=0,
    peak_held_device_bytes=0,
    num_evictions=0,
    num_fetches=0,
    num_resurrections=0,
    num_recomputed_ops=0,
    stall_ns=0,
    num_kept_not_understood=(),
)


def test_the_disabling_variable_makes_attach_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_DISABLE", "1")
    model = gated_stack()
    before = hooks_of(model)
    with attach(model, "offload") as first, attach(model, "offload"):
        assert hooks_of(model) == before
        feature_step(model, 0)
        assert first.statistics() == EMPTY
        assert first.report() == "ebbtide keeps everything: no hook is installed"
    for value in ("", "0"):
        monkeypatch.setenv("EBBTIDE_DISABLE", value)
        with attach(model, "recompute"):
            assert hooks_of(model) != before


def test_the_disabling_variable_is_mentioned_once_in_a_process() -> None:
    program = (
        "from torch import nn; from ebbtide.torch import attach\n"
        "for _ in range(3): attach(nn.Linear(2, 2), 'no such plan').close()"
    )
    source = Path(__file__).parents[2] / "src"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "EBBTIDE_DISABLE": "1", "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == "EBBTIDE_DISABLE is set: attach() does nothing\n"
    assert result.stdout == ""


def test_statistics_count_one_step_exactly(tmp_path: Path) -> None:
    """Under `offload-inputs`, whose sums are easy: the inputs of all evicted blocks."""
    model = seeded(gated_stack)
    with attach_here(model, "offload-inputs", tmp_path) as tide:
        assert (tide.plan, tide.workload) == (None, None)
        assert tide.statistics() == EMPTY
        train_attached(tide, model, feature_step)
        assert tide.plan is not None and tide.workload is not None
        evicted = [n for n, d in tide.plan.decisions.items() if d is Decision.DISK]
        num_bytes = len(evicted) * ROW_BYTES
        assert set(evicted) <= {f"blocks.{i}:input" for i in range(NUM_BLOCKS)}
        counts = tide.statistics()
        assert counts.disk == TierStatistics(
            moved_out_bytes=num_bytes,
            moved_in_bytes=num_bytes,
            held_bytes=0,
            peak_held_bytes=num_bytes,
        )
        assert counts.host == TierStatistics()
        assert counts.num_evictions == counts.num_fetches == len(evicted)
        assert counts.num_resurrections == 0
        assert counts.held_device_bytes == 0
        assert counts.peak_held_device_bytes == num_bytes
        # Norm, gate, up, silu and product, in each block.
        assert counts.num_recomputed_ops == 5 * NUM_BLOCKS
        assert tide.host_taken_bytes == 0
        tide.reset_statistics()
        assert tide.statistics() == EMPTY


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    model = seeded(gated_stack)
    with attach_here(model, "offload-inputs", tmp_path) as tide:
        assert tide.report() == "ebbtide has not observed a whole training step yet"
        train_attached(tide, model, feature_step)
        assert tide.plan is not None
        assert tide.workload is not None
        sizes = {a.name: a.num_bytes for block in tide.workload.blocks for a in block.activations}
        decided: list[str] = []
        for decision in Decision:
            names = [n for n, made in tide.plan.decisions.items() if made is decision]
            if names:
                held = format_bytes(sum(sizes[name] for name in names))
                decided.append(f"{len(names)} {decision.value} ({held})")
        num_moved = sum(made is Decision.DISK for made in tide.plan.decisions.values())
        kib = f"{num_moved * ROW_BYTES / 1024} KiB"
        stall_ns = tide.statistics().stall_ns
        waited = [f"compute waited {stall_ns / 1e6:.1f} ms for copies"] if stall_ns else []
        assert tide.report().splitlines() == [
            f"plan offload-inputs: {', '.join(decided)}",
            "predicted: nothing, as the plan was made without a budget; steps are not timed",
            f"moved out {kib} in {num_moved} copies, in {kib} in {num_moved}; 0 fetches avoided, "
            "15 operators run again",
            f"peaks: host 0 B, disk {kib}, in flight on the device {kib}",
            *waited,
        ]


def test_the_report_names_what_was_not_understood(tmp_path: Path) -> None:
    """Here: a step that is larger than the first, for which the tier has no room."""
    model = seeded(models.llama)
    with attach_here(model, "offload-inputs", tmp_path) as tide:
        for num_tokens in (NUM_TOKENS, NUM_TOKENS, 4 * NUM_TOKENS):
            ids = models.tokens(2, num_tokens)
            model(input_ids=ids, labels=ids).loss.backward()
        ((reason, _),) = tide.statistics().num_kept_not_understood
        assert reason == "no room left in the disk tier"
        assert "(no room left in the disk tier)" in tide.report().splitlines()[-1]


def test_small_activations_are_not_moved(tmp_path: Path) -> None:
    for min_bytes, num_moved in ((ROW_BYTES + 1, 0), (ROW_BYTES, 1)):
        model = seeded(gated_stack)
        with attach_here(model, "offload-inputs", tmp_path, min_bytes=min_bytes) as tide:
            train_attached(tide, model, feature_step)
            assert min(tide.statistics().num_evictions, 1) == num_moved


def test_a_model_that_skips_blocks_trains_on(tmp_path: Path) -> None:
    """With a block that never runs there is no plan; what can be recomputed is."""

    class Skipping(Stack):
        def forward(self, h_BTD: torch.Tensor) -> torch.Tensor:
            return self.blocks[2](self.blocks[0](h_BTD))

    def build() -> nn.Module:
        return Skipping(Gated)

    model = seeded(build)
    with attach_here(model, "offload", tmp_path) as tide:
        trace = train_attached(tide, model, feature_step)
        assert tide.plan is None
        assert tide.statistics().num_recomputed_ops == 10
        assert tide.report() == "ebbtide has not observed a whole training step yet"
    assert differences(trace, train(seeded(build), feature_step)) == []


def test_the_plan_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(models.llama)
    with (
        caplog.at_level(logging.INFO, logger="ebbtide"),
        attach_here(model, "offload", tmp_path) as tide,
    ):
        train(model, language_step)
        assert tide.plan is not None
        num = len(tide.plan.decisions)
    assert [r.message for r in caplog.records] == [f"plan offload: {num} decisions"]


def test_every_refusal_is_one_of_ours() -> None:
    for kind in (MemoryTierError, ModelError, PlanError, RuntimeStateError):
        assert issubclass(kind, EbbtideError)


def test_the_handle_is_public() -> None:
    assert attach(gated_stack(), "keep").__class__ is Tide
