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
        for name in matched:
            if decision is Decision.RECOMPUTE and not activations[name].is_replayable:
                if name == pattern:
                    kind = activations[name].kind.value
                    raise PlanError(
                        f"decide: {name} cannot be recomputed: it is of kind {kind!r}, and inputs, "
                        "random ops and unknown ops are never run again. Pin it to KEEP or HOST."
                    )
                continue
            pins[name] = decision
    return pins


def _read_decision(pattern: str, given: str | Decision) -> Decision:
    if isinstance(given, Decision):
        return given
    valid = tuple(decision.name for decision in Decision)
    if given.upper() not in valid:
        message = unknown_name_message("decision", given, valid)
        raise PlanError(f"decide: pattern {pattern!r}: {message}")
    return Decision[given.upper()]
