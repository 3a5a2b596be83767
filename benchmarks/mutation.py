"""Change the code of the lifetimes in one place at a time, and see whether a test dies.

    PYTHONPATH=src:. python3 benchmarks/mutation.py --out benchmarks/results/mutation.json

Every comparison, constant, operator, condition, call, assignment and jump of the files below is a
place to change; a sample of them is drawn with a fixed seed. The tests named for a file are those
that need no GPU and little time. A change that nobody notices is printed, and is a missing test, or
changes nothing that matters. What is not changed: assertions of our own invariants, messages,
logging, and names. Needs no GPU; about half an hour on two idle cores. What was judged so far is
in the file of `--out`, so that a run that is ended counts.
"""

from __future__ import annotations

import argparse
import ast
import enum
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random

import pytest
import torch

from tests.torch.mutations import ROOT, copy_project

MIN_TIMEOUT_S = 120
TIMES_CONTROL = 8
"""A change whose tests take this many times what they take without it loops for ever: other things
may run on the machine, so the bound is wide."""
NUM_MUTANTS = 120
SEED = 10
STACK = ("tests/torch/test_traffic.py", "tests/torch/test_rules.py", "tests/torch/test_record.py")
FILES = {
    "torch/traffic.py": (*STACK, "tests/torch/test_anchors.py", "tests/torch/test_sanitizer.py"),
    "torch/tiers.py": ("tests/torch/test_tiers.py", "tests/torch/test_traffic.py",
                       "tests/torch/test_disk_tier.py", "tests/torch/test_refusals.py"),
    "torch/anchors.py": ("tests/torch/test_anchors.py", *STACK),
    "torch/record.py": ("tests/torch/test_record.py", "tests/torch/test_rules.py",
                        "tests/torch/test_tape.py", "tests/torch/test_traps.py"),
    "torch/nodes.py": ("tests/torch/test_tape.py", "tests/torch/test_rules.py",
                       "tests/torch/test_traps.py", "tests/torch/test_script.py"),
    "torch/devices/cpu.py": ("tests/torch/devices/test_cpu.py", "tests/torch/test_disk_tier.py"),
    "memory/arena.py": ("tests/memory/test_arena.py", "tests/memory/test_arena_size.py"),
    "memory/ledger.py": ("tests/memory/test_ledger.py", "tests/torch/test_traffic.py"),
    "memory/stripes.py": ("tests/memory/test_stripes.py", "tests/memory/test_disk_folders.py"),
    "memory/disk.py": ("tests/memory/test_disk.py", "tests/memory/test_disk_folders.py"),
}  # fmt: skip
"""What holds, moves and frees activations, and its tests; the cheap ones first."""

# The small model and one schedule are enough, and ten times as fast as all.
CHOSEN = (
    "not llama and not gpt2 and not (every_schedule and (eager or random)) "
    "and not random_moments and not fully_sharded"
)

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+", ast.Div: "*",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    start: int
    """Where it starts in the file's bytes, and where it ends."""
    end: int
    old: str
    new: str


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return every change of a file, in the order of the source."""
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: list[Mutant] = []
    for node, new in _changes(ast.parse(text), text):
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old = text.encode()[start:end].decode()
        if old != new:
            found.append(
                Mutant(file=file, line=node.lineno, start=start, end=end, old=old, new=new)
            )
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.new))


def _changes(tree: ast.AST, text: str) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield what each change replaces, and what stands there then."""
    for node in _nodes_in_functions(tree):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                yield node, _joined(text, left, COMPARISONS[type(op)], right)
            case ast.BoolOp(values=[first, second]):
                other = "or" if isinstance(node.op, ast.And) else "and"
                yield node, _joined(text, first, other, second)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, f"({_source(text, operand)})"
            case ast.BinOp(left=left, right=right) if type(node.op) in OPERATORS:
                yield node, _joined(text, left, OPERATORS[type(node.op)], right)
            case ast.Constant(value=bool() as value):
                yield node, str(not value)
            case ast.Constant(value=int() as value):
                yield node, str(value + 1)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield test, "False"
                if isinstance(node, ast.If):
                    yield test, "True"
            case ast.Expr(value=ast.Call()) | ast.Continue() | ast.Break() | ast.Raise():
                yield node, "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield node, "pass"
            case ast.AugAssign(op=op) if type(op) in OPERATORS:
                yield node, "pass"
                sign = OPERATORS[type(op)]
                target, value = _source(text, node.target), _source(text, node.value)
                yield node, f"{target} {sign}= {value}"
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield node, "return None"
            case ast.Delete():
                yield node, "pass"
            case _:
                pass


def _nodes_in_functions(tree: ast.AST, *, is_inside: bool = False) -> Iterator[ast.AST]:
    """Yield what runs, without assertions, messages, logging and annotations."""
    if isinstance(tree, ast.Assert | ast.JoinedStr):
        return
    if isinstance(tree, ast.Expr) and ast.unparse(tree).startswith(("log.", "super()")):
        return
    if is_inside:
        yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        is_body = is_inside or (isinstance(tree, ast.FunctionDef) and name == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes_in_functions(child, is_inside=is_body)


def _joined(text: str, left: ast.expr, sign: str, right: ast.expr) -> str:
    return f"({_source(text, left)}) {sign} ({_source(text, right)})"


def _source(text: str, node: ast.expr) -> str:
    found = ast.get_source_segment(text, node)
    assert found is not None, "bug: a node without source"
    return found


def sample(num_mutants: int, seed: int) -> list[Mutant]:
    """Draw changes from each file, by how many it has; in an order of chance."""
    package = ROOT / "src/ebbtide"
    by_file = {
        file: mutants_of(file, (package / file).read_text(encoding="utf-8")) for file in FILES
    }
    num_all = sum(map(len, by_file.values()))
    draw, chosen = Random(seed), list[Mutant]()
    for mutants in by_file.values():
        num = max(1, round(num_mutants * len(mutants) / num_all))
        chosen += draw.sample(mutants, min(num, len(mutants)))
    draw.shuffle(chosen)
    print(f"{len(chosen)} of {num_all} changes", file=sys.stderr)
    return chosen


class State(enum.Enum):
    """What became of a change."""

    NOTICED = "noticed"
    ENDLESS = "never ended"
    """Its tests were ended; that is noticed as well."""
    SURVIVED = "survived"


class Workplace:
    """A copy of the project in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        copy_project(ROOT, folder)

    def run(
        self,
        tests: tuple[str, ...],
        timeout_s: float | None = None,
        *,
        keeps_bytecode: bool = False,
    ) -> State:
        """Run tests; returns whether they notice that something is wrong."""
        context = multiprocessing.get_context("fork")  # importing torch takes longer than tests
        child = context.Process(target=_run, args=(self._folder, tests, keeps_bytecode))
        child.start()
        child.join(timeout_s)
        if child.exitcode is None:
            child.kill()
            child.join()
            return State.ENDLESS
        return State.NOTICED if child.exitcode else State.SURVIVED

    def judge(self, mutant: Mutant, timeout_s: float) -> State:
        """Return whether a test notices a change."""
        path = self._folder / "src/ebbtide" / mutant.file
        status, content = path.stat(), path.read_bytes()
        try:
            changed = content[: mutant.start] + mutant.new.encode() + content[mutant.end :]
            path.write_bytes(changed)
            os.utime(path, (status.st_atime, status.st_mtime + 60))  # or the old bytecode is taken
            return self.run(FILES[mutant.file], timeout_s)
        finally:
            path.write_bytes(content)
            os.utime(path, (status.st_atime, status.st_mtime))


def _run(folder: Path, tests: tuple[str, ...], keeps_bytecode: bool) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "ebbtide")]:
        del sys.modules[name]
    os.chdir(folder)
    sys.path[:0] = [str(folder / "src"), str(folder)]
    sys.dont_write_bytecode = not keeps_bytecode
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    options = ("-q", "--tb=no", "-x", "-p", "no:cacheprovider", "-m", "not slow", "-k", CHOSEN)
    code = 1
    try:
        code = int(pytest.main([*options, *tests]))
    finally:
        os._exit(code)


def main() -> int:
    """Print what survived; return 1 if the tests fail by themselves, or below nine in ten died."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutants", type=int, default=NUM_MUTANTS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--files", default="", help="with commas between; all, if empty")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="write counts and survivors here, as JSON")
    options = parser.parse_args()
    wanted = set(filter(None, options.files.split(",")))
    mutants = [m for m in sample(options.mutants, options.seed) if not wanted or m.file in wanted]
    judged: list[tuple[Mutant, State]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as threads:
        places: SimpleQueue[Workplace] = SimpleQueue()
        for number in range(options.jobs):
            places.put(Workplace(Path(folder) / str(number)))
        timeouts_s: dict[str, float] = {}

        def control(file: str) -> bool:
            place = places.get()
            start = time.monotonic()
            state = place.run(FILES[file], keeps_bytecode=True)
            timeouts_s[file] = max(MIN_TIMEOUT_S, TIMES_CONTROL * (time.monotonic() - start))
            places.put(place)
            if state is not State.SURVIVED:
                print(f"the tests of {file} fail without a change", flush=True)
            return state is State.SURVIVED

        def judge(mutant: Mutant) -> None:
            place = places.get()
            try:
                state = place.judge(mutant, timeouts_s[mutant.file])
            finally:
                places.put(place)
            change = f"{mutant.old!r} -> {mutant.new!r}"
            print(f"{state.value:11} {mutant.file}:{mutant.line} {change}", flush=True)
            judged.append((mutant, state))
            if options.out is not None:
                write(options, list(judged))

        if not all(list(threads.map(control, [f for f in FILES if not wanted or f in wanted]))):
            return 1
        try:
            list(threads.map(judge, mutants))
        except KeyboardInterrupt:
            threads.shutdown(cancel_futures=True)
    num_noticed = sum(state is not State.SURVIVED for _, state in judged)
    print(f"{num_noticed} of {len(judged)} changes were noticed")
    return 0 if num_noticed >= 0.9 * len(judged) else 1


def write(options: argparse.Namespace, judged: list[tuple[Mutant, State]]) -> None:
    """Write what was tried, which may be less than was asked for, and what survived."""
    facts = {
        "command": f"PYTHONPATH=src:. python3 benchmarks/mutation.py --mutants {options.mutants} "
        f"--seed {options.seed}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    by_file = {
        file: {
            "tried": sum(m.file == file for m, _ in judged),
            "noticed": sum(m.file == file and s is not State.SURVIVED for m, s in judged),
        }
        for file in FILES
    }
    total = {
        name: sum(of_file[name] for of_file in by_file.values()) for name in ("tried", "noticed")
    }
    survived = [
        {"file": m.file, "line": m.line, "old": m.old, "new": m.new}
        for m, state in judged
        if state is State.SURVIVED
    ]
    num_endless = sum(state is State.ENDLESS for _, state in judged)
    found = {
        "facts": facts,
        "total": {**total, "of_these_never_ended": num_endless},
        "files": by_file,
        "survived": survived,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
