"""The names of strategies: what `--strategies` takes, and what each row is called."""

from __future__ import annotations

from ebbtide.errors import PlanError
from ebbtide.naming import unknown_name_message
from ebbtide.planner import NAMED_PLANS, parse_plan_name

EBBTIDE_PREFIX = "ebbtide:"
# The plan that the planner makes for `--budget`; it is called by no plan's name.
BUDGET_STRATEGY = "ebbtide"
# Each block compiled, and torch's partitioner recomputing within a share of its memory.
COMPILE_BUDGET_PREFIX = "compile-budget:"
# Selective checkpointing: by operator, or every n-th block.
SAC_PREFIX = "torch-sac:"

DEFAULT_PEERS = ("keep", "checkpoint", "checkpoint-offload", "save-on-cpu", "trl")
PEERS = (*DEFAULT_PEERS, "torchtune", "deepspeed", "compile-keep")
PEER_FAMILIES = (f"{COMPILE_BUDGET_PREFIX}SHARE", f"{SAC_PREFIX}op", f"{SAC_PREFIX}N")

DEFAULT_STRATEGIES = (
    *DEFAULT_PEERS,
    "ebbtide:recompute",
    "ebbtide:offload-inputs",
    "ebbtide:offload",
    "ebbtide:balanced",
    "ebbtide:offload-last:4",
)

# A run that fits can stand in for `keep` as the reference of gradients, in this order.
# Rows on compiled blocks have a reference of their own, since compiling changes bits.
REFERENCE_STRATEGIES = ("keep", "checkpoint", "compile-keep")


def is_ours(name: str) -> bool:
    """Whether a strategy is one of ebbtide's own plans."""
    return name == BUDGET_STRATEGY or name.startswith(EBBTIDE_PREFIX)


def runs_compiled(name: str, *, is_compiled: bool) -> bool:
    """Whether a strategy's blocks are compiled, in a run with or without `--compile`."""
    return is_compiled or name == "compile-keep" or name.startswith(COMPILE_BUDGET_PREFIX)


def parse_strategies(listed: str, *, has_budget: bool = False) -> tuple[str, ...]:
    """Return the canonical names in a comma-separated list, in its order.

    A plan's name works without `ebbtide:`, but for `keep`, which is the peer. With a budget,
    `ebbtide` is the last one where the list does not name it.

    Raises:
        ValueError: The list is empty, a name is unknown or given twice, or `ebbtide` has no
            budget.
    """
    names = tuple(_parse_name(part.strip()) for part in listed.split(",") if part.strip())
    if not names:
        raise ValueError(
            f"--strategies {listed!r} names no strategy; give names with commas between, such as "
            "--strategies keep,checkpoint,ebbtide:balanced"
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"--strategies names {twice} twice; each strategy makes one row")
    if BUDGET_STRATEGY in names and not has_budget:
        raise ValueError(
            f"--strategies names {BUDGET_STRATEGY}, which is the plan for a budget; give one, "
            f"such as --budget 40GiB, or name a plan, such as {EBBTIDE_PREFIX}balanced"
        )
    return (*names, BUDGET_STRATEGY) if has_budget and BUDGET_STRATEGY not in names else names


def order_runs(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the order to run in: whatever can be the gradients' reference comes first."""
    first = tuple(name for name in REFERENCE_STRATEGIES if name in names)
    return first + tuple(name for name in names if name not in first)


def _parse_name(name: str) -> str:
    if name in PEERS or name == BUDGET_STRATEGY:
        return name
    if name.startswith(COMPILE_BUDGET_PREFIX):
        return COMPILE_BUDGET_PREFIX + _parse_share(name)
    if name.startswith(SAC_PREFIX):
        return SAC_PREFIX + _parse_mode(name)
    try:
        parse_plan_name(name.removeprefix(EBBTIDE_PREFIX))
    except PlanError as error:
        family = name.removeprefix(EBBTIDE_PREFIX).partition(":")[0]
        if f"{family}:K" in NAMED_PLANS:
            raise ValueError(f"--strategies {name}: {error}") from error
        ours = (BUDGET_STRATEGY, *(EBBTIDE_PREFIX + plan for plan in NAMED_PLANS))
        valid = (*PEERS, *PEER_FAMILIES, *ours)
        raise ValueError(unknown_name_message("strategy", name, valid)) from error
    return EBBTIDE_PREFIX + name.removeprefix(EBBTIDE_PREFIX)


def _parse_share(name: str) -> str:
    given = name.removeprefix(COMPILE_BUDGET_PREFIX)
    try:
        share = float(given)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(
            f"--strategies {name}: {given!r} is no share of memory from 0 to 1; give one, such as "
            f"{COMPILE_BUDGET_PREFIX}0.5"
        )
    return f"{share:g}"


def _parse_mode(name: str) -> str:
    given = name.removeprefix(SAC_PREFIX)
    if given != "op" and not (given.isdecimal() and int(given) >= 1):
        raise ValueError(
            f"--strategies {name}: {given!r} is neither op nor a whole number of 1 or more; give "
            f"{SAC_PREFIX}op, or {SAC_PREFIX}2 for every second block"
        )
    return given if given == "op" else str(int(given))
