"""Byte counts as people write them, and the int bytes used everywhere else."""

import re
from dataclasses import dataclass
from fractions import Fraction

from ebbtide.naming import shorten, unknown_name_message

# Binary and decimal prefixes as IEC 80000-13 and the SI define them. Spelling is exact,
# because "Gb" means bits and guessing would be wrong by a factor of eight; "KB" is the
# one spelling outside the standards that is accepted, as everybody writes it.
_BYTES_PER_UNIT = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_PRINTED_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")
_SIZE_RULE = 'a size is a number, zero or more, and a unit, such as "40GiB", "1.5 GB" or 1024'

MOST_BYTES = 2**63 - 1
"""What systems count bytes with. A larger size is a slip, and its arithmetic may take for ever."""

# Digits of `MOST_BYTES` and a fraction that is finer than a byte of the largest unit.
_MOST_DIGITS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpec:
    """A directory that activations may be written to, and how much of it."""

    path: str
    """The directory, as the caller wrote it. Not checked to exist."""

    cap_bytes: int
    """The most bytes that may lie there at once. Zero means that it is not used."""


def parse_bytes(text: str | int) -> int:
    """Read a size such as "40GiB", "40 GB", "512MiB", "1.5GiB" or 123.

    A number without a unit counts bytes. `GiB` is 2**30 bytes and `GB` 10**9.
    A fraction of a byte is dropped, so the result never exceeds what was asked.

    Raises:
        ValueError: The size is negative, not a number, above 8 EiB, or has an unknown unit.
    """
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"size {text} is negative; {_SIZE_RULE}")
        if text > MOST_BYTES:
            raise _too_large(str(text) if text.bit_length() < 256 else "given")
        return text
    shown = shorten(text)
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"cannot read {shown!r} as a size; {_SIZE_RULE}")
    if len(match["number"]) > _MOST_DIGITS:
        raise _too_large(shown)
    unit = match["unit"] or "B"
    if unit not in _BYTES_PER_UNIT:
        unknown = unknown_name_message("unit", unit, _BYTES_PER_UNIT)
        raise ValueError(f"cannot read {shown!r} as a size: {unknown}; {_SIZE_RULE}")
    size_bytes = Fraction(match["number"]) * _BYTES_PER_UNIT[unit]
    if unit == "B" and size_bytes.denominator != 1:
        raise ValueError(f"cannot read {shown!r} as a size: bytes are whole; {_SIZE_RULE}")
    if size_bytes > MOST_BYTES:
        raise _too_large(shown)
    return int(size_bytes)


def format_bytes(num_bytes: int) -> str:
    """Write a size for people, in binary units with one decimal: "1.5 GiB".

    Whole bytes below 1 KiB have no decimal. A negative number, such as a
    difference of two sizes, keeps its sign. `parse_bytes` reads the result.
    """
    sign = "-" if num_bytes < 0 else ""
    magnitude_bytes = abs(num_bytes)
    if magnitude_bytes < 1024:
        return f"{sign}{magnitude_bytes} B"
    power = min((magnitude_bytes.bit_length() - 1) // 10, len(_PRINTED_UNITS) - 1)
    # Tenths are rounded before the unit is settled: 1023.96 KiB is "1.0 MiB", and an
    # integer keeps the result exact where a float would already have been rounded.
    tenths = _rounded_quotient(magnitude_bytes * 10, 1024**power)
    if tenths >= 10240 and power < len(_PRINTED_UNITS) - 1:
        power += 1
        tenths = _rounded_quotient(magnitude_bytes * 10, 1024**power)
    return f"{sign}{tenths // 10}.{tenths % 10} {_PRINTED_UNITS[power]}"


def parse_path_and_cap(text: str) -> DiskSpec:
    """Read a directory and its cap, such as "/nvme/scratch:500GiB".

    The last colon separates the two, so the directory may contain colons.

    Raises:
        ValueError: The directory or the cap is missing, or the cap is not a size.
    """
    shown = shorten(text)
    rule = 'write a directory, a colon and a cap, such as "/nvme/scratch:500GiB"'
    path, colon, cap = text.rpartition(":")
    if not colon:
        raise ValueError(f"disk {shown!r} has no cap; {rule}")
    if not path.strip():
        raise ValueError(f"disk {shown!r} has no directory; {rule}")
    if not cap.strip():
        raise ValueError(f"disk {shown!r} has no cap after the colon; {rule}")
    try:
        cap_bytes = parse_bytes(cap)
    except ValueError as error:
        raise ValueError(f"disk {shown!r} has a cap that is not a size; {rule}: {error}") from error
    return DiskSpec(path=path, cap_bytes=cap_bytes)


def _too_large(shown: str) -> ValueError:
    return ValueError(f"size {shown} is above {MOST_BYTES} bytes, 8 EiB; {_SIZE_RULE}")


def _rounded_quotient(numerator: int, denominator: int) -> int:
    """Divide and round to the nearest integer, halves up."""
    return (2 * numerator + denominator) // (2 * denominator)
