"""`ebbtide doctor` from the command line: what it prints, and its exit status."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ebbtide.commands import doctor_jax
from ebbtide.commands.arguments import read_machine
from ebbtide.commands.doctor import register
from ebbtide.doctor import Disk, Facts, make_machine
from ebbtide.errors import ExitCode
from ebbtide.jax.flags import xla_flags
from ebbtide.machine import Machine
from tests.commands.test_plan import Finished
from tests.doctor.machines import FAST, GIB, GOOD, GPU, HOST, with_gpu
from tests.jax.test_flags import MACHINE, PLAN

VARIABLES = (
    "XLA_FLAGS",
    "JAX_REMAT3",
    "JAX_OPTIMIZATION_LEVEL",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> Finished:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["doctor", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Finished(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)


def test_missing_flags_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = run("--jax")
    assert finished.exit_code == ExitCode.FAILED
    lines = finished.stdout.splitlines()
    assert lines[0].startswith("jaxlib 0.")
    assert lines[1].startswith("! missing: xla_gpu_enable_latency_hiding_scheduler: ")
    assert lines[2] == (
        "    Set --xla_gpu_enable_latency_hiding_scheduler=true (openxla/xla#18139)."
    )
    assert lines[-1].endswith("(!) make offloading slow or unsafe.")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler")
    assert "latency_hiding_scheduler: " not in run("--jax").stdout
    assert run("--jax", "--unrolled").exit_code == ExitCode.DONE


def test_the_flags_of_a_plan_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", xla_flags(MACHINE, PLAN).xla_flags)
    finished = run("--jax", "--json")
    assert finished.exit_code == ExitCode.DONE
    form = json.loads(finished.stdout)
    assert set(form) == {"jaxlib", "is_fit", "findings"}
    assert form["is_fit"] is True
    assert all(not finding["is_serious"] for finding in form["findings"])


def test_json_has_every_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1 --xla_gpu_enable_command_buffer=")
    finished = run("--jax", "--json")
    assert finished.exit_code == ExitCode.FAILED
    form = json.loads(finished.stdout)
    assert form["is_fit"] is False
    assert form["findings"][0] == {
        "concern": "unknown",
        "name": "xla_no_such_flag",
        "message": "XLA does not know the flag 'xla_no_such_flag' and ends the process",
        "change": "Leave it out, or look for its present name",
        "source": "xla/parse_flags_from_env.cc",
        "is_serious": True,
    }
    assert "xla_gpu_enable_command_buffer" not in [f["name"] for f in form["findings"]]


def test_flags_alone_take_no_folders() -> None:
    finished = run("--jax", "--disk", "/tmp")
    assert finished.exit_code == ExitCode.MISUSE
    assert finished.stderr.startswith("ebbtide doctor: --jax looks at flags alone")
    assert finished.stdout == ""


@pytest.fixture
def find_out(monkeypatch: pytest.MonkeyPatch) -> Callable[[Facts], None]:
    """Let the machine be one that a test makes up, on which jax is not installed."""
    monkeypatch.setattr(doctor_jax, "find_in_flags", lambda *, is_scanned: ())

    def be(facts: Facts) -> None:
        def survey(disks: Sequence[Disk]) -> Facts:
            return replace(facts, disks=tuple(disks) if disks else facts.disks)

        monkeypatch.setattr("ebbtide.commands.doctor.survey", survey)

    return be


def test_a_good_machine_is_fit_and_its_file_is_what_planners_read(
    tmp_path: Path, find_out: Callable[[Facts], None]
) -> None:
    find_out(GOOD)
    out = tmp_path / "machine.json"
    finished = run("--out", str(out))
    assert (finished.exit_code, finished.stderr) == (
        ExitCode.DONE,
        f"ebbtide doctor: wrote {out}\n",
    )
    lines = finished.stdout.splitlines()
    assert lines[0] == "GPUs, and GB/s of their links to pinned host memory:"
    assert lines[2].split() == [
        *("0", "NVIDIA", "H200", "140.0", "GiB", "5", "x16", "of", "5", "x16", "0"),
        *("55.2", "55.3", "100.6", "55.2", "55.3", "100.6"),
    ]
    assert lines[-1] == "Nothing found."
    assert read_machine(str(out)) == make_machine(GOOD)


def test_json_has_links_and_findings(find_out: Callable[[Facts], None]) -> None:
    slow = replace(FAST, in_bytes_per_s=20_000_000_000)
    find_out(with_gpu(replace(GPU, alone=slow, together=slow)))
    finished = run("--json")
    assert finished.exit_code == ExitCode.FAILED
    form = json.loads(finished.stdout)
    assert set(form) == {
        *("is_fit", "seconds", "links", "pci_gpus", "host", "disks", "software", "findings"),
        *("unknown", "machine", "no_machine_because"),
    }
    assert form["is_fit"] is False
    (link,) = form["links"]
    assert (link["gpu"], link["pci_address"], link["numa_node"]) == (0, GPU.pci_address, 0)
    assert link["alone"] == link["together"] == {
        "out_bytes_per_s": 55_200_000_000,
        "in_bytes_per_s": 20_000_000_000,
        "both_bytes_per_s": 100_600_000_000,
    }  # fmt: skip
    assert (link["pcie"]["generation"], link["pcie"]["width"]) == (5, 16)
    assert link["pcie"]["ceiling_bytes_per_s"] == 63_015_384_615
    (finding,) = form["findings"]
    assert set(finding) == {"code", "severity", "what", "evidence", "advice"}
    assert (finding["code"], finding["severity"]) == ("slow-link", "serious")
    assert Machine.from_json(json.dumps(form["machine"])).in_bytes_per_s == 20_000_000_000


def test_a_note_alone_is_no_failure(find_out: Callable[[Facts], None]) -> None:
    find_out(replace(GOOD, host=replace(HOST, huge_pages="never")))
    finished = run()
    assert finished.exit_code == ExitCode.DONE
    lines = finished.stdout.splitlines()
    assert lines[-1] == "Nothing of this makes offloading slow, unsafe or impossible."
    assert lines[-3].startswith("- no-huge-pages: the system gives no huge pages")


def test_gpus_that_were_not_measured_give_no_file(
    tmp_path: Path, find_out: Callable[[Facts], None]
) -> None:
    find_out(replace(GOOD, gpus=(), unknown=("the link of GPU 0",)))
    out = tmp_path / "machine.json"
    finished = run("--out", str(out))
    assert finished.exit_code == ExitCode.FAILED
    assert not out.exists()
    assert f"--out {out}: the system shows GPUs that could not be measured" in finished.stderr
    assert "not found out: the link of GPU 0" in finished.stdout.splitlines()
    assert "! gpu-out-of-reach: " in finished.stdout


def test_a_file_that_cannot_be_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find_out: Callable[[Facts], None]
) -> None:
    find_out(GOOD)
    out = tmp_path / "machine.json"

    def survey(_: Sequence[Disk]) -> Facts:
        out.mkdir()  # while it measured
        return GOOD

    monkeypatch.setattr("ebbtide.commands.doctor.survey", survey)
    finished = run("--out", str(out))
    assert finished.exit_code == ExitCode.FAILED
    assert finished.stdout.splitlines()[-1] == "Nothing found."
    assert finished.stderr == (
        f"ebbtide doctor: --out {out}: the file cannot be written (Is a directory); name another\n"
    )


def test_folders_are_given_with_or_without_a_size(find_out: Callable[[Facts], None]) -> None:
    find_out(GOOD)
    finished = run("--json", "--disk", "/a:5GiB", "--disk", "/b", "--disk", "/c:d")
    disks = json.loads(finished.stdout)["disks"]
    assert [(disk["path"], disk["cap_bytes"]) for disk in disks] == [
        ("/a", 5 * GIB),
        ("/b", None),
        ("/c:d", None),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--disk", "/a:5parsec"], "has a cap that is not a size"),
        (["--disk", ""], "--disk was given without a folder"),
        (["--out", "/no/such/folder/m.json"], "there is no folder /no/such/folder"),
        (["--out", "m" * 300], "the file cannot be written (File name too long); name another"),
    ],
)
def test_misuse(arguments: list[str], message: str) -> None:
    finished = run(*arguments)
    assert finished.exit_code == ExitCode.MISUSE
    assert message in finished.stderr
    assert finished.stdout == ""


@pytest.mark.slow
def test_the_machine_that_this_runs_on(tmp_path: Path) -> None:
    folder, out = tmp_path / "disk", tmp_path / "machine.json"
    folder.mkdir()
    finished = run("--json", "--disk", str(folder), "--out", str(out))
    form = json.loads(finished.stdout)
    assert finished.exit_code in (ExitCode.DONE, ExitCode.FAILED)
    assert form["is_fit"] is (finished.exit_code == ExitCode.DONE)
    assert form["host"]["available_bytes"] > 0
    assert form["disks"][0]["write_bytes_per_s"] > 0
    assert form["software"]["torch_build"] != ""
    assert form["machine"] == json.loads(out.read_text())
    assert list(folder.iterdir()) == []
