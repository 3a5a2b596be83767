"""Read the wire format of protocol buffers: just what a profile needs, without a generated class.

The format is Google's "Protocol Buffers: Encoding". Nothing is copied but texts.
"""

from collections.abc import Iterator

VARINT, FIXED_64, LENGTH, FIXED_32 = 0, 1, 2, 5


class WireError(Exception):
    """The bytes end in the middle of a field, or are no protocol buffer."""


def read_fields(view: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yield number, wire type and value of each field of a message.

    Varints come as unsigned, fixed numbers and nested messages as the bytes that hold them.

    Raises:
        WireError: A field does not end where it should; those before it were yielded.
    """
    at, size = 0, len(view)
    while at < size:
        key, at = _varint(view, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise WireError("a field has number 0")
        if kind == VARINT:
            value, at = _varint(view, at)
            yield number, kind, value
            continue
        if kind == LENGTH:
            length, at = _varint(view, at)
        elif kind == FIXED_64:
            length = 8
        elif kind == FIXED_32:
            length = 4
        else:
            raise WireError(f"a field has the unknown wire type {kind}")
        if at + length > size:
            raise WireError("a field ends after its message")
        yield number, kind, view[at : at + length]
        at += length


def text(value: int | memoryview) -> str:
    """Return a field's text; empty if it is no text."""
    return "" if isinstance(value, int) else bytes(value).decode("utf-8", errors="replace")


def read_numbers(value: int | memoryview) -> list[int]:
    """Return a repeated int64, which is written as one number each or packed into one field.

    Raises:
        WireError: The last one does not end.
    """
    if isinstance(value, int):
        return [signed(value)]
    numbers: list[int] = []
    at = 0
    while at < len(value):
        number, at = _varint(value, at)
        numbers.append(signed(number))
    return numbers


def signed(value: int | memoryview) -> int:
    """Return an int64, which is written as its two's complement; 0 if it is no number."""
    if not isinstance(value, int):
        return 0
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(view):
            raise WireError("a number ends after its message")
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise WireError("a number has more than 64 bits")
