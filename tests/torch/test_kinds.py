"""Every kind of program that a public fault was about: the same bits as without ebbtide.

`docs/cases.md` says which test stands for which case.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from ebbtide.torch.devices.fake import Schedule
from tests.torch.cases import Case
from tests.torch.fakes import FakeTide, MakePlan, offload_everything, planned
from tests.torch.kinds import KINDS
from tests.torch.training import Trace, attach_here, differences, seeded, train

NUM_HOST_BYTES = 64 << 20
UNSEEN = "did not come back bit for bit"
WRITTEN_UNSEEN = frozenset(
    {"an unseen write to what recipes start from", "an unseen write that is read"}
)
ON_FAKE: dict[str, tuple[MakePlan, Schedule]] = {
    "recompute": (planned("recompute"), "late"),
    "offload": (planned("offload"), "late"),
    "everything": (offload_everything, "random"),
}


@cache
def wanted(name: str) -> Trace:
    """What a training leaves when nothing is attached."""
    case = KINDS[name]
    return train(seeded(case.build), case.step)


def assert_kept_only_what_it_should(name: str, reasons: list[str]) -> None:
    """Check that blocks were understood, but for what is there to be not understood."""
    allowed = {UNSEEN} if name in WRITTEN_UNSEEN else set[str]()
    assert {reason for reason in reasons if not reason.startswith("subclass")} <= allowed


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("plan", ON_FAKE)
@pytest.mark.parametrize("name", KINDS)
def test_gradients_have_the_same_bits_on_the_fake_device(name: str, plan: str) -> None:
    case: Case = KINDS[name]
    make_plan, schedule = ON_FAKE[plan]
    model = seeded(case.build)
    with FakeTide(model, make_plan, schedule=schedule, num_host_bytes=NUM_HOST_BYTES) as tide:
        assert differences(train(model, case.step), wanted(name)) == []
        counts = tide.ledger.snapshot()
        assert_kept_only_what_it_should(name, [r for r, _ in counts.num_kept_not_understood])
        if tide.runtime.traffic is not None:
            tide.assert_nothing_is_left()
            assert counts.host.moved_out_bytes >= tide.plan.host_bytes
        else:
            assert name == "a block that raises and is forgiven"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("plan", ["balanced"])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_have_the_same_bits_on_the_cpu(name: str, plan: str, tmp_path: Path) -> None:
    case: Case = KINDS[name]
    model = seeded(case.build)
    with attach_here(model, plan, tmp_path) as tide:
        assert differences(train(model, case.step), wanted(name)) == []
        counts = tide.statistics()
        assert_kept_only_what_it_should(name, [r for r, _ in counts.num_kept_not_understood])
        assert counts.moved_in_bytes > 0 or name == "a block that raises and is forgiven"
