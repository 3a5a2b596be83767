"""Checksums of what lies on disk, by where it lies."""

import threading
from typing import Any, final

from ebbtide.errors import MissingExtraError
from ebbtide.memory.stripes import Part


@final
class Checksums:
    """Remembers one checksum for each part that was written.

    XXH3 of 64 bits: it finds what a disk or a wrong offset does, and no intent.

    Raises:
        MissingExtraError: xxhash is not installed.
    """

    def __init__(self) -> None:
        try:
            import xxhash
        except ImportError as error:
            raise MissingExtraError.for_extra("disk", needed_by="checksums on disk") from error
        self._digest: Any = xxhash.xxh3_64_intdigest
        self._lock = threading.Lock()
        self._digests: dict[tuple[int, int], tuple[int, int]] = {}

    def note(self, part: Part, content: memoryview) -> None:
        """Remember the checksum of what is written to a part; it replaces an earlier one."""
        digest = self._digest(content)
        with self._lock:
            self._digests[part.file, part.offset_bytes] = (part.num_bytes, digest)

    def matches(self, part: Part, content: memoryview) -> bool:
        """Return whether `content` has the checksum of what was written to the part last."""
        digest = self._digest(content)
        with self._lock:
            return self._digests.get((part.file, part.offset_bytes)) == (part.num_bytes, digest)
