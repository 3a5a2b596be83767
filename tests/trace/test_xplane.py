"""JAX's xplane.pb: our reader against JAX's own, on planes made here and on a real CPU trace."""

from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import TraceError
from ebbtide.timeline import HostMemory, Lane
from ebbtide.trace.names import name_scope
from ebbtide.trace.overlap import analyse
from ebbtide.trace.read import read_trace
from tests.trace.planes import Plane, Programs, bytes_field, space
from tests.trace.test_hlo_program import instruction, proto
from tests.trace.test_kineto import spans_of, times_of

PS = 1000
START_NS = 1_764_000_000_000_000_123


KERNEL_DETAILS = (
    "regs:32 static_shared:0 dynamic_shared:1024 grid:512,2,1 block:128,1,1 occ_pct:100"
)


def details(source: str, target: str, num_bytes: int) -> str:
    return f"kind_src:{source} kind_dst:{target} size:{num_bytes} dest:0 async:1"


def gpu_plane(number: int = 0) -> Plane:
    """The worked example of docs/overlap.md, on streams that copies and kernels share."""
    plane = Plane(f"/device:GPU:{number}")
    evict = {
        "memcpy_details": details("device", "pinned", 1200),
        "hlo_op": "wrapped_dynamic-update-slice.1",
        "tf_op": "jit(step)/ebbtide: evict h.0.input",
    }
    fetch = {"memcpy_details": details("pinned", "device", 1000), "hlo_op": "copy-start.3"}
    plane.add_line(
        "Stream #14(Compute,MemcpyD2H)",
        START_NS,
        ("loop_fusion", 0, 40 * PS, {"hlo_op": "fusion.1", "kernel_details": KERNEL_DETAILS}),
        ("MemcpyD2H", 30 * PS, 30 * PS, evict),
    )
    plane.add_line(
        "Stream #70(Compute,MemcpyH2D)",
        START_NS,
        ("MemcpyH2D", 50 * PS, 20 * PS, fetch),
        ("gemm_fusion", 70 * PS, 30 * PS, {}),
        ("ncclDevKernel_AllReduce", 95 * PS, 10 * PS, {}),
    )
    plane.add_line("XLA Ops", START_NS, ("fusion.1", 0, 99 * PS, {}))
    return plane


def host_plane() -> Plane:
    plane = Plane("/host:CPU")
    plane.add_line("python", START_NS, ("train", 0, 100 * PS, {"step_num": 7}))
    return plane


def write(path: Path, text: bytes) -> Path:
    path.write_bytes(text)
    return path


def test_a_step_becomes_lanes_with_the_figures_worked_out_by_hand(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "h.xplane.pb", space(host_plane(), gpu_plane())))
    assert (trace.kind, trace.notes) == ("JAX profiler", ())
    assert times_of(trace, Lane.COMPUTE) == [("loop_fusion", 0, 40), ("gemm_fusion", 70, 100)]
    launches = [s.launch for s in spans_of(trace, Lane.COMPUTE)]
    assert launches == ["512x2x1 blocks of 128x1x1", ""]
    assert times_of(trace, Lane.COLLECTIVE) == [("ncclDevKernel_AllReduce", 95, 105)]
    assert times_of(trace, Lane.STEP) == [("step 7", 0, 100)]
    (out,), (back,) = spans_of(trace, Lane.COPY_OUT), spans_of(trace, Lane.COPY_IN)
    assert (out.name, out.num_bytes, out.host_memory) == ("h.0.input", 1200, HostMemory.PINNED)
    assert (back.name, back.num_bytes) == ("copy-start.3", 1000)
    found = analyse(trace.devices[0].timeline)
    assert (found.copy_out.hidden_ns, found.copy_out.exposed_ns) == (10, 20)
    assert (found.copy_in.hidden_ns, found.copy_in.exposed_ns) == (0, 20)


def test_parts_of_a_nanosecond_never_make_a_gap(tmp_path: Path) -> None:
    plane = Plane("/device:GPU:0")
    plane.add_line("Stream #1", 50, ("a", 1500, 1700, {}), ("b", 3200, 900, {}))
    trace = read_trace(write(tmp_path / "h.xplane.pb", space(plane)))
    assert times_of(trace, Lane.COMPUTE) == [("a", 0, 2), ("b", 2, 3)]


def test_several_gpus(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "h.xplane.pb", space(gpu_plane(1), gpu_plane(0))))
    assert [device.name for device in trace.devices] == ["GPU 0", "GPU 1"]


def test_jaxs_own_reader_sees_the_same(tmp_path: Path) -> None:
    profiler: Any = pytest.importorskip("jax.profiler")
    text = space(host_plane(), gpu_plane())
    profile = profiler.ProfileData.from_serialized_xspace(text)
    theirs = sorted(
        (event.name, round(event.start_ns - START_NS), round(event.end_ns - START_NS))
        for line in profile.find_plane_with_name("/device:GPU:0").lines
        if line.name.startswith("Stream")
        for event in line.events
    )
    trace = read_trace(write(tmp_path / "h.xplane.pb", text))
    ours = [
        (s.name, s.start_ns, s.end_ns)
        for s in trace.devices[0].timeline.spans
        if s.lane is not Lane.STEP
    ]
    names = {"h.0.input": "MemcpyD2H", "copy-start.3": "MemcpyH2D"}
    # A float holds times since 1970 to 256 ns, so theirs are near, and ours exact.
    mine = sorted((names.get(name, name), start, end) for name, start, end in ours)
    assert [name for name, *_ in theirs] == [name for name, *_ in mine]
    for their, my in zip(theirs, mine, strict=True):
        assert abs(their[1] - my[1]) <= 256
        assert abs(their[2] - my[2]) <= 256


@pytest.mark.slow
def test_a_real_trace_of_a_cpu_has_no_gpu_in_it(tmp_path: Path) -> None:
    jax: Any = pytest.importorskip("jax")
    with jax.profiler.trace(str(tmp_path)):
        jax.numpy.ones(8).sum().block_until_ready()
    (path,) = tmp_path.rglob("*.xplane.pb")
    trace = read_trace(path)
    assert trace.devices == ()
    assert trace.num_events > 0
    assert (
        "ran on a GPU, so there is nothing to measure; record with jax.profiler.trace("
        in (trace.notes[-1])
    )


def test_a_file_that_is_cut(tmp_path: Path) -> None:
    text = space(gpu_plane(), host_plane())
    end_of_first = len(bytes_field(1, gpu_plane().to_bytes()))
    trace = read_trace(write(tmp_path / "h.xplane.pb", text[: end_of_first + 20]))
    assert len(spans_of(trace, Lane.COMPUTE)) == 2
    assert trace.notes == (
        "the file is not whole (a field ends after its message); 1 planes before that were read. "
        "Let jax.profiler.stop_trace() return before copying the file.",
    )


def test_every_cut_gives_a_message_and_no_traceback(tmp_path: Path) -> None:
    text = space(gpu_plane(), host_plane())
    for size in range(1, len(text), 7):
        path = write(tmp_path / "h.xplane.pb", text[:size])
        try:
            assert read_trace(path).notes
        except TraceError as error:
            assert str(error).startswith(f"{path}: it is no xplane.pb (")


def test_lines_that_are_broken_inside(tmp_path: Path) -> None:
    plane = Plane("/device:GPU:0")
    plane.add_line("Stream #1", 0, ("a", 0, 5 * PS, {}))
    plane.lines.append(b"\xff\xff\xff")
    trace = read_trace(write(tmp_path / "h.xplane.pb", space(plane)))
    assert times_of(trace, Lane.COMPUTE) == [("a", 0, 5)]
    assert trace.notes == (
        "a line of '/device:GPU:0' is not whole (a number ends after its message); the rest was "
        "read",
    )


def copied_by(program: int, instruction_name: str, scopes: str = "XlaModule:") -> Plane:
    plane = Plane("/device:GPU:0")
    stats: dict[str, str | int] = {
        "memcpy_details": details("device", "pinned", 1200),
        "hlo_op": instruction_name,
        "tf_op": scopes,
        "program_id": program,
    }
    plane.add_line("Stream #69(MemcpyD2H)", START_NS, ("MemcpyD2H", 0, 30 * PS, stats))
    return plane


def moved_names(path: Path) -> list[str]:
    (device,) = read_trace(path).devices
    return [moved.name for moved in analyse(device.timeline).moved]


def test_a_copy_has_the_name_that_its_program_gives_to_what_it_moves(tmp_path: Path) -> None:
    def copies(name: str) -> bytes:
        return proto(
            entry=(
                2,
                [
                    instruction(1, "gemm", "custom-call", scope=name_scope(name)),
                    instruction(2, "copy-start", "copy-start", [1]),
                ],
            )
        )

    # Two programs with an instruction of the same name; the planes come in any order.
    programs = Programs({41: copies("mlp.up"), 42: copies("attn.out")})
    for number, (program, name) in enumerate(((41, "mlp.up"), (42, "attn.out"))):
        plane = copied_by(program, "copy-start")
        for planes in ((plane, programs), (programs, plane)):
            path = write(tmp_path / f"{number}.xplane.pb", space(*planes))
            assert moved_names(path) == [name]
    unknown = write(tmp_path / "x.xplane.pb", space(programs, copied_by(43, "copy-start")))
    assert moved_names(unknown) == ["copy-start"]


def test_a_program_that_is_broken_leaves_the_names_of_xla_and_a_note(tmp_path: Path) -> None:
    broken = Programs({41: bytes_field(1, bytes_field(3, b"\x0a\x7fshort"))})
    path = write(tmp_path / "a.xplane.pb", space(broken, copied_by(41, "copy-start")))
    assert moved_names(path) == ["copy-start"]
    (note,) = read_trace(path).notes
    assert note.startswith("the program 41 is not whole")
    assert note.endswith("its copies have XLA's names")


def test_programs_whose_table_is_broken_are_told_of(tmp_path: Path) -> None:
    whole = Programs({41: b""}).to_bytes()
    # A statistic of the entry that ends after its message.
    entry = bytes_field(2, bytes_field(5, b"\x0a\x7fshort"))
    broken = bytes_field(1, whole + bytes_field(4, entry))
    path = write(tmp_path / "a.xplane.pb", space(copied_by(41, "copy-start")) + broken)
    assert moved_names(path) == ["copy-start"]
    (note,) = read_trace(path).notes
    assert note.startswith("the profile's programs are not whole")
