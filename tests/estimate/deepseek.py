"""DeepSeek-V3 on 128 GB200: the published table, what is assumed, and our rows."""

from dataclasses import dataclass, replace
from functools import cache

from ebbtide.catalog.accelerators import ACCELERATORS, MATMUL_SHARE
from ebbtide.catalog.calls import Rates
from ebbtide.catalog.models import MODELS
from ebbtide.catalog.networks import Axis
from ebbtide.estimate.setup import Degrees, Setup
from ebbtide.estimate.strategies import Row, Strategy
from ebbtide.plan import Decision
from tests.estimate.asking import ask

NAMES = ["moe_mlpwi_0", "moe_mlpwi_1"]
"""What is offloaded, and what `kept` is taken to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One row of the table."""

    tflops: float
    """A second and device."""
    peak_gib: float
    """Of device memory."""


PUBLISHED = {
    "remat": Published(tflops=578.3, peak_gib=151.3),
    "offload, no overlap": Published(tflops=541.6, peak_gib=145.6),
    "offload, overlapped": Published(tflops=908.2, peak_gib=165.2),
    "kept, batch 256": Published(tflops=425.3, peak_gib=113.3),
    "kept, batch 1024": None,
}
"""NVIDIA's figures for DeepSeek-V3 671B on 128 GB200, as the seed has them; None: out of memory."""

ASSUMED = Setup(
    shape=MODELS["deepseek-v3-671b"],
    context=4096,
    # A global batch of 1024 on 128 devices.
    batch=8,
    degrees=Degrees(fsdp=16, ep=8),
)
"""FSDP 16 by EP 8 and sequences of 4096, as in a later recipe of theirs; AdamW in fp32."""


@cache
def calibrated_rates() -> Rates:
    """Return rates that give the published throughput of remat: one factor on all of them."""
    published = PUBLISHED["remat"]
    assert published is not None
    row = ask(ASSUMED, "gb200-nvl72", rates=_rates(1.0)).row(Strategy.REMAT)
    # A step without copies is as much faster as all rates are, but for what waits for experts.
    waited_s = row.collectives[Axis.EXPERT] / 1e9
    flops = row.flops_per_s * row.step_ns / 1e9
    return _rates((row.step_ns / 1e9 - waited_s) / (flops / published.tflops / 1e12 - waited_s))


@cache
def make_rows() -> dict[str, Row]:
    """Return our row for each of the published ones."""
    rates = calibrated_rates()
    full = ask(ASSUMED, "gb200-nvl72", names=NAMES, rates=rates)
    quarter = ask(replace(ASSUMED, batch=2), "gb200-nvl72", names=NAMES, rates=rates)
    return {
        "remat": full.row(Strategy.REMAT),
        "offload, no overlap": full.row(Strategy.OFFLOAD_SYNC),
        "offload, overlapped": full.row(Strategy.OFFLOAD),
        "kept, batch 256": quarter.row_by_names(Strategy.OFFLOAD, Decision.KEEP),
        "kept, batch 1024": full.row_by_names(Strategy.OFFLOAD, Decision.KEEP),
    }


def _rates(factor: float) -> Rates:
    whole = ACCELERATORS["gb200-nvl72"].rates("bf16", MATMUL_SHARE)
    return Rates(
        flops_per_ns=int(whole.flops_per_ns * factor),
        attention_flops_per_ns=int(whole.attention_flops_per_ns * factor),
        moved_bytes_per_ns=int(whole.moved_bytes_per_ns * factor),
    )
