"""Ranks that meet; `tests/torch/distributed` has what takes more than one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from ebbtide.machine import Machine
from ebbtide.torch import attach
from ebbtide.torch.budgets import BudgetPlanner
from ebbtide.torch.ranks import Ranks, count_local_ranks
from tests.torch.models import Gated, Stack
from tests.torch.training import feature_step

ROOT = Path(__file__).parents[2]


@pytest.fixture
def world() -> Iterator[Any]:
    """A group of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def model() -> nn.Module:
    return Stack(Gated)


def test_a_rank_gets_back_what_it_gave(world: Any) -> None:
    ranks = Ranks(world)
    assert ranks.names == ("rank 0",)
    assert ranks.is_first
    assert ranks.exchange("a") == ("a",)
    assert ranks.from_first("b") == "b"
    ranks.meet()
    # Another time the same ranks meet they do not find what was left of the last one.
    assert Ranks(world).exchange("c") == ("c",)


def test_what_is_no_process_group_is_refused(world: Any) -> None:
    given = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    with pytest.raises(TypeError, match=r"DeviceMesh; it must be a process group: .*WORLD"):
        Ranks(given)
    outside = distributed.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ValueError, match="a group that this process is not a rank of"):
        Ranks(outside)
    assert Ranks(world).names == ("rank 0",)


def test_ranks_without_a_budget_are_refused(world: Any) -> None:
    with pytest.raises(ValueError, match=r"ranks= was given without a budget"):
        attach(model(), "recompute", ranks=world)


def test_local_ranks_are_counted_as_torchrun_says_or_all(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert count_local_ranks() == 1
    monkeypatch.setattr(distributed, "get_world_size", lambda: 6)
    assert count_local_ranks() == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert count_local_ranks() == 4


def test_the_disk_that_is_given_is_shared_by_the_ranks_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    trained = model()
    with attach(trained, "offload", disk=f"{tmp_path}:8MiB", min_bytes=1024) as tide:
        for index in range(2):
            feature_step(trained, index)
        assert tide.runtime is not None and tide.runtime.tiers is not None
        disk = tide.runtime.tiers.disk
        assert disk is not None
        assert disk.statistics().cap_bytes == 2 * 2**20
        assert tide.statistics().moved_out_bytes > 0


def test_the_pinned_memory_that_is_given_is_shared_by_the_ranks_of_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def probe(*_: Any, **__: Any) -> Machine:
        return Machine(
            name="four ranks",
            device_bytes=2**40,
            host_bytes=2**36,
            out_bytes_per_s=1,
            in_bytes_per_s=1,
            both_bytes_per_s=1,
            num_local_ranks=4,
        )

    monkeypatch.setattr(import_module("ebbtide.torch.budgets"), "probe_machine", probe)
    planner = BudgetPlanner(
        "1GiB",
        device=torch.device("cpu"),
        host_bytes=2**30,
        disks=(),
        decide=None,
        min_bytes=0,
        planner="greedy",
    )
    assert planner.machine.host_bytes == 2**30
    assert planner.machine.host_bytes_per_rank == 2**28


def test_a_torch_without_distributed_runs_plans_and_refuses_ranks() -> None:
    """Gradients under a plan and under a budget are compared there, bit for bit."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.torch.alone"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    by_plan, by_budget, refusal = finished.stdout.splitlines()
    assert by_plan == "{'plan': 'recompute'} recompute True"
    assert by_budget == "{'budget': '1GiB'} lp True"
    assert refusal.startswith("ranks= was given, but this torch was built without torch.distribu")
