from dataclasses import replace

import pytest

from ebbtide.catalog.accelerators import ACCELERATORS
from ebbtide.catalog.machines import find_machine
from ebbtide.catalog.models import MODELS
from ebbtide.estimate.search import CONTEXT_STEP, Largest, find_largest
from ebbtide.estimate.setup import Degrees, Optimizer, Setup
from ebbtide.estimate.strategies import Limits

MACHINE = find_machine("h200-pcie5")
RATES = ACCELERATORS["h200-pcie5"].rates("bf16")
SHAPE = replace(MODELS["llama-3-8b"], num_layers=4, vocab=256)
SETUP = Setup(shape=SHAPE, context=1024, batch=1, optimizer=Optimizer.NONE)


def largest(axis: str, setup: Setup, device_gib: float, host_gib: float = 100.0) -> Largest:
    limits = Limits(
        budget_bytes=int(device_gib * 2**30), host_bytes=int(host_gib * 2**30), disk_bytes=0
    )
    return find_largest(axis, setup, MACHINE, RATES, limits)


def test_keeping_takes_as_much_as_the_bytes_of_a_token_say() -> None:
    held = 4 * SHAPE.num_parameters
    found = largest("batch", SETUP, (held + 2**33) / 2**30)
    # 136.1 KiB a token and layer, and at most a layer's and a half beside it.
    a_layer = 1024 * 136.125 * 2**10
    assert 2**33 / (5.5 * a_layer) < found.keep <= 2**33 / (4 * a_layer)


def test_each_way_fits_more_than_the_one_before() -> None:
    found = largest("batch", SETUP, 12)
    assert 0 < found.keep < found.remat <= found.offload


def test_without_room_on_the_host_inputs_cannot_go_there() -> None:
    # An input of 1024 tokens is 8 MiB a layer, of which the last one's goes as well.
    found = largest("batch", SETUP, 12, host_gib=10 * 4 * 8 / 1024)
    assert found.offload == 10
    assert found.remat > 10


def test_where_the_weights_do_not_fit_nothing_does() -> None:
    assert largest("batch", SETUP, 1) == Largest(keep=0, remat=0, offload=0)


@pytest.mark.parametrize("degrees", [Degrees(cp=4), Degrees(tp=2, sp=True)])
def test_contexts_are_split_evenly(degrees: Degrees) -> None:
    setup = replace(SETUP, degrees=degrees, context=CONTEXT_STEP * 4)
    found = largest("context", setup, 8)
    ranks = degrees.cp * (degrees.tp if degrees.sp else 1)
    assert found.keep > 0
    assert found.keep % (ranks * CONTEXT_STEP) == 0
