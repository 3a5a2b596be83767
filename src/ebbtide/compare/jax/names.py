"""The rows of a comparison in JAX: a policy, and the flags that XLA compiles it with.

A row's name is `POLICY` or `POLICY@FLAGS`. Without `@FLAGS` each policy has its own best: those
that offload need command buffers off for their copies to overlap, which slows the others down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ebbtide.integrations.maxtext_names import LAYER_INPUT, OFFLOADING, SAVING
from ebbtide.naming import unknown_name_message

EBBTIDE = "ebbtide"
"""The plan for `--budget`."""
NO_REMAT = "no-remat"
FULL_REMAT = "full-remat"

REFERENCES = (NO_REMAT, FULL_REMAT)
"""Rows that can be what gradients are compared with, the first that finishes."""

QKV_AND_EXPERTS = (
    *("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj"),
    *("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRow:
    """A policy by hand: names, of which a model may lack some."""

    saved: tuple[str, ...] = ()
    """Kept on the device."""
    offloaded: tuple[str, ...] = ()
    """Kept in host memory."""


BY_HAND: Mapping[str, NamedRow] = MappingProxyType(
    {
        "minimal": NamedRow(saved=SAVING["minimal"]),
        **{name: NamedRow(offloaded=names) for name, names in OFFLOADING.items()},
        "offload": NamedRow(offloaded=QKV_AND_EXPERTS),
        "offload-attention": NamedRow(offloaded=(LAYER_INPUT, "context.out", "context.residual.0")),
    }
)
"""`minimal`, `qkv_proj_offloaded` and `minimal_offloaded` are MaxText's presets."""

POLICIES = (NO_REMAT, FULL_REMAT, *BY_HAND, EBBTIDE)

FLAG_SETS = ("none", "lhs", "pipelined", "overlap")
"""What `@` may be followed by; `ebbtide.compare.jax.flags` has the flags."""

DEFAULT_STRATEGIES = (
    *(NO_REMAT, FULL_REMAT, "minimal", *OFFLOADING),
    *("offload@none", "offload@lhs", "offload@pipelined", "offload", "offload-attention"),
)


def is_ours(name: str) -> bool:
    """Whether a row is ebbtide's own plan."""
    return policy_of(name) == EBBTIDE


def policy_of(name: str) -> str:
    """Return the part of a row's name before `@`."""
    return name.partition("@")[0]


def flag_set_of(name: str) -> str:
    """Return a row's flag set: the part after `@`, or what its policy runs best with."""
    policy, _, given = name.partition("@")
    if given:
        return given
    moves = policy == EBBTIDE or bool(policy in BY_HAND and BY_HAND[policy].offloaded)
    return "overlap" if moves else "lhs"


def parse_strategies(listed: str, *, has_budget: bool) -> tuple[str, ...]:
    """Return the names in a comma-separated list, in its order.

    With a budget, `ebbtide` is the last one where the list does not name it.

    Raises:
        ValueError: The list is empty, a name is unknown or given twice, or `ebbtide` has no
            budget.
    """
    names = tuple(part.strip() for part in listed.split(",") if part.strip())
    if not names:
        raise ValueError(
            f"--strategies {listed!r} names no strategy; give names with commas between, such as "
            f"--strategies {NO_REMAT},{FULL_REMAT},offload"
        )
    for name in names:
        policy, mark, flags = name.partition("@")
        if policy not in POLICIES:
            raise ValueError(unknown_name_message("strategy of jax", policy, POLICIES))
        if mark and flags not in FLAG_SETS:
            message = unknown_name_message("flag set", flags, FLAG_SETS)
            raise ValueError(f"--strategies {name}: {message}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"--strategies names {twice} twice; each strategy makes one row")
    ours = [name for name in names if is_ours(name)]
    if ours and not has_budget:
        raise ValueError(
            f"--strategies names {ours[0]}, which is the plan for a budget; give one, such as "
            "--budget 40GiB"
        )
    return (*names, EBBTIDE) if has_budget and not ours else names


def order_runs(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the order to run in: what can be the gradients' reference comes first."""
    first = tuple(name for name in REFERENCES if name in names)
    return first + tuple(name for name in names if name not in first)
