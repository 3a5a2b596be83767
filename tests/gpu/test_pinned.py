"""Pinned host memory from the real driver: its pages, its copies, and its refusals."""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.memory.pages import read_mapping
from ebbtide.torch import attach
from ebbtide.torch.devices.pinned import CudaDriver, PinnedMemory, pinned_memory_of
from tests.torch.models import WIDTH, Gated, Stack, features
from tests.torch.training import seeded

_maker: Any = import_module("ebbtide.torch.maker")

MIB = 2**20


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_a_region_is_pinned_and_its_bytes_go_there_and_back() -> None:
    region = pinned_memory_of(gpu()).pin(32 * MIB + 1)
    assert region.buffer.is_pinned()
    assert region.buffer.numel() == 32 * MIB + 1
    source = torch.randint(0, 256, (32 * MIB + 1,), dtype=torch.uint8, device=gpu())
    region.buffer.copy_(source, non_blocking=True)
    back = torch.zeros_like(source).copy_(region.buffer, non_blocking=True)
    assert torch.equal(back, source)
    region.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of its mappings")
def test_registered_pages_are_hidden_from_forks_and_go_when_they_are_closed() -> None:
    region = pinned_memory_of(gpu()).pin(32 * MIB)
    address = region.buffer.data_ptr()
    mapping = read_mapping(address)
    assert mapping is not None and {"hg", "dc"} <= mapping.flags
    assert mapping.resident_bytes >= 32 * MIB
    child = os.fork()
    if child == 0:
        os._exit(7 if read_mapping(address) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    region.close()
    left = read_mapping(address)
    assert left is not None
    assert left.resident_bytes <= mapping.resident_bytes - 32 * MIB


def test_an_operator_never_meets_the_error_of_the_driver() -> None:
    """The same pages twice: a refusal that costs no memory."""
    region = pinned_memory_of(gpu()).pin(MIB)
    assert CudaDriver(gpu()).register(region.buffer.data_ptr(), 4096) == 712
    assert int(torch.ones(8, device=gpu()).sum()) == 8
    torch.cuda.synchronize()
    region.close()


def test_less_host_memory_than_the_plan_needs_changes_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 65536 kB\n")

    def memory_of(device: torch.device) -> PinnedMemory:
        return PinnedMemory(CudaDriver(device), root=tmp_path)

    monkeypatch.setattr(_maker, "pinned_memory_of", memory_of)

    def gradients(plan: str | None) -> list[torch.Tensor]:
        with torch.device("cpu"):
            model = seeded(lambda: Stack(Gated, 8))
            inputs = features(64, 1024, WIDTH)
        model.to(gpu())
        tide = None if plan is None else attach(model, plan)
        for _ in range(3):
            model.zero_grad()
            model(inputs.to(gpu())).square().mean().backward()
        if tide is not None:
            counts = tide.statistics()
            assert tide.plan is not None
            assert 0 < tide.plan.host_bytes <= tide.host_taken_bytes <= 60 * MIB
            assert counts.host.moved_out_bytes > 0
            assert counts.num_kept_not_understood == ()
            tide.close()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = gradients(None)
    with caplog.at_level(logging.WARNING, logger="ebbtide"):
        got = gradients("offload")
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    (record,) = caplog.records
    assert "of pinned host memory was refused: MemAvailable" in record.getMessage()
