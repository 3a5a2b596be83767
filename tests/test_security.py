"""What the package never does with what it is given: it is data, and none of it runs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"

UNPACKERS = frozenset(
    {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
)
"""Modules that run what they read."""

RUNNERS = frozenset({"eval", "exec", "compile", "__import__"})
SAFE_YAML = frozenset({"SafeLoader", "CSafeLoader"})


def dangers(source: str) -> Iterator[str]:
    """Name each place of a module that would run what a file or a name says."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                found = [n.name for n in node.names if n.name.partition(".")[0] in UNPACKERS]
                yield from (f"line {node.lineno}: import {name}" for name in found)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in UNPACKERS:
                yield f"line {node.lineno}: from {module}"
            case ast.Call(func=ast.Name(id=name)) if name in RUNNERS:
                yield f"line {node.lineno}: {name}()"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
                if danger := danger_of_call(owner, name, node):
                    yield f"line {node.lineno}: {danger}"
            case _:
                pass


def danger_of_call(owner: str, name: str, call: ast.Call) -> str:
    """Say what is wrong with `owner.name(...)`; empty if nothing is."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}

    def is_true(option: str) -> bool:
        value = given.get(option)
        return isinstance(value, ast.Constant) and value.value is True

    match owner, name:
        case ("torch", "load") if not is_true("weights_only"):
            return "torch.load() without weights_only=True"
        case (("numpy" | "np"), "load") if is_true("allow_pickle"):
            return "numpy.load(allow_pickle=True)"
        case ("yaml", ("load" | "parse" | "compose" | "load_all")):
            loader = given.get("Loader")
            if not (isinstance(loader, ast.Attribute) and loader.attr in SAFE_YAML):
                return f"yaml.{name}() without a safe loader"
        case ("yaml", ("unsafe_load" | "full_load" | "Loader" | "UnsafeLoader" | "FullLoader")):
            return f"yaml.{name}()"
        case ("os", ("system" | "popen")):
            return f"os.{name}()"
        case ("subprocess", _) if is_true("shell"):
            return f"subprocess.{name}(shell=True)"
        case _:
            pass
    return ""


def test_nothing_that_is_read_is_run() -> None:
    found = {
        str(path.relative_to(SOURCES)): list(dangers(path.read_text(encoding="utf-8")))
        for path in sorted(SOURCES.rglob("*.py"))
    }
    assert len(found) > 150
    assert {name: places for name, places in found.items() if places} == {}


@pytest.mark.parametrize(
    ("source", "danger"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "from pickle"),
        ("x = eval(y)", "eval()"),
        ("exec(y)", "exec()"),
        ("torch.load(path)", "torch.load() without weights_only=True"),
        ("torch.load(path, weights_only=flag)", "torch.load() without weights_only=True"),
        ("torch.load(path, weights_only=True)", ""),
        ("np.load(path, allow_pickle=True)", "numpy.load(allow_pickle=True)"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml.load() without a safe loader"),
        ("yaml.parse(text, Loader=yaml.SafeLoader)", ""),
        ("yaml.unsafe_load(text)", "yaml.unsafe_load()"),
        ("os.system(text)", "os.system()"),
        ("subprocess.run(text, shell=True)", "subprocess.run(shell=True)"),
        ("re.compile(text)", ""),
        ("torch.compile(block)", ""),
    ],
)
def test_each_danger_is_found(source: str, danger: str) -> None:
    assert list(dangers(source)) == ([f"line 1: {danger}"] if danger else [])
