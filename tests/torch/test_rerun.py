"""One operator of a traced graph, run by itself."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ebbtide.torch.devices.fake import FakeMeter
from ebbtide.torch.rerun import NUM_RUNS, Rerun


def call_of(function: Any, *inputs: Tensor, mode: Literal["fake", "symbolic"] = "fake") -> fx.Node:
    """Return the last call of a traced function."""
    graph = make_fx(function, tracing_mode=mode)(*inputs).graph
    return [node for node in graph.nodes if node.op == "call_function"][-1]


def test_it_runs_on_tensors_of_the_traced_layout_and_leaves_the_random_state_alone() -> None:
    left_MK, right_KN = torch.ones(4, 6), torch.ones(5, 6, dtype=torch.float32).t()
    rerun = Rerun.of(call_of(torch.mm, left_MK, right_KN))
    assert rerun is not None
    seen: list[tuple[Any, ...]] = []
    mm = rerun._function  # pyright: ignore[reportPrivateUsage]

    def note(*args: Tensor) -> Tensor:
        seen.append(tuple((a.shape, a.stride(), a.dtype) for a in args))
        assert not torch.is_grad_enabled()
        torch.rand(3)  # as an operator that draws would
        return mm(*args)

    rerun._function = note  # pyright: ignore[reportPrivateUsage]
    state = torch.get_rng_state()
    assert rerun.time_ns(FakeMeter(tick_ns=1000)) == 1000
    assert torch.equal(torch.get_rng_state(), state)
    layouts = tuple((t.shape, t.stride(), t.dtype) for t in (left_MK, right_KN))
    assert seen == [layouts] * (1 + NUM_RUNS)


def test_sizes_for_any_batch_are_those_that_were_traced() -> None:
    rerun = Rerun.of(call_of(torch.mm, torch.ones(4, 6), torch.ones(6, 5), mode="symbolic"))
    assert rerun is not None
    specs = rerun._args  # pyright: ignore[reportPrivateUsage]
    assert [spec.shape for spec in specs] == [(4, 6), (6, 5)]
    assert all(type(size) is int for spec in specs for size in spec.shape)


def test_whole_numbers_and_empty_tensors_can_be_made() -> None:
    index_K = torch.tensor([0, 2])
    rerun = Rerun.of(call_of(lambda x, i: x.index_select(0, i), torch.ones(3, 2), index_K))
    assert rerun is not None and rerun.time_ns(FakeMeter(tick_ns=5)) == 5
    empty = Rerun.of(call_of(torch.mm, torch.ones(0, 6), torch.ones(6, 5)))
    assert empty is not None and empty.time_ns(FakeMeter(tick_ns=5)) == 5


def test_what_does_not_run_has_no_time_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    rerun = Rerun.of(call_of(torch.mm, torch.ones(4, 6), torch.ones(6, 5)))
    assert rerun is not None

    def refuse(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    rerun._function = refuse  # pyright: ignore[reportPrivateUsage]
    assert rerun.time_ns(FakeMeter(tick_ns=5)) is None
    assert "cannot be timed by itself: no room" in caplog.text


def test_a_mistake_of_ours_is_not_taken_for_that() -> None:
    rerun = Rerun.of(call_of(torch.mm, torch.ones(4, 6), torch.ones(6, 5)))
    assert rerun is not None

    def mistake(*_: Tensor) -> Tensor:
        raise TypeError("wrong arguments")

    rerun._function = mistake  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(TypeError):
        rerun.time_ns(FakeMeter(tick_ns=5))
