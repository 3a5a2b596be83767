"""The Workload: what one training step of a model keeps for backward, block by block.

A Workload is made by observing one real step. It is frozen, it knows no framework, and it
has a JSON form (`docs/formats.md`).
"""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Self, cast

from ebbtide.block import (
    LOCAL_MARKS,
    Activation,
    BackwardEvent,
    Block,
    OpKind,
    duplicate_name_message,
)
from ebbtide.errors import PlanError
from ebbtide.forms import (
    read_field,
    read_flag,
    read_form,
    read_int,
    read_list,
    read_names,
    read_record,
    read_text,
    refuse_negative,
    refuse_unknown_fields,
)
from ebbtide.naming import unknown_name_message

WORKLOAD_FORMAT = "ebbtide-workload"
WORKLOAD_VERSION = 4

NEW_IN_3 = {"gradient_bytes", "turn_gradient_bytes", "ends_gradient_bytes", "is_fused"}
"""Fields that version 2 did not have: there `resident_bytes` has all gradients, and no block is
fused."""

NEW_IN_4 = {"store_ns_per_gib"}
"""Version 3 did not have it: there storing costs no compute time."""

MOST_ENTRIES = 1_000_000
"""Activations, inputs and uses that blocks may have together in a file: a hundred times as many as
models with a thousand blocks have. Blocks share classes, so that a small file could ask for more
than any memory holds."""

# 64 bits: two models of one user never meet by chance, and the text still fits on a line.
FINGERPRINT_HEX_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a step takes and holds outside of the blocks.

    Raises:
        PlanError: A number is negative.
    """

    resident_bytes: int
    """Held all through the step: parameters, buffers, optimizer state, and the gradients that are
    there when it starts."""
    turn_bytes: int
    """Most bytes held beyond that between the last block's forward and its backward, such as
    logits and the loss; what the blocks store is not counted."""
    turn_ns: int
    """Time between the last block's forward and its backward."""
    ends_bytes: int
    """Most bytes held before the first block's forward and after its backward, beyond
    `resident_bytes` and all gradients, such as the optimizer's own; none of the blocks stores
    anything then."""
    ends_ns: int
    """Time of forward before the first block, and of backward after it."""
    constant_bytes: int = 0
    """Held from the first block's forward to its backward, such as embeddings and masks."""
    turn_gradient_bytes: int = 0
    """Gradients of parameters that are there when the last block's backward starts, such as the
    head's, and were not before the step."""
    ends_gradient_bytes: int = 0
    """Those that come after the first block's backward, such as the embedding's."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            refuse_negative(getattr(self, name), "outside", name)


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
    outside: Outside | None = None
    """The rest of the step; None if it was not measured."""

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
                        duplicate_name_message(activation.name, owners[activation.name], block.name)
                    )
                owners[activation.name] = block.name

    @property
    def num_bytes_saved(self) -> int:
        """Bytes that autograd keeps for backward when no plan is active."""
        return sum(block.num_bytes_saved for block in self.blocks)

    @property
    def gradient_bytes(self) -> int:
        """Gradients of parameters that the step makes, and that were not there before it."""
        made_bytes = sum(block.gradient_bytes for block in self.blocks)
        if self.outside is None:
            return made_bytes
        outside = self.outside
        return made_bytes + outside.turn_gradient_bytes + outside.ends_gradient_bytes

    def with_gradients_resident(self) -> Self:
        """Return the workload of a step before which all gradients are there already.

        Such is each further micro-batch, and each step where gradients are zeroed in place.
        """
        if self.outside is None or not self.gradient_bytes:
            return self
        outside = replace(
            self.outside,
            resident_bytes=self.outside.resident_bytes + self.gradient_bytes,
            turn_gradient_bytes=0,
            ends_gradient_bytes=0,
        )
        blocks = tuple(
            replace(block, backward=tuple(replace(e, gradient_bytes=0) for e in block.backward))
            for block in self.blocks
        )
        return replace(self, blocks=blocks, outside=outside)

    @property
    def is_timed(self) -> bool:
        """Whether times and the rest of the step are known, as a budget needs."""
        return self.outside is not None and all(
            block.backward or not block.num_bytes_saved for block in self.blocks
        )

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
        """Return the JSON form; equal workloads give equal text, byte for byte.

        Blocks that differ in their names alone share one entry of `classes`.
        """
        classes: list[dict[str, object]] = []
        blocks: list[dict[str, object]] = []
        index_of: dict[str, int] = {}
        for block in self.blocks:
            form = _class_form(block)
            key = json.dumps(form)
            if key not in index_of:
                index_of[key] = len(classes)
                classes.append(form)
            blocks.append({"name": block.name, "class": index_of[key]})
        form = {
            "format": WORKLOAD_FORMAT,
            "version": WORKLOAD_VERSION,
            "model": self.model,
            "classes": classes,
            "blocks": blocks,
            "outside": None if self.outside is None else _plain_form(self.outside),
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
        model = read_text(record, "model", where="workload")
        blocks = read_list(record, "blocks", where="workload")
        if record["version"] == 1:
            fields = {"format", "version", "model", "blocks"}
            refuse_unknown_fields(record, fields, where="workload")
            read_1 = tuple(_read_block_1(b, where=f"blocks[{i}]") for i, b in enumerate(blocks))
            return cls(model=model, blocks=read_1)
        fields = {"format", "version", "model", "classes", "blocks", "outside"}
        refuse_unknown_fields(record, fields, where="workload")
        classes = read_list(record, "classes", where="workload")
        version = read_int(record, "version", where="workload")
        read: list[Block] = []
        num_entries = 0
        for index, given in enumerate(blocks):
            read.append(_read_block(given, classes, version, where=f"blocks[{index}]"))
            num_entries += _num_entries(read[-1])
            if num_entries > MOST_ENTRIES:
                raise PlanError(
                    f"workload: the first {index + 1} of {len(blocks)} blocks have {num_entries} "
                    f"activations, inputs and uses; all together may have {MOST_ENTRIES}. "
                    "Observe the model again: ebbtide observe."
                )
        return cls(model=model, blocks=tuple(read), outside=_read_outside(record, version))


def _class_form(block: Block) -> dict[str, object]:
    def local(name: str) -> str:
        return _local_name(name, block.name)

    form = _plain_form(block)
    del form["name"]
    form["activations"] = [
        {
            **_plain_form(activation),
            "name": local(activation.name),
            "kind": activation.kind.value,
            "inputs": [local(name) for name in activation.inputs],
            "group": local(activation.group),
        }
        for activation in block.activations
    ]
    form["backward"] = [
        {**_plain_form(event), "uses": [local(name) for name in event.uses]}
        for event in block.backward
    ]
    return form


def _plain_form(value: Activation | BackwardEvent | Block | Outside) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _local_name(name: str, block_name: str) -> str:
    rest = name.removeprefix(block_name)
    return rest if rest != name and rest.startswith(LOCAL_MARKS) else name


def _full_name(name: str, block_name: str) -> str:
    return block_name + name if name.startswith(LOCAL_MARKS) else name


def _read_block(value: object, classes: list[object], version: int, *, where: str) -> Block:
    record = read_record(value, where=where)
    refuse_unknown_fields(record, {"name", "class"}, where=where)
    name = read_text(record, "name", where=where)
    index = read_int(record, "class", where=where)
    if not 0 <= index < len(classes):
        raise PlanError(
            f"{where}: class is {index}; it must be one of the {len(classes)} entries of classes, "
            "counted from 0. See docs/formats.md."
        )
    where = f"classes[{index}]"
    form = read_record(classes[index], where=where)
    fields = set(Block.__dataclass_fields__) - {"name"}
    if version == 2:
        fields -= NEW_IN_3
    if version < 4:
        fields -= NEW_IN_4
    refuse_unknown_fields(form, fields, where=where)
    activations = read_list(form, "activations", where=where)
    backward = read_list(form, "backward", where=where)
    return Block(
        name=name,
        class_name=read_text(form, "class_name", where=where),
        activations=tuple(
            _read_activation(activation, name, where=f"{where}.activations[{i}]")
            for i, activation in enumerate(activations)
        ),
        backward=tuple(
            _read_event(event, name, version, where=f"{where}.backward[{i}]")
            for i, event in enumerate(backward)
        ),
        rest_ns=read_int(form, "rest_ns", where=where),
        workspace_bytes=read_int(form, "workspace_bytes", where=where),
        is_fused="is_fused" in fields and read_flag(form, "is_fused", where=where),
        store_ns_per_gib=read_int(form, "store_ns_per_gib", where=where)
        if "store_ns_per_gib" in fields
        else 0,
    )


def _num_entries(block: Block) -> int:
    num_inputs = sum(len(activation.inputs) for activation in block.activations)
    return len(block.activations) + num_inputs + sum(len(event.uses) for event in block.backward)


def _read_event(value: object, block_name: str, version: int, *, where: str) -> BackwardEvent:
    record = read_record(value, where=where)
    numbers = set(BackwardEvent.__dataclass_fields__) - {"uses"}
    if version == 2:
        numbers -= NEW_IN_3
    refuse_unknown_fields(record, {"uses", *numbers}, where=where)
    return BackwardEvent(
        uses=tuple(_full_name(name, block_name) for name in read_names(record, "uses", where)),
        **{name: read_int(record, name, where=where) for name in sorted(numbers)},
    )


def _read_outside(record: dict[str, object], version: int) -> Outside | None:
    value = read_field(record, "outside", where="workload")
    if value is None:
        return None
    form = read_record(value, where="outside")
    names = set(Outside.__dataclass_fields__)
    if version == 2:
        names -= NEW_IN_3
    refuse_unknown_fields(form, names, where="outside")
    return Outside(**{name: read_int(form, name, where="outside") for name in sorted(names)})


def _read_block_1(value: object, *, where: str) -> Block:
    """Read a block of version 1, which had no times and no classes."""
    record = read_record(value, where=where)
    refuse_unknown_fields(record, {"name", "class_name", "activations"}, where=where)
    activations = read_list(record, "activations", where=where)
    fields = set(Activation.__dataclass_fields__) - {"make_ns"}
    for index, activation in enumerate(activations):
        place = f"{where}.activations[{index}]"
        refuse_unknown_fields(read_record(activation, where=place), fields, where=place)
    return Block(
        name=read_text(record, "name", where=where),
        class_name=read_text(record, "class_name", where=where),
        activations=tuple(
            _read_activation(
                {"make_ns": 0, **cast(dict[str, object], activation)},
                "",
                where=f"{where}.activations[{index}]",
            )
            for index, activation in enumerate(activations)
        ),
    )


def _read_activation(value: object, block_name: str, *, where: str) -> Activation:
    record = read_record(value, where=where)
    refuse_unknown_fields(record, set(Activation.__dataclass_fields__), where=where)
    kind = read_text(record, "kind", where=where)
    valid_kinds = tuple(op_kind.value for op_kind in OpKind)
    if kind not in valid_kinds:
        raise PlanError(f"{where}: {unknown_name_message('op kind', kind, valid_kinds)}")
    return Activation(
        name=_full_name(read_text(record, "name", where=where), block_name),
        op=read_text(record, "op", where=where),
        kind=OpKind(kind),
        num_bytes=read_int(record, "num_bytes", where=where),
        inputs=tuple(_full_name(name, block_name) for name in read_names(record, "inputs", where)),
        is_saved=read_flag(record, "is_saved", where=where),
        is_replayable=read_flag(record, "is_replayable", where=where),
        group=_full_name(read_text(record, "group", where=where), block_name),
        make_ns=read_int(record, "make_ns", where=where),
    )
