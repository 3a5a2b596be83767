"""Which module may import which: the core no framework, and no floor one above it."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "ebbtide"
NOT_CORE = frozenset({"torch", "jax", "integrations", "compare"})
FRAMEWORKS = ("jax", "torch", "transformers")

# A unit is what lies directly in the package: a module, or a folder with all that is in
# it. The package's own `__init__` re-exports the core, so it stands just above it.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset(
        {"units", "budget", "errors", "files", "naming", "supported", "version", "forms", "drawing"}
    ),
    frozenset({"block", "workload", "machine", "plan", "timeline"}),
    frozenset({"memory"}),
    frozenset({"planner", "check", "simulate", "catalog", "trace", "doctor"}),
    frozenset({"report", "estimate", "sweep", "sweep_plot"}),
    frozenset({"__init__"}),
    frozenset({"torch", "jax"}),
    frozenset({"compare", "commands", "integrations"}),
    frozenset({"cli"}),
)
FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}


def read_sources() -> dict[str, str]:
    """The text of every module, by its path inside the package: "planner/lp.py"."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def unit_of(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


def imported_units(path: str, source: str) -> set[str]:
    """The units that a module imports, at its top or inside a function."""
    package = ["ebbtide", *path.split("/")[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from ebbtide import units` imports the module, any other name the package.
            is_root = origin == "ebbtide"
            names.update(
                f"ebbtide.{alias.name}" if is_root and alias.name in FLOOR_OF else origin
                for alias in node.names
            )
    parts = [name.split(".") for name in names]
    return {(part[1] if len(part) > 1 else "__init__") for part in parts if part[0] == "ebbtide"}


def find_wrong_imports(sources: dict[str, str]) -> list[str]:
    """One line for each import that points up, for each unit without a floor, and a circle."""
    faults: list[str] = []
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        unit = unit_of(path)
        if unit not in FLOOR_OF:
            faults.append(f"{path}: give {unit!r} a floor in tests/test_imports.py")
            continue
        others = imported_units(path, source) - {unit}
        graph.setdefault(unit, set()).update(others)
        for other in sorted(others):
            if other not in FLOOR_OF:
                faults.append(f"{path}: imports {other!r}, which has no floor")
            elif FLOOR_OF[other] > FLOOR_OF[unit]:
                faults.append(f"{path}: imports {other!r}, which is on a higher floor")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        faults.append(f"circle: {' -> '.join(error.args[1])}")
    return faults


def frameworks_imported_by(modules: Iterable[str], *paths: Path) -> list[str]:
    """Import the modules in a new process; return the frameworks that came with them."""
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        f"print(*[name for name in {FRAMEWORKS!r} if name in sys.modules])\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, *modules],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.split()


def core_modules() -> list[str]:
    paths = [path for path in read_sources() if unit_of(path) not in NOT_CORE]
    dotted = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths
    ]
    return ["ebbtide" if name == "__init__" else f"ebbtide.{name}" for name in dotted]


def test_the_core_imports_no_framework() -> None:
    modules = core_modules()
    assert {"ebbtide", "ebbtide.units", "ebbtide.cli"} <= set(modules)
    assert frameworks_imported_by(modules, SOURCE) == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_core_that_imports_a_framework_is_caught(tmp_path: Path, framework: str) -> None:
    (tmp_path / f"{framework}.py").write_text("")
    (tmp_path / "leaky.py").write_text(f"def load():\n    import {framework}\n\nload()\n")
    assert frameworks_imported_by(["ebbtide.units", "leaky"], tmp_path, SOURCE) == [framework]


def test_imports_point_down() -> None:
    assert find_wrong_imports(read_sources()) == []


@pytest.mark.parametrize(
    "line",
    [
        "import ebbtide.torch",
        "import ebbtide.torch.attach as attach",
        "from ebbtide.torch import attach",
        "from ebbtide import torch",
        "from ..torch import attach",
        "from .. import torch",
        "def f():\n    from ebbtide.torch.attach import attach",
    ],
)
def test_an_import_that_points_up_is_caught(line: str) -> None:
    assert find_wrong_imports({"planner/lp.py": line}) == [
        "planner/lp.py: imports 'torch', which is on a higher floor"
    ]


@pytest.mark.parametrize("line", ["import ebbtide", "from ebbtide import PlanError"])
def test_the_core_may_not_import_the_package_that_re_exports_it(line: str) -> None:
    assert find_wrong_imports({"planner/lp.py": line}) == [
        "planner/lp.py: imports '__init__', which is on a higher floor"
    ]


def test_a_circle_on_one_floor_is_caught() -> None:
    sources = {"plan.py": "import ebbtide.workload", "workload.py": "from .plan import Plan"}
    assert [fault.split(":")[0] for fault in find_wrong_imports(sources)] == ["circle"]


def test_a_unit_without_a_floor_is_caught() -> None:
    assert find_wrong_imports({"utils.py": "", "cli.py": "import ebbtide.common"}) == [
        "utils.py: give 'utils' a floor in tests/test_imports.py",
        "cli.py: imports 'common', which has no floor",
    ]


@pytest.mark.parametrize(
    "line", ["import torch", "from torch import nn", "from ebbtide.units import parse_bytes"]
)
def test_an_import_that_points_down_or_out_is_allowed(line: str) -> None:
    assert find_wrong_imports({"torch/attach.py": line}) == []
