"""The calls to the system behind the disk tier: one seam, so that a test can make each one fail."""

import errno
import fcntl
import mmap
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import final

BLOCK_SIZES = (512, 4096)
"""What direct requests must be whole multiples of, in place, size and memory: the logical blocks of
today's disks. Anything else goes through the page cache."""

# What open says where a file system or a system has no files without a name.
_NO_NAMELESS_FILES = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFile:
    """A file that has no name."""

    descriptor: int
    block_bytes: int
    """Requests are whole multiples of this and pass the page cache by; 1: they go through it."""


class AbstractFileCalls(ABC):
    """The calls to the system that a `DiskStore` makes; a test can make them fail."""

    @abstractmethod
    def open(self, path: Path) -> OpenFile:
        """Open a new file in the folder of `path` that no other process can see.

        `path`, which must not exist, is the name that it has for a moment where the file system
        cannot do without.
        """

    @abstractmethod
    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Make the file `num_bytes` bytes long and allocate them all; OSError if impossible."""

    @abstractmethod
    def write_at(self, descriptor: int, source: memoryview, offset_bytes: int) -> int:
        """Write some of `source`, at least one byte, and return how many bytes."""

    @abstractmethod
    def read_at(self, descriptor: int, target: memoryview, offset_bytes: int) -> int:
        """Read into some of `target` and return how many bytes; 0 at the end of the file."""


@final
class SystemFileCalls(AbstractFileCalls):
    """The real calls.

    Args:
        is_direct: Pass the page cache by where the file system can: what is evicted is read once,
            and cached it would take the memory that evicting it frees.
    """

    def __init__(self, *, is_direct: bool = True) -> None:
        self._is_direct = is_direct

    def open(self, path: Path) -> OpenFile:
        """Create and return the file; only its owner may read it."""
        descriptor = _open_nameless(path)
        try:
            block_bytes = _find_block_bytes(descriptor) if self._is_direct else 1
        except BaseException:
            os.close(descriptor)
            raise
        return OpenFile(descriptor=descriptor, block_bytes=block_bytes)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Allocate with posix_fallocate, which only some systems and file systems have."""
        if sys.platform != "linux":
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        os.posix_fallocate(descriptor, 0, num_bytes)

    def write_at(self, descriptor: int, source: memoryview, offset_bytes: int) -> int:
        """Write with pwritev, which moves no file position that threads would share."""
        return os.pwritev(descriptor, [source], offset_bytes)

    def read_at(self, descriptor: int, target: memoryview, offset_bytes: int) -> int:
        """Read with preadv, which moves no file position that threads would share."""
        return os.preadv(descriptor, [target], offset_bytes)


def _open_nameless(path: Path) -> int:
    if sys.platform == "linux":
        try:
            return os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
    # O_EXCL follows no link: whoever put one there gets an error.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    return descriptor


def _find_block_bytes(descriptor: int) -> int:
    """Switch direct requests on, and return what they must be multiples of; 1: there are none."""
    if sys.platform != "linux":
        return 1
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return 1
    # Only a write tells: nothing but newer kernels' statx does, and Python has none.
    for block_bytes in BLOCK_SIZES:
        # In memory, too, it begins at no more than one block.
        memory = aligned_memory(block_bytes, skip_bytes=block_bytes)
        try:
            is_whole = os.pwritev(descriptor, [memory], block_bytes) == block_bytes
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            continue
        os.ftruncate(descriptor, 0)
        if is_whole:
            return block_bytes
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return 1


def aligned_memory(num_bytes: int, *, skip_bytes: int = 0) -> memoryview:
    """Return zeroed memory whose address is a multiple of the page size, plus `skip_bytes`."""
    pages = mmap.mmap(-1, skip_bytes + num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(pages)[skip_bytes:]
