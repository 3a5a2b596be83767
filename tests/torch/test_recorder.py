"""What `ebbtide trace --record` puts into the command's Python, run here on small trainings."""

import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.profiler import profile

from ebbtide.torch.recorder.sitecustomize import (
    OPTIMIZER,
    Recorder,
    WatchingFinder,
    install,
    run_other,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*[Pp]rofiler.*")


def step(optimizer: optim.Optimizer, model: nn.Module) -> None:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(num_steps: int) -> None:
    model = nn.Linear(8, 8)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        step(optimizer, model)


def watch(folder: Path, *, skip: int = 2, steps: int = 2) -> Recorder:
    recorder = Recorder(str(folder), "trace.json", skip, steps)
    recorder.watch(sys.modules[OPTIMIZER])
    return recorder


def status_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def names_in(folder: Path) -> list[str]:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event.get("name", "") for event in events]


@pytest.fixture(autouse=True)
def no_hook_stays() -> Iterator[None]:
    hooks: dict[int, object] = vars(sys.modules[OPTIMIZER])["_global_optimizer_post_hooks"]
    before = dict(hooks)
    yield
    assert dict(hooks) == before


@pytest.mark.parametrize("num_steps", [5, 9])
def test_as_many_steps_are_recorded_as_were_asked_for(tmp_path: Path, num_steps: int) -> None:
    watch(tmp_path, skip=2, steps=3)
    train(num_steps)
    assert status_in(tmp_path) == {"num_counted": 5, "num_recorded": 3, "error": ""}
    names = names_in(tmp_path)
    assert names.count("aten::addmm") == 3  # the linear layer's forward
    assert names.count("Optimizer.step#SGD.step") == 3
    assert sorted(name for name in names if name.startswith("ProfilerStep")) == [
        "ProfilerStep#1",
        "ProfilerStep#2",
        "ProfilerStep#3",
    ]
    assert "[memory]" in names


def test_a_training_that_ends_early_keeps_its_whole_steps(tmp_path: Path) -> None:
    recorder = watch(tmp_path, skip=2, steps=4)
    train(4)
    assert not (tmp_path / "status.json").exists()
    recorder.end()  # as the end of the process does
    assert status_in(tmp_path) == {"num_counted": 4, "num_recorded": 2, "error": ""}
    assert names_in(tmp_path).count("aten::addmm") == 2


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_training_that_ends_before_leaves_no_recording(tmp_path: Path, num_steps: int) -> None:
    recorder = watch(tmp_path)
    train(num_steps)
    recorder.end()  # as the end of the process does
    recorder.end()  # a second time does nothing
    assert status_in(tmp_path) == {"num_counted": num_steps, "num_recorded": 0, "error": ""}
    assert not (tmp_path / "trace.json").exists()


def test_of_two_optimizers_the_first_tells_the_steps(tmp_path: Path) -> None:
    watch(tmp_path, skip=2, steps=2)
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    optimizers = [optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(6):
        for optimizer, model in zip(optimizers, models, strict=True):
            step(optimizer, model)
    assert status_in(tmp_path)["num_recorded"] == 2
    assert names_in(tmp_path).count("aten::addmm") == 4  # both models, in each step


def test_another_rank_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    recorder = watch(tmp_path)
    train(6)
    recorder.end()  # as the end of the process does
    assert [path.name for path in tmp_path.iterdir()] == ["torch"]


def test_the_first_of_several_processes_without_a_rank_records(tmp_path: Path) -> None:
    (tmp_path / "began").touch()
    recorder = watch(tmp_path)
    train(6)
    recorder.end()  # as the end of the process does
    assert not (tmp_path / "status.json").exists()


def test_a_program_with_a_profiler_of_its_own_keeps_it(tmp_path: Path) -> None:
    watch(tmp_path)
    with profile() as own:
        train(6)
    assert status_in(tmp_path) == {
        "num_counted": 1,
        "num_recorded": 0,
        "error": "RuntimeError: the program runs under a profiler of its own at that step",
    }
    events = own.events()
    assert events is not None
    assert sum(event.name == "aten::addmm" for event in events) == 6


def test_a_folder_that_cannot_be_written_does_not_stop_the_training(tmp_path: Path) -> None:
    recorder = watch(tmp_path / "gone")
    train(6)
    recorder.end()


def test_torchs_optimizers_are_watched_when_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "optimizer.py").write_text(
        "hooks = []\nregister_optimizer_step_post_hook = hooks.append\n"
    )
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    finder = WatchingFinder(Recorder(str(tmp_path), "trace.json", 2, 2))
    sys.meta_path.insert(0, finder)
    assert finder.find_spec("torch.optim") is None
    spec = finder.find_spec(OPTIMIZER, [str(tmp_path)])
    assert finder not in sys.meta_path
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(vars(module)["hooks"]) == 1
    assert (tmp_path / "torch").exists()


def test_settings_put_the_finder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    install(json.dumps({"folder": str(tmp_path), "file": "t", "skip": 2, "steps": 2}))
    assert isinstance(sys.meta_path[0], WatchingFinder)
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


def test_a_module_of_the_same_name_runs_as_without_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "custom_site.py").write_text("mark = 7\n")
    monkeypatch.setitem(sys.modules, "custom_site", ModuleType("custom_site"))
    run_other("custom_site", [str(tmp_path)])
    assert vars(sys.modules["custom_site"])["mark"] == 7
    run_other("custom_site_that_is_not_there", [str(tmp_path)])
