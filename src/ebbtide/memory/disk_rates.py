"""How fast folders take bytes and give them back, as a disk store copies them."""

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from ebbtide.memory.disk_file import DiskFile
from ebbtide.memory.file_calls import AbstractFileCalls, SystemFileCalls, aligned_memory
from ebbtide.memory.stripes import STRIPE_BYTES
from ebbtide.units import DiskSpec

NUM_BYTES = 64 * 2**20
"""Written to each folder and read from it: 0.3 s at 0.2 GB/s."""

# Not measured: enough that reads and writes go on side by side, and few enough to leave most
# cores of a small machine to the data loader.
NUM_THREADS = 4
"""Requests in flight to one folder, here and in a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """What was measured of one folder while all others copied as well."""

    write_bytes_per_s: int
    read_bytes_per_s: int


def _go_on() -> None:
    """Wait for nobody."""


def measure_rates(
    folders: Sequence[DiskSpec],
    *,
    calls: AbstractFileCalls | None = None,
    wait_for_others: Callable[[], None] = _go_on,
) -> list[DiskRates]:
    """Write `NUM_BYTES` to every folder at once, or its cap if that is less, and read them back.

    Where requests go through the page cache, it is waited for until the disk has the bytes, and
    they are dropped from it: what fits there goes at the speed of memory, a step that evicts more
    does not.

    Args:
        wait_for_others: Called before the writes and before the reads, so that several processes
            measure at the same time.

    Raises:
        MemoryTierError: A folder cannot be written.
    """
    calls = SystemFileCalls() if calls is None else calls
    sizes = [min(NUM_BYTES, spec.cap_bytes) for spec in folders]
    # Random bytes: some disks compress, and zeros may take no place at all.
    source = aligned_memory(max(sizes))
    source[:] = secrets.token_bytes(max(sizes))
    with ExitStack() as opened, ThreadPoolExecutor(len(folders)) as threads:
        trials: list[_Trial] = []
        for spec, num_bytes in zip(folders, sizes, strict=True):
            file = DiskFile(spec.path, calls)
            opened.callback(file.close)
            file.allocate(num_bytes)
            trials.append(_Trial(file, source[:num_bytes], aligned_memory(num_bytes)))
        wait_for_others()
        writing_s = list(threads.map(_Trial.write, trials))
        wait_for_others()
        reading_s = list(threads.map(_Trial.read, trials))
    return [
        DiskRates(
            write_bytes_per_s=max(1, int(num_bytes / write_s)),
            read_bytes_per_s=max(1, int(num_bytes / read_s)),
        )
        for num_bytes, write_s, read_s in zip(sizes, writing_s, reading_s, strict=True)
    ]


class _Trial:
    """One folder's file, with what is written to it and where it is read back to."""

    def __init__(self, file: DiskFile, source: memoryview, target: memoryview) -> None:
        self._file = file
        self._source = source
        self._target = target

    def write(self) -> float:
        """Return the seconds until the disk has all."""
        start = time.perf_counter()
        self._copy(self._file.write, self._source)
        self._file.flush()
        return time.perf_counter() - start

    def read(self) -> float:
        """Return the seconds that reading all took."""
        start = time.perf_counter()
        self._copy(self._file.read, self._target)
        return time.perf_counter() - start

    def _copy(self, copy: Callable[[int, memoryview], None], buffer: memoryview) -> None:
        def copy_stripe(first: int) -> None:
            copy(first, buffer[first : first + STRIPE_BYTES])

        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ebbtide-probe") as threads:
            # The list: an exception of a thread is raised when its result is taken.
            list(threads.map(copy_stripe, range(0, buffer.nbytes, STRIPE_BYTES)))
