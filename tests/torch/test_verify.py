"""`verify`: it finds what was planted, says where, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.torch.verification import Verification
from ebbtide.torch.verify import verify
from tests.torch import faults
from tests.torch.fakes import FakeTide, offload_everything, planned
from tests.torch.models import Gated, Stack, features
from tests.torch.training import (
    seeded,
)

NUM_BLOCKS = 4


def stack(make_block: Callable[[], nn.Module] = Gated) -> nn.Module:
    return seeded(lambda: Stack(make_block, NUM_BLOCKS))


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def verify_fake(tide: FakeTide, model: nn.Module, **options: Any) -> Verification:
    torch.manual_seed(3)
    return verify(model, tide.runtime, tide.ledger, features(), loss=square, **options)


# -- planted faults --------------------------------------------------------------------------------


FAULTS = {
    "race": (faults.race, Gated),
    "lost stride": (faults.lost_stride, faults.Permuted),
    "lost order": (faults.lost_order, faults.Permuted),
    "swapped": (faults.swapped, Gated),
    "stale": (faults.stale, Gated),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_the_last_block_that_it_hits_is_named(name: str) -> None:
    plant, make_block = FAULTS[name]
    model = stack(make_block)
    with FakeTide(model, offload_everything) as tide:
        assert verify_fake(tide, model).equal
        with plant(tide.device):
            found = verify_fake(tide, model)
    assert not found.equal
    assert found.largest_difference > 0.0
    assert found.noise == 0.0
    first = found.first_difference
    assert first is not None and first.step == 1
    # Every block is hit, and backward comes to the last one first.
    assert first.block == f"blocks.{NUM_BLOCKS - 1}"
    assert first.tensor.startswith(f"gradient of blocks.{NUM_BLOCKS - 1}.")
    assert f"DIFFERENT: first {first.tensor}, in block {first.block}" in str(found)


def test_dropout_that_is_run_again_is_found() -> None:
    model = stack(faults.Dropping)
    with faults.dropout_again(), FakeTide(model, planned("recompute")) as tide:
        found = verify_fake(tide, model)
    assert not found.equal and found.first_difference is not None
    assert found.first_difference.block == f"blocks.{NUM_BLOCKS - 1}"


@pytest.mark.parametrize("name", ["race", "stale"])
def test_without_decoys_the_bytes_of_the_step_before_would_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place or a row that was not written holds what is right, where every step is the same."""

    def nothing(self: object) -> None:
        del self

    model = stack()
    with FakeTide(model, offload_everything) as tide:
        assert verify_fake(tide, model).equal
        plant = faults.stale if name == "stale" else faults.race_on_used_memory
        with plant(tide.device):
            with monkeypatch.context() as patch:
                patch.setattr("ebbtide.torch.verify._Verifier._decoy", nothing)
                verify_fake(tide, model, steps=1)  # its bytes are there from now on
                assert verify_fake(tide, model, steps=2).equal
            assert not verify_fake(tide, model, steps=2).equal


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_the_block_of_a_fault_is_named_though_all_before_it_differ(block: int) -> None:
    model = stack(faults.Permuted)
    with FakeTide(model, offload_everything) as tide:
        assert verify_fake(tide, model).equal
        with faults.lost_order(block=f"blocks.{block}"):
            found = verify_fake(tide, model)
    assert found.first_difference is not None
    assert found.first_difference.block == f"blocks.{block}"


def test_a_fault_that_comes_once_is_found_and_the_step_is_named() -> None:
    model = stack()
    with FakeTide(model, offload_everything) as tide:
        assert verify_fake(tide, model).equal
        with faults.once(
            faults.swapped, tide.device, num_backward=6
        ):  # two to a step: the decoy's and its own
            found = verify_fake(tide, model)
    assert not found.equal and found.first_difference is not None
    assert found.first_difference.step == 3
    assert found.first_difference.block == f"blocks.{NUM_BLOCKS - 1}"
