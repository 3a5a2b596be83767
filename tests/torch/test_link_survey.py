"""The program that measures the links of all GPUs."""

import pytest
import torch

from ebbtide.doctor.facts import PciLink
from ebbtide.doctor.programs import command_of, run
from ebbtide.torch.link_survey import measure
from tests.torch.test_link import NUM_BYTES, Trial, Uplink

LINK = PciLink(generation=5, width=16, is_of_copies=True)


def test_gpus_are_measured_alone_and_then_at_once() -> None:
    uplink = Uplink()
    told: list[dict[str, object]] = []
    looked: list[int] = []

    def look(index: int) -> PciLink:
        looked.append(index)
        return LINK

    measure({0: Trial(uplink), 2: Trial(uplink)}, told.append, look)
    names = ("out_bytes_per_s", "in_bytes_per_s", "both_bytes_per_s")
    alone = dict.fromkeys(names, NUM_BYTES * 1000)
    half = dict.fromkeys(names, NUM_BYTES * 500)
    assert [(record["gpu"], record.get("alone"), record.get("together")) for record in told] == [
        (0, alone, None),
        (2, alone, None),
        (0, None, half),
        (2, None, half),
    ]
    link = told[0]["link"]
    assert isinstance(link, dict)
    assert (link["generation"], link["width"], link["is_of_copies"]) == (5, 16, True)
    assert set(looked[: len(looked) // 2]) == {0} and set(looked[len(looked) // 2 :]) == {2}


def test_one_gpu_is_measured_once() -> None:
    told: list[dict[str, object]] = []
    measure({0: Trial(Uplink())}, told.append, lambda _: LINK)
    assert [set(record) for record in told] == [{"gpu", "alone", "link"}]


@pytest.mark.slow
def test_the_program_says_what_torch_is() -> None:
    told = run(command_of("ebbtide.torch.link_survey"), 300.0)
    assert told.error == ""
    assert told.records[0]["torch"] == torch.__version__
    assert told.records[0]["num_gpus"] == torch.cuda.device_count()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is measured in tests/gpu")
def test_without_a_gpu_only_torch_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    from ebbtide.torch.link_survey import main

    main()
    assert capsys.readouterr().out.count("\n") == 1
