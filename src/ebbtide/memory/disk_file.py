"""One file of the disk tier: it has no name, and its space is allocated before it is used."""

import errno
import logging
import os
import secrets
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

import numpy as np

from ebbtide.errors import MemoryTierError
from ebbtide.memory.file_calls import AbstractFileCalls, aligned_memory
from ebbtide.memory.folders import check_folder
from ebbtide.units import format_bytes

log = logging.getLogger("ebbtide")

STAGE_BYTES = 4 * 1024 * 1024
"""Memory of each thread that direct requests pass through where the caller's does not begin at a
block. Small, since it is host memory, and each copy into it is one."""

_PREFIX = ".ebbtide-"

_STALE_S = 60
"""A file that still has its name after this is one whose process was killed between two calls."""

# What posix_fallocate says on a file system that cannot allocate ahead.
_CANNOT_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


@final
class DiskFile:
    """A file in a folder; every method may be called from any thread.

    Args:
        folder: Where the file is made; must exist and be writable.
        calls: The calls to the system.

    Raises:
        MemoryTierError: The folder does not exist, is not a folder, could be another user's doing
            (`check_folder`), or no file can be made in it.
    """

    def __init__(self, folder: str | os.PathLike[str], calls: AbstractFileCalls) -> None:
        self.folder = Path(folder)
        self.size_bytes = 0
        self._place = f"disk folder {str(self.folder)!r}"
        self._calls = calls
        self._staging = threading.local()
        check_folder(self.folder)
        self._remove_stale_files()
        # The random part is for other processes and other stores of this one.
        path = self.folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            opened = calls.open(path)
        except OSError as error:
            raise MemoryTierError(
                f"{self._place}: no file can be made in it ({error.strerror}); ebbtide needs to "
                "write there. Give yourself permission to write, or name another folder."
            ) from error
        self._descriptor, self.block_bytes = opened.descriptor, opened.block_bytes
        self.device = os.fstat(self._descriptor).st_dev
        """The file system that it lies on."""

    @property
    def is_direct(self) -> bool:
        """Whether requests pass the page cache by."""
        return self.block_bytes > 1

    def free_bytes(self) -> int:
        """Return what is free on its file system for this user."""
        # By the file: the folder may be gone.
        found = os.fstatvfs(self._descriptor)
        return found.f_bavail * found.f_frsize

    def allocate(self, num_bytes: int) -> None:
        """Make the file `num_bytes` long, no less than it is.

        Where the file system cannot allocate ahead, the file is extended without: a full disk is
        then found by a write.

        Raises:
            MemoryTierError: The disk or the quota is full, or the system refuses.
        """
        if num_bytes == self.size_bytes:
            return
        try:
            self._calls.allocate(self._descriptor, num_bytes)
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise self._refused(error, f"reserving {exact(num_bytes)}") from error
            os.ftruncate(self._descriptor, num_bytes)
        self.size_bytes = num_bytes

    def write(self, offset_bytes: int, source: memoryview) -> None:
        """Write all of `source`, on the calling thread.

        Args:
            offset_bytes: A multiple of the largest block size.
            source: Contiguous bytes. What lies behind them in the file up to a whole block is
                overwritten.

        Raises:
            MemoryTierError: The system refused, or wrote nothing.
        """
        self._copy(offset_bytes, source, self._write_staged, self._calls.write_at, "writing")

    def read(self, offset_bytes: int, target: memoryview) -> None:
        """Fill all of `target`, on the calling thread; as `write` otherwise."""
        self._copy(offset_bytes, target, self._read_staged, self._calls.read_at, "reading")

    def flush(self) -> None:
        """Wait until the disk has what was written, and drop it from the page cache."""
        if self.is_direct:
            return
        os.fsync(self._descriptor)
        if sys.platform == "linux":
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Free the disk space; nothing may be read or written at the same time or after."""
        os.close(self._descriptor)

    def _copy(
        self,
        offset_bytes: int,
        buffer: memoryview,
        copy_staged: Callable[[int, memoryview], int],
        call: Callable[[int, memoryview, int], int],
        verb: str,
    ) -> None:
        """Call until all of `buffer` is copied: one call may copy less than it is given."""
        num_done = 0
        while num_done < buffer.nbytes:
            first = offset_bytes + num_done
            rest = buffer[num_done:]
            whole_bytes = self._direct_bytes(rest)
            try:
                if whole_bytes:
                    num_bytes = call(self._descriptor, rest[:whole_bytes], first)
                    # A direct request that was cut short is continued where a block begins.
                    num_bytes -= num_bytes % self.block_bytes
                else:
                    num_bytes = copy_staged(first, rest[:STAGE_BYTES])
            except OSError as error:
                done = f"{verb} {exact(buffer.nbytes)} at byte {offset_bytes} of its file"
                raise self._refused(error, done) from error
            if num_bytes == 0:
                raise MemoryTierError(
                    f"{self._place}: {verb} stopped after {exact(num_done)} of "
                    f"{exact(buffer.nbytes)}, at byte {first} of its file; the file must hold "
                    "what was reserved. Check the disk, or name another folder."
                )
            num_done += num_bytes

    def _direct_bytes(self, buffer: memoryview) -> int:
        """Return how much of `buffer` one request can take as it is."""
        if self.block_bytes == 1:
            return buffer.nbytes
        address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        is_aligned = address % self.block_bytes == 0
        return buffer.nbytes - buffer.nbytes % self.block_bytes if is_aligned else 0

    def _write_staged(self, offset_bytes: int, source: memoryview) -> int:
        stage = self._stage(source.nbytes)
        _copy_bytes(stage[: source.nbytes], source)
        num_bytes = self._calls.write_at(self._descriptor, stage, offset_bytes)
        return min(num_bytes - num_bytes % self.block_bytes, source.nbytes)

    def _read_staged(self, offset_bytes: int, target: memoryview) -> int:
        stage = self._stage(target.nbytes)
        num_bytes = self._calls.read_at(self._descriptor, stage, offset_bytes)
        num_bytes = min(num_bytes - num_bytes % self.block_bytes, target.nbytes)
        _copy_bytes(target[:num_bytes], stage[:num_bytes])
        return num_bytes

    def _stage(self, num_bytes: int) -> memoryview:
        """Return this thread's aligned memory, as much of it as whole blocks need."""
        memory: memoryview | None = getattr(self._staging, "memory", None)
        if memory is None:
            memory = self._staging.memory = aligned_memory(STAGE_BYTES)
        return memory[: -(-num_bytes // self.block_bytes) * self.block_bytes]

    def _remove_stale_files(self) -> None:
        """Remove what a killed process left, on a file system without nameless files."""
        try:
            found = list(self.folder.glob(f"{_PREFIX}*"))
        except OSError:
            return  # it may not be listed; opening tells whether it can be used
        for path in found:
            try:
                status = path.lstat()
                is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if is_ours and time.time() - status.st_mtime > _STALE_S:
                    path.unlink()
            except OSError as error:
                log.debug("%s stays: %s", path, error)

    def _refused(self, error: OSError, action: str) -> MemoryTierError:
        place = f"{self._place}: {action} failed"
        reason = f"errno {error.errno}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return MemoryTierError(
                f"{place}, since the disk or your quota is full ({reason}); other "
                "programs may have filled it. Free space there, or name another folder."
            )
        return MemoryTierError(
            f"{place} ({reason}); activations there cannot be trusted any more. "
            "Check the disk, or name another folder."
        )


def exact(num_bytes: int) -> str:
    """Return a size for people, with its bytes."""
    return f"{format_bytes(num_bytes)} ({num_bytes} bytes)"


def _copy_bytes(target: memoryview, source: memoryview) -> None:
    # Not target[:] = source, which keeps all other Python threads waiting.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
