"""On a GPU, every plan leaves losses and gradients with the bits that they have without it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.torch import attach
from tests.torch import models
from tests.torch.cases import CASES, ODD_CASES
from tests.torch.models import Gated, Stack, features, tokens
from tests.torch.training import (
    PLANS,
    Step,
    Trace,
    differences,
    feature_step,
    language_step,
    learn_at_once,
    seeded,
    train,
    train_attached,
)

ALL_CASES = CASES | ODD_CASES


@pytest.fixture(autouse=True)
def deterministic_on_cuda() -> Iterator[None]:
    """Let torch refuse every kernel whose bits vary, and make tensors on the GPU."""
    torch.set_default_device("cuda")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward is not deterministic
    with learn_at_once():
        yield
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    torch.set_default_device("cpu")


def build_on_cuda(name: str) -> nn.Module:
    if name == "adapters on a frozen base":
        pytest.importorskip("peft")
    with torch.device("cpu"):
        model = seeded(ALL_CASES[name].build)
    return model.to("cuda")


@cache
def train_plain(name: str) -> Trace:
    return train(build_on_cuda(name), ALL_CASES[name].step)


def train_plain_or_skip(name: str) -> Trace:
    try:
        return train_plain(name)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        pytest.skip(f"torch itself does not repeat its bits here: {error}")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_same_bits(name: str, plan: str) -> None:
    wanted = train_plain_or_skip(name)
    model = build_on_cuda(name)
    with attach(model, plan, min_bytes=1024) as tide:
        got = train_attached(tide, model, CASES[name].step)
        counts = tide.statistics()
        assert tide.plan is not None
        assert (counts.host.moved_out_bytes > 0) == (tide.plan.host_bytes > 0)
        assert counts.host.moved_in_bytes <= CASES[name].num_backwards * tide.plan.host_bytes
        assert counts.host.held_bytes == 0
    assert differences(got, wanted) == []


@pytest.mark.parametrize("name", ODD_CASES)
def test_odd_programs_have_the_same_bits(name: str) -> None:
    wanted = train_plain_or_skip(name)
    model = build_on_cuda(name)
    with attach(model, "balanced", min_bytes=1024) as tide:
        got = train(model, ODD_CASES[name].step)
        assert tide.statistics().moved_out_bytes > 0
        assert tide.statistics().host.held_bytes == 0
    assert differences(got, wanted) == []


@pytest.mark.parametrize("plan", ["offload", "balanced"])
@pytest.mark.parametrize("host", [None, "20KiB"])
def test_disk_gives_the_same_bits(plan: str, host: str | None, tmp_path: Path) -> None:
    name = "llama with grouped queries"
    model = build_on_cuda(name)
    disk = f"{tmp_path}:200MiB"
    with attach(model, plan, disk=disk, host=host, min_bytes=1024) as tide:
        got = train_attached(tide, model, language_step)
        counts = tide.statistics()
        assert tide.plan is not None
        assert counts.disk.moved_out_bytes == tide.plan.disk_bytes > 0
        assert counts.disk.moved_in_bytes > 0
        assert counts.host.moved_out_bytes == tide.plan.host_bytes
        assert (tide.plan.host_bytes > 0) == (host is not None)
        assert tide.plan.host_bytes <= 20 * 1024
    assert differences(got, train_plain(name)) == []


def test_a_second_backward_of_one_graph_reads_what_the_first_had_from_pinned_memory(
    tmp_path: Path,
) -> None:
    name = "llama with grouped queries"
    ids = tokens(device="cuda")

    def loss_of(model: Any) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    plain = build_on_cuda(name)
    wanted = torch.autograd.grad(loss_of(plain), list(plain.parameters()))
    model = build_on_cuda(name)
    with attach(model, "offload", disk=f"{tmp_path}:200MiB", min_bytes=1024) as tide:
        for _ in range(3):
            loss_of(model).backward()
        loss = loss_of(model)
        for _ in range(2):
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            assert all(map(torch.equal, found, wanted))
        runtime = tide.runtime
        assert runtime is not None and runtime.tiers is not None
        assert runtime.tiers.disk is not None
        assert runtime.tiers.disk.statistics().read_bytes > 0
        del loss


def crossing_step(model: nn.Module, index: int) -> Tensor:
    """Run two forwards before their backwards, the first one's backward first."""
    del index
    losses = [model(features()).square().mean() for _ in range(2)]
    for loss in losses:
        loss.backward()
    return losses[0] + losses[1]


def failing_step(model: nn.Module, index: int) -> Tensor:
    """Fail in the middle block first, in every step; then train as usual."""
    middle: Any = model.get_submodule("blocks.1")
    middle.error = ArithmeticError
    with pytest.raises(ArithmeticError):
        model(features())
    middle.error = None
    return feature_step(model, index)


def evaluating_step(model: nn.Module, index: int) -> Tensor:
    """Evaluate without gradients in every step; then train as usual."""
    model.eval()
    with torch.no_grad():
        model(input_ids=tokens(device="cuda"))
    model.train()
    return language_step(model, index)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "two forwards before two backwards": (lambda: Stack(Gated), crossing_step),
    "a forward that fails": (lambda: Stack(models.Failing), failing_step),
    "evaluation between steps": (models.gpt2, evaluating_step),
}


def on_cuda(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("cpu"):
        model = seeded(build)
    return model.to("cuda")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_the_same_bits(name: str, plan: str) -> None:
    build, step = PROGRAMS[name]
    wanted = train(on_cuda(build), step)
    model = on_cuda(build)
    with attach(model, plan, min_bytes=1024) as tide:
        got = train_attached(tide, model, step)
        counts = tide.statistics()
        assert tide.plan is not None
        assert (counts.host.moved_out_bytes > 0) == (tide.plan.host_bytes > 0)
        assert counts.host.held_bytes == counts.held_device_bytes == 0
    assert differences(got, wanted) == []


@pytest.mark.parametrize("plan", PLANS)
def test_a_copy_of_an_attached_model_trains_on_its_own(plan: str) -> None:
    model, plain = on_cuda(models.llama), on_cuda(models.llama)
    with attach(model, plan, min_bytes=1024) as tide:
        got = train(model, language_step, num_steps=2)
        assert differences(got, train(plain, language_step, num_steps=2)) == []
        duplicate, plain_duplicate = copy.deepcopy(model), copy.deepcopy(plain)
        tide.reset_statistics()
        theirs = train(duplicate, language_step, first=10)
        assert tide.statistics().moved_out_bytes == tide.statistics().num_recomputed_ops == 0
    assert differences(theirs, train(plain_duplicate, language_step, first=10)) == []


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_on_another_stream_gives_the_same_bits(plan: str) -> None:
    name = "llama with grouped queries"
    model = build_on_cuda(name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with attach(model, plan, min_bytes=1024) as tide, torch.cuda.stream(stream):
        got = train_attached(tide, model, language_step)
    torch.cuda.synchronize()
    assert differences(got, train_plain(name)) == []


class Wide(nn.Module):
    """A feed-forward of four products, large enough for copies to take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = h_BTD
        for linear in self.linears:
            x_BTD = torch.tanh(linear(x_BTD))
        return h_BTD + x_BTD


def large_stack() -> nn.Module:
    return Stack(Wide, num_blocks=8).to("cuda")


def large_step(model: nn.Module) -> None:
    model(features(8, 1024, 512)).square().mean().backward()


def test_copies_under_load_give_the_same_bits_many_times() -> None:
    """64 MiB a block and slow compute: copies and kernels really overlap."""
    model = seeded(large_stack)
    torch.manual_seed(3)
    large_step(model)
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with attach(model, "offload") as tide:
        for _ in range(20):
            model.zero_grad()
            torch.manual_seed(3)
            large_step(model)
            got = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert tide.statistics().host.moved_out_bytes > 19 * 100 * 2**20


def fill_with_nan(*_: Any) -> None:
    """Take and overwrite the memory that was let go last."""
    torch.full((8 * 1024 * 512,), float("nan"))


@pytest.mark.parametrize("plan", PLANS)
def test_memory_that_is_let_go_may_be_overwritten_at_once(plan: str) -> None:
    """With the CPU far ahead, so that all copies and kernels still lie before the device."""
    model = seeded(large_stack)
    inputs = features(8, 1024, 512).requires_grad_()
    model(inputs).square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with attach(model, plan) as tide:
        for block in model.get_submodule("blocks").children():
            block.register_forward_hook(fill_with_nan)
            block.register_full_backward_hook(fill_with_nan)
        for _ in range(5):
            model.zero_grad()
            torch.cuda._sleep(50_000_000)  # pyright: ignore[reportPrivateUsage]
            loss = model(inputs).square().mean()
            fill_with_nan()
            torch.cuda._sleep(50_000_000)  # pyright: ignore[reportPrivateUsage]
            loss.backward()
            got = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert (tide.statistics().moved_out_bytes > 0) == (plan != "recompute")


def test_a_write_to_what_was_evicted_is_an_error_or_does_no_harm() -> None:
    def build(is_legal: bool) -> nn.Module:
        return Stack(lambda: models.Overwriting(is_legal=is_legal)).to("cuda")

    model, legal = seeded(lambda: build(False)), seeded(lambda: build(True))
    for plan in PLANS:
        with attach(model, plan, min_bytes=1024):
            for index in range(4):
                torch.manual_seed(index)
                feature_step(legal, index)
                torch.manual_seed(index)
                try:
                    feature_step(model, index)
                except RuntimeError as error:
                    assert "modified by an inplace operation" in str(error)
                else:
                    for ours, theirs in zip(model.parameters(), legal.parameters(), strict=True):
                        assert ours.grad is not None and theirs.grad is not None
                        assert torch.equal(ours.grad, theirs.grad)
                model.zero_grad()
                legal.zero_grad()


def test_plan_keep_installs_nothing() -> None:
    model = seeded(large_stack)

    def num_hooks() -> int:
        tables = [v for m in model.modules() for k, v in vars(m).items() if "_hooks" in k]
        return sum(len(table) for table in tables if isinstance(table, dict))

    def peak_of_a_step() -> int:
        torch.cuda.reset_peak_memory_stats()
        large_step(model)
        return torch.cuda.max_memory_allocated()

    large_step(model)
    before = peak_of_a_step()
    with attach(model, "keep") as tide:
        assert num_hooks() == 0
        assert peak_of_a_step() == before
        assert tide.host_taken_bytes == 0
        assert tide.plan is None


def test_pinned_memory_is_taken_once_and_in_exact_size() -> None:
    model = seeded(large_stack)
    with attach(model, "offload") as tide:
        large_step(model)
        assert tide.host_taken_bytes == 0
        large_step(model)
        taken, address = tide.host_taken_bytes, tide.host_region_address
        before = torch.cuda.host_memory_stats()
        for _ in range(5):
            large_step(model)
        after = torch.cuda.host_memory_stats()
        held = tide.statistics().host.peak_held_bytes
        assert (tide.host_taken_bytes, tide.host_region_address) == (taken, address)
        assert held <= taken <= 1.02 * held
        assert {k: after[k] for k in before if "alloc" in k} == {
            k: v for k, v in before.items() if "alloc" in k
        }


def test_a_longer_batch_finds_room_in_the_step_after_next() -> None:
    model = seeded(large_stack)
    with attach(model, "offload") as tide:
        for _ in range(3):
            large_step(model)
        short = tide.host_taken_bytes
        model(features(8, 2048, 512)).square().mean().backward()
        assert tide.host_taken_bytes == short  # never within a step
        model(features(8, 2048, 512)).square().mean().backward()
        assert tide.plan is not None
        assert short < 2 * tide.plan.host_bytes <= tide.host_taken_bytes
        tide.reset_statistics()
        model(features(8, 2048, 512)).square().mean().backward()
        assert tide.statistics().num_kept_not_understood == ()


def test_graphs_dropped_without_backward_leave_nothing() -> None:
    model = seeded(large_stack)
    with attach(model, "offload") as tide:
        for _ in range(3):
            large_step(model)
        gc.collect()  # what earlier tests left may not go in mid-loop
        torch.cuda.synchronize()
        sizes: list[int] = []
        inputs = features(8, 1024, 512)
        for _ in range(50):
            model(inputs)
            assert tide.statistics().host.held_bytes == 0
            sizes.append(torch.cuda.memory_allocated())
        assert len(set(sizes[2:])) == 1


def test_offloaded_inputs_peak_below_checkpointing() -> None:
    with torch.device("cpu"):
        model: Any = seeded(lambda: models.llama().to(torch.bfloat16))
    model.to("cuda")

    def peak_of_a_step() -> int:
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            ids = torch.randint(0, models.VOCABULARY, (4, 2048))
            model(input_ids=ids, labels=ids).loss.backward()
        return torch.cuda.max_memory_allocated()

    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointing = peak_of_a_step()
    model.gradient_checkpointing_disable()
    with attach(model, "offload-inputs", min_bytes=1024) as tide:
        offloading = peak_of_a_step()
        assert tide.statistics().host.moved_out_bytes > 0
    # Each block's recipes start from copies of small tables: the rotary ones, of both halves, in
    # two bytes.
    tables_bytes = models.NUM_BLOCKS * 2 * 2048 * (models.WIDTH // models.NUM_HEADS) * 2
    assert offloading <= checkpointing + tables_bytes
