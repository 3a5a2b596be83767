"""One thing that a person should know or change."""

import enum
from dataclasses import dataclass


@enum.unique
class Severity(enum.Enum):
    """How much a finding matters."""

    SERIOUS = "serious"
    """Offloading is slow, unsafe or impossible with it."""
    NOTE = "note"
    """Worth knowing; offloading works and is about as fast without a change."""


@enum.unique
class Code(enum.Enum):
    """What was found, for programs."""

    NARROW_LINK = "narrow-link"
    SMALL_SLOT = "small-slot"
    SLOW_LINK = "slow-link"
    SHARED_UPLINK = "shared-uplink"
    ONE_WAY_LINK = "one-way-link"
    FAR_NODE = "far-node"
    PINNING_REFUSED = "pinning-refused"
    LOW_MEMLOCK = "low-memlock"
    LITTLE_HOST_MEMORY = "little-host-memory"
    GROUP_LIMIT = "group-limit"
    NO_HUGE_PAGES = "no-huge-pages"
    WSL = "wsl"
    BUSY_HOST = "busy-host"
    MEMORY_FOLDER = "memory-folder"
    NETWORK_FOLDER = "network-folder"
    CACHED_FOLDER = "cached-folder"
    SLOW_DISK = "slow-disk"
    FULL_DISK = "full-disk"
    UNUSABLE_DISK = "unusable-disk"
    NO_GPU = "no-gpu"
    GPU_OUT_OF_REACH = "gpu-out-of-reach"
    OLD_VERSION = "old-version"
    UNTRIED_VERSION = "untried-version"
    FIXED_SEGMENTS = "fixed-segments"
    TWO_ALLOCATOR_SETTINGS = "two-allocator-settings"
    NO_CACHE = "no-cache"
    BLOCKING_LAUNCHES = "blocking-launches"
    ONE_CONNECTION = "one-connection"
    SWITCHED_OFF = "switched-off"
    SANITIZER = "sanitizer"
    JAX = "jax"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong, by which figures, and what to do."""

    code: Code
    severity: Severity
    what: str
    """The finding in one sentence, without a full stop."""
    evidence: str
    """What was read or measured; without a full stop."""
    advice: str
    """What to do: whole sentences."""
