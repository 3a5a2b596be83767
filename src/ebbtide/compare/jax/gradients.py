"""Write one row's gradients to disk, and compare another row's with them.

One file a leaf, so that a model of gigabytes is never in memory twice. Bits are written as
unsigned integers: numpy's files do not know bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

NUM_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far gradients are from the reference's."""

    is_equal: bool
    """Every bit."""
    largest_difference: float
    """Largest absolute difference; infinite where a value is not finite or a shape differs."""
    relative_difference: float
    """The largest difference of an element, over the largest element of the reference's leaf."""
    worst: str
    """The leaf where that is largest; empty if all are equal."""


def write_gradients(gradients: Any, folder: Path) -> None:
    """Write every leaf under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, leaf in _list_leaves(gradients):
        values = np.asarray(leaf)
        np.save(_name_file(folder, name), values.view(f"uint{8 * values.itemsize}"))


def compare_gradients(gradients: Any, folder: Path) -> Agreement:
    """Compare every leaf with what `write_gradients` wrote, a few layers in memory at a time."""
    is_equal, largest, relative, worst = True, 0.0, 0.0, ""
    for name, leaf in _list_leaves(gradients):
        path = _name_file(folder, name)
        found = np.asarray(leaf)
        if not path.is_file():
            return _refuse(name)
        bits = np.load(path, mmap_mode="r")
        if bits.shape != found.shape or bits.dtype.itemsize != found.dtype.itemsize:
            return _refuse(name)
        if np.array_equal(bits, found.view(bits.dtype)):
            continue
        is_equal = False
        # numpy computes outside of Python's lock: gigabytes take seconds, and not a minute.
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            rows = pool.map(_compare_rows, np.atleast_2d(found), np.atleast_2d(bits))
            gaps, scales = zip(*rows, strict=True)
        gap, scale = max(gaps), max(scales)
        largest = max(largest, gap)
        if gap / scale > relative if scale else gap > 0:
            relative, worst = gap / scale if scale else math.inf, name
    return Agreement(
        is_equal=is_equal,
        largest_difference=largest,
        relative_difference=relative,
        worst=worst,
    )


def _compare_rows(found: Any, bits: Any) -> tuple[float, float]:
    """Return the largest difference, and the largest element of the reference."""
    expected = np.ascontiguousarray(bits).view(found.dtype).astype(np.float32)
    difference = float(np.abs(found.astype(np.float32) - expected).max(initial=0))
    scale = float(np.abs(expected).max(initial=0))
    return (difference if math.isfinite(difference) else math.inf), scale


def _refuse(name: str) -> Agreement:
    return Agreement(
        is_equal=False,
        largest_difference=math.inf,
        relative_difference=math.inf,
        worst=name,
    )


def _list_leaves(gradients: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        yield ".".join(str(key.key) for key in path), leaf


def _name_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"
