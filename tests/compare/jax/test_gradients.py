"""Gradients on disk: equal bits, how far others are, and what is missing."""

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from ebbtide.compare.jax.gradients import compare_gradients, write_gradients


def make_gradients(dtype: Any) -> dict[str, Any]:
    return {
        "layers": {"kernel": jnp.arange(24, dtype=dtype).reshape(2, 3, 4)},
        "ends": {"scale": jnp.asarray([1.0, -8.0], dtype)},
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_was_written_is_equal(tmp_path: Path, dtype: Any) -> None:
    write_gradients(make_gradients(dtype), tmp_path)
    found = compare_gradients(make_gradients(dtype), tmp_path)
    assert (found.is_equal, found.largest_difference, found.worst) == (True, 0.0, "")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_leaf_that_differs_most_for_its_size_is_named(tmp_path: Path, dtype: Any) -> None:
    reference = make_gradients(dtype)
    write_gradients(reference, tmp_path)
    reference["layers"]["kernel"] = reference["layers"]["kernel"].at[1, 2, 3].add(2)
    reference["ends"]["scale"] = reference["ends"]["scale"].at[0].add(1)
    found = compare_gradients(reference, tmp_path)
    assert not found.is_equal
    assert found.largest_difference == 2.0  # of 23
    assert found.relative_difference == 0.125  # 1 of 8
    assert found.worst == "ends.scale"


def test_zeros_of_two_signs_are_not_equal_bits(tmp_path: Path) -> None:
    write_gradients({"a": jnp.zeros(2)}, tmp_path)
    found = compare_gradients({"a": -jnp.zeros(2)}, tmp_path)
    assert (found.is_equal, found.largest_difference, found.relative_difference) == (False, 0, 0)


def test_what_is_not_finite_or_not_there_differs_without_end(tmp_path: Path) -> None:
    write_gradients({"a": jnp.ones(2)}, tmp_path)
    bad = compare_gradients({"a": jnp.asarray([1.0, jnp.nan])}, tmp_path)
    assert (bad.largest_difference, bad.worst) == (math.inf, "a")
    shape = compare_gradients({"a": jnp.ones(3)}, tmp_path)
    assert (shape.relative_difference, shape.worst) == (math.inf, "a")
    missing = compare_gradients({"a": jnp.ones(2), "b": jnp.ones(2)}, tmp_path)
    assert (missing.relative_difference, missing.worst) == (math.inf, "b")
