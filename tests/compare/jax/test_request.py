"""What a run in JAX can be asked, and what it refuses by name."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.compare.jax.request import (
    OPTIONS_OF_TORCH,
    JaxRequest,
    check_jax_request,
    refuse_options_of_torch,
    write_jax_command,
)

REQUEST = JaxRequest(
    model="llama-tiny-shape",
    layers=2,
    context=None,
    batch=1,
    steps=None,
    strategies=("no-remat", "offload@lhs"),
    budget="4GiB",
    host=None,
    dtype=None,
    text=None,
    device=None,
    seed=0,
)


@pytest.mark.parametrize("option", OPTIONS_OF_TORCH)
def test_what_only_torch_has_is_refused_by_name(option: str) -> None:
    given = {name: name == option for name in OPTIONS_OF_TORCH}
    with pytest.raises(ValueError, match=f"{option} has no meaning .*; leave it out"):
        refuse_options_of_torch(given)


def test_nothing_given_is_nothing_refused() -> None:
    refuse_options_of_torch(dict.fromkeys(OPTIONS_OF_TORCH, False))
    check_jax_request(REQUEST)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float16"}, "--dtype float16: .* bfloat16 or float32"),
        ({"budget": "many"}, "--budget many"),
        ({"context": 1}, "--context 1"),
        ({"batch": 0}, "--batch 0"),
        ({"text": Path("gone.txt")}, r"--text gone\.txt"),
    ],
)
def test_a_wrong_value_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_jax_request(replace(REQUEST, **change))  # pyright: ignore[reportArgumentType]


def test_the_written_command_has_every_default() -> None:
    command = write_jax_command(REQUEST, context=64, steps=3, device="cpu", dtype="float32")
    assert shlex.split(command) == [
        *("ebbtide", "compare", "--framework", "jax", "--model", "llama-tiny-shape"),
        *("--layers", "2", "--context", "64", "--batch", "1", "--steps", "3"),
        *("--strategies", "no-remat,offload@lhs", "--budget", "4GiB"),
        *("--dtype", "float32", "--device", "cpu", "--seed", "0"),
    ]
