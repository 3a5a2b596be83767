"""Move the activations that autograd keeps out of device memory, and back in time.

Importing this package imports neither torch nor jax. The runtimes are
`ebbtide.torch` and `ebbtide.jax`.
"""

from ebbtide.errors import (
    BudgetError,
    CorruptionError,
    EbbtideError,
    MemoryTierError,
    MissingExtraError,
    ModelError,
    PinnedMemoryError,
    PlanError,
    RankError,
    RuntimeStateError,
    TraceError,
)
from ebbtide.units import DiskSpec, format_bytes, parse_bytes, parse_path_and_cap
from ebbtide.version import __version__

__all__ = [
    "BudgetError",
    "CorruptionError",
    "DiskSpec",
    "EbbtideError",
    "MemoryTierError",
    "MissingExtraError",
    "ModelError",
    "PinnedMemoryError",
    "PlanError",
    "RankError",
    "RuntimeStateError",
    "TraceError",
    "__version__",
    "format_bytes",
    "parse_bytes",
    "parse_path_and_cap",
]
