"""Which file is what, and what is said of those that are no traces."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from ebbtide.errors import TraceError
from ebbtide.trace.read import read_trace


def message_of(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["run.nsys-rep", "run.qdrep"])
def test_nsyss_own_file_gets_the_command_that_exports_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x00\x01nsys")
    assert message_of(path) == (
        f"{path}: it is Nsight Systems' own format, which only nsys reads. Run nsys export --type "
        f"sqlite --output {tmp_path / 'run.sqlite'} {path} and give the .sqlite file."
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", b"", "the file is empty; give a Chrome trace"),
        ("a.txt", b"hello", "its first bytes are those of no trace; give a Chrome trace"),
        ("a.txt", b"\nhello", "its first bytes are those of no trace; give a Chrome trace"),
        ("a.pftrace", b"\x0a\x10xx", "it is Perfetto's own format; convert it with traceconv"),
        ("a.gz", b"\x1f\x8bnot really", "its gzip stream is broken from the start ("),
        (
            "a.gz",
            gzip.compress(b"hello", mtime=0),
            "it is gzip, but no JSON is in it; give a Chrome",
        ),
        ("a.pb", b"\x0a\xff", "it is no xplane.pb (a number ends after its message); record"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(text)
    assert message_of(path).startswith(f"{path}: {message}")


def test_a_folder_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert message_of(tmp_path).startswith(f"{tmp_path}: it is a folder; give ")
    path = tmp_path / "absent.json"
    assert message_of(path).startswith(f"{path}: the file cannot be read (No such file or")


@pytest.mark.slow
def test_a_real_trace_of_torch_on_a_cpu_says_how_to_record_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    program = (
        "import sys, torch\n"
        "from torch.profiler import ProfilerActivity, profile\n"
        "with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:\n"
        "    (torch.ones(9, 9) @ torch.ones(9, 9)).sum()\n"
        "prof.export_chrome_trace(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True)
    trace = read_trace(path)
    assert (trace.kind, trace.devices) == ("PyTorch profiler", ())
    assert trace.num_events > 10
    assert trace.notes == (
        f"none of the {trace.num_events} events ran on a GPU, so there is nothing to measure; "
        "record with torch.profiler.profile(activities=[ProfilerActivity.CPU, "
        "ProfilerActivity.CUDA]) on a machine with a GPU, and prof.export_chrome_trace(FILE)",
    )
