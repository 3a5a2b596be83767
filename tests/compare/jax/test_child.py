"""What a row's process does besides training: kinds of failure, notes, tasks."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ebbtide.compare.jax.child import (
    choose_attention,
    describe_copies,
    is_out_of_memory,
    main,
    write_reference,
)
from ebbtide.compare.jax.gradients import compare_gradients
from ebbtide.compare.jax.layers import AttentionKind
from ebbtide.compare.jax.shapes import JaxModelSource
from ebbtide.compare.jax.task import JaxTask, read_task, write_task

TASK = JaxTask(
    strategy="offload@lhs",
    source=JaxModelSource(name="llama-tiny-shape", layers=2, folder="", title="tiny"),
    context=16,
    batch=1,
    num_counted_steps=1,
    num_warm_up_steps=1,
    dtype="float32",
    seed=0,
    budget=None,
    host=None,
    xla_flags="",
    may_start_again=False,
    tokens="tokens.npz",
    gradients=None,
    is_reference=False,
    result="outcome.json",
)


def test_a_task_survives_its_file(tmp_path: Path) -> None:
    write_task(TASK, tmp_path / "task.json")
    assert read_task(tmp_path / "task.json") == TASK


@pytest.mark.parametrize(
    ("message", "is_memory"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.", True),
        ("INTERNAL: cuDNN failed", False),
    ],
)
def test_xlas_words_for_no_memory_are_known(message: str, is_memory: bool) -> None:
    assert is_out_of_memory(jax.errors.JaxRuntimeError(message)) is is_memory
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))


def test_a_failure_of_the_programs_own_is_raised(tmp_path: Path) -> None:
    write_task(TASK, tmp_path / "task.json")
    with pytest.raises(FileNotFoundError, match=r"tokens\.npz"):
        main(tmp_path / "task.json")


def test_a_cpu_attends_with_the_reference() -> None:
    assert choose_attention("bfloat16") is AttentionKind.REFERENCE


def test_what_did_not_happen_on_a_cpu_is_told_in_one_sentence() -> None:
    compiled: Any = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((2,), "float32")).compile()
    assert describe_copies(compiled, 0) == []
    assert describe_copies(compiled, 1024) == ["on a CPU nothing moves: XLA has one memory there"]


def test_the_reference_says_how_far_its_own_gradients_are_apart(tmp_path: Path) -> None:
    def step_with(*values: float) -> Any:
        left = list(values)

        def compiled(params: Any, state: Any, ids: Any) -> Any:
            gradients = {"embed": params * left.pop(0), "head": params}
            return params, state, 0.0, gradients

        return compiled

    def make_args() -> tuple[Any, ...]:
        return jnp.full((4,), 2.0), None, None

    equal = write_reference(step_with(1.0, 1.0), make_args(), make_args, tmp_path / "equal")
    assert equal == "the same step taken again has the same gradients, bit for bit"
    noisy = write_reference(step_with(1.0, 1.25), make_args(), make_args, tmp_path / "noisy")
    assert noisy == (
        "the same step taken again has gradients that differ by 5.0e-01, 2.5e-01 of the largest, "
        "most in embed: differences of that size are noise"
    )
    # What was written is of the first time.
    first = {"embed": jnp.full((4,), 2.0), "head": jnp.full((4,), 2.0)}
    assert compare_gradients(first, tmp_path / "noisy").is_equal
