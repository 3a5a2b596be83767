"""Broken files: a good one with random edits, or nothing but random bytes.

Whoever calls gives the random numbers: hypothesis, which then finds the smallest edits that fail,
or a seeded generator, which is faster.
"""

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

ODD_VALUES = (
    *("null", "true", "false", "0", "1", "2", "3", "-1", "1.5", "NaN", "-Infinity", "1e999"),
    *("9" * 19, "9" * 30, "9" * 4000, "9" * 5000, "-" + "9" * 4300, "1e-400", '""', '"a"'),
    *('"\\ud800"', '"\\u0000"', '"\\u001b[2J"', '"' + "9" * 5000 + '"', '"1e99999999999"'),
    *("[]", "{}", "[[1]]", '{"a": {}}', "[" * 400 + "]" * 400, '["a", 1]', "[null]"),
    *('{"a": 1, "a": 2}', '"nan"', '"sNaN"', '"-1"', '"\u0661"', '"' + "." * 70 + '"'),
)
"""JSON values, as text: what some reader might not have thought of."""

ODD_BYTES = (
    *(b"", b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\n", b" " * 40, b"9" * 5000),
    *(b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b"(", b")", b":", b",", b"=", b"%", b"-", b"--"),
    *(b"NaN", b"1e999", b"null", b"*a", b"&a ", b"<<: ", b"!!int ", b"2024-99-99", b"S(5)"),
    *(b"\x80" * 12, b"\x7f\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x1b[2J", b"\xd9\xa1"),
)


def broken_bytes(chance: Random, whole: Sequence[bytes]) -> bytes:
    """Return one of some good files with up to five edits, which may be cut, or any bytes."""
    if chance.randrange(8) == 0:
        return chance.randbytes(chance.randrange(300))
    made = bytearray(chance.choice(whole))
    if chance.randrange(5) == 0:
        del made[chance.randrange(len(made) + 1) :]
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(made) + 1)
        size = chance.choice((0, 0, 1, 1, 2, 8, 100))
        put = chance.choice(ODD_BYTES) if chance.randrange(2) else chance.randbytes(1)
        made[at : at + size] = put
    return bytes(made)


def broken_json(chance: Random, whole: Sequence[str]) -> bytes:
    """Return JSON with up to three other values in it, or `broken_bytes` of it."""
    text = chance.choice(whole)
    if chance.randrange(3) == 0:
        return broken_bytes(chance, [text.encode()])
    root = [json.loads(text)]
    texts: dict[str, str] = {}
    for number in range(chance.randrange(1, 4)):
        mark = f"@{number}@"
        texts[json.dumps(mark)] = chance.choice(ODD_VALUES)
        holder, key = chance.choice(list(_places(root)))
        if chance.randrange(4):
            holder[key] = mark
        elif isinstance(holder, dict):
            holder[f"more {number}"] = mark
        else:
            holder.append(mark)
    text = json.dumps(root[0])
    for mark, value in texts.items():
        text = text.replace(mark, value)
    return text.encode()


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every list or object with each of its keys, the outermost first."""
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    for key in keys:
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from _places(holder[key])
