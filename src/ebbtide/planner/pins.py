"""Decisions that a user makes by pattern: `{"*.mlp.*": "RECOMPUTE"}`."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from ebbtide.errors import PlanError
from ebbtide.naming import nearest, unknown_name_message
from ebbtide.plan import Decision
from ebbtide.workload import Workload

# A model has hundreds of activations.
NUM_SHOWN = 5


def resolve_pins(
    decide: Mapping[str, str | Decision] | None, workload: Workload
) -> dict[str, Decision]:
    """Return the decision of each activation that a pattern matches; later patterns win.

    Args:
        decide: Pattern over activation names, as in a shell (`*`, `?`, `[...]`), to `KEEP`,
            `HOST`, `DISK` or `RECOMPUTE`.
        workload: What the patterns are for.

    Raises:
        PlanError: A pattern matches nothing, a decision is unknown, or what must not be re-run
            is to be recomputed.
    """
    activations = {a.name: a for block in workload.blocks for a in block.activations}
    pins: dict[str, Decision] = {}
    for pattern, given in (decide or {}).items():
        decision = _read_decision(pattern, given)
        matched = [name for name in activations if fnmatchcase(name, pattern)]
        if not matched:
            close = ", ".join(nearest(pattern, activations)[:NUM_SHOWN])
            raise PlanError(
                f"decide: the pattern {pattern!r} matches no activation of {workload.model}; "
                f"the nearest are {close}."
            )
        if decision is Decision.RECOMPUTE:
            able = [name for name in matched if activations[name].is_replayable]
            if not able:
                kinds = ", ".join(sorted({activations[name].kind.value for name in matched}))
                raise PlanError(
                    f"decide: {pattern!r} cannot be recomputed: it matches kind {kinds} only, and "
                    "inputs, random ops and unknown ops are never run again. Pin it to KEEP or "
                    "HOST."
                )
            matched = able
        pins.update(dict.fromkeys(matched, decision))
    _refuse_split_calls(pins, workload)
    return pins


def _refuse_split_calls(pins: dict[str, Decision], workload: Workload) -> None:
    for block in workload.blocks:
        first: dict[str, str] = {}
        for activation in block.activations:
            if activation.name not in pins:
                continue
            other = first.setdefault(activation.group, activation.name)
            is_replayed = {pins[name] is Decision.RECOMPUTE for name in (other, activation.name)}
            if len(is_replayed) == 2:
                raise PlanError(
                    f"decide: {other} and {activation.name} are made by one op call, and "
                    f"{pins[other].name} and {pins[activation.name].name} were asked for; either "
                    "all of a call's outputs are recomputed or none. Pin them alike."
                )


def _read_decision(pattern: str, given: str | Decision) -> Decision:
    if isinstance(given, Decision):
        return given
    valid = tuple(decision.name for decision in Decision)
    if given.upper() not in valid:
        message = unknown_name_message("decision", given, valid)
        raise PlanError(f"decide: pattern {pattern!r}: {message}")
    return Decision[given.upper()]
