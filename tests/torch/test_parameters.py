"""Whose storages are parameters, as FSDP swaps them around a block."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from ebbtide.torch.identity import storage_key
from ebbtide.torch.parameters import (
    Parameters,
    Recent,
    is_gathered_for_its_module,
    storages_of,
)


class Lookup:
    """Looks up the parameters of a model, and counts how often it was asked to."""

    def __init__(self, model: nn.Module) -> None:
        self.num_calls = 0
        self._model = model

    def __call__(self) -> dict[int, Tensor]:
        self.num_calls += 1
        return storages_of(self._model.modules())


def test_parameters_and_buffers_of_a_model_are_known_by_storage() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    found = storages_of(model.modules())
    tensors = [*model.parameters(), *model.buffers()]
    assert set(found) == {storage_key(t) for t in tensors}
    assert all(found[storage_key(t)] is t for t in tensors)


def test_all_are_looked_up_once_for_a_storage_that_no_forward_knew() -> None:
    layer, recent, foreign = nn.Linear(2, 3), Recent(), torch.zeros(2)
    lookup = Lookup(layer)
    parameters = Parameters(lookup, recent)
    assert parameters.known(storage_key(layer.weight)) is None
    assert parameters.get(storage_key(layer.weight)) is layer.weight
    assert parameters.get(storage_key(layer.bias)) is layer.bias
    assert parameters.get(storage_key(foreign)) is None
    assert lookup.num_calls == 1
    later = Parameters(lookup, recent)
    assert later.known(storage_key(layer.bias)) is layer.bias
    assert later.get(storage_key(layer.weight)) is layer.weight
    assert lookup.num_calls == 1
    assert later.get(storage_key(foreign)) is None
    assert lookup.num_calls == 2


def test_a_parameter_is_not_known_by_a_storage_that_it_stood_on_before() -> None:
    layer, recent = nn.Linear(2, 3), Recent()
    Parameters(Lookup(layer), recent).get(0)
    old = layer.weight.data
    layer.weight.data = torch.zeros(3, 2)
    parameters = Parameters(Lookup(layer), recent)
    assert parameters.known(storage_key(old)) is None
    assert parameters.get(storage_key(old)) is None
    assert parameters.get(storage_key(layer.weight)) is layer.weight


def test_earlier_lookups_hold_no_parameter() -> None:
    layer, recent = nn.Linear(2, 3), Recent()
    Parameters(Lookup(layer), recent).get(0)
    key = storage_key(layer.weight)
    assert recent[key]() is layer.weight
    layer.weight = nn.Parameter(torch.zeros(3, 2))
    gc.collect()
    assert recent[key]() is None
    assert Parameters(None, recent).known(key) is None


def test_what_is_swapped_in_later_is_added_once() -> None:
    layer = nn.Linear(2, 3)
    parameters = Parameters(Lookup(layer))
    swapped = nn.Parameter(torch.zeros(3, 2))
    assert parameters.get(storage_key(swapped)) is None
    assert parameters.add(layer) == []
    layer.weight = swapped
    assert parameters.add(layer) == [storage_key(swapped)]
    assert parameters.get(storage_key(swapped)) is swapped
    assert parameters.add(layer) == []


def test_what_comes_before_the_lookup_comes_with_it() -> None:
    layer = nn.Linear(2, 3)
    parameters = Parameters(Lookup(layer))
    layer.weight = nn.Parameter(torch.zeros(3, 2))
    assert parameters.add(layer) == []
    assert parameters.get(storage_key(layer.weight)) is layer.weight


def test_only_what_a_module_holds_itself_is_added() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    assert Parameters().add(model) == []
    assert Parameters().add(model[0]) == [storage_key(t) for t in model.parameters()]


def test_what_is_no_strided_tensor_is_left_out() -> None:
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    model.register_buffer("nothing", None)
    assert storages_of(model.modules()) == {}


def test_a_storage_that_a_parameter_has_left_is_none_of_a_parameter() -> None:
    """Also where it was looked up in this forward: ZeRO-3 gathers into other memory each time."""
    layer = nn.Linear(2, 3)
    parameters = Parameters(Lookup(layer))
    old = layer.weight.data
    assert parameters.get(storage_key(old)) is layer.weight
    layer.weight.data = torch.zeros(3, 2)
    assert parameters.get(storage_key(old)) is None
    assert parameters.add(layer) == [storage_key(layer.weight)]
    assert parameters.get(storage_key(layer.weight)) is layer.weight


@pytest.mark.parametrize(
    ("attributes", "is_gathered"),
    [
        ({}, False),
        ({"ds_status": "AVAILABLE", "ds_persist": False}, True),
        ({"ds_status": "NOT_AVAILABLE", "ds_persist": False}, True),
        ({"ds_status": "AVAILABLE", "ds_persist": True}, False),
    ],
)
def test_what_zero_gathers_is_told_by_its_marks(
    attributes: dict[str, object], is_gathered: bool
) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    vars(parameter).update(attributes)
    assert is_gathered_for_its_module(parameter) is is_gathered
