"""The disk tier: files that have no names, and threads that copy.

Nothing is left behind when a process is killed, since a file without a name goes with the process
that opened it. Space is allocated before the first step, so that a full disk is found then and not
in the middle of a step. With several folders, each activation is spread over their files by what
each disk was measured to do.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, final

from ebbtide.errors import MemoryTierError, RuntimeStateError
from ebbtide.memory.arena import Arena, Region
from ebbtide.memory.checksums import Checksums
from ebbtide.memory.disk_file import DiskFile, exact
from ebbtide.memory.disk_rates import NUM_THREADS, measure_rates
from ebbtide.memory.file_calls import BLOCK_SIZES, AbstractFileCalls, SystemFileCalls
from ebbtide.memory.mounts import find_file_system, warning_for
from ebbtide.memory.stripes import Part, Stripes
from ebbtide.units import DiskSpec

log = logging.getLogger("ebbtide")

DISK_ALIGNMENT_BYTES = max(BLOCK_SIZES)
"""Regions begin at multiples of it, whatever the disk's own blocks are."""

BytesLike = memoryview | bytearray | bytes
"""What a copy reads or fills; `memoryview(x)` makes one of anything with the buffer protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStatistics:
    """How full a disk store is and was, and what went through it."""

    cap_bytes: int
    """Most bytes that its files may have together."""
    reserved_bytes: int
    """Bytes that they have."""
    held_bytes: int
    """Sum of what callers asked for and still hold."""
    peak_taken_bytes: int
    """Most bytes that were taken at once, with the rounding to 4096."""
    num_regions: int
    """Regions that callers hold."""
    num_refused: int
    """Requests for which nothing was free."""
    written_bytes: int
    """Bytes written since the start; what wears the disks."""
    read_bytes: int
    """Bytes read since the start."""


class _Copy:
    """A copy that several requests make."""

    def __init__(self, num_parts: int) -> None:
        self.future: Future[None] = Future()
        self._lock = threading.Lock()
        self._num_left = num_parts
        self._error: BaseException | None = None

    def end_part(self, error: BaseException | None) -> None:
        """Note that a part is done; the last one tells whoever waits.

        Not the first that fails: the others still use the caller's memory.
        """
        with self._lock:
            self._error = self._error or error
            self._num_left -= 1
            if self._num_left:
                return
        if self._error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self._error)


@final
class DiskStore:
    """Space on disk for evicted activations: take a region, write it, read it, give it back.

    Every method may be called from any thread. Copies run on threads of the store; two copies
    are unordered, so the caller waits for the future of a write before it reads that region.
    Other programs cannot see the files, and the system frees them when the process ends in any
    way. A child made by fork must not use the store. Requests pass the page cache by where the
    file system can, so that what is evicted really leaves memory.

    Args:
        folders: Where files are made, one in each, and the most bytes there, rounded down to a
            multiple of 4096; folders must exist and be writable.
        rates: How much each folder is given beside the others, in any unit. By default they are
            measured if there are several.
        has_checksums: Keep a checksum of what is written, and compare it with what is read.
        num_threads: Requests in flight to one folder; each takes one thread.
        calls: The calls to the system; other ones than the real ones are for tests.

    Raises:
        MemoryTierError: A folder does not exist, is not a folder, could be another user's doing, or
            no file can be made in it.
        MissingExtraError: Checksums were asked for, and xxhash is not installed.
        ValueError: There is no folder, a cap is below 0, a rate is not above 0 or of no folder, or
            `num_threads` is below 1.
    """

    def __init__(
        self,
        folders: Sequence[DiskSpec],
        *,
        rates: Sequence[float] | None = None,
        has_checksums: bool = False,
        num_threads: int = NUM_THREADS,
        calls: AbstractFileCalls | None = None,
    ) -> None:
        _check(folders, rates, num_threads)
        calls = SystemFileCalls() if calls is None else calls
        self._caps = [spec.cap_bytes - spec.cap_bytes % DISK_ALIGNMENT_BYTES for spec in folders]
        self._place = "disk folder " + " and ".join(repr(str(spec.path)) for spec in folders)
        self._checksums = Checksums() if has_checksums else None
        self._lock = threading.Lock()
        self._arena = Arena(0, DISK_ALIGNMENT_BYTES)
        self._written_bytes = self._read_bytes = 0
        self._is_closed = False
        with ExitStack() as opened:
            self._files: list[DiskFile] = []
            for spec in folders:
                self._files.append(DiskFile(spec.path, calls))
                opened.callback(self._files[-1].close)
            if rates is None:
                rates = _measured_rates(folders, calls)
            self._stripes = Stripes(rates)
            for file in self._files:
                _say_what_is_wrong_with(file)
            self._close_files = opened.pop_all().close
        self._threads = ThreadPoolExecutor(
            num_threads * len(folders), thread_name_prefix="ebbtide-disk"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def reserve(self, num_bytes: int) -> None:
        """Make the files at least `num_bytes` bytes long together, rounded up to 4096.

        Where a file system cannot allocate ahead, files are extended without: a full disk is then
        found by a write.

        Raises:
            MemoryTierError: The caps or the free space of the disks are too small, or the system
                refuses.
            RuntimeStateError: The store is closed.
        """
        wanted_bytes = -(-num_bytes // DISK_ALIGNMENT_BYTES) * DISK_ALIGNMENT_BYTES
        with self._lock:
            self._check_open()
            reserved_bytes = self._stripes.num_bytes
            if wanted_bytes <= reserved_bytes:
                return
            cap_bytes = sum(self._caps)
            if wanted_bytes > cap_bytes:
                raise MemoryTierError(
                    f"{self._place}: the plan needs {exact(wanted_bytes)}, but the cap is "
                    f"{exact(cap_bytes)}; the cap is never exceeded. Raise the cap, or use a plan "
                    "that moves less."
                )
            room = self._room()
            grown = self._stripes.grow(wanted_bytes, room)
            if grown is None:
                more_bytes, free_bytes = wanted_bytes - reserved_bytes, sum(room) - reserved_bytes
                raise MemoryTierError(
                    f"{self._place}: the plan needs {exact(more_bytes)} more, but the disk has "
                    f"only {exact(free_bytes)} free; all space is reserved before the first step. "
                    "Free space there, name a folder on a larger disk, or use a plan that moves "
                    "less."
                )
            for file, size_bytes in zip(self._files, grown.sizes, strict=True):
                file.allocate(size_bytes)
            self._stripes = grown
            self._arena.grow(wanted_bytes)

    def take(self, num_bytes: int) -> Region | None:
        """Return room for `num_bytes` bytes, or None when no free range is that large.

        Raises:
            RuntimeStateError: The store is closed.
        """
        with self._lock:
            self._check_open()
            return self._arena.take(num_bytes)

    def give_back(self, region: Region) -> None:
        """Make a region free again; the very object that `take` returned.

        Copies of the region that still run are unchecked: they may then read or overwrite
        another activation, and gradients are silently wrong. After `close` it does nothing.

        Raises:
            AssertionError: The store does not hold the region.
        """
        with self._lock:
            if not self._is_closed:
                self._arena.give_back(region)

    def write(self, region: Region, buffer: BytesLike) -> Future[None]:
        """Start to copy `buffer` to `region`.

        The buffer is held until the future is done. Writing to it before is unchecked: the
        activation is then silently wrong.

        Args:
            region: Taken from this store and not given back.
            buffer: `region.num_bytes` contiguous bytes.

        Returns:
            Done when the bytes are in the files; its exception is a MemoryTierError when the
            system refused, for example because a disk is full.

        Raises:
            RuntimeStateError: The store is closed.
            ValueError: The buffer has another size, or is not contiguous.
        """
        return self._start(region, _as_bytes(region, buffer), self._write_part)

    def read(self, region: Region, buffer: BytesLike) -> Future[None]:
        """Start to copy `region` to `buffer`.

        The buffer is held until the future is done; what it holds before is undefined.

        Args:
            region: Taken from this store, not given back, and its write done.
            buffer: `region.num_bytes` contiguous bytes that may be written.

        Returns:
            Done when the buffer is filled; its exception is a MemoryTierError when the system
            refused, or when what was read has another checksum than what was written.

        Raises:
            RuntimeStateError: The store is closed.
            ValueError: The buffer has another size, is not contiguous or is read-only.
        """
        target = _as_bytes(region, buffer)
        if target.readonly:
            raise ValueError("buffer is read-only; pass one that may be written")
        return self._start(region, target, self._read_part)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def is_direct(self) -> bool:
        """Whether every request passes the page cache by."""
        return all(file.is_direct for file in self._files)

    def statistics(self) -> DiskStatistics:
        """Return how full the store is and was; also after `close`."""
        with self._lock:
            arena = self._arena.statistics()
            return DiskStatistics(
                cap_bytes=sum(self._caps),
                reserved_bytes=arena.capacity_bytes,
                held_bytes=arena.held_bytes,
                peak_taken_bytes=arena.peak_taken_bytes,
                num_regions=arena.num_regions,
                num_refused=arena.num_refused,
                written_bytes=self._written_bytes,
                read_bytes=self._read_bytes,
            )

    def close(self) -> None:
        """Wait for requests that run, fail those that wait, and free the disk space.

        The futures of copies with requests that had not begun hold a RuntimeStateError. Regions
        that are still held are lost. Closing twice does nothing.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        # Without the lock, which the copies take. Not cancel_futures: the executor drops what it
        # cancels without telling concurrent.futures.wait, which then never returns.
        self._threads.shutdown(wait=True)
        self._close_files()

    def _start(
        self, region: Region, buffer: memoryview, copy_part: Callable[[Part, memoryview], None]
    ) -> Future[None]:
        with self._lock:
            self._check_open()
            parts = list(self._stripes.split(region.offset_bytes, region.num_bytes))
            copy = _Copy(len(parts))
            for part in parts:
                first = part.start_bytes - region.offset_bytes
                piece = buffer[first : first + part.num_bytes]
                self._threads.submit(self._run_part, copy, part, piece, copy_part)
            return copy.future

    def _run_part(
        self,
        copy: _Copy,
        part: Part,
        piece: memoryview,
        copy_part: Callable[[Part, memoryview], None],
    ) -> None:
        error: BaseException | None = None
        try:
            with self._lock:
                self._check_open()
            copy_part(part, piece)
        except BaseException as raised:
            error = raised
        # Whoever waits counts on its memory being free, and the executor holds arguments longer.
        with suppress(BufferError):  # the traceback of an error may use it
            piece.release()
        copy.end_part(error)

    def _write_part(self, part: Part, piece: memoryview) -> None:
        if self._checksums is not None:
            self._checksums.note(part, piece)
        self._files[part.file].write(part.offset_bytes, piece)
        with self._lock:
            self._written_bytes += part.num_bytes

    def _read_part(self, part: Part, piece: memoryview) -> None:
        file = self._files[part.file]
        file.read(part.offset_bytes, piece)
        if self._checksums is not None and not self._checksums.matches(part, piece):
            raise MemoryTierError(
                f"disk folder {str(file.folder)!r}: {exact(part.num_bytes)} at byte "
                f"{part.offset_bytes} of its file are not what was written there: their checksum "
                "is another. No gradient was made from them. Check the disk, or name another "
                "folder."
            )
        with self._lock:
            self._read_bytes += part.num_bytes

    def _room(self) -> list[int]:
        """Return the most bytes that each file can have; folders of one disk share what is free."""
        free = {file.device: file.free_bytes() for file in self._files}
        room: list[int] = []
        for file, cap_bytes in zip(self._files, self._caps, strict=True):
            more_bytes = min(cap_bytes - file.size_bytes, free[file.device])
            more_bytes -= more_bytes % DISK_ALIGNMENT_BYTES
            free[file.device] -= more_bytes
            room.append(file.size_bytes + more_bytes)
        return room

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeStateError(
                f"the store in {self._place} is closed; a closed store holds nothing. "
                "Make a new one."
            )


def _check(folders: Sequence[DiskSpec], rates: Sequence[float] | None, num_threads: int) -> None:
    if not folders:
        raise ValueError("folders is empty; a store needs one or more")
    for spec in folders:
        if spec.cap_bytes < 0:
            raise ValueError(f"cap_bytes is {spec.cap_bytes}; it must be 0 or more")
    if rates is not None and (len(rates) != len(folders) or min(rates) <= 0):
        raise ValueError(f"rates is {list(rates)}; it must hold one above 0 for each folder")
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; it must be 1 or more")


def _say_what_is_wrong_with(file: DiskFile) -> None:
    warning = warning_for(file.folder, find_file_system(file.folder))
    if not warning and not file.is_direct:
        warning = (
            f"disk folder {str(file.folder)!r} takes no direct requests (O_DIRECT): copies go "
            "through the page cache, which holds them in memory as long as some is free."
        )
    if warning:
        log.warning("%s", warning)


def _measured_rates(folders: Sequence[DiskSpec], calls: AbstractFileCalls) -> list[float]:
    """Return how fast each folder takes bytes and gives them back, where there are several."""
    if len(folders) == 1:
        return [1.0]
    measured = measure_rates(folders, calls=calls)
    # Every byte that is written is read once.
    return [1 / (1 / rate.write_bytes_per_s + 1 / rate.read_bytes_per_s) for rate in measured]


def _as_bytes(region: Region, buffer: BytesLike) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("buffer is not contiguous; pass contiguous bytes")
    if view.nbytes != region.num_bytes:
        raise ValueError(
            f"buffer has {view.nbytes} bytes, but the region has {region.num_bytes}; a region is "
            "copied whole"
        )
    return view.cast("B")
