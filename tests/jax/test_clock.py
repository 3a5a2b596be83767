"""Times of a block, with a clock whose every run takes what the test says."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ebbtide.jax import observe
from ebbtide.jax.clock import COPY_BYTES, measure, measure_rates, time_ns

CLOCK = import_module("ebbtide.jax.clock")


def block(params: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ params)


def test_the_fastest_run_counts_and_the_first_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    readings = iter([0, 50, 100, 130, 200, 290])
    monkeypatch.setattr(CLOCK.time, "perf_counter_ns", lambda: next(readings))
    assert time_ns(lambda value: calls.append(value), (7,)) == 30
    assert calls == [7] * 4


def test_rates_are_of_a_product_and_of_a_sum_of_two_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def take(program: Any, arguments: Any) -> int:
        taken.append(max(leaf.size for leaf in arguments))
        return 1_000_000

    monkeypatch.setattr(CLOCK, "time_ns", take)
    rates = measure_rates(2 * 128**3, jnp.float32)
    assert taken == [128 * 128, COPY_BYTES["cpu"] // 4]
    assert rates.flops_per_s == pytest.approx(2 * 128**3 / 1e-3)
    assert rates.memory_bytes_per_s == pytest.approx(3 * COPY_BYTES["cpu"] / 1e-3)


def test_a_block_is_timed_forward_and_backward_with_numbers_for_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([500, 900, 1_000_000, 1_000_000])
    monkeypatch.setattr(CLOCK, "time_ns", lambda program, arguments: next(times))
    params = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    pace = measure(observe(block, params, x), block, params, x)
    assert (pace.forward_ns, pace.backward_ns) == (500, 900)
