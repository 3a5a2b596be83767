"""Which part of the disk tier lies in which file, where there are several.

A part of at most `STRIPE_BYTES` goes to the file that is emptiest for its rate, so that all files
are done at about the same time; a file that is full is left out.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STRIPE_BYTES = 16 * 1024 * 1024
"""One request: finer parts would make requests smaller, coarser ones leave files idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A range of the tier that lies in one piece in one file."""

    start_bytes: int
    """Where it begins in the tier."""
    num_bytes: int
    file: int
    offset_bytes: int
    """Where it begins in the file."""


class Stripes:
    """The parts of a tier that only grows.

    Args:
        rates: One for each file, in any unit, above 0.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = tuple(rates)
        self._sizes = [0] * len(self._rates)
        self._parts: list[Part] = []
        self._starts: list[int] = []
        self._num_bytes = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many bytes of the tier lie in each file."""
        return tuple(self._sizes)

    @property
    def num_bytes(self) -> int:
        """How large the tier is."""
        return self._num_bytes

    def grow(self, num_bytes: int, caps: Sequence[int]) -> "Stripes | None":
        """Return a tier of `num_bytes` that begins as this one does; None if it does not fit.

        Args:
            num_bytes: No less than it has.
            caps: The most bytes of each file.
        """
        grown = Stripes(self._rates)
        grown._sizes, grown._num_bytes = list(self._sizes), self._num_bytes
        grown._parts, grown._starts = list(self._parts), list(self._starts)
        while grown._num_bytes < num_bytes:
            if not grown._add(num_bytes - grown._num_bytes, caps):
                return None
        return grown

    def split(self, start_bytes: int, num_bytes: int) -> Iterator[Part]:
        """Yield where a range lies, in order, in requests of at most a stripe."""
        index = bisect_right(self._starts, start_bytes) - 1
        end = start_bytes + num_bytes
        while start_bytes < end:
            part = self._parts[index]
            skipped = start_bytes - part.start_bytes
            length = min(part.num_bytes - skipped, end - start_bytes)
            for first in range(0, length, STRIPE_BYTES):
                yield Part(
                    start_bytes=start_bytes + first,
                    num_bytes=min(STRIPE_BYTES, length - first),
                    file=part.file,
                    offset_bytes=part.offset_bytes + skipped + first,
                )
            start_bytes += length
            index += 1

    def _add(self, most_bytes: int, caps: Sequence[int]) -> bool:
        """Add one part to the file that would be done first; False if all are full."""
        open_files = [i for i, cap in enumerate(caps) if self._sizes[i] < cap]
        if not open_files:
            return False
        file = min(open_files, key=lambda i: ((self._sizes[i] + STRIPE_BYTES) / self._rates[i], i))
        offset = self._sizes[file]
        # Parts end where stripes of the file do: one that was cut short is filled up first.
        length = min(STRIPE_BYTES - offset % STRIPE_BYTES, caps[file] - offset, most_bytes)
        last = self._parts[-1] if self._parts else None
        if last is not None and last.file == file and last.offset_bytes + last.num_bytes == offset:
            self._parts[-1] = Part(
                start_bytes=last.start_bytes,
                num_bytes=last.num_bytes + length,
                file=file,
                offset_bytes=last.offset_bytes,
            )
        else:
            self._starts.append(self._num_bytes)
            self._parts.append(
                Part(start_bytes=self._num_bytes, num_bytes=length, file=file, offset_bytes=offset)
            )
        self._sizes[file] += length
        self._num_bytes += length
        return True
