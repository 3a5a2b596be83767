"""What a parent asks of a child goes through a file unchanged."""

from pathlib import Path

from ebbtide.compare.jax.shapes import JaxModelSource
from ebbtide.compare.jax.task import JaxTask, read_task, write_task


def test_a_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    task = JaxTask(
        strategy="offload@lhs",
        source=JaxModelSource(name="llama-tiny-shape", layers=3, folder="", title="tiny"),
        context=64,
        batch=2,
        num_counted_steps=3,
        num_warm_up_steps=1,
        dtype="bfloat16",
        seed=5,
        budget="40GiB",
        host=None,
        xla_flags="--xla_gpu_enable_latency_hiding_scheduler=true",
        may_start_again=True,
        tokens="tokens.npz",
        gradients=None,
        is_reference=False,
        result="outcome.json",
    )
    write_task(task, tmp_path / "task.json")
    assert read_task(tmp_path / "task.json") == task
