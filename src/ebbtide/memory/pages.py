"""Pages of host memory for a driver to pin: large ones, out of forks, near one NUMA node.

They are private anonymous pages, mapped here and touched first by whoever registers them, so
that the advice below is there when the system chooses pages. Each piece of advice is a wish: a
system that does not know it gives ordinary pages, and everything works more slowly.
"""

import ctypes
import mmap
import os
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ebbtide.memory.numa import prefer_node


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWishes:
    """Which wishes the system granted; what it then does is in `read_mapping`."""

    takes_huge_pages: bool
    """Huge pages may be used: 3 GiB registered in 0.5 to 0.7 s, in shared pages without them in
    1.4 to 1.7 (the host of one H200)."""
    is_hidden_from_forks: bool
    """A forked process does not see the pages."""
    numa_node: int | None
    """The node that pages come from as long as it has some; None: no node is preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """What Linux says of a mapping."""

    flags: frozenset[str]
    """`VmFlags`: `hg` where huge pages are wished for, `dc` where forks do not see it."""
    resident_bytes: int
    """What is in memory now."""
    huge_bytes: int
    """What of that lies in huge pages."""


@final
class HostPages:
    """A row of pages that nobody has touched; they go back when the last user is gone.

    Args:
        num_bytes: 1 or more; the system rounds up to whole pages, and so takes less than one more.
        numa_node: Where the pages shall come from; None: wherever the system likes.

    Raises:
        OSError: The system refuses.
    """

    def __init__(self, num_bytes: int, *, numa_node: int | None = None) -> None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes is {num_bytes}; it must be 1 or more")
        self.memory = _map(num_bytes)
        """The bytes, for whoever takes a buffer."""
        self.num_bytes = num_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        is_huge = is_hidden = False
        if sys.platform == "linux":
            is_huge = _advise(self.memory, mmap.MADV_HUGEPAGE)
            # A forked data loader shares private pages until one side writes, and then one side
            # gets a copy: the driver would go on to read and write the other.
            is_hidden = _advise(self.memory, mmap.MADV_DONTFORK)
        has_node = numa_node is not None and prefer_node(self.address, num_bytes, numa_node)
        self.wishes = PageWishes(
            takes_huge_pages=is_huge,
            is_hidden_from_forks=is_hidden,
            numa_node=numa_node if has_node else None,
        )
        _mapped.add(self.memory)

    def discard(self) -> None:
        """Give the pages back to the system now, also while the buffer is still referred to.

        The caller must have unregistered them: a copy that still runs is unchecked, and then
        writes to memory that is no longer there.
        """
        if sys.platform == "linux":
            _advise(self.memory, mmap.MADV_DONTNEED)


def read_mapping(address: int, smaps: Path = Path("/proc/self/smaps")) -> Mapping | None:
    """Return what Linux says of the mapping at `address`; None where it has none.

    Takes the system as long as it takes to walk all pages of the process.
    """
    try:
        lines = smaps.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    is_found = False
    sizes: dict[str, int] = {}
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, _, end = name.partition("-")
            is_found = int(start, 16) <= address < int(end, 16)
        elif is_found and name == "VmFlags:":
            return Mapping(
                flags=frozenset(rest.split()),
                resident_bytes=sizes.get("Rss:", 0),
                huge_bytes=sizes.get("AnonHugePages:", 0),
            )
        elif is_found and rest.endswith(" kB"):
            sizes[name] = int(rest.split()[0]) * 1024
    return None


def _map(num_bytes: int) -> mmap.mmap:
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, num_bytes)
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (ValueError, OverflowError) as error:
        raise OSError(str(error)) from error  # more than there are addresses


def _advise(memory: mmap.mmap, advice: int) -> bool:
    try:
        memory.madvise(advice)
    except OSError:
        return False
    return True


# In a forked process the addresses are free, and may be given to somebody else. When the
# `mmap` object dies there, it would unmap what is not its own; so there it never dies.
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_inherited: list[mmap.mmap] = []


def _keep_in_child() -> None:
    _inherited.extend(_mapped)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_keep_in_child)
