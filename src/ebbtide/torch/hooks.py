"""Hang the runtime onto a model's modules, and take it off again.

Hooks that are always called, not a patched `forward`: a patched forward survives `deepcopy` and
then runs the original's weights. A copy or an unpickled model carries inert hooks instead.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ebbtide.torch.calls import CompiledCall
from ebbtide.torch.forward import BlockState
from ebbtide.torch.internals import compiled_call_of, pre_hooks_of
from ebbtide.torch.runtime import Runtime

log = logging.getLogger("ebbtide")

Removable = RemovableHandle | CompiledCall

_warned: set[str] = set()
"""Runtimes whose user was told that blocks were compiled after `attach`."""


class _Hook:
    """A hook that turns inert when the module that carries it is copied or pickled."""

    __slots__ = ("_call", "_runtime")

    def __init__(self, call: Callable[..., None], runtime: Runtime | None = None) -> None:
        self._call = call
        self._runtime = "" if runtime is None else f"{id(runtime):x}"
        """Tells runtimes apart; a text, which the compiler takes for constant."""

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            # The compiler would take the runtime itself for a part of the model.
            if self._runtime:
                _warn_of_compiling(self._runtime)
            return
        self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], _Hook], tuple[()]]:
        return _inert_hook, ()


@torch.compiler.assume_constant_result
def _warn_of_compiling(runtime: str) -> bool:
    """Warn once: what is assumed to be constant is called as torch compiles, and only then."""
    if runtime not in _warned:
        _warned.add(runtime)
        log.warning(
            "blocks were compiled after attach: they run as they would without ebbtide, and the "
            "plan moves and recomputes nothing of them. Let ebbtide compile them, with "
            "attach(model, ..., compile=True), or compile each block before you attach."
        )
    return True


def _inert_hook() -> _Hook:
    return _Hook(_do_nothing)


def _do_nothing(*_: Any) -> None:
    """Hook of a copied model: the copy is not attached."""


class Hooks:
    """All hooks of an attached model; few of them while a plan keeps everything.

    The runtime holds it and must die with its model at once, so it holds the runtime weakly.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)
        model = runtime.model
        self._always: list[Removable] = []
        """Those that see the batch: at the model, and where its first block starts."""
        if runtime.is_timed and model is not None:
            self._always += _install_model(runtime, model)
        if runtime.blocks:
            self._always.append(_install_entry(runtime, runtime.blocks[0]))
        self._others: list[Removable] = []
        self._scopes: dict[int, list[Removable]] = {}
        """By block: those of its inner modules."""
        self.hook_blocks(True)

    def hook_blocks(self, is_wanted: bool) -> None:
        """Register what it takes to record blocks, or remove that again."""
        runtime = self._runtime()
        if not is_wanted:
            self._remove_blocks()
        elif not self._others and runtime is not None:
            self._hook_blocks(runtime)

    def hook_scopes(self, state: BlockState, is_wanted: bool) -> bool:
        """Register what tells which module of a block runs, or remove it again.

        Returns whether it is there now. It stays where somebody else's hooks may swap the
        parameters of an inner module, as those of FSDP do: they are looked up behind them.
        """
        runtime, block = self._runtime(), state.module()
        known = self._scopes.setdefault(state.index, [])
        if is_wanted and not known and runtime is not None and block is not None:
            for path, module in block.named_modules(prefix=state.path):
                if module is not block:
                    known += _install_scope(runtime, state, path, module)
        elif not is_wanted and block is not None and not _has_other_hooks(block):
            self._remove(known)
        return bool(known)

    def close(self) -> None:
        """Remove everything."""
        self._remove_blocks()
        self._remove(self._always)

    def _hook_blocks(self, runtime: Runtime) -> None:
        for state in runtime.blocks:
            if state.index > 0:
                self._others.append(_install_entry(runtime, state))
            self._others += _install_exit(runtime, state)
            # What is hooked in a compiled block would be compiled with it.
            state.has_scopes = not state.is_compiled and self.hook_scopes(state, True)

    def _remove_blocks(self) -> None:
        self._remove(self._others)
        for handles in self._scopes.values():
            self._remove(handles)

    @staticmethod
    def _remove(handles: list[Removable]) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()


def _install_model(runtime: Runtime, model: nn.Module) -> list[Removable]:
    def before(*_: Any) -> None:
        runtime.start_forward()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        runtime.end_forward(output)

    return [
        model.register_forward_pre_hook(_Hook(before, runtime)),
        model.register_forward_hook(_Hook(after, runtime), always_call=True),
    ]


def _install_entry(runtime: Runtime, state: BlockState) -> Removable:
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        runtime.enter(state, module, args, kwargs)

    block = _block_of(state)
    if compiled_call_of(block) is not None:
        return CompiledCall(runtime, state, block)  # it tells of the end, too
    return block.register_forward_pre_hook(_Hook(before, runtime), with_kwargs=True)


def _install_exit(runtime: Runtime, state: BlockState) -> list[Removable]:
    def after(module: nn.Module, args: Any, output: Any) -> None:
        runtime.leave(state, output)

    block = _block_of(state)
    if compiled_call_of(block) is not None:
        return []
    # First of the block's forward hooks: FSDP's frees the parameters that checks replay with.
    return [block.register_forward_hook(_Hook(after, runtime), always_call=True, prepend=True)]


def _block_of(state: BlockState) -> nn.Module:
    block = state.module()
    assert block is not None, "bug in ebbtide"
    return block


def _has_other_hooks(block: nn.Module) -> bool:
    inner = (module for module in block.modules() if module is not block)
    return any(not isinstance(h, _Hook) for module in inner for h in pre_hooks_of(module))


def _install_scope(
    runtime: Runtime, state: BlockState, path: str, module: nn.Module
) -> list[Removable]:
    is_leaf = next(module.children(), None) is None

    def step_in(module: nn.Module, args: Any) -> None:
        runtime.step_into(state, module, path, is_leaf)

    def step_out(*_: Any) -> None:
        runtime.step_out(state)

    return [
        module.register_forward_pre_hook(_Hook(step_in, runtime)),
        module.register_forward_hook(_Hook(step_out, runtime), always_call=True),
    ]
