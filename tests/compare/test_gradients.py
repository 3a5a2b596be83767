import math
from pathlib import Path

import pytest
import torch

from ebbtide.compare.gradients import choose_compared_steps, compare_gradients, write_gradients


@pytest.fixture
def model() -> torch.nn.Linear:
    layer = torch.nn.Linear(3, 2)
    layer.weight.grad = torch.arange(6.0).reshape(2, 3)
    layer.bias.grad = torch.tensor([1.0, -0.0])
    return layer


def test_the_same_gradients_are_equal(model: torch.nn.Linear, tmp_path: Path) -> None:
    write_gradients(model, tmp_path / "reference", 1)
    agreement = compare_gradients(model, tmp_path / "reference", 1)
    assert (agreement.is_equal, agreement.largest_difference, agreement.worst) == (True, 0.0, "")


def test_one_changed_value_is_found_with_its_parameter(
    model: torch.nn.Linear, tmp_path: Path
) -> None:
    write_gradients(model, tmp_path, 2)
    assert model.weight.grad is not None and model.bias.grad is not None
    model.weight.grad[1, 2] += 0.25
    model.bias.grad[0] += 0.125
    agreement = compare_gradients(model, tmp_path, 2)
    assert not agreement.is_equal
    assert agreement.largest_difference == 0.25
    assert agreement.worst == "weight"


def test_gradients_keep_bf16_bits(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    layer(torch.ones(4, dtype=torch.bfloat16)).sum().backward()
    write_gradients(layer, tmp_path, 1)
    assert compare_gradients(layer, tmp_path, 1).is_equal
    layer.weight.grad = None
    layer.float()(torch.ones(4)).sum().backward()
    assert math.isnan(compare_gradients(layer, tmp_path, 1).largest_difference)


@pytest.mark.parametrize("is_written", [True, False])
def test_a_gradient_on_one_side_only_differs(
    model: torch.nn.Linear, tmp_path: Path, is_written: bool
) -> None:
    grad = model.bias.grad
    model.bias.grad = grad if is_written else None
    write_gradients(model, tmp_path, 1)
    model.bias.grad = None if is_written else grad
    agreement = compare_gradients(model, tmp_path, 1)
    assert not agreement.is_equal
    assert agreement.worst == "bias"
    assert math.isnan(agreement.largest_difference)


def test_a_value_that_is_not_a_number_ranks_worst(model: torch.nn.Linear, tmp_path: Path) -> None:
    write_gradients(model, tmp_path, 1)
    assert model.weight.grad is not None and model.bias.grad is not None
    model.weight.grad += 100.0
    model.bias.grad[0] = math.nan
    agreement = compare_gradients(model, tmp_path, 1)
    assert agreement.worst == "bias"
    assert math.isnan(agreement.largest_difference)


def test_small_models_compare_every_step_and_large_ones_two() -> None:
    assert choose_compared_steps(4, 135_000_000) == (1, 2, 3, 4)
    assert choose_compared_steps(7, 2_000_000_000) == (1, 7)
    assert choose_compared_steps(1, 2_000_000_000) == (1,)
