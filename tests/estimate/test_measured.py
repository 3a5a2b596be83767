"""A run of two blocks, scaled to five layers."""

from dataclasses import replace

import pytest

from ebbtide.catalog.models import MODELS
from ebbtide.estimate.measured import scale_measured
from ebbtide.estimate.resident import Resident, resident_of, stages_of
from ebbtide.estimate.setup import Degrees, Setup
from ebbtide.planner import named_plan
from ebbtide.workload import Workload
from tests.estimate.asking import ask

SHAPE = replace(MODELS["gpt2"], num_layers=2)
SETUP = Setup(shape=SHAPE, context=256, batch=1)
FULL = replace(SETUP, shape=replace(SHAPE, num_layers=5))


@pytest.fixture(scope="module")
def measured() -> Workload:
    return ask(SETUP).workloads[0]


def resident(setup: Setup) -> Resident:
    return resident_of(setup, stages_of(setup)[0])


def test_the_last_block_is_repeated_under_names_of_its_own(measured: Workload) -> None:
    scaled = scale_measured(measured, FULL, 5, resident(FULL))
    assert [block.name for block in scaled.blocks] == [
        "transformer.h.0", "transformer.h.1",
        "transformer.h.1+1", "transformer.h.1+2", "transformer.h.1+3",
    ]  # fmt: skip
    assert scaled.num_bytes_saved == measured.num_bytes_saved * 5 // 2
    assert sum(b.forward_ns for b in scaled.blocks) * 2 == 5 * sum(
        b.forward_ns for b in measured.blocks
    )
    # Names are unique, and inputs and uses are those of the same block.
    for block in scaled.blocks:
        names = {a.name for a in block.activations}
        assert all(name.startswith(block.name) for name in names)
        assert all(set(a.inputs) <= names for a in block.activations)
        assert all(set(event.uses) <= names for event in block.backward)
    named_plan("offload", scaled).check_fits(scaled)


def test_what_is_resident_is_the_full_models(measured: Workload) -> None:
    scaled = scale_measured(measured, FULL, 5, resident(FULL))
    assert scaled.outside is not None and measured.outside is not None
    assert scaled.outside.resident_bytes == resident(FULL).total
    assert scaled.outside.resident_bytes > measured.outside.resident_bytes
    assert scaled.outside.turn_ns == measured.outside.turn_ns


def test_fewer_layers_than_were_run_are_the_first_ones(measured: Workload) -> None:
    scaled = scale_measured(measured, SETUP, 1, resident(SETUP))
    assert scaled.blocks == measured.blocks[:1]


@pytest.mark.parametrize("degrees", [Degrees(tp=2), Degrees(cp=2), Degrees(pp=2)])
def test_a_run_does_not_tell_what_a_part_of_a_layer_takes(
    measured: Workload, degrees: Degrees
) -> None:
    setup = replace(SETUP, degrees=degrees)
    with pytest.raises(ValueError, match="does not tell what a part of a layer takes"):
        scale_measured(measured, setup, 2, resident(SETUP))


def test_other_numbers_of_tokens_are_refused(measured: Workload) -> None:
    with pytest.raises(ValueError, match="its blocks take 256 tokens of gpt2's width, and"):
        scale_measured(measured, replace(SETUP, batch=2), 2, resident(SETUP))


def test_a_run_without_times_is_refused(measured: Workload) -> None:
    bare = Workload(model="GPT2LMHeadModel", blocks=measured.blocks)
    with pytest.raises(ValueError, match="it has no times; write it again"):
        scale_measured(bare, SETUP, 2, resident(SETUP))
