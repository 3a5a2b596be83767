"""Counts what the runtime moved, held, fetched, recomputed and could not understand."""

import threading
from collections import Counter
from dataclasses import dataclass
from typing import assert_never

from ebbtide.plan import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """Traffic to and from one tier, and what it holds."""

    moved_out_bytes: int = 0
    """Bytes evicted from the device to the tier since the start."""
    moved_in_bytes: int = 0
    """Bytes fetched from the tier to the device since the start."""
    held_bytes: int = 0
    """Bytes that the tier holds now."""
    peak_held_bytes: int = 0
    """Most bytes that the tier ever held at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SanitizerStatistics:
    """What a sanitizer looked at since attach, and what that took."""

    num_steps: int
    """Forward passes through the blocks."""
    num_tensors: int
    """Saved tensors that were compared when backward asked for them."""
    num_copies: int
    """Fetches that were compared with what was evicted."""
    compared_bytes: int
    """Bytes that were compared, of both."""
    poisoned_bytes: int
    """Bytes of memory and of places in the tiers that were overwritten."""
    num_delays: int
    """Copies that were held back: for some time, or until somebody waited for them."""
    delay_ns: int
    """For how long, those for some time together."""
    check_ns: int
    """What the host spent in checksums and comparisons, waiting for the device included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a ledger had counted at one moment."""

    host: TierStatistics
    """Pinned host memory."""
    disk: TierStatistics
    """The disk tier."""
    held_device_bytes: int
    """Device bytes held for copies now: sources not yet let go and fetched copies."""
    peak_held_device_bytes: int
    """Most device bytes ever held for copies at once."""
    num_evictions: int
    """Activations evicted, to either tier."""
    num_fetches: int
    """Activations fetched, from either tier."""
    num_resurrections: int
    """Fetches avoided, since the device source was still there."""
    num_recomputed_ops: int
    """Op calls that were run again in backward."""
    stall_ns: int
    """Time that a CPU, as the device, waited for copies. 0 on a GPU: there waits are queued, and
    only a trace tells how long they were."""
    num_kept_not_understood: tuple[tuple[str, int], ...]
    """Reason and number of tensors, for what stayed on the device because ebbtide does not
    understand it (design rule 11); sorted by reason."""
    sanitizer: SanitizerStatistics | None = None
    """Of `attach(sanitize=True)`, since attach; None without."""

    @property
    def moved_out_bytes(self) -> int:
        """Bytes evicted from the device, to either tier."""
        return self.host.moved_out_bytes + self.disk.moved_out_bytes

    @property
    def moved_in_bytes(self) -> int:
        """Bytes fetched to the device, from either tier."""
        return self.host.moved_in_bytes + self.disk.moved_in_bytes


class Ledger:
    """Thread-safe counters of one runtime.

    Every method takes one short lock and may be called from any thread. The caller counts an
    eviction when the tier's space is taken and a release when that space is free again: a
    fetch alone releases nothing, since a retained graph fetches again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tiers = {Decision.HOST: TierStatistics(), Decision.DISK: TierStatistics()}
        self._held_device_bytes = 0
        self._peak_held_device_bytes = 0
        self._num_evictions = 0
        self._num_fetches = 0
        self._num_resurrections = 0
        self._num_recomputed_ops = 0
        self._stall_ns = 0
        self._num_kept_not_understood: Counter[str] = Counter()

    def reset(self) -> None:
        """Start counting anew; what is held now stays counted, and is the new peak."""
        with self._lock:
            self._tiers = {
                tier: TierStatistics(held_bytes=old.held_bytes, peak_held_bytes=old.held_bytes)
                for tier, old in self._tiers.items()
            }
            self._num_evictions = self._num_fetches = self._num_resurrections = 0
            self._num_recomputed_ops = self._stall_ns = 0
            self._num_kept_not_understood = Counter()
            self._peak_held_device_bytes = self._held_device_bytes

    def count_eviction(self, tier: Decision, num_bytes: int) -> None:
        """Count an activation of `num_bytes` bytes that leaves the device for `tier`."""
        _check(tier, num_bytes)
        with self._lock:
            before = self._tiers[tier]
            held_bytes = before.held_bytes + num_bytes
            self._tiers[tier] = TierStatistics(
                moved_out_bytes=before.moved_out_bytes + num_bytes,
                moved_in_bytes=before.moved_in_bytes,
                held_bytes=held_bytes,
                peak_held_bytes=max(before.peak_held_bytes, held_bytes),
            )
            self._num_evictions += 1

    def count_fetch(self, tier: Decision, num_bytes: int) -> None:
        """Count an activation of `num_bytes` bytes that is copied from `tier` to the device."""
        _check(tier, num_bytes)
        with self._lock:
            before = self._tiers[tier]
            self._tiers[tier] = TierStatistics(
                moved_out_bytes=before.moved_out_bytes,
                moved_in_bytes=before.moved_in_bytes + num_bytes,
                held_bytes=before.held_bytes,
                peak_held_bytes=before.peak_held_bytes,
            )
            self._num_fetches += 1

    def count_release(self, tier: Decision, num_bytes: int) -> None:
        """Count `num_bytes` bytes of `tier` that an activation no longer occupies.

        Raises:
            AssertionError: More was released than evicted.
        """
        _check(tier, num_bytes)
        with self._lock:
            before = self._tiers[tier]
            assert num_bytes <= before.held_bytes, (
                f"{num_bytes} bytes of {tier.value} were released, but only {before.held_bytes} "
                "are held; this is a bug in ebbtide"
            )
            self._tiers[tier] = TierStatistics(
                moved_out_bytes=before.moved_out_bytes,
                moved_in_bytes=before.moved_in_bytes,
                held_bytes=before.held_bytes - num_bytes,
                peak_held_bytes=before.peak_held_bytes,
            )

    def count_device_bytes(self, change_bytes: int) -> None:
        """Count device bytes that copies begin to hold, or no longer hold if negative.

        Raises:
            AssertionError: More was let go than held.
        """
        with self._lock:
            held_bytes = self._held_device_bytes + change_bytes
            assert held_bytes >= 0, (
                f"{-change_bytes} device bytes were let go, but only {self._held_device_bytes} are "
                "held for copies; this is a bug in ebbtide"
            )
            self._held_device_bytes = held_bytes
            self._peak_held_device_bytes = max(self._peak_held_device_bytes, held_bytes)

    def count_resurrection(self) -> None:
        """Count a fetch that was not needed, since the device source was still there."""
        with self._lock:
            self._num_resurrections += 1

    def count_recomputed_ops(self, num_ops: int) -> None:
        """Count `num_ops` op calls that were run again in backward."""
        with self._lock:
            self._num_recomputed_ops += num_ops

    def count_stall(self, duration_ns: int) -> None:
        """Count time that compute waited for a copy."""
        with self._lock:
            self._stall_ns += duration_ns

    def count_kept_not_understood(self, reason: str) -> None:
        """Count a tensor that stays on the device for `reason`."""
        with self._lock:
            self._num_kept_not_understood[reason] += 1

    def snapshot(self) -> Statistics:
        """Return all counters as they are together at one moment."""
        with self._lock:
            return Statistics(
                host=self._tiers[Decision.HOST],
                disk=self._tiers[Decision.DISK],
                held_device_bytes=self._held_device_bytes,
                peak_held_device_bytes=self._peak_held_device_bytes,
                num_evictions=self._num_evictions,
                num_fetches=self._num_fetches,
                num_resurrections=self._num_resurrections,
                num_recomputed_ops=self._num_recomputed_ops,
                stall_ns=self._stall_ns,
                num_kept_not_understood=tuple(sorted(self._num_kept_not_understood.items())),
            )


def _check(tier: Decision, num_bytes: int) -> None:
    match tier:
        case Decision.HOST | Decision.DISK:
            pass
        case Decision.KEEP | Decision.RECOMPUTE:
            raise ValueError(f"tier is {tier.value!r}; only 'host' and 'disk' hold moved bytes")
        case _:
            assert_never(tier)
    if num_bytes < 0:
        raise ValueError(f"num_bytes is {num_bytes}; it must be 0 or more")
