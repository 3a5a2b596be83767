"""Which block is named: the first in forward, and the last where backward alone went wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ebbtide.torch.localise import Place, Probe, locate
from tests.torch.models import Gated, Stack, features

BLOCKS = ("b.0", "b.1", "b.2")


def probe(
    outputs: tuple[int, int, int] = (1, 2, 3), gradients: tuple[int, int, int] = (4, 5, 6)
) -> Probe:
    made = Probe()
    made.outputs.update({path: (p,) for path, p in zip(BLOCKS, outputs, strict=True)})
    made.gradients.update({path: (p,) for path, p in zip(BLOCKS, gradients, strict=True)})
    return made


ALL = {f"gradient of {path}.{name}": 0.5 for path in BLOCKS for name in ("up", "down")}
ARRIVED = [f"{path}.{name}" for path in reversed(BLOCKS) for name in ("down", "up")]


@pytest.mark.parametrize(
    ("differences", "planned", "place"),
    [
        # In forward all that follows differs: the first one is to blame.
        ({"loss": 0.1, **ALL}, probe(outputs=(1, 8, 9)), Place(block="b.1", tensor="output")),
        ({"loss": 0.1, **ALL}, probe(), Place(block="", tensor="loss")),
        # In backward all that comes before differs: the last one is, and its first gradient.
        (ALL, probe(), Place(block="b.2", tensor="gradient of b.2.down")),
        (
            {n: d for n, d in ALL.items() if "b.2" not in n},
            probe(gradients=(9, 5, 6)),
            Place(block="b.1", tensor="gradient of b.1.down"),
        ),
        (
            {"gradient of b.1.up": 0.5, "gradient of b.0.up": 0.5},
            probe(gradients=(9, 5, 6)),
            Place(block="b.1", tensor="gradient of b.1.up"),
        ),
        # All of its own is right, but not what it hands on.
        (
            {n: d for n, d in ALL.items() if "b.0" in n},
            probe(gradients=(9, 5, 6)),
            Place(block="b.1", tensor="gradient of its input"),
        ),
        # A step that was looked into did not show it again.
        (
            {n: d for n, d in ALL.items() if "b.0" in n},
            probe(),
            Place(block="b.0", tensor="gradient of b.0.down"),
        ),
        ({"gradient of head": 0.5}, probe(), Place(block="", tensor="gradient of head")),
        ({"buffer b.1.mean": 0.5}, probe(), Place(block="b.1", tensor="buffer b.1.mean")),
        ({"random state": 0.5}, probe(), Place(block="", tensor="random state")),
    ],
)
def test_the_block_that_is_to_blame_is_named(
    differences: dict[str, float], planned: Probe, place: Place
) -> None:
    plain = [probe(), probe()]
    found = locate(differences, blocks=BLOCKS, arrived=ARRIVED, plain=plain, planned=planned)
    assert found == place


def test_where_steps_without_a_plan_differ_nothing_is_concluded() -> None:
    plain = [probe(outputs=(1, 2, 3)), probe(outputs=(1, 7, 3))]
    planned = probe(outputs=(1, 8, 3))
    assert not planned.differs_from(plain)
    found = locate(ALL, blocks=BLOCKS, arrived=ARRIVED, plain=plain, planned=planned)
    assert found == Place(block="b.2", tensor="gradient of b.2.down")


def test_a_probe_sees_outputs_and_their_gradients_and_goes_again() -> None:
    torch.manual_seed(0)
    model, h_BTD = Stack(Gated), features()
    blocks: dict[str, nn.Module] = {f"b.{i}": b for i, b in enumerate(model.blocks)}
    probes: list[Probe] = []
    for scale in (1.0, 1.0, 2.0):
        with Probe().on(blocks) as made:
            (model(h_BTD).square().mean() * scale).backward()
        probes.append(made)
    assert list(probes[0].outputs) == list(blocks)
    assert set(probes[0].gradients) == set(blocks)
    assert not probes[1].differs_from([probes[0]])
    assert probes[2].outputs == probes[0].outputs
    assert all(probes[2].gradients[path] != probes[0].gradients[path] for path in blocks)
    model(h_BTD)
    assert probes[2].outputs == probes[0].outputs  # its hooks are off
