"""Find the repeated blocks of a model."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn

from ebbtide.errors import ModelError
from ebbtide.naming import unknown_name_message
from ebbtide.torch.internals import inner_module


def find_blocks(
    model: nn.Module, blocks: str | Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """Return the blocks of `model` by module path, in order.

    Without `blocks`: the longest run of modules of one class, side by side in a `ModuleList` or
    `Sequential`. A run inside a block of another run (experts inside layers) does not count.

    Args:
        model: The model to look in.
        blocks: Module paths, or glob patterns of them such as `encoder.layer.*`.

    Raises:
        ModelError: There is no run of two or more, a path does not exist, or one block lies in
            another.
    """
    if blocks is not None:
        return _named_blocks(model, [blocks] if isinstance(blocks, str) else list(blocks))
    runs = [run for run in _runs(model) if len(run) > 1]
    outer = [r for r in runs if not any(_lies_in(next(iter(r)), o) for o in runs if o is not r)]
    if not outer:
        raise ModelError(
            f"{type(model).__name__} has no repeated blocks: no ModuleList or Sequential holds two "
            "or more modules of one class side by side. Name the blocks: "
            "attach(model, blocks=['encoder.first', 'encoder.second'])."
        )
    return max(outer, key=len)


def _runs(model: nn.Module) -> list[dict[str, nn.Module]]:
    runs: list[dict[str, nn.Module]] = []
    for path, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        run: dict[str, nn.Module] = {}
        previous: type[nn.Module] | None = None
        for name, child in container.named_children():
            kind = type(inner_module(child))
            if kind is not previous:
                runs.append(run)
                run, previous = {}, kind
            run[f"{path}.{name}" if path else name] = child
        runs.append(run)
    return runs


def _lies_in(path: str, run: dict[str, nn.Module]) -> bool:
    return any(path.startswith(f"{block}.") for block in run)


def _named_blocks(model: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    modules = {path: module for path, module in model.named_modules() if path}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        # A `*` stands for one path element: `layers.*` must not match what is inside a layer.
        depth = pattern.count(".")
        matches = [p for p in modules if p.count(".") == depth and fnmatch.fnmatchcase(p, pattern)]
        if not matches:
            raise ModelError(unknown_name_message("block", pattern, modules))
        found |= {path: modules[path] for path in matches}
    for path in found:
        if _lies_in(path, found):
            raise ModelError(
                f"block {path} lies inside another block that was named; blocks must not overlap. "
                "Name the outer or the inner ones only."
            )
    return {path: module for path, module in modules.items() if path in found}
