"""Stand between the caller and a compiled block, outside of what is compiled.

`module.compile()` puts a compiled call into the module, and torch calls that in place of the
module's hooks and forward: hooks that are registered on the module are compiled with it. So the
compiled call itself is wrapped. torch drops it when a module is copied or pickled, and the wrapper
goes with it. `torch.compile(module)` makes a module around the module instead; hooks on that one
run outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ebbtide.torch.forward import BlockState
from ebbtide.torch.internals import compiled_call_of, set_compiled_call
from ebbtide.torch.runtime import Runtime


class CompiledCall:
    """Calls a compiled block, and tells the runtime of its start and its end.

    A handle as `register_forward_hook` gives one: `remove` puts back what was there.
    """

    def __init__(self, runtime: Runtime, state: BlockState, module: nn.Module) -> None:
        call = compiled_call_of(module)
        assert call is not None, "bug in ebbtide: the block is not compiled"
        self._runtime = weakref.ref(runtime)
        self._state = state
        self._module = weakref.ref(module)
        self._call: Callable[..., Any] = call
        set_compiled_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runtime, module = self._runtime(), self._module()
        if runtime is None or module is None:
            return self._call(*args, **kwargs)
        runtime.enter(self._state, module, args, kwargs)
        output = None
        try:
            output = self._call(*args, **kwargs)
            return output
        finally:
            runtime.leave(self._state, output)

    def remove(self) -> None:
        """Put the compiled call back, unless somebody has compiled the block anew since."""
        module = self._module()
        if module is not None and compiled_call_of(module) is self:
            set_compiled_call(module, self._call)
