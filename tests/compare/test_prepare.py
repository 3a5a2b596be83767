import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from ebbtide.compare.prepare import (
    choose_optimizer,
    choose_work_folder,
    find_device,
    find_disturbance,
    prepare_setup,
)
from ebbtide.compare.request import CompareRequest
from ebbtide.compare.task import Optimizer
from tests.compare.test_request import GOOD


@pytest.fixture
def request_tiny(tiny_model: Path, text_file: Path) -> CompareRequest:
    return replace(
        GOOD, model=str(tiny_model), text=text_file, context=64, batch=2, steps=3, device="cpu"
    )


def test_a_setup_has_windows_for_every_step_and_the_facts(
    request_tiny: CompareRequest, text_file: Path, tmp_path: Path
) -> None:
    setup = prepare_setup(request_tiny, tmp_path)
    tokens = load_file(setup.tokens)
    content = text_file.read_bytes()
    assert tokens["train"].shape == (2 * (2 + 3), 64)
    assert tokens["train"].flatten().tolist() == list(content[:640])
    assert tokens["held_out"].tolist() == [list(content[8000:8064])]
    facts = setup.facts
    assert (facts.model, facts.context, facts.batch, facts.steps) == ("tiny-llama", 64, 2, 3)
    assert (facts.dtype, facts.held_out_tokens) == ("float32", 64)
    assert facts.state_bytes == 4 * 4 * facts.parameters
    assert facts.logits_bytes == 2 * 64 * 256 * 4
    assert (
        facts.versions["torch"] == torch.__version__.partition("+")[0]
        or "+" in (facts.versions["torch"])
    )


def test_a_budget_takes_windows_for_four_warm_up_steps(
    request_tiny: CompareRequest, tmp_path: Path
) -> None:
    setup = prepare_setup(replace(request_tiny, budget="1GiB"), tmp_path)
    assert load_file(setup.tokens)["train"].shape == (2 * (4 + 3), 64)
    assert (setup.facts.warm_up_steps, setup.facts.steps) == (4, 3)
    assert "--budget 1GiB" in setup.facts.command


def test_a_cpu_run_gets_a_temporary_disk_and_says_so(
    request_tiny: CompareRequest, tmp_path: Path
) -> None:
    setup = prepare_setup(request_tiny, tmp_path)
    (disk,) = setup.disks
    folder, _, cap_bytes = disk.rpartition(":")
    assert Path(folder) == tmp_path / "disk" and Path(folder).is_dir()
    assert 0 < int(cap_bytes) < os.statvfs(tmp_path).f_frsize * os.statvfs(tmp_path).f_blocks
    assert setup.facts.disk.startswith("a temporary folder (")
    assert str(tmp_path) not in setup.facts.command


def test_a_given_disk_is_used(request_tiny: CompareRequest, tmp_path: Path) -> None:
    one, other = f"{tmp_path}:1GiB", f"{tmp_path}:2GiB"
    setup = prepare_setup(replace(request_tiny, disks=(one,)), tmp_path)
    assert setup.disks == (one,) and setup.facts.disk == one
    setup = prepare_setup(replace(request_tiny, disks=(one, other)), tmp_path)
    assert setup.disks == (one, other) and setup.facts.disk == f"{one} and {other}"


def test_a_context_beyond_the_positions_is_refused(
    request_tiny: CompareRequest, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"--context 513: .* has 512 positions; .*512 or less"):
        prepare_setup(replace(request_tiny, context=513), tmp_path)


def test_the_default_context_fits_the_model(request_tiny: CompareRequest, tmp_path: Path) -> None:
    setup = prepare_setup(replace(request_tiny, context=None, steps=None), tmp_path)
    assert (setup.facts.context, setup.facts.steps) == (512, 1)


def test_host_memory_is_no_tier_of_a_cpu(request_tiny: CompareRequest, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--host 1GiB: on a CPU the host's memory is the device"):
        prepare_setup(replace(request_tiny, host="1GiB"), tmp_path)


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cpu:0", ""])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"--device {name}: unknown device; give cpu"):
        find_device(name)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="torch sees 0 CUDA devices here; give --device cpu"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="sees 2 CUDA devices here; give cuda:0 to cuda:1"):
        find_device("cuda:2")


def test_the_first_gpu_is_chosen_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device(None) == torch.device("cuda:0")
    assert find_device("cuda") == torch.device("cuda:0")
    assert find_device("cuda:1") == torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert find_device(None) == torch.device("cpu")


def test_a_busy_machine_makes_times_worthless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (1.4, 0.0, 0.0))
    assert find_disturbance(torch.device("cpu")) == ""
    monkeypatch.setattr(psutil, "getloadavg", lambda: (6.0, 0.0, 0.0))
    assert "load average of 2 cores was 6.0" in find_disturbance(torch.device("cpu"))
    assert find_disturbance(torch.device("cuda:0")) == ""


def test_large_models_get_an_optimizer_without_state() -> None:
    assert choose_optimizer("smollm2", 134_515_008) is Optimizer.ADAMW
    assert choose_optimizer("a-folder", 3_000_000_000) is Optimizer.SGD
    assert choose_optimizer("llama-8b-shape", 500_000_000) is Optimizer.SGD


def test_work_goes_to_the_first_folder_that_is_not_in_memory(tmp_path: Path) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"22 21 0:30 / {memory.resolve()} rw - tmpfs tmpfs rw\n"
    )
    assert choose_work_folder((memory, disk), mounts) == disk
    assert choose_work_folder((memory, memory / "other"), mounts) == memory
