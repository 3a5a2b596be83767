"""What is freed in the midst of the heap goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ebbtide.memory.heap import find_trim

MIB = 2**20

# A first block is mapped alone and raises the size from which blocks are; later ones come from the
# heap, and the last of them keeps its end in use.
PROGRAM = f"""
import os
from ebbtide.memory.heap import find_trim

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

del (first := [bytearray({MIB + MIB // 2})])[:]
blocks = [bytearray(b"1") * {MIB} for _ in range(64)]
last = blocks.pop()
del blocks[:]
before = resident()
find_trim()()
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux alone")
def test_holes_in_the_heap_go_back() -> None:
    if find_trim() is None:
        pytest.skip("this Linux has another C library than glibc")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 48 * MIB


def test_where_the_c_library_cannot_there_is_nothing_to_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert find_trim() is None
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert find_trim() is None
