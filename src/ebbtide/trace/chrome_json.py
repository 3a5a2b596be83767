"""Stream the events of a Chrome trace, plain or gzip, without holding the file.

Each event is decoded by itself from a window of text, so memory does not grow with the file, and
what comes before a fault is still read. Timestamps are kept as text: microseconds since 1970 with
three decimals do not fit a float.
"""

import json
import re
import zlib
from codecs import getincrementaldecoder
from collections.abc import Generator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import BinaryIO, Final, cast

GZIP_MAGIC: Final = b"\x1f\x8b"

_CHUNK_BYTES: Final = 1 << 22
_PIECE_BYTES: Final = 1 << 16
_MAX_VALUE_CHARS: Final = 1 << 26
"""An event, or a field beside the events, that is longer is no trace's: 64 Mi characters."""

_MOST_TIMES_PACKED: Final = 200
"""What unpacks to more than so many times its size is no trace's: times and numbers differ from
event to event, and make files of profilers 10 to 30 times as large. zlib's limit is 1032."""

_FREE_BYTES: Final = 1 << 26
"""Up to here anything may be unpacked."""

_EVENTS = "traceEvents"
_SPACE: Final = re.compile(r"[\s,]*")
_NEXT_EVENT: Final = re.compile(r"\}\s*,\s*(?=\{\s*\")")
# Faults this near the end of the window may only mean that the rest is not there yet.
_NEAR_CHARS: Final = 64

_decode: Final = json.JSONDecoder(parse_float=str, strict=False).raw_decode


class EventStream:
    """The events of one file; iterate once, then ask what else there was.

    Attributes:
        fields: The fields beside the events, by name: `deviceProperties`, `schemaVersion`, ...
        problem: Why reading ended before the file did; empty: it did not.
        num_skipped: Events that were broken, between others that were not.
        has_events: There is a list of events.
    """

    def __init__(self, path: Path) -> None:
        self.fields: dict[str, object] = {}
        self.problem = ""
        self.num_skipped = 0
        self.has_events = False
        self._path = path
        self._text = ""
        self._at = 0
        self._is_at_end = False
        self._chunks = self._read_chunks()

    def __iter__(self) -> Iterator[dict[str, object]]:
        """Yield the events that are objects, in the order of the file.

        Raises:
            OSError: The file cannot be read.
        """
        first = self._peek()
        if first == "[":
            self._at += 1
            yield from self._read_events()
        elif first == "{":
            self._at += 1
            yield from self._read_object()
        elif not self.problem:
            self.problem = "it does not start with '{' or '['" if first else "it is empty"

    def _read_object(self) -> Iterator[dict[str, object]]:
        while True:
            mark = self._peek()
            if mark == "}":
                return
            if mark != '"':
                self._stop("it ends in the middle of its fields" if not mark else "no field name")
                return
            name = self._value()
            colon = self._peek() if name is not None else ""
            if colon != ":":
                self._stop("it ends in the middle of a field")
                return
            self._at += 1
            if name == _EVENTS and self._peek() == "[":
                self._at += 1
                yield from self._read_events()
                if self.problem:
                    return
                continue
            value = self._value()
            if value is None:
                return
            self.fields[str(name)] = value[0] if isinstance(value, tuple) else value

    def _read_events(self) -> Iterator[dict[str, object]]:
        self.has_events = True
        skip = _SPACE.match
        while True:
            self._at = skip(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            try:
                event, self._at = _decode(self._text, self._at)
            except json.JSONDecodeError as error:
                mark = self._peek()
                if mark == "]":
                    self._at += 1
                    return
                if not mark:
                    self._stop("it ends in the middle of the events")
                    return
                if self._may_be_cut(error):
                    if len(self._text) - self._at > _MAX_VALUE_CHARS:
                        self._stop("an event is longer than 64 million characters")
                        return
                    if not self._more():
                        self._stop("it ends in the middle of an event")
                        return
                elif not self._skip_event():
                    self._stop(f"an event is not JSON ({error.msg})")
                    return
                continue
            except RecursionError:
                self._stop("an event is nested too deep")
                return
            except ValueError:
                # Python reads no number of more than 4300 digits.
                if not self._skip_event():
                    self._stop("an event has a number that is too long")
                    return
                continue
            if isinstance(event, dict):
                yield cast(dict[str, object], event)
            else:
                self.num_skipped += 1

    def _value(self) -> object | None:
        """Decode one value; None, with `problem` set, if it is not whole. `null` is `(None,)`."""
        while self._peek():
            try:
                value, end = _decode(self._text, self._at)
                # A number at the very end of the window may go on in the next chunk.
                if end == len(self._text) and not self._is_at_end:
                    self._more()
                    continue
                self._at = end
                return (None,) if value is None else value
            except json.JSONDecodeError as error:
                is_long = len(self._text) - self._at > _MAX_VALUE_CHARS
                if is_long or not self._may_be_cut(error) or not self._more():
                    self._stop(f"a field is not JSON ({error.msg})")
                    return None
            except RecursionError:
                self._stop("a field is nested too deep")
                return None
            except ValueError:
                self._stop("a field has a number that is too long")
                return None
        self._stop("it ends in the middle of a field")
        return None

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        near_end = error.pos >= len(self._text) - _NEAR_CHARS
        return near_end or error.msg.startswith("Unterminated string")

    def _skip_event(self) -> bool:
        """Go on behind a broken event; False if no other is in sight."""
        self.num_skipped += 1
        while True:
            match = _NEXT_EVENT.search(self._text, self._at)
            if match is not None:
                self._at = match.end()
                return True
            if len(self._text) - self._at > _MAX_VALUE_CHARS or not self._more():
                return False

    def _peek(self) -> str:
        """Return the next character that is no space or comma; empty at the end."""
        while True:
            self._at = cast(re.Match[str], _SPACE.match(self._text, self._at)).end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            self._is_at_end = True
            return False
        self._text = self._text[self._at :] + chunk
        self._at = 0
        return True

    def _stop(self, problem: str) -> None:
        # A fault of the compressed stream is the cause of what the text then lacks.
        self.problem = self.problem or problem

    def _read_chunks(self) -> Generator[str, None, None]:
        decoder = getincrementaldecoder("utf-8")(errors="replace")
        with self._path.open("rb") as file:
            is_gzip = file.read(2) == GZIP_MAGIC
            file.seek(0)
            if not is_gzip:
                while chunk := file.read(_CHUNK_BYTES):
                    yield decoder.decode(chunk)
                return
            pieces: list[bytes] = []
            num_bytes = 0
            for piece in self._unpack(file):
                pieces.append(piece)
                num_bytes += len(piece)
                if num_bytes >= _CHUNK_BYTES:
                    yield decoder.decode(b"".join(pieces))
                    pieces.clear()
                    num_bytes = 0
            yield decoder.decode(b"".join(pieces))

    def _unpack(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield what is packed, in small pieces: a fault takes the piece that it is in with it."""
        unpack = zlib.decompressobj(wbits=31)
        rest = b""
        num_bytes = 0
        while True:
            packed = rest or file.read(_PIECE_BYTES)
            if num_bytes > max(_FREE_BYTES, _MOST_TIMES_PACKED * file.tell()):
                self.problem = (
                    f"it unpacks to more than {_MOST_TIMES_PACKED} times its size, as no trace does"
                )
                return
            if not packed:
                if not unpack.eof:
                    self.problem = "its gzip stream ends in the middle"
                return
            try:
                # Bounded, so that a small file that unpacks to terabytes fills no memory.
                piece = unpack.decompress(packed, _PIECE_BYTES)
            except zlib.error as error:
                self.problem = f"its gzip stream is broken ({error})"
                return
            num_bytes += len(piece)
            yield piece
            rest = unpack.unconsumed_tail
            if unpack.eof:
                rest = unpack.unused_data or file.read(_PIECE_BYTES)
                if rest[:2] != GZIP_MAGIC:
                    return
                unpack = zlib.decompressobj(wbits=31)


def nanoseconds(microseconds: object) -> int | None:
    """Return a time of a Chrome trace in whole nanoseconds, exactly; None if it is no time.

    What is finer than a nanosecond is cut off.
    """
    if isinstance(microseconds, int) and not isinstance(microseconds, bool):
        return microseconds * 1000
    if isinstance(microseconds, str):
        units, _, fraction = microseconds.partition(".")
        try:
            if fraction.isdecimal() and units.isdecimal():
                return int(units) * 1000 + int((fraction + "00")[:3])
            value = Decimal(microseconds)
            # Before it becomes an int: 1e999999999 would take all memory.
            return int(value * 1000) if value.is_finite() and abs(value) < 10**18 else None
        except (ArithmeticError, ValueError):
            return None
    return None
