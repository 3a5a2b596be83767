"""`ebbtide plan` from the command line: what it prints, writes and refuses."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ebbtide.catalog import find_machine
from ebbtide.commands.plan import register
from ebbtide.errors import ExitCode
from ebbtide.plan import Plan
from ebbtide.planner.solve import plan_for_budget
from ebbtide.workload import Workload

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "docs" / "examples" / "workload.json")
PAGE = ROOT / "docs" / "plan-command.md"
MACHINE = find_machine("h200-pcie5")
GIB = 2**30

KEYS = {
    *("outcome", "message", "planner", "budget_gib", "planning_ms", "predicted_step_s"),
    *("bound_step_s", "gap", "peak_gib", "host_gib", "disk_gib", "decisions"),
    "disk_written_gib_per_day",
    *("release_at", "fetch_at"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command line ended."""

    exit_code: int
    stdout: str
    stderr: str


def run_alone(*arguments: str) -> Finished:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Finished(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)


def run(*arguments: str) -> Finished:
    """Run for the example and a machine; the greedy planner, as it is the fastest."""
    planner = () if {"--check", "--planner"} & set(arguments) else ("--planner", "greedy")
    machine = () if "--machine" in arguments else ("--machine", "h200-pcie5")
    return run_alone(EXAMPLE, *machine, *planner, *arguments)


def run_json(*arguments: str) -> dict[str, Any]:
    finished = run(*arguments, "--json")
    assert (finished.exit_code, finished.stderr) == (ExitCode.DONE, "")
    return json.loads(finished.stdout)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    finished = run("--budget", "12GiB", "--out", str(path))
    assert finished.exit_code == ExitCode.DONE
    assert finished.stderr == f"ebbtide plan: wrote {path}\n"
    return path


def test_the_json_is_the_plan_of_the_planner() -> None:
    published = run_json("--budget", "12GiB")
    workload = Workload.from_json(Path(EXAMPLE).read_text())
    outcome = plan_for_budget(workload, MACHINE, budget_bytes=12 * GIB, planner="greedy")
    plan = outcome.plan
    assert plan is not None
    assert set(published) == KEYS
    assert published["outcome"] == "found"
    assert (published["planner"], published["message"]) == ("greedy", outcome.message)
    assert published["budget_gib"] == 12.0
    assert published["planning_ms"] > 0
    assert published["predicted_step_s"] == plan.predicted_step_ns / 1e9
    assert published["bound_step_s"] == plan.bound_step_ns / 1e9
    assert published["gap"] == plan.predicted_step_ns / plan.bound_step_ns - 1
    assert published["peak_gib"] == plan.peak_bytes / GIB
    assert (published["host_gib"], published["disk_gib"]) == (plan.host_bytes / GIB, 0.0)
    assert published["decisions"] == {n: d.value for n, d in plan.decisions.items()}
    assert published["release_at"] == dict(plan.release_at)
    assert published["fetch_at"] == dict(plan.fetch_at)


def test_lp_plans_where_nobody_else_is_asked_for() -> None:
    pytest.importorskip("scipy")
    finished = run_alone(EXAMPLE, "--machine", "h200-pcie5", "--budget", "12GiB")
    assert finished.exit_code == ExitCode.DONE
    assert re.search(r"^planned by lp in \d+ ms$", finished.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("budget", "budget_bytes"),
    [
        ("14GiB", 14 * GIB),
        ("10%", MACHINE.device_bytes // 10),
        ("auto", MACHINE.device_bytes - MACHINE.device_bytes * 6 // 100),
    ],
)
def test_a_budget_is_a_size_a_share_or_auto(budget: str, budget_bytes: int) -> None:
    assert run_json("--budget", budget)["budget_gib"] == budget_bytes / GIB


def test_without_json_a_summary_is_printed() -> None:
    finished = run("--budget", "12GiB")
    assert (finished.exit_code, finished.stderr) == (ExitCode.DONE, "")
    lines = finished.stdout.splitlines()
    assert lines[0].startswith("12.0 GiB at most; the step takes ")
    assert lines[2].split() == ["activation", "each", "keep", "host", "disk", "recompute"]
    rows = {line.split()[0]: line.split()[3:] for line in lines[3:15]}
    assert {".input", ".self_attn:out", ".mlp.gate_proj", ".mlp.product"} <= set(rows)
    # The example has eight blocks of one class, so each kind is there eight times.
    assert all(sum(map(int, counts)) == 8 for counts in rows.values())
    assert lines[15].startswith("bytes ")
    step = re.search(
        r"^step: ([\d.]+) ms = ([\d.]+) ms when all is kept \+ ([\d.]+) ms of recomputation "
        r"\+ ([\d.]+) ms slower beside copies \+ ([\d.]+) ms of stalls$",
        finished.stdout,
        re.MULTILINE,
    )
    assert step is not None
    total, *parts = map(float, step.groups())
    assert total == pytest.approx(sum(parts), abs=0.26)
    assert re.search(r"^copies out: [\d.]+ GiB in [\d.]+ ms$", finished.stdout, re.MULTILINE)
    assert re.search(r"^planned by greedy in \d+ ms$", finished.stdout, re.MULTILINE)


def test_stalls_name_what_was_waited_for() -> None:
    finished = run("--budget", "10.2GiB", "--planner", "offload")
    assert re.search(
        r"^longest stalls: [\d.]+ ms for model\.layers\.\d", finished.stdout, re.MULTILINE
    )


def test_everything_fits_into_a_large_budget() -> None:
    finished = run("--budget", "40GiB")
    assert finished.exit_code == ExitCode.DONE
    assert finished.stdout.startswith("everything fits: the step takes 18.6 GiB at most\n")


def test_nothing_fits_is_exit_status_3() -> None:
    finished = run("--budget", "8GiB")
    assert (finished.exit_code, finished.stdout) == (ExitCode.NO_PLAN_FITS, "")
    assert finished.stderr.startswith("ebbtide plan: no plan of greedy fits a budget of 8.0 GiB; ")
    assert "The logits hold the peak" in finished.stderr


def test_nothing_fits_is_an_object_too() -> None:
    finished = run("--budget", "8GiB", "--json")
    assert finished.exit_code == ExitCode.NO_PLAN_FITS
    assert finished.stderr.startswith("ebbtide plan: no plan of greedy fits")
    published = json.loads(finished.stdout)
    assert published["outcome"] == "nothing fits"
    assert 8.0 < published["smallest_budget_gib"] < 12.0
    smallest = run_json("--budget", str(int(published["smallest_budget_gib"] * GIB)))
    assert smallest["outcome"] == "found"


def test_tiers_and_decisions_are_the_users() -> None:
    published = run_json("--budget", "14GiB", "--host", "0", "--decide", "*.residual=keep")
    assert published["host_gib"] == 0.0
    residuals = {d for n, d in published["decisions"].items() if n.endswith(".residual")}
    assert residuals == {"keep"}


def test_later_decisions_win() -> None:
    decided = ("--decide", "*.residual=host", "--decide", "*=keep", "--decide", "*.residual=host")
    published = run_json("--budget", "20GiB", *decided)
    counted = {name: d for name, d in published["decisions"].items() if d == "host"}
    assert len(counted) == 8
    assert all(name.endswith(".residual") for name in counted)


def test_disks_add_up(tmp_path: Path) -> None:
    machine = replace(
        MACHINE, host_bytes=0, disk_write_bytes_per_s=3 * 10**9, disk_read_bytes_per_s=3 * 10**9
    )
    path = tmp_path / "machine.json"
    path.write_text(machine.to_json())
    asked = ("--budget", "11GiB", "--machine", str(path), "--planner", "offload")
    enough = run(*asked, "--disk", "/nvme0:6GiB", "--disk", "3GiB", "--json")
    published = json.loads(enough.stdout)
    assert published["outcome"] == "found"
    assert 6.0 < published["disk_gib"] <= 9.0
    assert run(*asked, "--disk", "6GiB").exit_code == ExitCode.NO_PLAN_FITS


def test_a_budget_that_the_device_does_not_have_is_said() -> None:
    finished = run("--budget", "200GiB")
    assert finished.exit_code == ExitCode.DONE
    assert finished.stderr == (
        "ebbtide plan: the budget of 200.0 GiB is more than the 140.4 GiB of h200-pcie5\n"
    )


def test_a_written_plan_is_read_back_and_sound(plan_file: Path) -> None:
    plan = Plan.from_json(plan_file.read_text())
    assert plan.budget_bytes == 12 * GIB
    finished = run("--check", str(plan_file))
    assert (finished.exit_code, finished.stderr) == (ExitCode.DONE, "")
    lines = finished.stdout.splitlines()
    assert lines[0] == "sound"
    assert lines[1].startswith("peak: 12.0 GiB, in ")
    assert lines[2].split() == ["resident", "7.5", "GiB"]
    assert lines[-1].startswith("on host: ")


def test_a_plan_with_faults_is_exit_status_1(plan_file: Path) -> None:
    finished = run("--check", str(plan_file), "--budget", "11GiB")
    assert finished.exit_code == ExitCode.FAILED
    assert finished.stdout.startswith("fault: ")
    assert "\npeak: 12.0 GiB, in " in finished.stdout


def test_a_check_is_an_object_too(plan_file: Path) -> None:
    published = run_json("--check", str(plan_file))
    assert (published["is_sound"], published["faults"]) == (True, [])
    plan = Plan.from_json(plan_file.read_text())
    assert published["peak_gib"] == plan.peak_bytes / GIB
    assert sum(published["holders_gib"].values()) == pytest.approx(published["peak_gib"])


def test_a_plan_of_another_model_has_a_fault(plan_file: Path, tmp_path: Path) -> None:
    plan = Plan.from_json(plan_file.read_text())
    decisions = {name.replace("model.", "encoder."): d for name, d in plan.decisions.items()}
    other = tmp_path / "other.json"
    other.write_text(replace(plan, decisions=decisions).to_json())
    finished = run("--check", str(other))
    assert finished.exit_code == ExitCode.FAILED
    assert finished.stdout.startswith("fault: plan 'greedy' is for LlamaForCausalLM")


def test_a_sweep_is_a_table_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.png"
    finished = run("--sweep", "3", "--plot", str(picture))
    assert finished.exit_code == ExitCode.DONE
    assert finished.stderr == f"ebbtide plan: wrote {picture}\n"
    lines = finished.stdout.splitlines()
    assert re.split(r"  +", lines[0]) == [
        *("budget GiB", "step ms", "bound ms", "gap", "peak GiB", "host GiB"),
    ]
    assert len(lines) == 4
    assert lines[-1].split() == ["18.62", "278.1", "278.1", "0.00%", "18.62", "0.00"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_is_an_object_too() -> None:
    points = run_json("--sweep", "2")["points"]
    assert [point["outcome"] for point in points] == ["found", "everything fits"]
    assert all(point["bound_step_s"] <= point["predicted_step_s"] for point in points)


def test_the_documented_flags_are_those_of_the_command() -> None:
    flag = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
    known = set(flag.findall(run_alone("--help").stdout))
    assert {"--machine", "--budget", "--check", "--sweep"} <= known
    documented = PAGE.read_text().partition("\n## `ebbtide observe`\n")[0]
    # Of another command: what an error that is quoted there says of it.
    documented = re.sub(r"`ebbtide compare [^`]*`", "", documented)
    assert set(flag.findall(documented)) == known


def test_every_json_key_is_documented() -> None:
    words = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    assert KEYS | {"smallest_budget_gib", "points"} <= words
    assert {"is_sound", "faults", "peak_moment", "holders_gib"} <= words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no --budget was given, and a plan is for one; give --budget 40GiB"),
        (("--budget", "40Gb"), "--budget 40Gb: cannot read '40Gb' as a budget"),
        (("--budget", "120%"), "--budget 120%: budget '120%' is more than the device has"),
        (
            ("--budget", "1GiB", "--host", "much"),
            "--host much: cannot read 'much' as a size; a size is a number",
        ),
        (("--budget", "1GiB", "--disk", "/d:x"), "--disk /d:x: disk '/d:x' has a cap that is not"),
        (
            ("--budget", "1GiB", "--disk", "9GiB"),
            "--disk 9GiB: the machine h200-pcie5 has no bandwidth to disk, so no time can be",
        ),
        (
            ("--budget", "1GiB", "--planner", "greed"),
            "unknown planner 'greed'; valid names, nearest first: greedy,",
        ),
        (
            ("--budget", "1GiB", "--machine", "h200"),
            "--machine h200: there is no such file, and in the catalog, unknown machine 'h200'; "
            "valid names, nearest first: gh200, h200-pcie5,",
        ),
        (("--budget", "1GiB", "--machine", EXAMPLE), f"--machine {EXAMPLE}: the file's format is"),
        (("--budget", "1GiB", "--machine", __file__), f"--machine {__file__}: the text is not"),
        (("--budget", "1GiB", "--machine", "/"), "--machine /: the file cannot be read ("),
        (("--budget", "1GiB", "--decide", "x"), "--decide x: it must be a pattern over"),
        (
            ("--budget", "1GiB", "--decide", "*.mlp=toss"),
            "--decide: pattern '*.mlp': unknown decision 'toss'; valid names",
        ),
        (("--budget", "1GiB", "--decide", "zz=keep"), "--decide: the pattern 'zz' matches no"),
        (("--budget", "1GiB", "--out", "/no/such/p.json"), "--out /no/such/p.json: there is no"),
        (("--budget", "1GiB", "--out", "/"), "--out /: it is a folder; give the name of a file"),
        (("--sweep", "1"), "--sweep 1: it must be 2 or more"),
        (("--sweep", "2", "--budget", "9GiB"), "--budget 9GiB was given with --sweep 2: a sweep"),
        (("--sweep", "2", "--plot", "x.svg"), "--plot x.svg: a PNG is written"),
        (("--budget", "1GiB", "--plot", "x.png"), "--plot x.png was given without --sweep"),
        (("--check", "/no/plan.json"), "--check /no/plan.json: the file cannot be read (No such"),
        (("--check", EXAMPLE), f"--check {EXAMPLE}: the file's format is 'ebbtide-workload'"),
        (
            ("--check", "p.json", "--planner", "lp"),
            "--planner was given with --check p.json: a plan that is checked is not made",
        ),
    ],
)
def test_misuse_exits_2_with_one_line(arguments: tuple[str, ...], message: str) -> None:
    finished = run(*arguments)
    assert (finished.exit_code, finished.stdout) == (ExitCode.MISUSE, "")
    assert finished.stderr.startswith(f"ebbtide plan: {message}")
    assert finished.stderr.count("\n") == 1


def test_a_workload_that_is_missing_is_misuse() -> None:
    finished = run_alone("/no/w.json", "--machine", "h200-pcie5", "--budget", "1GiB")
    assert finished.exit_code == ExitCode.MISUSE
    assert finished.stderr == (
        "ebbtide plan: WORKLOAD /no/w.json: the file cannot be read (No such file or directory); "
        "give an existing file\n"
    )


def test_a_workload_without_times_is_misuse(tmp_path: Path) -> None:
    workload = Workload.from_json(Path(EXAMPLE).read_text())
    path = tmp_path / "untimed.json"
    path.write_text(replace(workload, outside=None).to_json())
    finished = run_alone(str(path), "--machine", "h200-pcie5", "--budget", "1GiB")
    assert finished.exit_code == ExitCode.MISUSE
    assert f"WORKLOAD {path}: it has no times, and a budget needs them" in finished.stderr
