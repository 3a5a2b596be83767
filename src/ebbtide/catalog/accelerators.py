"""How fast the devices of the catalog's machines compute: published peaks, and what is reached.

Peaks are dense, without sparsity. What a training step reaches of them is an assumption taken from
one device: a model of a step with the three shares below is within 10 % of our measurements on an
H200 (`docs/estimate.md`). Known weakness: other devices reach other shares.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ebbtide.catalog.calls import Rates

# Of the peak, in matrix products of a step of Llama 3 8B's shape: fitted to the measured step that
# keeps everything at 8192 and 65,536 tokens (benchmarks/results/llama-8b-shape.md). A single large
# product reached 0.70 (689 of 989 TFLOP/s).
MATMUL_SHARE = 0.66
# Of the same peak, in fused attention forward and backward; fitted in the same way.
ATTENTION_SHARE = 0.53
# Of the memory's bandwidth, in elementwise kernels.
MEMORY_SHARE = 0.73


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device's published peaks."""

    bf16_flops_per_s: int
    """In bf16 or fp16 with sums in fp32, dense."""
    fp8_flops_per_s: int
    """In fp8, dense; 0: it has none."""
    memory_bytes_per_s: int
    """Of device memory."""
    source: str
    """Where the figures are from."""

    def peak_flops_per_s(self, dtype: str) -> int:
        """Return the peak of matrix products in `bf16`, `fp8` or `fp32` (as TF32, half of bf16)."""
        if dtype == "fp8":
            return self.fp8_flops_per_s
        return self.bf16_flops_per_s // (2 if dtype == "fp32" else 1)

    def rates(self, dtype: str, matmul_share: float = MATMUL_SHARE) -> Rates:
        """Return what a step reaches; attention is computed in bf16 where products are in fp8."""
        attention = self.peak_flops_per_s("fp32" if dtype == "fp32" else "bf16")
        return Rates(
            flops_per_ns=max(1, int(self.peak_flops_per_s(dtype) * matmul_share / 1e9)),
            attention_flops_per_ns=max(
                1, int(attention * ATTENTION_SHARE * matmul_share / MATMUL_SHARE / 1e9)
            ),
            moved_bytes_per_ns=max(1, int(self.memory_bytes_per_s * MEMORY_SHARE / 1e9)),
        )


def _accelerator(bf16: float, fp8: float, memory: float, source: str) -> Accelerator:
    """Write peaks in TFLOP/s and TB/s."""
    return Accelerator(
        bf16_flops_per_s=int(bf16 * 1e12),
        fp8_flops_per_s=int(fp8 * 1e12),
        memory_bytes_per_s=int(memory * 1e12),
        source=source,
    )


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "a100-pcie4": _accelerator(312.0, 0.0, 2.039, "NVIDIA A100 80GB data sheet, SXM."),
        "h100-pcie5": _accelerator(989.4, 1978.9, 3.35, "NVIDIA H100 data sheet, SXM."),
        "h200-pcie5": _accelerator(989.4, 1978.9, 4.8, "NVIDIA H200 data sheet, SXM."),
        "b200-pcie5": _accelerator(2250.0, 4500.0, 8.0, "NVIDIA HGX B200 data sheet, one of 8."),
        "rtx4090": _accelerator(165.2, 330.3, 1.008, "NVIDIA Ada GPU architecture paper, 1.1."),
        "gh200": _accelerator(989.4, 1978.9, 4.0, "NVIDIA GH200 data sheet, 96 GB HBM3."),
        "gb200-nvl72": _accelerator(
            2500.0, 5000.0, 8.0, "NVIDIA GB200 NVL72 data sheet, one of 72."
        ),
        "gb300-nvl72": _accelerator(
            2500.0, 5000.0, 8.0, "NVIDIA GB300 NVL72 data sheet, one of 72."
        ),
        "vera-rubin": _accelerator(
            4000.0,
            17_500.0,
            22.0,
            "NVIDIA Vera Rubin NVL72, one of 72, announced: 22 TB/s, and 1.26 EFLOP/s of fp8 a "
            "rack; bf16 as on its preliminary page, not confirmed elsewhere.",
        ),
    }
)
"""Name of the machine to its accelerator; read-only."""
