"""Hold our table of MaxText's names against a MaxText wheel. MaxText is not imported.

    pip download maxtext --no-deps --python-version 3.12 --only-binary=:all: -d wheels
    python scripts/check_maxtext.py wheels/maxtext-0.2.5-py3-none-any.whl

Prints what differs, and ends with 1 if anything does.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from ebbtide.integrations.maxtext_names import (
    DEAD_KEYS,
    DECODERS,
    KEYS,
    LAYER_INPUT,
    OFFLOADING,
    SAVING,
)

TYPES = "maxtext/configs/types.py"
DECODER_TYPES = "maxtext/common/common_types.py"
FOLDERS = tuple(f"maxtext/{name}/" for name in ("common", "configs", "layers", "models", "utils"))


def find_differences(wheel: Path) -> list[str]:
    """Return a line for each difference."""
    with ZipFile(wheel) as archive:
        trees = {
            name: ast.parse(archive.read(name))
            for name in archive.namelist()
            if name.startswith(FOLDERS) and name.endswith(".py")
        }
    types = trees[TYPES]
    fields = {
        node.target.id
        for node in ast.walk(types)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and ast.unparse(node.annotation) == "RematLocation"
    }
    read = max(_lists_with(types, LAYER_INPUT), key=len, default=())
    (decoders,) = (
        [str(ast.literal_eval(entry.value)) for entry in node.body if isinstance(entry, ast.Assign)]
        for node in ast.walk(trees[DECODER_TYPES])
        if isinstance(node, ast.ClassDef) and node.name == "DecoderBlockType"
    )
    given = {name for tree in trees.values() for name in _names_given(tree)}
    policies = {
        word.value
        for tree in trees.values()
        for word in ast.walk(tree)
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    }
    return [
        *_compare("keys that custom reads", set(KEYS), set(read)),
        *_compare("fields of a place", {*KEYS, *DEAD_KEYS}, fields),
        *_compare("decoders", set(DECODERS), set(decoders)),
        *(f"dead keys: {name} is given" for name in sorted(DEAD_KEYS & given)),
        *(f"keys: no layer gives {name}" for name in sorted(set(KEYS) - given)),
        *(f"presets: no {name}" for name in sorted({*SAVING, *OFFLOADING} - policies)),
    ]


def _compare(what: str, ours: set[str], theirs: set[str]) -> Iterator[str]:
    yield from (f"{what}: {name} is not in the wheel" for name in sorted(ours - theirs))
    yield from (f"{what}: {name} is not in our table" for name in sorted(theirs - ours))


def _lists_with(tree: ast.AST, name: str) -> list[tuple[str, ...]]:
    """Return the lists of texts that have this one."""
    found: list[tuple[str, ...]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.List):
            texts = tuple(
                e.value
                for e in node.elts
                if isinstance(e, ast.Constant) and isinstance(e.value, str)
            )
            if len(texts) == len(node.elts) and name in texts:
                found.append(texts)
    return found


def _names_given(tree: ast.AST) -> Iterator[str]:
    """Yield every text that some call is given: `checkpoint_name`, or what calls it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                for part in ast.walk(argument):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value


def main() -> int:
    """Check the wheel that the command line names."""
    differences = find_differences(Path(sys.argv[1]))
    print("\n".join(differences) or f"{len(KEYS)} keys and {len(DECODERS)} decoders agree")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
