"""The storages of a model's parameters and buffers: they are referenced, and never moved.

They are looked up anew in every forward: FSDP swaps them around each block, and frees them after.
ZeRO-3 of DeepSpeed gathers each for the time of its own module, onto another storage each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ebbtide.torch.identity import storage_key
from ebbtide.torch.internals import post_accumulate_hooks_of, tensor_tables
from ebbtide.torch.sharded import local_of

Recent = dict[int, weakref.ref[Tensor]]
"""Parameters and buffers of earlier lookups, by the storage that they stood on then."""


class Parameters:
    """Parameters and buffers by storage, as they are in one forward of one block.

    To look all of them up takes long, so that waits for a storage that no earlier forward knew.

    Args:
        look_up: Returns those of the model and of the block as they are now; what it returns is
            held, and so are its storages.
        recent: Those of earlier forwards, some of which may stand on other storages by now; what
            is looked up is added.
    """

    __slots__ = ("_look_up", "_now", "_recent")

    def __init__(
        self,
        look_up: Callable[[], Mapping[int, Tensor]] | None = None,
        recent: Recent | None = None,
    ) -> None:
        self._look_up = look_up
        self._now: dict[int, Tensor] = {}
        self._recent = {} if recent is None else recent

    def known(self, key: int) -> Tensor | None:
        """Return the parameter or buffer over a storage, if it was one in an earlier forward."""
        found = self._recent.get(key)
        tensor = None if found is None else found()
        # The key is that of a storage that is alive: the one it stands on, or of somebody else.
        return tensor if tensor is not None and _key_of(tensor) == key else None

    def get(self, key: int) -> Tensor | None:
        """Return the parameter or buffer over a storage."""
        found = self._standing(key)
        if found is None:
            found = self.known(key)
        if found is None and self._look_up is not None:
            look_up, self._look_up = self._look_up, None
            self._take(look_up())
            found = self._standing(key)
        return found

    def add(self, module: nn.Module) -> list[int]:
        """Add what a module holds itself; returns the storages that were not known.

        Nothing where all are still to be looked up: these come with the others then.
        """
        if self._look_up is not None:
            return []
        found = storages_of([module])
        new = [key for key in found if self._standing(key) is None]
        self._take(found)
        return new

    def _standing(self, key: int) -> Tensor | None:
        """Return what was looked up over a storage, if it has not left that since."""
        found = self._now.get(key)
        if found is not None and _key_of(found) != key:
            del self._now[key]
            return None
        return found

    def _take(self, found: Mapping[int, Tensor]) -> None:
        for key, tensor in found.items():
            if self._now.setdefault(key, tensor) is tensor:
                self._recent[key] = weakref.ref(tensor)


def is_gathered_for_its_module(parameter: Tensor) -> bool:
    """Whether ZeRO-3 gathers a parameter when its own module runs, and frees it behind that.

    What it does not partition, being small, is there all the time.
    """
    # Set by DeepSpeed on each parameter that it partitions.
    status = getattr(parameter, "ds_status", None)
    return status is not None and not getattr(parameter, "ds_persist", False)


def may_be_updated_in_backward(parameter: Tensor) -> bool:
    """Whether some hook may update a parameter as soon as its gradient is there, which no backward
    node waits for that the gradient does not come from."""
    return bool(
        parameter._backward_hooks
        or post_accumulate_hooks_of(parameter)
        # Set by torch's `_apply_optimizer_in_backward`, whose hook is on no tensor.
        or getattr(parameter, "_in_backward_optimizers", None)
    )


def storages_of(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """Return the parameters and buffers that these modules hold themselves, by storage.

    Of a DTensor that is the storage of this rank's part; what is not strided is left out.
    """
    return {
        key: tensor
        for module in modules
        for table in tensor_tables(module)
        for tensor in table.values()
        if tensor is not None and (key := _key_of(tensor)) is not None
    }


def _key_of(tensor: Tensor) -> int | None:
    """Return the storage that a parameter or buffer stands on."""
    plain = tensor if type(tensor) in (Tensor, nn.Parameter) else local_of(tensor)
    return None if plain is None or plain.layout is not torch.strided else storage_key(plain)
