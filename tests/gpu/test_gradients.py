"""On a GPU, every plan leaves losses and gradients with the bits that they have without it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.torch import attach
from tests.torch import models
from tests.torch.cases import CASES
from tests.torch.models import Stack, features
from tests.torch.training import (
    PLANS,
    Trace,
    differences,
    language_step,
    seeded,
    train,
    train_attached,
)


@pytest.fixture(autouse=True)
def deterministic_on_cuda() -> Iterator[None]:
    """Let torch refuse every kernel whose bits vary, and make tensors on the GPU."""
    torch.set_default_device("cuda")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward is not deterministic
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    torch.set_default_device("cpu")


def build_on_cuda(name: str) -> nn.Module:
    with torch.device("cpu"):
        model = seeded(CASES[name].build)
    return model.to("cuda")


@cache
def train_plain(name: str) -> Trace:
    return train(build_on_cuda(name), CASES[name].step)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_same_bits(name: str, plan: str) -> None:
    try:
        wanted = train_plain(name)
    except RuntimeError as error:
        if "deterministic" in str(error):
            pytest.skip(f"torch itself does not repeat its bits here: {error}")
        raise
    model = build_on_cuda(name)
    with attach(model, plan, min_bytes=1024) as tide:
        got = train_attached(tide, model, CASES[name].step)
        counts = tide.statistics()
        assert tide.plan is not None
        assert (counts.host.moved_out_bytes > 0) == (tide.plan.host_bytes > 0)
        assert counts.host.moved_in_bytes <= CASES[name].num_backwards * tide.plan.host_bytes
        assert counts.host.held_bytes == 0
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
        assert tide.host_taken_bytes >= 2 * short
        tide.reset_statistics()
        model(features(8, 2048, 512)).square().mean().backward()
        assert tide.statistics().num_kept_not_understood == ()


def test_graphs_dropped_without_backward_leave_nothing() -> None:
    model = seeded(large_stack)
    with attach(model, "offload") as tide:
        for _ in range(3):
            large_step(model)
        torch.cuda.synchronize()
        sizes: list[int] = []
        for _ in range(20):
            model(features(8, 1024, 512))
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
    assert offloading <= checkpointing
