"""One plan for several ranks: each tells what it measured, and the first decides for the worst.

The exchange has one moment: the first block's forward of the step after the measured one, where
each rank would make its own plan. No other call of ebbtide waits for another rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.errors import BudgetError, EbbtideError, RankError
from ebbtide.machine import Machine
from ebbtide.plan import Plan
from ebbtide.planner.worst import worst_machine, worst_workload
from ebbtide.torch.ranks import Ranks
from ebbtide.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one rank measured, or the worst of what all did."""

    workload: Workload
    machine: Machine
    rows: int
    """Sequences of the batch that the workload was observed with."""
    length: int
    """Tokens in each."""
    num_graphs: int
    """Forwards whose graphs are alive at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks go on with."""

    found: Found
    plan: Plan


Scaled = Callable[[Found, int, int], Workload]
"""A workload at another number of rows and another length."""


def agree(
    ranks: Ranks,
    found: Found,
    wishes: Mapping[str, str],
    *,
    scaled: Scaled,
    make: Callable[[Found], Plan],
) -> Agreed:
    """Exchange what ranks found, and return the plan of the first rank for the worst of it.

    Args:
        ranks: Each of them makes this call.
        found: What this one measured.
        wishes: What its user asked for; must be the same on each of them.
        scaled: Makes workloads of one batch shape of them.
        make: Makes the plan; called on the first rank alone.

    Raises:
        BudgetError: No plan keeps to the budget; raised on all ranks, with the same words.
        PlanError: They observed different blocks; raised on all ranks as well.
        RankError: Some did not come, or were asked for something else.
    """
    told = [_Told.from_json(text) for text in ranks.exchange(_Told(found, wishes).to_json())]
    for each, name in zip(told, ranks.names, strict=True):
        for wish, value in each.wishes.items():
            if value != told[0].wishes[wish]:
                raise RankError(
                    f"{name} was asked for {wish}={value}, and {ranks.names[0]} for "
                    f"{told[0].wishes[wish]}. Ranks that share a plan must attach with the same "
                    "arguments."
                )
    worst = _worst([each.found for each in told], ranks.names, scaled)
    answer = ""
    if ranks.is_first:
        try:
            answer = make(worst).to_json()
        except BudgetError as error:
            answer = f"{_REFUSED}{error}"
        except EbbtideError:
            ranks.from_first(_FAILED)  # so that nobody waits for this one
            raise
    answer = ranks.from_first(answer)
    if answer == _FAILED:
        raise RankError(f"{ranks.names[0]} could not make a plan; its own error says why.")
    if answer.startswith(_REFUSED):
        raise BudgetError(answer.removeprefix(_REFUSED))
    return Agreed(found=worst, plan=Plan.from_json(answer))


_REFUSED = "refused: "
_FAILED = "failed"


def _worst(founds: Sequence[Found], names: Sequence[str], scaled: Scaled) -> Found:
    """Bring all to the shape of the largest batch, and take the worst of each number."""
    largest = max(founds, key=_num_tokens)
    rows, length = largest.rows, largest.length
    workloads = [
        each.workload if (each.rows, each.length) == (rows, length) else scaled(each, rows, length)
        for each in founds
    ]
    return Found(
        workload=worst_workload(workloads, names),
        machine=worst_machine([each.machine for each in founds]),
        rows=rows,
        length=length,
        num_graphs=max(each.num_graphs for each in founds),
    )


def _num_tokens(found: Found) -> tuple[int, int]:
    return found.rows * found.length, found.length


class _Told:
    """What one rank tells the others."""

    def __init__(self, found: Found, wishes: Mapping[str, str]) -> None:
        self.found = found
        self.wishes = dict(wishes)

    def to_json(self) -> str:
        return json.dumps(
            {
                "workload": self.found.workload.to_json(),
                "machine": self.found.machine.to_json(),
                "rows": self.found.rows,
                "length": self.found.length,
                "num_graphs": self.found.num_graphs,
                "wishes": self.wishes,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> _Told:
        form: dict[str, Any] = json.loads(text)
        found = Found(
            workload=Workload.from_json(form["workload"]),
            machine=Machine.from_json(form["machine"]),
            rows=form["rows"],
            length=form["length"],
            num_graphs=form["num_graphs"],
        )
        return cls(found, form["wishes"])
