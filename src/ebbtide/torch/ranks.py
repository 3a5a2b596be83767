"""Ranks that share a plan: they meet, and each tells all others what it found.

They meet in the key-value store of their process group, and in no collective: nothing of ours
stands between the collectives of a step, whose order all ranks must agree on, and one that does
not come is named.
"""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from ebbtide.errors import RankError
from ebbtide.torch.internals import store_of

TIMEOUT_S: Final = 300
"""For the slowest rank to come to the step in which the plan is made."""

_LOCAL_RANKS_VARIABLE: Final = "LOCAL_WORLD_SIZE"

_num_made: Counter[str] = Counter()
"""How often the ranks of a group were brought together; the same on each of them."""


def is_distributed() -> bool:
    """Return whether this process is one of several ranks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def count_local_ranks() -> int:
    """Return how many ranks share this node, at least 1.

    torchrun says so. Without it all ranks are taken to be on this node, so that what they share
    is never given out twice.
    """
    given = os.environ.get(_LOCAL_RANKS_VARIABLE, "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return torch.distributed.get_world_size() if is_distributed() else 1


class Ranks:
    """The ranks of a group, which all do the same steps.

    Args:
        group: Those that share a plan; this process must be one of them. Every one of them must
            make its `Ranks` of the group in the same order.

    Raises:
        ValueError: It is not, or `torch.distributed` is not initialised or not there.
        TypeError: It is no process group.
    """

    def __init__(self, group: object) -> None:
        if not torch.distributed.is_available():
            raise ValueError(
                "ranks= was given, but this torch was built without torch.distributed: there is "
                "one process. Leave ranks= out."
            )
        if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "ranks= is a group that this process is not a rank of. Give the group whose ranks "
                "share a plan with this one."
            )
        if not isinstance(group, ProcessGroup):
            raise TypeError(
                f"ranks= is a {type(group).__name__}; it must be a process group: "
                "torch.distributed.group.WORLD, or mesh.get_group(name) of a mesh."
            )
        self._rank, self._num = group.rank(), group.size()
        self._global_ranks = torch.distributed.get_process_group_ranks(group)
        self._store: Any = store_of(group)
        self._timeout_s = TIMEOUT_S
        name = group.group_name
        self._prefix = f"ebbtide/{name}/{_num_made[name]}"
        _num_made[name] += 1
        self._num_meetings = 0

    @property
    def names(self) -> tuple[str, ...]:
        """What each is called, by its number in the whole job."""
        return tuple(f"rank {rank}" for rank in self._global_ranks)

    @property
    def is_first(self) -> bool:
        """Whether this one decides."""
        return self._rank == 0

    def meet(self) -> None:
        """Wait until all ranks are here; up to `TIMEOUT_S`.

        Raises:
            RankError: Some did not come; they are named.
        """
        self.exchange("")

    def exchange(self, text: str) -> tuple[str, ...]:
        """Give `text` to all ranks; returns what each of them gave, in the order of ranks.

        Raises:
            RankError: Some did not come; they are named.
        """
        key = f"{self._prefix}/{self._num_meetings}"
        self._num_meetings += 1
        self._store.set(f"{key}/{self._rank}", text)
        keys = [f"{key}/{rank}" for rank in range(self._num)]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:  # what a store raises for a timeout differs by its kind
            missing = [n for n, k in zip(self.names, keys, strict=True) if not self._has(k)]
            if not missing:
                raise
            raise RankError(
                f"{', '.join(missing)} did not come within {self._timeout_s} s to where the "
                f"{self._num} ranks of ranks= make their plan: the first block's forward of the "
                "step after the measured one. All of them must attach with the same group and run "
                "the same steps; give a group of ranks that do, or leave ranks= out."
            ) from error
        return tuple(self._store.get(key).decode() for key in keys)

    def from_first(self, text: str) -> str:
        """Return what the first rank gave; the others' text is not looked at.

        Raises:
            RankError: Some did not come; they are named.
        """
        return self.exchange(text if self.is_first else "")[0]

    def _has(self, key: str) -> bool:
        return self._store.check([key])
