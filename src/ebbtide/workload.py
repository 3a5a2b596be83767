"""The Workload: what one training step of a model keeps for backward, block by block.

A Workload is made by observing one real step. It is frozen, it knows no framework, and it
has a JSON form (`docs/formats.md`). The readers of JSON fields at the end of this module are
shared with `ebbtide.plan`, so that both forms refuse broken files in the same words.
"""

import enum
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self, cast

from ebbtide.errors import PlanError
from ebbtide.naming import unknown_name_message

WORKLOAD_FORMAT = "ebbtide-workload"
WORKLOAD_VERSION = 1

# 64 bits: two models of one user never meet by chance, and the text still fits on a line.
FINGERPRINT_HEX_DIGITS = 16


@enum.unique
class OpKind(enum.Enum):
    """What made an activation, as far as planning needs to know."""

    INPUT = "input"
    """A block's input: produced outside the block, so the block cannot make it again."""
    MATMUL = "matmul"
    """A matrix product: dear to recompute."""
    ATTENTION = "attention"
    """An output of a fused attention kernel: dear to recompute."""
    NORM = "norm"
    """An output of a fused normalisation kernel: cheap to recompute."""
    ELEMENTWISE = "elementwise"
    """A cheap pure op: elementwise, cast, reduction, gather or copy."""
    RANDOM = "random"
    """An output of an op that draws random numbers: never re-run (design rule 8)."""
    OPAQUE = "opaque"
    """Anything else that may not be re-run: unknown op, in-place result, collective."""


# INPUT has no op in the block to run again; RANDOM and OPAQUE ops must not be run again.
NEVER_REPLAYED = frozenset({OpKind.INPUT, OpKind.RANDOM, OpKind.OPAQUE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """One storage that a block's forward produces or receives.

    Raises:
        PlanError: The size is negative, or `is_replayable` is claimed for a kind that is
            never re-run.
    """

    name: str
    """Unique in the workload, for example `model.layers.3.mlp.gate_proj`."""
    op: str
    """The op that made it, by its aten name, for example `aten.mm`."""
    kind: OpKind
    """What the op is to a planner."""
    num_bytes: int
    """Bytes of the whole storage, not of the view that autograd may keep."""
    inputs: tuple[str, ...]
    """Names of the earlier activations of the same block that its op reads.

    Parameters are not listed: they are always on the device.
    """
    is_saved: bool
    """True if autograd keeps it, or a view of it, for backward."""
    is_replayable: bool
    """True if its op is known to be pure, so that running it again gives the same bits."""
    group: str
    """Shared by the outputs of one op call, for example attention output and log-sum-exp."""

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise PlanError(
                f"activation {self.name!r} has num_bytes {self.num_bytes}; a size is 0 or more. "
                "Give the bytes of its storage."
            )
        if self.is_replayable and self.kind in NEVER_REPLAYED:
            raise PlanError(
                f"activation {self.name!r} is of kind {self.kind.value!r} and marked replayable; "
                "inputs, random ops and opaque ops are never re-run. "
                "Set is_replayable to false, or give the kind of the op."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One repeated part of a model, for example a transformer layer.

    Raises:
        PlanError: A name is there twice, or an op reads what is not an earlier activation of
            the block.
    """

    name: str
    """Module path, for example `model.layers.3`; unique in the workload."""
    class_name: str
    """Class of the module, for example `LlamaDecoderLayer`."""
    activations: tuple[Activation, ...]
    """In the order in which the forward pass makes them."""

    def __post_init__(self) -> None:
        earlier: set[str] = set()
        for activation in self.activations:
            if activation.name in earlier:
                raise PlanError(_duplicate_message(activation.name, self.name))
            for name in activation.inputs:
                if name not in earlier:
                    raise PlanError(self._order_message(activation, name))
            earlier.add(activation.name)

    @property
    def num_bytes_saved(self) -> int:
        """Bytes that autograd keeps for backward when no plan is active."""
        return sum(activation.num_bytes for activation in self.activations if activation.is_saved)

    def _order_message(self, reader: Activation, name: str) -> str:
        """Say why `reader` cannot read `name`: unknown, a cycle, or listed too late."""
        inputs_of = {activation.name: activation.inputs for activation in self.activations}
        given = f"block {self.name!r}: activation {reader.name!r} reads {name!r}, which"
        rule = "an activation reads only earlier activations of its own block"
        if name not in inputs_of:
            return (
                f"{given} the block does not have; {rule}. "
                "List it first, as kind 'input' if it comes from outside the block."
            )
        cycle = _path_through_inputs(inputs_of, start=name, goal=reader.name)
        if cycle:
            path = " reads ".join((reader.name, *cycle))
            return (
                f"{given} closes a cycle ({path}); {rule}. "
                "Give the result of an in-place op a name of its own."
            )
        return f"{given} is listed later; {rule}. List activations in execution order."


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The blocks of one model in execution order, with what each keeps for backward.

    Raises:
        PlanError: Two blocks or two activations have the same name.
    """

    model: str
    """Class name of the model, for example `LlamaForCausalLM`."""
    blocks: tuple[Block, ...]
    """In the order in which the forward pass runs them."""

    def __post_init__(self) -> None:
        block_names: set[str] = set()
        owners: dict[str, str] = {}
        for block in self.blocks:
            if block.name in block_names:
                raise PlanError(
                    f"block {block.name!r} is listed twice; a block's name is its module path and "
                    "unique. Observe each module once."
                )
            block_names.add(block.name)
            for activation in block.activations:
                if activation.name in owners:
                    raise PlanError(
                        _duplicate_message(activation.name, owners[activation.name], block.name)
                    )
                owners[activation.name] = block.name

    @property
    def num_bytes_saved(self) -> int:
        """Bytes that autograd keeps for backward when no plan is active."""
        return sum(block.num_bytes_saved for block in self.blocks)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over block names, class names and activation names.

        Sizes are left out: a plan made at one batch shape may serve another one. Two
        workloads with equal fingerprints have the same activation names in the same order.
        """
        names = [
            [block.name, block.class_name, [activation.name for activation in block.activations]]
            for block in self.blocks
        ]
        digest = hashlib.sha256(json.dumps(names).encode("ascii"))
        return digest.hexdigest()[:FINGERPRINT_HEX_DIGITS]

    def to_json(self) -> str:
        """Return the JSON form; equal workloads give equal text, byte for byte."""
        form = {
            "format": WORKLOAD_FORMAT,
            "version": WORKLOAD_VERSION,
            "model": self.model,
            "blocks": [_block_form(block) for block in self.blocks],
        }
        return json.dumps(form, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the JSON form that `to_json` writes.

        Raises:
            PlanError: The text is not JSON, not this format or version, lacks a field, has an
                unknown one or one of the wrong type, or breaks a rule of `Workload`, `Block`
                or `Activation`.
        """
        record = read_form(text, form=WORKLOAD_FORMAT, version=WORKLOAD_VERSION)
        refuse_unknown_fields(record, {"format", "version", "model", "blocks"}, where="workload")
        blocks = read_list(record, "blocks", where="workload")
        return cls(
            model=read_text(record, "model", where="workload"),
            blocks=tuple(
                _read_block(block, where=f"blocks[{index}]") for index, block in enumerate(blocks)
            ),
        )


def _duplicate_message(name: str, *block_names: str) -> str:
    places = " and ".join(repr(block_name) for block_name in block_names)
    return (
        f"activation {name!r} is listed twice, in {places}; names are unique in a workload, since "
        "a plan decides by name. Number the outputs of an op that runs more than once."
    )


def _path_through_inputs(
    inputs_of: dict[str, tuple[str, ...]], *, start: str, goal: str
) -> tuple[str, ...]:
    """Names from `start` to `goal`, each reading the next; empty if there is no such path."""
    # A loop, not recursion: a long chain of ops would exceed Python's recursion limit.
    reader_of: dict[str, str | None] = {start: None}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name == goal:
            path: list[str] = []
            step: str | None = name
            while step is not None:
                path.append(step)
                step = reader_of[step]
            return tuple(reversed(path))
        for source in inputs_of.get(name, ()):
            if source not in reader_of:
                reader_of[source] = name
                waiting.append(source)
    return ()


def _block_form(block: Block) -> dict[str, object]:
    return {
        "name": block.name,
        "class_name": block.class_name,
        "activations": [
            {
                "name": activation.name,
                "op": activation.op,
                "kind": activation.kind.value,
                "num_bytes": activation.num_bytes,
                "inputs": list(activation.inputs),
                "is_saved": activation.is_saved,
                "is_replayable": activation.is_replayable,
                "group": activation.group,
            }
            for activation in block.activations
        ],
    }


def _read_block(value: object, *, where: str) -> Block:
    record = read_record(value, where=where)
    refuse_unknown_fields(record, {"name", "class_name", "activations"}, where=where)
    activations = read_list(record, "activations", where=where)
    return Block(
        name=read_text(record, "name", where=where),
        class_name=read_text(record, "class_name", where=where),
        activations=tuple(
            _read_activation(activation, where=f"{where}.activations[{index}]")
            for index, activation in enumerate(activations)
        ),
    )


def _read_activation(value: object, *, where: str) -> Activation:
    record = read_record(value, where=where)
    refuse_unknown_fields(record, set(Activation.__dataclass_fields__), where=where)
    inputs = read_list(record, "inputs", where=where)
    for name in inputs:
        if not isinstance(name, str):
            raise PlanError(_type_message("inputs", name, "a list of texts", where))
    kind = read_text(record, "kind", where=where)
    valid_kinds = tuple(op_kind.value for op_kind in OpKind)
    if kind not in valid_kinds:
        raise PlanError(f"{where}: {unknown_name_message('op kind', kind, valid_kinds)}")
    return Activation(
        name=read_text(record, "name", where=where),
        op=read_text(record, "op", where=where),
        kind=OpKind(kind),
        num_bytes=read_int(record, "num_bytes", where=where),
        inputs=tuple(str(name) for name in inputs),
        is_saved=read_flag(record, "is_saved", where=where),
        is_replayable=read_flag(record, "is_replayable", where=where),
        group=read_text(record, "group", where=where),
    )


def read_form(text: str, *, form: str, version: int) -> dict[str, object]:
    """Return the outermost record of a JSON file of ours.

    Args:
        text: The file's text.
        form: The value that its field `format` must have.
        version: The value that its field `version` must have.

    Raises:
        PlanError: The text is not JSON, names a field twice, or is another format or version.
    """
    try:
        value = cast(object, json.loads(text, object_pairs_hook=_refuse_repeated_fields))
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"the text is not JSON ({error}); {form!r} is a JSON form. "
            "Write the file again with to_json()."
        ) from error
    record = read_record(value, where="the file")
    given_form = record.get("format")
    if given_form != form:
        raise PlanError(
            f"the file's format is {given_form!r}; this reader takes {form!r} only. "
            "Pass a file of that format."
        )
    given_version = record.get("version")
    if type(given_version) is not int or given_version != version:
        raise PlanError(
            f"the file's version is {given_version!r}; this ebbtide reads version {version} of "
            f"{form!r} only. Write the file again with this ebbtide."
        )
    return record


def read_record(value: object, *, where: str) -> dict[str, object]:
    """Return `value` if it is a JSON object; `where` names it in the message otherwise."""
    if not isinstance(value, dict):
        raise PlanError(
            f"{where} is {_shown(value)}; it must be an object with named fields. "
            "See docs/formats.md."
        )
    return cast(dict[str, object], value)


def refuse_unknown_fields(record: dict[str, object], valid: Collection[str], *, where: str) -> None:
    """Raise PlanError if `record` has a field that no reader would honour."""
    for name in record:
        if name not in valid:
            message = unknown_name_message("field", name, tuple(sorted(valid)))
            raise PlanError(f"{where}: {message}")


def read_text(record: dict[str, object], name: str, *, where: str) -> str:
    """Return the field `name`, which must be a text."""
    value = _read_field(record, name, where=where)
    if not isinstance(value, str):
        raise PlanError(_type_message(name, value, "a text", where))
    return value


def read_int(record: dict[str, object], name: str, *, where: str) -> int:
    """Return the field `name`, which must be a whole number."""
    value = _read_field(record, name, where=where)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(_type_message(name, value, "a whole number", where))
    return value


def read_flag(record: dict[str, object], name: str, *, where: str) -> bool:
    """Return the field `name`, which must be true or false."""
    value = _read_field(record, name, where=where)
    if not isinstance(value, bool):
        raise PlanError(_type_message(name, value, "true or false", where))
    return value


def read_list(record: dict[str, object], name: str, *, where: str) -> list[object]:
    """Return the field `name`, which must be a list."""
    value = _read_field(record, name, where=where)
    if not isinstance(value, list):
        raise PlanError(_type_message(name, value, "a list", where))
    return cast(list[object], value)


def _read_field(record: dict[str, object], name: str, *, where: str) -> object:
    if name not in record:
        raise PlanError(f"{where} has no field {name!r}; it is required. See docs/formats.md.")
    return record[name]


def _type_message(name: str, value: object, wanted: str, where: str) -> str:
    return f"{where}: {name} is {_shown(value)}; it must be {wanted}. See docs/formats.md."


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_repeated_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # json keeps the last of two fields with one name: a plan edited by hand would lose a line.
    record: dict[str, object] = {}
    for name, value in pairs:
        if name in record:
            raise ValueError(f"field {name!r} is there twice")
        record[name] = value
    return record
