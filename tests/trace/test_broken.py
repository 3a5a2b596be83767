"""Files with random faults: whatever is in them, a trace or one message comes out."""

import gzip
import random
from pathlib import Path

import pytest

from ebbtide.catalog import find_machine
from ebbtide.commands.trace_report import write_trace
from ebbtide.errors import TraceError
from ebbtide.trace.findings import find
from ebbtide.trace.overlap import analyse
from ebbtide.trace.read import read_trace
from tests.trace import test_nsys, test_xplane
from tests.trace.chrome import a_step, text_of
from tests.trace.planes import space

NUM_FILES = 60
MACHINE = find_machine("h200-pcie5")
ODD = (b"9" * 30, b"-", b"null", b"[[", b"1e99", b'"', b"{", b"}", b"NaN", b"\\", b"\0")


def whole_file(kind: str, folder: Path) -> bytes:
    match kind:
        case "json":
            return text_of(*a_step()).encode()
        case "gzip":
            return gzip.compress(text_of(*a_step()).encode(), mtime=0)
        case "sqlite":
            return test_nsys.make(folder / "whole", **test_nsys.a_step()).read_bytes()
        case _:
            return space(test_xplane.host_plane(), test_xplane.gpu_plane())


def damage(whole: bytes, chance: random.Random) -> bytes:
    text = bytearray(whole)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(max(len(text), 1))
        match chance.randrange(3):
            case 0:
                text[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del text[at : at + chance.randrange(1, 40)]
            case _:
                text[at:at] = chance.choice(ODD)
    return bytes(text)


@pytest.mark.parametrize("kind", ["json", "gzip", "sqlite", "xplane"])
def test_damage_never_ends_in_a_traceback(kind: str, tmp_path: Path) -> None:
    whole = whole_file(kind, tmp_path)
    chance = random.Random(kind)
    path = tmp_path / f"damaged.{'pb' if kind == 'xplane' else kind}"
    num_read = 0
    for _ in range(NUM_FILES):
        path.write_bytes(damage(whole, chance))
        try:
            trace = read_trace(path)
        except TraceError as error:
            assert str(error).startswith(f"{path}: ")
            continue
        num_read += bool(trace.devices)
        analyses = [analyse(device.timeline, MACHINE) for device in trace.devices]
        findings = [
            finding
            for device, analysis in zip(trace.devices, analyses, strict=True)
            for finding in find(device, analysis, machine=MACHINE)
        ]
        lines = list(write_trace(trace, analyses, findings, []))
        assert lines[0].startswith(f"{path}: ")
    # Some damage leaves something to read, so that the above was tried.
    assert num_read > 0
