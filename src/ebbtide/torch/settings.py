"""Settings of torch on which bits depend: as they are in forward, they are in what runs again.

A product in TF32 has other bits than one in float32, a sum by two threads other bits than one by
four. Programs change such settings between forward and backward, by context managers around
the forward for example. What backward makes again then has to be made as forward made it. So it is
with dispatch modes of the program's, which may change what an operator returns.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final

from ebbtide.torch.internals import SETTINGS, active_modes, under_modes

_AS_THEY_ARE: Final = nullcontext()


class Settings:
    """The settings of torch, and the dispatch modes of this thread, at one moment.

    They belong to the process: while others than the program's are in force, what other threads
    compute is computed under them too. Settings that the program changes inside a block are
    unchecked but for the block's first forward under each plan.

    Args:
        device_type: Settings for this type of device are noted; of an unknown one, those of "cpu".
    """

    __slots__ = ("_modes", "_table", "_values")

    def __init__(self, device_type: str) -> None:
        self._table = SETTINGS.get(device_type, SETTINGS["cpu"])
        self._values = self._now()
        self._modes = active_modes()

    def in_force(self) -> AbstractContextManager[object]:
        """Return a context in which torch computes under these settings and modes."""
        now, modes = self._now(), active_modes()
        if now == self._values and modes == self._modes:
            return _AS_THEY_ARE
        stack = ExitStack()
        if now != self._values:
            stack.enter_context(self._instead_of(now))
        if modes != self._modes:
            stack.enter_context(under_modes(self._modes))
        return stack

    def _now(self) -> list[Any]:
        return [setting.get() for setting in self._table]

    @contextmanager
    def _instead_of(self, before: list[Any]) -> Generator[None]:
        self._change(before, self._values)
        try:
            yield
        finally:
            self._change(self._values, before)

    def _change(self, before: list[Any], after: list[Any]) -> None:
        for setting, old, new in zip(self._table, before, after, strict=True):
            if old != new:
                setting.set(new)
