"""Measure the link between this process's device and pinned host memory, in jax's own way."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from ebbtide.errors import PlanError
from ebbtide.jax.clock import time_ns
from ebbtide.jax.policy import HOST_KIND
from ebbtide.machine import Machine
from ebbtide.memory.limits import find_tightest_limit

LINK_BYTES = 256 * 2**20
"""Copied each way: 5 ms at 55 GB/s, long beside what launching takes."""

FREE_SHARE = 8
"""One part of so many of the free host memory stays free."""


@cache
def probe_machine() -> Machine:
    """Return the first local device with its link, measured once in a process.

    Copies a quarter of a GiB each way, alone and both ways at once, in compiled programs. How much
    compute slows down beside a copy is not measured.

    Raises:
        PlanError: The device is a CPU, or has no pinned host memory: there is no link.
    """
    device = jax.local_devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    stats: dict[str, Any] = device.memory_stats() or {}
    if device.platform == "cpu" or HOST_KIND not in kinds or "bytes_limit" not in stats:
        raise PlanError(
            f"there is no link to measure: jax's device is {device.device_kind} ({device.platform})"
            f" with the memories {', '.join(kinds)}. Give machine=, a Machine or a name of the "
            "catalog such as 'h200-pcie5'."
        )
    here = jax.sharding.SingleDeviceSharding(device)
    there = here.with_memory_kind(HOST_KIND)
    out = jax.jit(lambda x: x, out_shardings=there)
    back = jax.jit(lambda x: x, out_shardings=here)
    values = jax.device_put(jnp.ones(LINK_BYTES // 4, jnp.float32), here)
    on_host = jax.block_until_ready(out(values))
    out_ns, in_ns = time_ns(out, (values,)), time_ns(back, (on_host,))
    both_ns = time_ns(lambda a, b: (out(a), back(b)), (values, on_host))
    num_ranks = len(jax.local_devices()) if jax.process_count() == 1 else 1
    limit = find_tightest_limit()
    free = 0 if limit is None else limit.room_bytes
    return Machine(
        name=device.device_kind,
        device_bytes=int(stats["bytes_limit"]),
        host_bytes=free - free // FREE_SHARE,
        out_bytes_per_s=LINK_BYTES * 10**9 // out_ns,
        in_bytes_per_s=LINK_BYTES * 10**9 // in_ns,
        both_bytes_per_s=2 * LINK_BYTES * 10**9 // both_ns,
        num_local_ranks=num_ranks,
        source=f"measured with jax {jax.__version__}, one device copying",
    )
