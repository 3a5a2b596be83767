"""A plan as MaxText's configuration, and a MaxText configuration as a plan.

MaxText decides by name, for all layers alike: `remat_policy: custom` with `offload`, `device` or
`remat` for each name. It ignores names that a decoder does not give, keys that nothing reads and
a layer input that is to be recomputed; here these are errors.

    model = MaxTextModel(decoder_block="llama2", attention="cudnn_flash_te", hardware="gpu")
    config = to_maxtext({"context": Decision.HOST, "query_proj": Decision.HOST}, model)
    print(config.to_yaml())
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import assert_never, cast

from ebbtide.errors import MissingExtraError, PlanError
from ebbtide.integrations.maxtext_names import (
    DEAD_KEYS,
    INNER_NAMES,
    KEYS,
    LAYER_INPUT,
    OFFLOADING,
    SAVING,
    MaxTextModel,
)
from ebbtide.jax.flags import FlagSet, xla_flags
from ebbtide.machine import Machine
from ebbtide.naming import shorten, unknown_name_message
from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import MIN_IN_FLIGHT_BYTES
from ebbtide.workload import Activation, Block, Workload

CUSTOM = "custom"
"""The policy that reads a decision for each name."""

NONE = "none"
"""The policy under which nothing is recomputed."""

_WORDS = {"offload": Decision.HOST, "device": Decision.KEEP, "remat": Decision.RECOMPUTE}

_MOST_YAML_CHARS = 2**20
_MOST_YAML_DEPTH = 20
"""MaxText's own base.yml has 100,000 characters, and lists of lists at most."""

# The stronger of two decisions for one value wins: a value that is offloaded under one of its
# names leaves the device, whatever its other name says.
_STRENGTH = {Decision.RECOMPUTE: 0, Decision.KEEP: 1, Decision.HOST: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTextConfig:
    """Settings to add to a MaxText run, and the environment to start it in."""

    settings: Mapping[str, str | bool] = field(hash=False)
    """Read-only, in the order in which they are written."""
    flags: FlagSet
    """What to set beside them; none, if no machine was given or nothing moves."""

    def to_yaml(self) -> str:
        """Return the settings as YAML text."""
        return "".join(f"{name}: {_word(value)}\n" for name, value in self.settings.items())

    def to_arguments(self) -> tuple[str, ...]:
        """Return the settings as arguments of MaxText's programs: `remat_policy=custom`."""
        return tuple(f"{name}={_word(value)}" for name, value in self.settings.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTextPlacement:
    """What a MaxText configuration does with each value that the model names."""

    model: MaxTextModel
    """Read from the same configuration."""
    policy: str
    """Its `remat_policy`."""
    is_scanned: bool
    """Its `scan_layers`."""
    decisions: Mapping[str, Decision] = field(hash=False)
    """What becomes of each of `model.names`; read-only, sorted. A value with two names has one
    decision under both."""
    ignored: tuple[str, ...]
    """Keys that are set to `offload` or `device` and do nothing; sorted."""


def to_maxtext(
    plan: Plan | Mapping[str, Decision],
    model: MaxTextModel,
    *,
    machine: Machine | None = None,
    names: Mapping[str, str] | None = None,
    is_scanned: bool = True,
) -> MaxTextConfig:
    """Write a plan, or decisions by MaxText's names, as a configuration.

    Args:
        plan: A plan, whose layers must agree; or MaxText's name to decision.
        model: Says which names there are.
        machine: With a plan: its flags and environment are chosen for this machine.
        names: Of a plan's activations to MaxText's names, by whole name or by its last part.
            Without an entry the last part is taken: `layers.3:query_proj` is `query_proj`.
        is_scanned: `scan_layers`.

    Returns:
        `remat_policy: custom` and a word for each name of the model: `remat`, if undecided.

    Raises:
        PlanError: A name is unknown, dead, or never given by this decoder; layers differ; disk is
            used; the layer input is to be recomputed; or a value with two names is to be
            recomputed under one and stored under the other.
    """
    decisions = _by_tensor(plan, names or {}) if isinstance(plan, Plan) else dict(plan)
    for name, decision in decisions.items():
        _check_decision(name, decision, model)
    for outer, inner in INNER_NAMES.items():
        _check_nested(outer, inner, decisions, model)
    settings: dict[str, str | bool] = {"remat_policy": CUSTOM, "scan_layers": is_scanned}
    for name in KEYS:
        if name in model.names:
            default = Decision.KEEP if name == LAYER_INPUT else Decision.RECOMPUTE
            settings[name] = _to_word(decisions.get(name, default))
    flags = FlagSet()
    if isinstance(plan, Plan) and machine is not None:
        flags = xla_flags(machine, plan, is_scanned=is_scanned)
    return MaxTextConfig(settings=MappingProxyType(settings), flags=flags)


def read_maxtext(config: str | Mapping[str, object]) -> MaxTextPlacement:
    """Read what a MaxText configuration does with each named value.

    Args:
        config: YAML text, or the mapping that it holds. A `base_config` is not followed, and a
            `model_name` not looked up: what is left out is MaxText's default.

    Raises:
        PlanError: The text is no mapping, the policy or decoder is unknown, or a name has another
            word than `offload`, `device` or `remat`.
        MissingExtraError: The text is YAML, and PyYAML is not installed.
    """
    settings = _read_yaml(config) if isinstance(config, str) else config
    model = MaxTextModel.from_config(settings)
    policy = settings.get("remat_policy", "full")
    policies = (CUSTOM, NONE, *SAVING, *OFFLOADING)
    if not isinstance(policy, str) or policy not in policies:
        raise PlanError(unknown_name_message("remat_policy", str(policy), policies))
    given = {name: _read_word(settings, name) for name in (*KEYS, *DEAD_KEYS) if name in settings}
    decisions = {name: _decide(name, policy, given) for name in model.names}
    for outer, inner in INNER_NAMES.items():
        if outer in decisions and inner in decisions:
            strongest = max(decisions[outer], decisions[inner], key=_STRENGTH.__getitem__)
            decisions[outer] = strongest
    scanned = settings.get("scan_layers", True)
    return MaxTextPlacement(
        model=model,
        policy=policy,
        is_scanned=scanned is True,
        decisions=MappingProxyType({name: decisions[name] for name in sorted(decisions)}),
        ignored=tuple(
            sorted(
                name
                for name, decision in given.items()
                if decision is not Decision.RECOMPUTE
                and (policy != CUSTOM or name not in model.names)
                # MaxText's own default, which comes with every configuration.
                and (name, decision) != (LAYER_INPUT, Decision.KEEP)
            )
        ),
    )


def plan_of(
    placement: MaxTextPlacement, workload: Workload, *, names: Mapping[str, str] | None = None
) -> Plan:
    """Make the plan that a MaxText configuration means for a workload, to simulate it.

    Args:
        placement: From `read_maxtext`.
        workload: Measured, or from the same model elsewhere.
        names: As in `to_maxtext`.

    Returns:
        A decision for each activation. One that MaxText does not name is recomputed, and kept
        where its operator cannot be run again.
    """
    decisions: dict[str, Decision] = {}
    host_bytes = max_block_bytes = 0
    for block in workload.blocks:
        block_bytes = 0
        for activation in block.activations:
            decision = _decision_for(activation, block, placement, names or {})
            decisions[activation.name] = decision
            if decision is Decision.HOST:
                block_bytes += activation.num_bytes
        host_bytes += block_bytes
        max_block_bytes = max(max_block_bytes, block_bytes)
    in_flight_bytes = max(MIN_IN_FLIGHT_BYTES, max_block_bytes)
    return Plan(
        name=f"maxtext:{placement.policy}",
        model=workload.model,
        fingerprint=workload.fingerprint,
        decisions=decisions,
        host_bytes=host_bytes,
        disk_bytes=0,
        max_out_bytes_in_flight=in_flight_bytes,
        max_in_bytes_in_flight=in_flight_bytes,
    )


def _decision_for(
    activation: Activation, block: Block, placement: MaxTextPlacement, names: Mapping[str, str]
) -> Decision:
    tensor = _tensor_name(activation.name, names)
    decision = placement.decisions.get(tensor, Decision.RECOMPUTE)
    if placement.policy == NONE:
        decision = Decision.KEEP
    if decision is Decision.RECOMPUTE and not activation.is_replayable:
        return Decision.KEEP
    return decision


def _by_tensor(plan: Plan, names: Mapping[str, str]) -> dict[str, Decision]:
    """One decision for each of MaxText's names, from those of all layers."""
    made: dict[str, Decision] = {}
    first: dict[str, str] = {}
    for name, decision in plan.decisions.items():
        tensor = _tensor_name(name, names)
        if tensor not in KEYS:
            if decision is Decision.RECOMPUTE:
                continue  # Without a name it is recomputed in MaxText as well.
            raise PlanError(
                f"plan {plan.name!r} has {decision.value} for {name!r}, which MaxText has no name "
                f"for. {unknown_name_message('name', tensor, KEYS)}. Plan with names= for it, or "
                "with its decision pinned to recompute."
            )
        if made.setdefault(tensor, decision) is not decision:
            raise PlanError(
                f"plan {plan.name!r} has {made[tensor].value} for {first[tensor]!r} and "
                f"{decision.value} for {name!r}; MaxText decides for {tensor} in all layers alike. "
                "Use the uniform planner."
            )
        first.setdefault(tensor, name)
    return made


def _tensor_name(name: str, names: Mapping[str, str]) -> str:
    last = re.split(r"[.:/]", name.partition("#")[0])[-1]
    return names.get(name) or names.get(last) or last


def _check_decision(name: str, decision: Decision, model: MaxTextModel) -> None:
    if name in DEAD_KEYS:
        raise PlanError(
            f"{name!r} is a key of MaxText's configuration that nothing reads: setting it changes "
            "nothing. Leave it out."
        )
    if name not in KEYS:
        raise PlanError(unknown_name_message("MaxText name", name, KEYS))
    if name not in model.names:
        known = ", ".join(sorted(model.names)) or "none"
        raise PlanError(
            f"{name!r} is {decision.value}, and a {model.decoder_block} decoder with attention "
            f"{model.attention} on {model.hardware} never names it, so that nothing would happen. "
            f"Its names are: {known}."
        )
    if decision is Decision.DISK:
        raise PlanError(f"{name!r} is disk; MaxText has none. Plan without a disk.")
    if name == LAYER_INPUT and decision is Decision.RECOMPUTE:
        raise PlanError(
            f"{name!r} is recompute, but it is what recomputing a layer starts from, and stays on "
            "the device. Set it to keep or host."
        )


def _check_nested(
    outer: str, inner: str, decisions: Mapping[str, Decision], model: MaxTextModel
) -> None:
    if not {outer, inner} <= model.names:
        return
    out = decisions.get(outer, Decision.RECOMPUTE)
    inside = decisions.get(inner, Decision.RECOMPUTE)
    if _STRENGTH[inside] > _STRENGTH[out]:
        raise PlanError(
            f"{inner!r} is {inside.value} and {outer!r} is {out.value}, but an expert's value has "
            f"both names, so it would be {inside.value} too. Set both to {inside.value}, or both "
            f"to {out.value}."
        )


def _decide(name: str, policy: str, given: Mapping[str, Decision]) -> Decision:
    if policy == NONE:
        return Decision.KEEP
    decision = Decision.RECOMPUTE
    if policy == CUSTOM:
        decision = given.get(name, Decision.RECOMPUTE)
    elif name in OFFLOADING.get(policy, ()):
        decision = Decision.HOST
    elif name in SAVING.get(policy, ()):
        decision = Decision.KEEP
    if name == LAYER_INPUT and decision is Decision.RECOMPUTE:
        return Decision.KEEP
    return decision


def _read_word(settings: Mapping[str, object], name: str) -> Decision:
    word = settings[name]
    if not isinstance(word, str) or word not in _WORDS:
        raise PlanError(f"{name}: {unknown_name_message('placement', str(word), _WORDS)}")
    return _WORDS[word]


def _read_yaml(text: str) -> Mapping[str, object]:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise MissingExtraError.for_extra("maxtext", needed_by="reading YAML text") from error
    if len(text) > _MOST_YAML_CHARS:
        raise PlanError(
            f"the MaxText configuration has {len(text)} characters; it may have {_MOST_YAML_CHARS}."
            " Give the text of a .yml file."
        )
    try:
        _refuse_hidden_size(yaml.parse(text, Loader=yaml.SafeLoader))
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated(key.value for key, _ in node.value)
        content: object = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        # A ValueError is of a number or a date that Python cannot have.
        raise PlanError(
            f"the MaxText configuration is no YAML: {shorten(str(error))}. Give the text of a .yml "
            "file."
        ) from error
    if not isinstance(content, dict):
        raise PlanError(
            f"the MaxText configuration is {type(content).__name__}, and must be a mapping of "
            "settings. Give the text of a .yml file."
        )
    return cast(dict[str, object], content)


def _refuse_hidden_size(events: Iterable[object]) -> None:
    """Refuse what makes much of little, or has the library make other things than it says.

    By an alias a value holds another many times; a tag calls a constructor for any text.
    """
    import yaml

    depth = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            raise PlanError(
                f"the MaxText configuration uses the alias *{shorten(event.anchor)}, and it may "
                "have none. Write the value out."
            )
        is_tagged = isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if is_tagged and event.tag is not None:
            raise PlanError(
                f"the MaxText configuration uses the tag {shorten(str(event.tag))}, and it may "
                "have none. Write the value alone."
            )
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_YAML_DEPTH:
            raise PlanError(
                f"the MaxText configuration is nested more than {_MOST_YAML_DEPTH} deep; its "
                "settings are words, numbers and lists. Give the text of a .yml file."
            )


def _refuse_repeated(keys: Iterable[object]) -> None:
    seen: set[str] = set()
    for key in keys:
        if not isinstance(key, str):
            continue
        if key in seen:
            raise PlanError(
                f"the MaxText configuration sets {shorten(key)!r} twice; of two settings readers "
                "take either. Leave one out."
            )
        seen.add(key)


def _to_word(decision: Decision) -> str:
    match decision:
        case Decision.HOST:
            return "offload"
        case Decision.KEEP:
            return "device"
        case Decision.RECOMPUTE:
            return "remat"
        case Decision.DISK:
            raise AssertionError("a decision for disk was not refused: a bug in ebbtide")
        case _:
            assert_never(decision)


def _word(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()
