"""Make an `xplane.pb` small enough to keep: of its programs only what says what copies move.

    PYTHONPATH=src:. python3 benchmarks/cut_xplane.py trace.xplane.pb cut.xplane.pb

Events, lines and statistics stay as they were written, and so do the numbers, names, operands,
calls and scopes of the instructions of each program that `ebbtide.jax` planned. Its shapes,
constants, buffers and settings go, and other programs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ebbtide.trace.wire import LENGTH, VARINT, read_fields, text

PROGRAMS = "/host:metadata"
PLANNED = b"ebbtide("
# Of an HloInstructionProto: name, opcode, metadata, parameter number, tuple index, number,
# operands, called computations; of OpMetadata the scopes.
OF_INSTRUCTION = frozenset({1, 2, 7, 9, 13, 35, 36, 38})
OF_METADATA = frozenset({2})

Message = memoryview


def cut_space(space: Message) -> bytes:
    """Return an XSpace with the planes of another, each cut."""
    return _rewrite(space, {1: _cut_plane})


def _cut_plane(plane: Message) -> bytes:
    if not any(number == 2 and text(value) == PROGRAMS for number, _, value in read_fields(plane)):
        return bytes(plane)
    return _rewrite(plane, {4: _cut_entry})


def _cut_entry(entry: Message) -> bytes | None:
    if PLANNED not in bytes(entry):
        return None
    # Entry: metadata: statistic: the proto: module: computation: instruction: metadata.
    metadata = _of(2, _of(5, _only({1, 3, 4, 6}, {6: _cut_proto})))
    return metadata(entry)


def _cut_proto(proto: Message) -> bytes | None:
    scopes = _only(OF_METADATA, {})
    instruction = _only(OF_INSTRUCTION, {7: scopes})
    computation = _only({1, 2, 5, 6}, {2: instruction})
    return _only({1}, {1: _only({1, 3}, {3: computation})})(proto)


Cut = Callable[[Message], bytes | None]


def _of(number: int, cut: Cut) -> Cut:
    return lambda message: _rewrite(message, {number: cut})


def _only(numbers: set[int] | frozenset[int], cuts: dict[int, Cut]) -> Cut:
    return lambda message: _rewrite(message, cuts, numbers)


def _rewrite(
    message: Message, cuts: dict[int, Cut], numbers: set[int] | frozenset[int] | None = None
) -> bytes:
    """Write a message again: some fields cut, and where `numbers` is given no others."""
    out = bytearray()
    for number, kind, value in read_fields(message):
        if numbers is not None and number not in numbers:
            continue
        if isinstance(value, int):
            out += _varint(number << 3 | VARINT) + _varint(value)
            continue
        cut = cuts.get(number) if kind == LENGTH else None
        written = bytes(value) if cut is None else cut(value)
        if written is not None:
            size = _varint(len(written)) if kind == LENGTH else b""
            out += _varint(number << 3 | kind) + size + written
    return bytes(out)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.write_bytes(cut_space(memoryview(given.file.read_bytes())))
    print(f"{given.out}: {given.out.stat().st_size} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
