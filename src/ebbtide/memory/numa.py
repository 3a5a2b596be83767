"""The NUMA node of a GPU, and pages from it.

Pages of the far node cost a GPU part of its link. The node is preferred and never demanded: a
full node degrades the copies, where a binding would have the process killed.
"""

import ctypes
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SystemCall = Callable[..., int]
"""The number of a system call and its arguments; returns -1 where the system refuses."""

# The kernel's tables of system calls; they differ by architecture and never change.
MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}

MPOL_PREFERRED = 1

_NODE = re.compile("node[0-9]+")
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def find_node(pci_address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device.

    Args:
        pci_address: Such as `0000:17:00.0`.
        root: The folder that holds `sys`.

    Returns:
        None where the system does not say, and where it has one node only.
    """
    nodes = root / "sys/devices/system/node"
    try:
        num_nodes = sum(1 for folder in nodes.iterdir() if _NODE.fullmatch(folder.name))
        text = (root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node").read_text()
        node = int(text)
    except (OSError, ValueError):
        return None
    return node if num_nodes > 1 and node >= 0 else None


def prefer_node(address: int, num_bytes: int, node: int, *, call: SystemCall | None = None) -> bool:
    """Let the pages from `address` on come from `node` when they are first touched.

    Args:
        address: The start of a page.
        num_bytes: How much; rounded up to whole pages.
        node: Its number.
        call: Another way to make the system call, for tests.

    Returns:
        False where the system refuses or has no such call; nothing has changed then.
    """
    number = MBIND_NUMBERS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    num_words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * num_words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    # One more than there are bits: the kernel takes one off before it reads them.
    num_bits = num_words * _WORD_BITS + 1
    make_call = _system_call if call is None else call
    return make_call(number, address, num_bytes, MPOL_PREFERRED, mask, num_bits, 0) == 0


def _system_call(number: int, *arguments: Any) -> int:
    # Plain Python ints would be passed as C ints, and cut to 32 bits.
    words = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return int(call(ctypes.c_long(number), *words))
