"""Whose storages are parameters, as FSDP swaps them around a block."""

from __future__ import annotations

import torch
from torch import nn

from ebbtide.torch.identity import storage_key
from ebbtide.torch.parameters import Parameters, storages_of


def test_parameters_and_buffers_of_a_model_are_known_by_storage() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    found = storages_of(model)
    tensors = [*model.parameters(), *model.buffers()]
    assert set(found) == {storage_key(t) for t in tensors}
    assert all(found[storage_key(t)] is t for t in tensors)


def test_what_is_swapped_in_later_is_added_once() -> None:
    layer = nn.Linear(2, 3)
    parameters = Parameters(storages_of(layer))
    assert parameters.add(layer) == []
    swapped = nn.Parameter(torch.zeros(3, 2))
    assert parameters.get(storage_key(swapped)) is None
    layer.weight = swapped
    assert parameters.add(layer) == [storage_key(swapped)]
    assert parameters.get(storage_key(swapped)) is swapped
    assert parameters.add(layer) == []


def test_only_what_a_module_holds_itself_is_added() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    assert Parameters().add(model) == []
    assert Parameters().add(*model.modules()) == [storage_key(t) for t in model.parameters()]


def test_what_is_no_strided_tensor_is_left_out() -> None:
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    model.register_buffer("nothing", None)
    assert storages_of(model) == {}
