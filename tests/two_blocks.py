"""A small machine and a step of two blocks, to work out by hand."""

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.machine import Machine
from ebbtide.workload import Outside, Workload

WIDE = 10**6

# One byte a nanosecond over the link; the disk is half as fast to write, twice as fast to read.
MACHINE = Machine(
    name="small",
    device_bytes=WIDE,
    host_bytes=WIDE,
    out_bytes_per_s=10**9,
    in_bytes_per_s=10**9,
    both_bytes_per_s=10**9,
    disk_bytes=WIDE,
    disk_write_bytes_per_s=5 * 10**8,
    disk_read_bytes_per_s=2 * 10**9,
)


def made(name: str, num_bytes: int, *inputs: str) -> Activation:
    """An activation; every call takes 10 ns."""
    return Activation(
        name=name,
        op="aten.mm",
        kind=OpKind.MATMUL if inputs else OpKind.INPUT,
        num_bytes=num_bytes,
        inputs=inputs,
        is_saved=True,
        is_replayable=bool(inputs),
        group=name,
        make_ns=10 if inputs else 0,
    )


def a_block(name: str, x_bytes: int, h_bytes: int) -> Block:
    x, h = f"{name}.x", f"{name}.h"
    return Block(
        name=name,
        class_name="Layer",
        activations=(made(x, x_bytes), made(h, h_bytes, x)),
        backward=tuple(BackwardEvent(uses=(use,), compute_ns=10, held_bytes=0) for use in (h, x)),
    )


def two_blocks(**outside: int) -> Workload:
    """a.x 10 and a.h 20, b.x 40 and b.h 80; a turn of 10 ns; 100 bytes are always there."""
    numbers = {"resident_bytes": 100, "turn_bytes": 0, "turn_ns": 10, "ends_bytes": 0, "ends_ns": 0}
    return Workload(
        model="Model",
        blocks=(a_block("a", 10, 20), a_block("b", 40, 80)),
        outside=Outside(**{**numbers, **outside}),
    )
