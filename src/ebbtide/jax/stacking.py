"""What a scan's stack costs compute: for what a policy keeps, and for what it moves.

A scan has one buffer for each residual of its body, with a slice for each layer. Forward fills it
and copies each value into its slice, and backward copies the slice out again. A value that is made
again is often fused into what reads it, and then is never in memory at all. What is moved has, in
place of the device's stack, buffers that it leaves from and comes back to, and its copies read and
write the device's memory beside compute.

Both are counted in passes over a value's bytes at the rate of the device's memory. The passes are
from one H200 (PCIe 5, jax 0.11.2, bf16), scans of a Llama's layers timed by hand: 2 to 3 ms a GiB
kept, and about 7 ms of the compute stream a GiB moved, where a pass over a GiB takes 0.26 ms.
Counting instructions gives five passes for keeping; that XLA's slice kernels run at half of the
memory's rate is likely, and was not looked at. `benchmarks/jax_stacking.py` measures both.
"""

from dataclasses import replace

from ebbtide.machine import Machine

KEPT_PASSES = 10
"""Of a value that a plan keeps."""
MOVED_PASSES = 27
"""Of a value that a plan moves, all of its way."""

MAX_SLOWDOWN_PPM = 1_000_000
"""Compute is not slowed down for longer than the copies take."""


def kept_ns_per_gib(memory_bytes_per_s: float) -> int:
    """Return the compute time of a GiB in the stack, forward and backward together.

    Args:
        memory_bytes_per_s: Of the device's own memory.
    """
    return round(KEPT_PASSES * 2**30 / memory_bytes_per_s * 1e9)


def charge_moves(machine: Machine, memory_bytes_per_s: float) -> Machine:
    """Return the machine whose copies slow compute down by what moving costs more than keeping.

    It is never less than what the machine says.

    Args:
        machine: Its links.
        memory_bytes_per_s: Of the device's own memory.
    """
    if not machine.out_bytes_per_s or not machine.in_bytes_per_s:
        return machine
    more_s = (MOVED_PASSES - KEPT_PASSES) / memory_bytes_per_s
    copies_s = 1 / machine.out_bytes_per_s + 1 / machine.in_bytes_per_s
    charged = min(MAX_SLOWDOWN_PPM, round(more_s / copies_s * 1e6))
    return replace(machine, slowdown_ppm=max(machine.slowdown_ppm, charged))
