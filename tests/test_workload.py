import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from ebbtide.errors import PlanError
from ebbtide.workload import Activation, Block, OpKind, Workload


def an_activation(
    name: str, *inputs: str, kind: OpKind = OpKind.MATMUL, num_bytes: int = 8, is_saved: bool = True
) -> Activation:
    return Activation(
        name=name,
        op="aten.mm",
        kind=kind,
        num_bytes=num_bytes,
        inputs=inputs,
        is_saved=is_saved,
        is_replayable=kind is not OpKind.INPUT,
        group=name,
    )


def a_block(name: str, *activations: Activation) -> Block:
    return Block(name=name, class_name="Layer", activations=activations)


def a_workload() -> Workload:
    return Workload(
        model="Model",
        blocks=(
            a_block(
                "layers.0",
                an_activation("layers.0.input", kind=OpKind.INPUT, num_bytes=100),
                an_activation("layers.0.up", "layers.0.input", num_bytes=30),
                an_activation("layers.0.down", "layers.0.up", num_bytes=7, is_saved=False),
            ),
            a_block("layers.1", an_activation("layers.1.input", kind=OpKind.INPUT, num_bytes=4)),
        ),
    )


def form_with(change: Callable[[dict[str, Any]], None]) -> str:
    form = cast(dict[str, Any], json.loads(a_workload().to_json()))
    change(form)
    return json.dumps(form)


def message_of(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        Workload.from_json(text)
    return str(caught.value)


def first_block(form: dict[str, Any]) -> dict[str, Any]:
    return form["blocks"][0]


def up_projection(form: dict[str, Any]) -> dict[str, Any]:
    return first_block(form)["activations"][1]


def test_saved_bytes_are_those_of_saved_activations() -> None:
    workload = a_workload()
    assert [block.num_bytes_saved for block in workload.blocks] == [130, 4]
    assert workload.num_bytes_saved == 134


def test_json_form_reads_back_equal_and_writes_the_same_bytes() -> None:
    text = a_workload().to_json()
    again = Workload.from_json(text)
    assert again == a_workload()
    assert again.to_json() == text
    assert text.endswith("}\n")


def test_json_form_names_its_format_version_and_kinds() -> None:
    form = json.loads(a_workload().to_json())
    assert (form["format"], form["version"], form["model"]) == ("ebbtide-workload", 1, "Model")
    assert up_projection(form) == {
        "name": "layers.0.up",
        "op": "aten.mm",
        "kind": "matmul",
        "num_bytes": 30,
        "inputs": ["layers.0.input"],
        "is_saved": True,
        "is_replayable": True,
        "group": "layers.0.up",
    }


def test_fingerprint_is_short_hex_and_fixed() -> None:
    assert a_workload().fingerprint == "1bdd450290400f80"


def test_fingerprint_does_not_depend_on_sizes_or_the_model_class() -> None:
    def change(form: dict[str, Any]) -> None:
        up_projection(form)["num_bytes"] = 60
        form["model"] = "Other"

    assert Workload.from_json(form_with(change)).fingerprint == a_workload().fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda form: first_block(form).update(name="layers.9"),
        lambda form: first_block(form).update(class_name="Other"),
        lambda form: first_block(form)["activations"][2].update(name="layers.0.other"),
        lambda form: form["blocks"].reverse(),
    ],
)
def test_fingerprint_depends_on_names_classes_and_order(
    change: Callable[[dict[str, Any]], None],
) -> None:
    assert Workload.from_json(form_with(change)).fingerprint != a_workload().fingerprint


def test_names_cannot_move_from_one_block_to_the_next_unnoticed() -> None:
    one = an_activation("one")
    two = an_activation("two")
    left = Workload(model="M", blocks=(a_block("a", one, two), a_block("b")))
    right = Workload(model="M", blocks=(a_block("a", one), a_block("b", two)))
    assert left.fingerprint != right.fingerprint


def test_another_format_is_refused() -> None:
    message = message_of(form_with(lambda form: form.update(format="ebbtide-plan")))
    assert message == (
        "the file's format is 'ebbtide-plan'; this reader takes 'ebbtide-workload' only. "
        "Pass a file of that format."
    )


@pytest.mark.parametrize("version", [2, 0, "1", True, None])
def test_another_version_is_refused(version: object) -> None:
    message = message_of(form_with(lambda form: form.update(version=version)))
    assert message == (
        f"the file's version is {version!r}; this ebbtide reads version 1 of 'ebbtide-workload' "
        "only. Write the file again with this ebbtide."
    )


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"format": ' + "9" * 5000 + "}"])
def test_malformed_json_is_refused(text: str) -> None:
    message = message_of(text)
    assert message.startswith("the text is not JSON (")
    assert message.endswith("is a JSON form. Write the file again with to_json().")


def test_a_field_that_is_there_twice_is_refused() -> None:
    assert "field 'model' is there twice" in message_of('{"model": "A", "model": "B"}')


@pytest.mark.parametrize("text", ["[]", "3", "null", '"text"'])
def test_a_file_that_is_no_object_is_refused(text: str) -> None:
    assert message_of(text) == (
        f"the file is {text}; it must be an object with named fields. See docs/formats.md."
    )


def test_a_missing_field_is_named() -> None:
    message = message_of(form_with(lambda form: up_projection(form).pop("op")))
    assert message == (
        "blocks[0].activations[1] has no field 'op'; it is required. See docs/formats.md."
    )


def test_an_unknown_field_is_refused_with_the_nearest_first() -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(is_save=True)))
    assert message.startswith(
        "blocks[0].activations[1]: unknown field 'is_save'; valid names, nearest first: is_saved, "
    )


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("name", 3, "name is 3; it must be a text"),
        ("num_bytes", 1.5, "num_bytes is 1.5; it must be a whole number"),
        ("num_bytes", True, "num_bytes is true; it must be a whole number"),
        ("is_saved", 1, "is_saved is 1; it must be true or false"),
        ("inputs", "layers.0.input", 'inputs is "layers.0.input"; it must be a list'),
        ("inputs", [3], "inputs is 3; it must be a list of texts"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(field: str, value: object, wanted: str) -> None:
    message = message_of(form_with(lambda form: up_projection(form).update({field: value})))
    assert message == f"blocks[0].activations[1]: {wanted}. See docs/formats.md."


def test_a_long_value_is_cut_in_the_message() -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(name=[1] * 100)))
    assert "..." in message
    assert len(message) < 200


def test_an_unknown_kind_lists_the_valid_ones_nearest_first() -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(kind="matmull")))
    assert message.startswith(
        "blocks[0].activations[1]: unknown op kind 'matmull'; valid names, nearest first: matmul, "
    )


def test_a_negative_size_is_refused() -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(num_bytes=-1)))
    assert message == (
        "activation 'layers.0.up' has num_bytes -1; a size is 0 or more. "
        "Give the bytes of its storage."
    )


@pytest.mark.parametrize("kind", ["input", "random", "opaque"])
def test_what_is_never_re_run_cannot_be_replayable(kind: str) -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(kind=kind)))
    assert message == (
        f"activation 'layers.0.up' is of kind '{kind}' and marked replayable; inputs, random ops "
        "and opaque ops are never re-run. Set is_replayable to false, or give the kind of the op."
    )


def test_a_name_that_is_twice_in_a_block_is_refused() -> None:
    message = message_of(
        form_with(lambda form: first_block(form)["activations"].append(up_projection(form)))
    )
    assert message == (
        "activation 'layers.0.up' is listed twice, in 'layers.0'; names are unique in a workload, "
        "since a plan decides by name. Number the outputs of an op that runs more than once."
    )


def test_a_name_that_is_in_two_blocks_is_refused() -> None:
    message = message_of(
        form_with(
            lambda form: form["blocks"][1]["activations"][0].update(name="layers.0.input"),
        )
    )
    assert message.startswith(
        "activation 'layers.0.input' is listed twice, in 'layers.0' and 'layers.1';"
    )


def test_a_block_that_is_listed_twice_is_refused() -> None:
    message = message_of(form_with(lambda form: form["blocks"][1].update(name="layers.0")))
    assert message.startswith("block 'layers.0' is listed twice; a block's name is its module path")


def test_an_input_that_the_block_does_not_have_is_refused() -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(inputs=["lost"])))
    assert message == (
        "block 'layers.0': activation 'layers.0.up' reads 'lost', which the block does not have; "
        "an activation reads only earlier activations of its own block. "
        "List it first, as kind 'input' if it comes from outside the block."
    )


def test_an_input_that_is_listed_later_is_refused() -> None:
    message = message_of(form_with(lambda form: first_block(form)["activations"].reverse()))
    assert message == (
        "block 'layers.0': activation 'layers.0.down' reads 'layers.0.up', which is listed later; "
        "an activation reads only earlier activations of its own block. "
        "List activations in execution order."
    )


def test_a_cycle_is_shown() -> None:
    message = message_of(
        form_with(lambda form: up_projection(form).update(inputs=["layers.0.down"]))
    )
    assert message == (
        "block 'layers.0': activation 'layers.0.up' reads 'layers.0.down', which closes a cycle "
        "(layers.0.up reads layers.0.down reads layers.0.up); an activation reads only earlier "
        "activations of its own block. Give the result of an in-place op a name of its own."
    )


def test_an_activation_that_reads_itself_is_a_cycle() -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(inputs=["layers.0.up"])))
    assert "closes a cycle (layers.0.up reads layers.0.up)" in message


def test_a_cycle_through_many_ops_is_found() -> None:
    num_ops = 3000
    names = [f"op.{index}" for index in range(num_ops)]
    with pytest.raises(PlanError, match="closes a cycle"):
        a_block("long", *(an_activation(name, names[i - 1]) for i, name in enumerate(names)))
