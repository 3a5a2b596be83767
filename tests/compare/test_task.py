from pathlib import Path

from ebbtide.compare.loss import LossKind
from ebbtide.compare.task import Optimizer, Task, describe_optimizer, read_task, write_task
from ebbtide.compare.workloads import ModelSource, Weights


def make_task(**changes: object) -> Task:
    fields: dict[str, object] = {
        "strategy": "keep",
        "source": ModelSource(
            weights=Weights.RANDOM_LLAMA, location="", num_layers=8, title="a model"
        ),
        "num_parameters": 1000,
        "context": 64,
        "batch": 1,
        "num_counted_steps": 1,
        "num_warm_up_steps": 2,
        "num_passes": 0,
        "dtype": "float32",
        "device": "cpu",
        "seed": 0,
        "optimizer": Optimizer.SGD,
        "host": None,
        "disks": ("/scratch:1GiB", "/other:2GiB"),
        "budget": None,
        "loss": LossKind.PLAIN,
        "is_compiled": False,
        "tokens": "tokens.safetensors",
        "gradients": None,
        "is_reference": False,
        "result": "row.json",
    }
    return Task(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def test_a_task_survives_its_file(tmp_path: Path) -> None:
    task = make_task()
    write_task(task, tmp_path / "task.json")
    assert read_task(tmp_path / "task.json") == task


def test_an_optimizer_is_described_with_its_rate() -> None:
    assert describe_optimizer(Optimizer.ADAMW) == "AdamW, learning rate 2e-05, fused"
    assert describe_optimizer(Optimizer.SGD) == "SGD without momentum, learning rate 0.01, fused"
