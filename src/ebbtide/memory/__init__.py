"""Where evicted bytes go: space in pinned memory and on disk, and the count of what moved."""

from ebbtide.memory.arena import Arena, ArenaStatistics, Region
from ebbtide.memory.disk import DiskStatistics, DiskStore
from ebbtide.memory.ledger import Ledger, Statistics, TierStatistics

__all__ = [
    "Arena",
    "ArenaStatistics",
    "DiskStatistics",
    "DiskStore",
    "Ledger",
    "Region",
    "Statistics",
    "TierStatistics",
]
