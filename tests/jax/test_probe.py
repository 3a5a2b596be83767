"""The link is measured on a GPU alone; elsewhere the message says what to give."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from ebbtide.errors import PlanError
from ebbtide.jax.probe import FREE_SHARE, LINK_BYTES, probe_machine

PROBE = import_module("ebbtide.jax.probe")


def test_a_cpu_has_no_link() -> None:
    with pytest.raises(PlanError, match=r"jax's device is cpu \(cpu\) .* 'h200-pcie5'"):
        probe_machine()


def test_a_link_is_bytes_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is a CPU in disguise."""
    (cpu, *_) = jax.local_devices()
    memories = [SimpleNamespace(kind=kind) for kind in ("device", "pinned_host")]
    device: Any = SimpleNamespace(
        platform="gpu",
        device_kind="Test GPU",
        addressable_memories=lambda: memories,
        memory_stats=lambda: {"bytes_limit": 1000},
    )
    plain = jax.sharding.SingleDeviceSharding(cpu)
    fake = SimpleNamespace(with_memory_kind=lambda kind: plain)
    times = iter([5_000_000, 4_000_000, 6_000_000])
    monkeypatch.setattr(PROBE.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(PROBE.jax.sharding, "SingleDeviceSharding", lambda device: fake)
    monkeypatch.setattr(PROBE.jax, "jit", lambda fun, out_shardings: fun)
    monkeypatch.setattr(PROBE.jax, "device_put", lambda value, sharding: value)
    monkeypatch.setattr(PROBE, "time_ns", lambda program, arguments: next(times))
    monkeypatch.setattr(PROBE, "find_tightest_limit", lambda: SimpleNamespace(room_bytes=800))
    probe_machine.cache_clear()
    try:
        machine = probe_machine()
    finally:
        probe_machine.cache_clear()
    assert (machine.name, machine.device_bytes) == ("Test GPU", 1000)
    assert machine.host_bytes == 800 - 800 // FREE_SHARE
    assert machine.out_bytes_per_s == LINK_BYTES * 200
    assert machine.in_bytes_per_s == LINK_BYTES * 250
    assert machine.both_bytes_per_s == 2 * LINK_BYTES * 10**9 // 6_000_000
    assert machine.num_local_ranks == 1
