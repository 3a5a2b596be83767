"""Read what is named on a command line: files, sizes and choices.

Whatever is wrong is a `ValueError` with one sentence: what was given, the rule, the next step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ebbtide.budget import parse_budget
from ebbtide.catalog import MACHINES
from ebbtide.errors import PlanError
from ebbtide.files import read_small_text
from ebbtide.machine import Machine
from ebbtide.naming import plain_name, unknown_name_message
from ebbtide.plan import Plan
from ebbtide.planner.named import parse_plan_name
from ebbtide.planner.solve import BUDGET_PLANNERS
from ebbtide.units import format_bytes, parse_bytes, parse_path_and_cap
from ebbtide.workload import Workload

Form = TypeVar("Form")

MOST_FILE_BYTES = 64 * 2**20
"""No workload, plan or machine has as many: a model with a thousand blocks takes some 100 kB."""


def read_workload(path: Path, option: str = "WORKLOAD") -> Workload:
    """Read a workload that has times, as planning needs; `option` is how it was given."""
    workload = _read_file(option, path, Workload.from_json)
    if not workload.is_timed:
        raise ValueError(
            f"{option} {path}: it has no times, and a budget needs them; write it again with "
            "`ebbtide observe`"
        )
    return workload


def read_plan(path: Path, option: str = "--check") -> Plan:
    """Read a plan; `option` is how it was given."""
    return _read_file(option, path, Plan.from_json)


def read_named_plan(given: str) -> str | Plan:
    """Return the name of a plan, or the plan of a file."""
    if Path(given).is_file():
        return _read_file("--plan", Path(given), Plan.from_json)
    try:
        parse_plan_name(given)
    except PlanError as error:
        raise ValueError(f"--plan {given}: there is no such file, and {error}") from error
    return given


def read_machine(given: str) -> Machine:
    """Return the machine of the catalog with this name, or else that of the file."""
    if given in MACHINES:
        return MACHINES[given]
    if not is_there(Path(given)):
        unknown = unknown_name_message("machine", given, MACHINES)
        raise ValueError(f"--machine {given}: there is no such file, and in the catalog, {unknown}")
    machine = _read_file("--machine", Path(given), Machine.from_json)
    return replace(machine, name=plain_name(machine.name) or "unnamed")


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder; a name that is too long for one is none."""
    try:
        return path.exists()
    except OSError:
        return False


def read_budget(given: str, machine: Machine) -> int:
    """Return the bytes of `--budget` on this machine."""
    try:
        return parse_budget(given, machine.device_bytes)
    except ValueError as error:
        raise ValueError(f"--budget {given}: {error}") from error


def read_host(given: str | None, machine: Machine) -> int | None:
    """Return the bytes of `--host`, or None if it was not given."""
    if given is None:
        return None
    try:
        num_bytes = parse_bytes(given)
    except ValueError as error:
        raise ValueError(f"--host {given}: {error}") from error
    if num_bytes and not machine.out_bytes_per_s * machine.in_bytes_per_s:
        raise ValueError(
            f"--host {given}: the machine {machine.name} has no bandwidth to host memory, so no "
            "time can be planned; leave --host out, or give a machine file with out_bytes_per_s "
            "and in_bytes_per_s"
        )
    return num_bytes


def read_disks(given: Sequence[str], machine: Machine) -> int | None:
    """Return the bytes of all `--disk` together, or None if there was none."""
    if not given:
        return None
    num_bytes = add_up_disks(given)
    if num_bytes and not machine.disk_write_bytes_per_s * machine.disk_read_bytes_per_s:
        raise ValueError(
            f"--disk {given[0]}: the machine {machine.name} has no bandwidth to disk, so no time "
            "can be planned; leave --disk out, or give a machine file with disk_write_bytes_per_s "
            "and disk_read_bytes_per_s"
        )
    return num_bytes


def add_up_disks(given: Sequence[str]) -> int:
    """Return the bytes of all `--disk` together."""
    num_bytes = 0
    for text in given:
        try:
            num_bytes += parse_path_and_cap(text).cap_bytes if ":" in text else parse_bytes(text)
        except ValueError as error:
            raise ValueError(f"--disk {text}: {error}") from error
    return num_bytes


def read_decisions(given: Sequence[str]) -> dict[str, str]:
    """Return pattern to decision; of two with the same pattern the later one counts."""
    decide: dict[str, str] = {}
    for text in given:
        pattern, mark, decision = text.rpartition("=")
        if not mark or not pattern:
            raise ValueError(
                f"--decide {text}: it must be a pattern over activation names, '=' and a decision; "
                "give for example --decide '*.mlp.*=recompute'"
            )
        # Later patterns win, so it must also come later.
        decide.pop(pattern, None)
        decide[pattern] = decision
    return decide


def check_planner(name: str) -> None:
    """Refuse a planner that there is not."""
    if name not in BUDGET_PLANNERS:
        raise ValueError(unknown_name_message("planner", name, BUDGET_PLANNERS))


def check_folder(option: str, path: Path) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    try:
        is_folder, has_folder = path.is_dir(), path.absolute().parent.is_dir()
    except OSError as error:  # such as a name that is too long
        raise ValueError(
            f"{option} {path}: the file cannot be written ({error.strerror}); name another"
        ) from error
    if is_folder:
        raise ValueError(f"{option} {path}: it is a folder; give the name of a file")
    if not has_folder:
        raise ValueError(
            f"{option} {path}: there is no folder {path.parent}; make it, or name another"
        )


def describe_large_budget(budget_bytes: int, machine: Machine) -> str:
    """Return a warning about a budget that the device does not have; empty if it has."""
    if budget_bytes <= machine.device_bytes:
        return ""
    return (
        f"the budget of {format_bytes(budget_bytes)} is more than the "
        f"{format_bytes(machine.device_bytes)} of {machine.name}"
    )


def _read_file(option: str, path: Path, read: Callable[[str], Form]) -> Form:
    try:
        return read(read_small_text(path, MOST_FILE_BYTES))
    except OSError as error:
        raise ValueError(
            f"{option} {path}: the file cannot be read ({error.strerror}); give an existing file"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{option} {path}: byte {error.start} is not UTF-8; give a JSON file"
        ) from error
    except PlanError as error:
        raise ValueError(f"{option} {path}: {error}") from error
    except ValueError as error:
        raise ValueError(
            f"{option} {path}: {error}; give a JSON file that ebbtide wrote"
        ) from error
