import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.compare.request import CompareRequest, check_request, write_command

GOOD = CompareRequest(
    model="smollm2",
    layers=None,
    context=None,
    batch=1,
    steps=None,
    strategies=("keep", "ebbtide:balanced"),
    host=None,
    disks=(),
    text=None,
    device=None,
    seed=0,
)


def test_a_good_request_passes(tmp_path: Path) -> None:
    check_request(GOOD)
    check_request(replace(GOOD, host="64GiB", disks=(f"{tmp_path}:1GiB",), context=2, layers=1))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(GOOD, batch=0), "--batch 0: it must be 1 or more"),
        (replace(GOOD, steps=0), "--steps 0: it must be 1 or more"),
        (replace(GOOD, context=1), "--context 1: it must be 2 or more"),
        (replace(GOOD, layers=-3), "--layers -3: it must be 1 or more"),
        (replace(GOOD, seed=-1), "--seed -1: it must be 0 or more"),
        (replace(GOOD, budget="lots"), "--budget lots: cannot read 'lots' as a budget: "),
        (replace(GOOD, budget="101%"), "--budget 101%: budget '101%' is more than the device has"),
        (replace(GOOD, host="lots"), "--host lots: cannot read 'lots' as a size"),
        (replace(GOOD, disks=("/scratch",)), "--disk /scratch: disk '/scratch' has no cap"),
        (replace(GOOD, disks=("/no/such:1GiB",)), "--disk /no/such:1GiB: /no/such is not a folder"),
        (replace(GOOD, text=Path("no.txt")), "--text no.txt: there is no such file"),
    ],
)
def test_a_bad_argument_is_named_with_its_rule(bad: CompareRequest, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_request(bad)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("budget", ["40GiB", "50%", "auto", "1000000"])
def test_a_budget_is_a_size_a_share_or_auto(budget: str) -> None:
    check_request(replace(GOOD, budget=budget))


def test_passes_take_the_place_of_warm_up_steps() -> None:
    request = replace(GOOD, budget="40GiB", passes=5)
    assert request.num_warm_up_steps == 0
    assert "--passes 5" in write_command(request, context=64, steps=1, device="cpu")
    with pytest.raises(ValueError, match="--passes -1: it must be 0 or more"):
        check_request(replace(GOOD, passes=-1))


def test_a_budget_takes_one_more_warm_up_step() -> None:
    assert GOOD.num_warm_up_steps == 2
    assert replace(GOOD, budget="40GiB").num_warm_up_steps == 4
    assert replace(GOOD, budget="40GiB", is_compiled=True).num_warm_up_steps == 5
    assert replace(GOOD, is_compiled=True).num_warm_up_steps == 2


def test_the_command_has_the_budget() -> None:
    request = replace(GOOD, strategies=("keep", "ebbtide"), budget="40GiB")
    command = write_command(request, context=512, steps=1, device="cpu")
    assert "--strategies keep,ebbtide --budget 40GiB" in command


def test_the_command_has_how_blocks_and_loss_are_run() -> None:
    request = replace(GOOD, is_compiled=True, has_chunked_loss=True)
    command = write_command(request, context=512, steps=1, device="cpu")
    assert command.endswith(" --compile --chunked-loss --device cpu --seed 0")


def test_the_command_spells_out_every_default() -> None:
    request = replace(GOOD, text=Path("my text.txt"), disks=("/tmp:1GiB", "/var/tmp:2GiB"))
    command = write_command(request, context=512, steps=1, device="cpu")
    assert shlex.split(command) == [
        *("ebbtide", "compare", "--model", "smollm2", "--context", "512", "--batch", "1"),
        *("--steps", "1", "--strategies", "keep,ebbtide:balanced"),
        *("--disk", "/tmp:1GiB", "--disk", "/var/tmp:2GiB"),
        *("--text", "my text.txt", "--device", "cpu", "--seed", "0"),
    ]
