"""The Plan: one decision for each activation that the runtime must store or make again.

How a runtime executes a plan: what is KEEP, HOST or DISK is *stored*; what is RECOMPUTE is
re-run in backward from its inputs, recursively, until stored activations are reached;
parameters are always there. An activation without a decision is recomputed where an op needs
it and it is replayable, and is not stored otherwise. The JSON form is in `docs/formats.md`.
"""

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Self

from ebbtide.errors import PlanError
from ebbtide.forms import (
    read_field,
    read_form,
    read_int,
    read_record,
    read_text,
    refuse_unknown_fields,
)
from ebbtide.naming import unknown_name_message
from ebbtide.workload import Workload

PLAN_FORMAT = "ebbtide-plan"
PLAN_VERSION = 2

# Moments of a plan that no activation stands for; no module has such a path.
TURN_START = "<turn start>"
TURN_END = "<turn end>"

# Enough to recognise the other model by; a whole list would fill the screen.
NUM_NAMES_SHOWN = 3


@enum.unique
class Decision(enum.Enum):
    """What becomes of an activation between its forward and its backward use."""

    KEEP = "keep"
    """Stays in device memory."""
    HOST = "host"
    """Evicted to pinned host memory, fetched before backward needs it."""
    DISK = "disk"
    """Evicted to disk, fetched before backward needs it."""
    RECOMPUTE = "recompute"
    """Dropped, and made again in backward from its inputs."""


MOVED: Final = frozenset({Decision.HOST, Decision.DISK})
"""Leaves the device, and comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All decisions for one model, with the bytes that executing them may use.

    Plans compare by value, can be hashed, copied and pickled.

    Raises:
        PlanError: A number of bytes is negative.
    """

    name: str
    """How the plan was made, for example `balanced`."""
    model: str
    """Class name of the model that the plan is for."""
    fingerprint: str
    """`Workload.fingerprint` of the workload that the plan is for."""
    # Not hashed: a mapping has no hash of its own, and equal plans still hash alike.
    decisions: Mapping[str, Decision] = field(hash=False)
    """Activation name to decision; read-only, sorted by name. A copy of what was passed."""
    host_bytes: int
    """Most bytes held in pinned host memory at once: the sum over HOST decisions."""
    disk_bytes: int
    """Most bytes held on disk at once: the sum over DISK decisions."""
    max_out_bytes_in_flight: int
    """Most bytes that evictions may hold on the device while their copies run."""
    max_in_bytes_in_flight: int
    """Most bytes that fetches may hold on the device before backward uses them."""
    release_at: Mapping[str, str] = field(hash=False, default_factory=dict[str, str])
    """Evicted activation to the activation before whose making compute waits for its copy and
    its device memory is let go; `TURN_START` and `TURN_END` stand for the moments after the last
    block's forward and before its backward. Read-only, sorted. Without an entry: the turn's start.
    A plan without any lets go when `max_out_bytes_in_flight` says so, and at the turn's start."""
    fetch_at: Mapping[str, str] = field(hash=False, default_factory=dict[str, str])
    """Evicted activation to the saved activation at whose first use in backward its fetch may
    start; `TURN_END` for the start of backward. Read-only, sorted. Without an entry: its first
    need. A plan without any fetches ahead as far as `max_in_bytes_in_flight` lets it."""
    budget_bytes: int = 0
    """Most device memory that the step may take; 0: the plan was made without a budget."""
    peak_bytes: int = 0
    """Predicted most device memory of the step; 0: not predicted."""
    predicted_step_ns: int = 0
    """Predicted time of forward and backward; 0: not predicted."""
    bound_step_ns: int = 0
    """No plan for this workload, machine and budget is faster; 0: not computed."""

    def __post_init__(self) -> None:
        for mapping in ("decisions", "release_at", "fetch_at"):
            given: Mapping[str, object] = getattr(self, mapping)
            ordered = {name: given[name] for name in sorted(given)}
            object.__setattr__(self, mapping, MappingProxyType(ordered))
        for name, num_bytes in self._byte_fields().items():
            if num_bytes < 0:
                raise PlanError(
                    f"plan {self.name!r} has {name} {num_bytes}; it must be 0 or more. Plan again."
                )

    def __reduce__(self) -> tuple[Callable[[str], "Plan"], tuple[str]]:
        # A read-only mapping can be neither pickled nor deep-copied, so the JSON form travels.
        return Plan.from_json, (self.to_json(),)

    def decision(self, name: str) -> Decision | None:
        """Return the decision for the activation `name`, or None if the plan has none."""
        return self.decisions.get(name)

    def check_fits(self, workload: Workload) -> None:
        """Refuse a workload that the plan was not made for.

        Sizes are unchecked: at another batch shape `host_bytes`, `disk_bytes` and the limits
        in flight are those of the shape that was planned.

        Raises:
            PlanError: The workload has another fingerprint, or lacks an activation that the
                plan decides.
        """
        names = {activation.name for block in workload.blocks for activation in block.activations}
        foreign = [name for name in self.decisions if name not in names]
        if self.fingerprint == workload.fingerprint and not foreign:
            return
        undecided = [
            activation.name
            for block in workload.blocks
            for activation in block.activations
            if activation.is_saved and activation.name not in self.decisions
        ]
        differences: list[str] = []
        if foreign:
            differences.append(f"only the plan has {_first_names(foreign)}")
        if undecided:
            differences.append(f"the plan has no decision for {_first_names(undecided)}")
        if not differences:
            differences.append("the order of activations or the class of a block differs")
        raise PlanError(
            f"plan {self.name!r} is for {self.model} (fingerprint {self.fingerprint}), but the "
            f"workload is {workload.model} (fingerprint {workload.fingerprint}): "
            f"{'; '.join(differences)}. A plan decides by activation name and holds for one model "
            "only. Make a plan for this workload, for example with "
            "ebbtide.planner.named_plan('balanced', workload)."
        )

    def to_json(self) -> str:
        """Return the JSON form; equal plans give equal text, byte for byte."""
        form: dict[str, object] = {
            "format": PLAN_FORMAT,
            "version": PLAN_VERSION,
            "name": self.name,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "decisions": {name: decision.value for name, decision in self.decisions.items()},
            "release_at": dict(self.release_at),
            "fetch_at": dict(self.fetch_at),
        }
        form.update(self._byte_fields())
        return json.dumps(form, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the JSON form that `to_json` writes.

        Raises:
            PlanError: The text is not JSON, not this format or version, lacks a field, has an
                unknown one or one of the wrong type, names an unknown decision, or gives a
                negative number of bytes.
        """
        record = read_form(text, form=PLAN_FORMAT, version=PLAN_VERSION)
        fields = {"format", "version", *cls.__dataclass_fields__}
        if record["version"] == 1:
            refuse_unknown_fields(record, fields - set(_SINCE_2), where="plan")
            record = {**record, **_SINCE_2}
        refuse_unknown_fields(record, fields, where="plan")
        decisions = read_record(
            read_field(record, "decisions", where="plan"), where="plan: decisions"
        )
        return cls(
            name=read_text(record, "name", where="plan"),
            model=read_text(record, "model", where="plan"),
            fingerprint=read_text(record, "fingerprint", where="plan"),
            decisions={name: _read_decision(decisions, name) for name in decisions},
            release_at=_read_moments(record, "release_at"),
            fetch_at=_read_moments(record, "fetch_at"),
            **{name: read_int(record, name, where="plan") for name in _NUMBERS},
        )

    def _byte_fields(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _NUMBERS}


_NUMBERS = (
    "host_bytes",
    "disk_bytes",
    "max_out_bytes_in_flight",
    "max_in_bytes_in_flight",
    "budget_bytes",
    "peak_bytes",
    "predicted_step_ns",
    "bound_step_ns",
)

# What a plan of version 1 does not say.
_SINCE_2: dict[str, object] = {
    "release_at": {},
    "fetch_at": {},
    **dict.fromkeys(_NUMBERS[4:], 0),
}


def _read_moments(record: dict[str, object], name: str) -> dict[str, str]:
    where = f"plan: {name}"
    moments = read_record(read_field(record, name, where="plan"), where=where)
    return {evicted: read_text(moments, evicted, where=where) for evicted in moments}


def _read_decision(decisions: dict[str, object], name: str) -> Decision:
    value = read_text(decisions, name, where="plan: decisions")
    valid = tuple(decision.value for decision in Decision)
    if value not in valid:
        raise PlanError(f"activation {name!r}: {unknown_name_message('decision', value, valid)}")
    return Decision(value)


def _first_names(names: list[str]) -> str:
    shown = ", ".join(names[:NUM_NAMES_SHOWN])
    num_more = len(names) - NUM_NAMES_SHOWN
    return f"{shown} and {num_more} more" if num_more > 0 else shown
