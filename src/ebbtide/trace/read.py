"""Tell by its first bytes what wrote a trace, and read it."""

import gc
import zlib
from pathlib import Path
from typing import Final

from ebbtide.errors import TraceError
from ebbtide.trace.builder import Trace
from ebbtide.trace.chrome_json import GZIP_MAGIC
from ebbtide.trace.kineto import HOW_TORCH, TORCH, read_chrome
from ebbtide.trace.nsys import HOW_NSYS, KIND, read_nsys
from ebbtide.trace.xplane import HOW_JAX, read_xplane

_SQLITE_MAGIC: Final = b"SQLite format 3\0"
_HEAD_BYTES: Final = 4096

KINDS: Final = (
    "a Chrome trace (JSON, plain or gzip) of torch.profiler or another program, an SQLite export "
    "of Nsight Systems, or an xplane.pb of jax.profiler"
)


def read_trace(path: Path) -> Trace:
    """Read a profiler's file, whichever of the known kinds it is; its name does not matter.

    What is cut or broken is left out, and `Trace.notes` says so. A trace without any work on a GPU
    is returned with no devices, and a note says how to record one.

    Raises:
        TraceError: The file cannot be read, or is of none of the kinds. The message says how to
            make one that is.
    """
    was_on = gc.isenabled()
    # Millions of small objects that hold no cycles: collecting in between takes half the time.
    gc.disable()
    try:
        trace = _read(path)
    except OSError as error:
        raise TraceError(
            f"{path}: the file cannot be read ({error.strerror or error}); give {KINDS}"
        ) from error
    finally:
        if was_on:
            gc.enable()
    if trace.devices:
        return trace
    how = {TORCH: HOW_TORCH, KIND: HOW_NSYS}.get(trace.kind, HOW_JAX)
    if trace.kind not in (TORCH, KIND) and "xplane" not in path.name:
        how = HOW_TORCH
    return Trace(
        file=trace.file,
        kind=trace.kind,
        num_events=trace.num_events,
        devices=(),
        notes=(
            *trace.notes,
            f"none of the {trace.num_events} events ran on a GPU, so there is nothing to measure; "
            f"{how}",
        ),
    )


def _read(path: Path) -> Trace:
    if path.is_dir():
        raise TraceError(f"{path}: it is a folder; give {KINDS}")
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise TraceError(
            f"{path}: it is Nsight Systems' own format, which only nsys reads. Run "
            f"nsys export --type sqlite --output {path.with_suffix('.sqlite')} {path} "
            "and give the .sqlite file."
        )
    if not head:
        raise TraceError(f"{path}: the file is empty; give {KINDS}")
    if head.startswith(_SQLITE_MAGIC):
        return read_nsys(path)
    if head.startswith(GZIP_MAGIC):
        start = _unpacked(path, head)
        if start[:1] not in (b"{", b"[") and start:
            raise TraceError(
                f"{path}: it is gzip, but no JSON is in it; give {KINDS}. Of an xplane.pb.gz, "
                "unpack it first."
            )
        return read_chrome(path)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return read_chrome(path)
    if path.name.endswith((".pftrace", ".perfetto-trace")):
        raise TraceError(
            f"{path}: it is Perfetto's own format; convert it with traceconv json IN OUT.json "
            "and give the JSON file"
        )
    # Field 1 of an XSpace, a plane, with a length: the byte 0x0a. An all-text file has it too.
    if head[0] == 0x0A and (b"\0" in head or path.name.endswith(".pb")):
        return read_xplane(path)
    raise TraceError(f"{path}: its first bytes are those of no trace; give {KINDS}")


def _unpacked(path: Path, head: bytes) -> bytes:
    """Return the start of what is packed, without spaces; empty if nothing is."""
    try:
        return zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES).lstrip()
    except zlib.error as error:
        raise TraceError(
            f"{path}: its gzip stream is broken from the start ({error}). Copy it again."
        ) from error
