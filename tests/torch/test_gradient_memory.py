"""What gradients take: before a step, in it, and what comes to stay later."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ebbtide.torch.gradient_memory import GradientMemory, Growth, gradient_bytes

SIZES = (4, 8, 400)
"""Elements of the parameters; of each a gradient takes four bytes an element."""


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in SIZES]


def give(*params: Tensor) -> None:
    sum(p.sum() for p in params).backward()  # pyright: ignore[reportAttributeAccessIssue]


def measured(params: list[nn.Parameter], *given: nn.Parameter) -> GradientMemory:
    memory = GradientMemory(params)
    memory.start()
    give(*given)
    memory.end()
    return memory


def test_what_was_there_is_told_from_what_came_and_what_is_missing() -> None:
    params = parameters()
    give(params[0])
    memory = measured(params, params[0], params[1])
    assert (memory.start_bytes, memory.missing_bytes) == (16, 1600)
    assert memory.grown_bytes == 32 + 1600


def test_a_gradient_that_a_hook_gave_up_is_not_missing() -> None:
    params = parameters()

    def give_up(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in params[1:]:
        parameter.register_post_accumulate_grad_hook(give_up)
    memory = measured(params, params[0], params[1])
    # The last one has the hook too, and got nothing.
    assert (memory.missing_bytes, memory.grown_bytes) == (1600, 16 + 1600)
    hooks = [p._post_accumulate_grad_hooks for p in params]  # pyright: ignore
    assert [len(table or ()) for table in hooks] == [0, 1, 1]


def test_views_into_one_bucket_count_their_elements() -> None:
    bucket = torch.zeros(1000)
    params = parameters()
    params[0].grad, params[1].grad = bucket[:4], bucket[4:12]
    assert gradient_bytes(params) == 16 + 32


def test_gradients_that_stay_are_told_of_once() -> None:
    params = parameters()
    memory = measured(params, *params)
    memory.finish(memory.grown_bytes)
    assert memory.take_growth(params) == (1648, Growth(num_bytes=0, has_gradients=True))
    assert memory.made_bytes == 0
    there, growth = memory.take_growth(params)
    assert there == 1648 and not growth


def test_gradients_that_were_dropped_are_nothing_new() -> None:
    params = parameters()
    memory = measured(params, *params)
    memory.finish(memory.grown_bytes)
    for parameter in params:
        parameter.grad = None
    there, growth = memory.take_growth(params)
    assert there == 0 and not growth


def test_gradients_beyond_those_that_were_made_count_as_resting() -> None:
    params = parameters()
    memory = measured(params, params[0])
    memory.finish(16)  # what is missing is not counted here
    give(params[1])
    assert memory.take_growth(params) == (48, Growth(num_bytes=48 - 16, has_gradients=True))


def test_parameters_that_are_unfrozen_count_before_they_get_a_gradient() -> None:
    params = parameters()
    params[2].requires_grad_(False)
    memory = measured(params, *params[:2])
    assert memory.missing_bytes == 0
    memory.finish(memory.grown_bytes)
    for parameter in params:
        parameter.grad = None
    params[2].requires_grad_(True)
    assert memory.take_growth(params) == (0, Growth(num_bytes=1600, has_gradients=False))
    assert not memory.take_growth(params)[1]
