"""`ebbtide trace` from the command line: what it prints and refuses."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ebbtide.commands.trace import register
from ebbtide.errors import ExitCode, TraceError
from ebbtide.planner import named_plan
from tests.trace.chrome import OUT, a_step, complete, copy, kernel, mark, text_of, write
from tests.two_blocks import MACHINE, two_blocks

SLOW = replace(MACHINE, out_bytes_per_s=10**8, in_bytes_per_s=10**8, both_bytes_per_s=10**8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command line ended."""

    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: str | Path) -> Finished:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Finished(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)


def run_json(*arguments: str | Path) -> dict[str, Any]:
    finished = run(*arguments, "--json")
    assert (finished.exit_code, finished.stderr) == (ExitCode.DONE, "")
    return json.loads(finished.stdout)


@pytest.fixture
def step_file(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.json", *a_step())


def test_json_has_the_figures_of_each_gpu(step_file: Path) -> None:
    found = run_json(step_file)
    assert set(found) == {"file", "kind", "num_events", "gpus", "findings", "notes"}
    (gpu,) = found["gpus"]
    figures = gpu["copy_out"]
    keys = "bytes", "busy_ms", "hidden_ms", "exposed_ms", "gb_per_s", "link_share"
    assert [figures[key] for key in keys] == [1_200_000, 0.03, 0.01, 0.02, 40.0, None]
    assert [gpu["copy_in"][key] for key in keys] == [1_000_000, 0.02, 0.0, 0.02, 50.0, None]
    assert (gpu["compute_busy_ms"], gpu["idle_ms"], gpu["window_ms"]) == (0.07, 0.03, 0.1)
    assert gpu["idle_by_reason_ms"] == {
        **{"launch": 0.0, "copy-in": 0.02, "copy-out": 0.01, "collective": 0.0, "unknown": 0.0}
    }
    assert gpu["idle_windows"] == [
        {"start_ms": 0.04, "end_ms": 0.07, "reason": "copy-in", "waited_for": "h.0.input"}
    ]
    assert [(m["name"], m["lane"], m["exposed_ms"]) for m in gpu["moved"]] == [
        ("h.0.input", "copy-in", 0.02),
        ("h.0.input", "copy-out", 0.02),
    ]
    assert [step["name"] for step in gpu["steps"]] == ["ProfilerStep#3"]


def test_text_has_them_too(step_file: Path) -> None:
    finished = run(step_file, "--machine", "h200-pcie5")
    assert finished.exit_code == ExitCode.DONE
    lines = finished.stdout.splitlines()
    assert lines[0] == f"{step_file}: PyTorch profiler, 13 events, 1 GPUs"
    assert lines[2] == "GPU 0: 0.10 ms recorded, compute busy 0.07, idle 0.03"
    assert lines[4].split() == [
        *("out", "1.1", "MiB", "40.0", "75", "%", "0.03", "0.01", "0.02", "1.1", "MiB", "0", "B")
    ]
    assert "idle ms by what was waited for: 0.02 copy-in, 0.01 copy-out" in lines
    assert "  at 0.04 ms for 0.03: copy-in, h.0.input" in lines


def test_steps_that_nobody_marked_are_told(tmp_path: Path) -> None:
    unmarked = write(tmp_path / "unmarked.json", kernel("gemm", 0, 50_000))
    assert run_json(unmarked)["gpus"][0]["steps"] == []
    assert "\nno steps are marked. To have figures of each step, " in run(unmarked).stdout
    marked = write(tmp_path / "marked.json", mark("step 4", 0, 50_000), kernel("gemm", 0, 50_000))
    assert "no steps are marked" not in run(marked).stdout


def test_a_kernel_beside_copies_is_told_with_its_launch(tmp_path: Path) -> None:
    def report(beside_ns: int) -> tuple[str, list[dict[str, Any]]]:
        shape = {"grid": [2, 66, 1], "block": [384, 1, 1]}
        alone = [kernel("gemm", at, at + 100_000, **shape) for at in (0, 100_000, 200_000)]
        beside = kernel("gemm", 300_000, 300_000 + beside_ns, **shape)
        path = write(tmp_path / "trace.json", *alone, beside, copy(OUT, 300_000, 500_000, 8))
        (line,) = (x for x in run(path).stdout.splitlines() if x.startswith("compute beside"))
        return line, run_json(path)["gpus"][0]["slowdowns"]

    line, (slowdown,) = report(120_000)
    assert line == "compute beside copies took 0.02 ms more, most of all: 0.02 gemm"
    assert slowdown == {
        **{"kernel": "gemm", "launch": "2x66x1 blocks of 384x1x1", "num_beside": 1},
        **{"num_alone": 3, "median_alone_ms": 0.1, "beside_ms": 0.12, "extra_ms": 0.02},
    }
    assert report(80_000)[0] == "compute beside copies took 0.02 ms less"


def test_findings_are_in_both(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.json",
        kernel("gemm", 0, 50_000),
        copy(OUT, 50_000, 90_000, 4 << 20, stream=7),
        kernel("gemm", 90_000, 100_000),
    )
    found = run_json(path)
    (finding,) = found["findings"]
    assert (finding["code"], finding["gpu"], finding["cost_ms"]) == (
        *("copies-on-compute-stream", "GPU 0"),
        0.04,
    )
    assert set(finding) == {"code", "gpu", "evidence", "advice", "cost_ms"}
    assert "  copies-on-compute-stream (GPU 0, 0.04 ms): 1 copies of 4.0 MiB ran on stream 7, " in (
        run(path).stdout
    )


def test_perfettos_file_gives_the_same_figures(step_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    finished = run(step_file, "--perfetto", out, "--json")
    assert finished.exit_code == ExitCode.DONE
    assert finished.stderr == f"ebbtide trace: wrote {out}\n"
    before = json.loads(finished.stdout)
    assert run_json(out) == {**before, "file": str(out)}


def test_perfettos_file_that_cannot_be_written(step_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "no" / "out.json.gz"
    finished = run(step_file, "--perfetto", out)
    assert finished.exit_code == ExitCode.MISUSE
    assert f"--perfetto {out}: the file cannot be written (No such file" in finished.stderr


@pytest.mark.parametrize("option", ["--html", "--perfetto"])
def test_the_trace_itself_is_not_written_over(step_file: Path, option: str) -> None:
    before = step_file.read_bytes()
    finished = run(step_file, option, step_file.parent / "." / step_file.name)
    assert finished.exit_code == ExitCode.MISUSE
    assert "that is FILE itself; name another" in finished.stderr
    assert step_file.read_bytes() == before


def test_of_a_trace_without_gpus_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    finished = run(write(tmp_path / "a.json", complete("cpu_op", "a", 0, 9)), "--perfetto", out)
    assert finished.exit_code == ExitCode.FAILED
    assert f"--perfetto {out}: it is not written: there is nothing to show" in finished.stderr
    assert not out.exists()


@pytest.fixture
def plan_files(tmp_path: Path) -> list[str | Path]:
    texts = {
        "plan": named_plan("offload-inputs", two_blocks(), min_bytes=1).to_json(),
        "workload": two_blocks().to_json(),
        "machine": SLOW.to_json(),
    }
    arguments: list[str | Path] = []
    for name, text in texts.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        arguments += [f"--{name}", path]
    return arguments


def test_a_plans_figures_stand_beside_the_traces(
    step_file: Path, plan_files: list[str | Path]
) -> None:
    (gpu,) = run_json(step_file, *plan_files)["gpus"]
    beside = gpu["predicted"]
    assert beside["step"] == "ProfilerStep#3"
    assert beside["predicted"]["copy_out"]["bytes"] == 10
    assert beside["measured"]["copy_out"]["bytes"] == 1_200_000
    assert beside["num_unnamed"] == 2
    lines = run(step_file, *plan_files).stdout.splitlines()
    rows = {line[:15].strip(): line.split()[-2:] for line in lines}
    assert rows["step ms"] == ["0.00", "0.10"]
    assert "2 measured copies carry no activation's name" in lines


def test_a_plans_figures_are_on_the_page(
    step_file: Path, plan_files: list[str | Path], tmp_path: Path
) -> None:
    pytest.importorskip("bokeh", reason="the extra report is not installed")
    text = ""
    for arguments, is_there in (([], False), (plan_files, True)):
        page = tmp_path / "page.html"
        assert run(step_file, "--html", page, *arguments).exit_code == ExitCode.DONE
        text = page.read_text(encoding="utf-8")
        assert ("GPU 0: the plan against ProfilerStep#3" in text) is is_there
        row = '<td class="word">out bytes</td><td>10 B</td><td>1.1 MiB</td>'
        assert (row in text) is is_there
    assert "2 measured copies carry no activation" in text


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("--machine", "a predicted step needs the workload that was planned and the machine; "),
        ("--workload", "a predicted step needs the workload that was planned and the machine; "),
        ("--plan", "it says what a plan is for; give --plan too"),
    ],
)
def test_a_plan_needs_its_workload_and_a_machine(
    step_file: Path, plan_files: list[str | Path], left_out: str, message: str
) -> None:
    at = plan_files.index(left_out)
    finished = run(step_file, *plan_files[:at], *plan_files[at + 2 :])
    assert (finished.exit_code, finished.stdout) == (ExitCode.MISUSE, "")
    assert message in finished.stderr


def test_a_plan_for_another_model_is_misuse(
    step_file: Path, plan_files: list[str | Path], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(path.read_text().replace(two_blocks().fingerprint, "0" * 16))
    finished = run(step_file, *plan_files)
    assert finished.exit_code == ExitCode.MISUSE
    assert finished.stderr.startswith(f"ebbtide trace: --plan {path}: ")


def test_a_file_that_is_not_there_is_misuse(tmp_path: Path) -> None:
    finished = run(tmp_path / "absent.json")
    assert finished.exit_code == ExitCode.MISUSE
    assert "there is no such file; give an existing one" in finished.stderr


def test_a_file_that_is_no_trace_fails_with_one_message(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(TraceError, match="its first bytes are those of no trace"):
        run(path)  # `ebbtide` prints it and ends with 1


def test_a_trace_without_a_gpu_fails_but_says_what_was_read(tmp_path: Path) -> None:
    path = write(tmp_path / "cpu.json", complete("cpu_op", "aten::mm", 0, 5))
    finished = run(path, "--json")
    assert finished.exit_code == ExitCode.FAILED
    assert json.loads(finished.stdout)["num_events"] == 1
    assert json.loads(finished.stdout)["gpus"] == []
    assert finished.stderr.startswith(
        f"ebbtide trace: {path}: none of the 1 events ran on a GPU, so there is nothing to measure;"
    )


def test_a_trace_that_is_cut_is_reported_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text(text_of(*a_step())[:-40])
    finished = run(path)
    assert finished.exit_code == ExitCode.DONE
    assert "GPU 0: " in finished.stdout
    assert "the file is not whole: it ends in the middle of an event." in finished.stderr
