import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.errors import PlanError
from ebbtide.workload import Outside, Workload


def an_activation(
    name: str,
    *inputs: str,
    kind: OpKind = OpKind.MATMUL,
    num_bytes: int = 8,
    is_saved: bool = True,
    group: str | None = None,
    make_ns: int = 0,
) -> Activation:
    return Activation(
        name=name,
        op="aten.mm",
        kind=kind,
        num_bytes=num_bytes,
        inputs=inputs,
        is_saved=is_saved,
        is_replayable=kind is not OpKind.INPUT,
        group=name if group is None else group,
        make_ns=make_ns,
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


def first_class(form: dict[str, Any]) -> dict[str, Any]:
    return form["classes"][0]


def up_projection(form: dict[str, Any]) -> dict[str, Any]:
    return first_class(form)["activations"][1]


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
    assert (form["format"], form["version"], form["model"]) == ("ebbtide-workload", 4, "Model")
    assert up_projection(form) == {
        "name": ".up",
        "op": "aten.mm",
        "kind": "matmul",
        "num_bytes": 30,
        "inputs": [".input"],
        "is_saved": True,
        "is_replayable": True,
        "group": ".up",
        "make_ns": 0,
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
        lambda form: form["blocks"][0].update(name="layers.9"),
        lambda form: first_class(form).update(class_name="Other"),
        lambda form: first_class(form)["activations"][2].update(name=".other"),
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


@pytest.mark.parametrize("version", [5, 0, "1", True, None])
def test_another_version_is_refused(version: object) -> None:
    message = message_of(form_with(lambda form: form.update(version=version)))
    assert message == (
        f"the file's version is {version!r}; this ebbtide reads versions 1 to 4 of "
        "'ebbtide-workload' only. Write the file again with this ebbtide."
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
        "classes[0].activations[1] has no field 'op'; it is required. See docs/formats.md."
    )


def test_an_unknown_field_is_refused_with_the_nearest_first() -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(is_save=True)))
    assert message.startswith(
        "classes[0].activations[1]: unknown field 'is_save'; valid names, nearest first: is_saved, "
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
        ("make_ns", 0.5, "make_ns is 0.5; it must be a whole number"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(field: str, value: object, wanted: str) -> None:
    message = message_of(form_with(lambda form: up_projection(form).update({field: value})))
    assert message == f"classes[0].activations[1]: {wanted}. See docs/formats.md."


def test_a_long_value_is_cut_in_the_message() -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(name=[1] * 100)))
    assert "..." in message
    assert len(message) < 200


def test_an_unknown_kind_lists_the_valid_ones_nearest_first() -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(kind="matmull")))
    assert message.startswith(
        "classes[0].activations[1]: unknown op kind 'matmull'; valid names, nearest first: matmul, "
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
        form_with(lambda form: first_class(form)["activations"].append(up_projection(form)))
    )
    assert message == (
        "activation 'layers.0.up' is listed twice, in 'layers.0'; names are unique in a workload, "
        "since a plan decides by name. Number the outputs of an op that runs more than once."
    )


def test_a_name_that_is_in_two_blocks_is_refused() -> None:
    message = message_of(
        form_with(
            lambda form: form["classes"][1]["activations"][0].update(name="layers.0.input"),
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
    message = message_of(form_with(lambda form: first_class(form)["activations"].reverse()))
    assert message == (
        "block 'layers.0': activation 'layers.0.down' reads 'layers.0.up', which is listed later; "
        "an activation reads only earlier activations of its own block. "
        "List activations in execution order."
    )


def test_a_cycle_is_shown() -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(inputs=[".down"])))
    assert message == (
        "block 'layers.0': activation 'layers.0.up' reads 'layers.0.down', which closes a cycle "
        "(layers.0.up reads layers.0.down reads layers.0.up); an activation reads only earlier "
        "activations of its own block. Give the result of an in-place op a name of its own."
    )


def test_an_activation_that_reads_itself_is_a_cycle() -> None:
    message = message_of(form_with(lambda form: up_projection(form).update(inputs=[".up"])))
    assert "closes a cycle (layers.0.up reads layers.0.up)" in message


def test_a_cycle_through_many_ops_is_found() -> None:
    num_ops = 3000
    names = [f"op.{index}" for index in range(num_ops)]
    with pytest.raises(PlanError, match="closes a cycle"):
        a_block("long", *(an_activation(name, names[i - 1]) for i, name in enumerate(names)))


VERSION_1 = """{
  "format": "ebbtide-workload",
  "version": 1,
  "model": "Model",
  "blocks": [
    {
      "name": "layers.0",
      "class_name": "Layer",
      "activations": [
        {
          "name": "layers.0.input",
          "op": "",
          "kind": "input",
          "num_bytes": 100,
          "inputs": [],
          "is_saved": true,
          "is_replayable": false,
          "group": "layers.0.input"
        },
        {
          "name": "layers.0.up",
          "op": "aten.mm",
          "kind": "matmul",
          "num_bytes": 30,
          "inputs": ["layers.0.input"],
          "is_saved": true,
          "is_replayable": true,
          "group": "layers.0.up"
        }
      ]
    }
  ]
}
"""


def test_a_file_of_version_1_is_read_without_times() -> None:
    workload = Workload.from_json(VERSION_1)
    (block,) = workload.blocks
    assert block == a_block(
        "layers.0",
        replace(an_activation("layers.0.input", kind=OpKind.INPUT, num_bytes=100), op=""),
        an_activation("layers.0.up", "layers.0.input", num_bytes=30),
    )
    assert (block.forward_ns, block.backward_ns, workload.outside) == (0, 0, None)
    assert not workload.is_timed


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('"model"', '"outside": null, "model"', "workload: unknown field 'outside'"),
        ('"class_name"', '"rest_ns": 0, "class_name"', "blocks[0]: unknown field 'rest_ns'"),
        ('"op": ""', '"op": "", "make_ns": 0', "blocks[0].activations[0]: unknown field 'make_ns'"),
        ('"kind": "matmul"', '"kind": "mm"', "blocks[0].activations[1]: unknown op kind 'mm'"),
        ('"op": "",', "", "blocks[0].activations[0] has no field 'op'"),
    ],
)
def test_a_file_of_version_1_has_the_fields_of_version_1_only(
    old: str, new: str, place: str
) -> None:
    assert message_of(VERSION_1.replace(old, new)).startswith(place)


def a_timed_block(name: str, **changes: Any) -> Block:
    fields: dict[str, Any] = {
        "name": name,
        "class_name": "Layer",
        "activations": (
            an_activation(f"{name}.input", kind=OpKind.INPUT),
            an_activation(f"{name}.attn:out", f"{name}.input", group=f"{name}.attn", make_ns=50),
            an_activation(f"{name}.attn:lse", f"{name}.input", group=f"{name}.attn", make_ns=50),
            an_activation(f"{name}.up", f"{name}.attn:out", make_ns=7),
        ),
        "backward": (
            an_event(f"{name}.attn:out", compute_ns=14),
            an_event(f"{name}.attn:out", f"{name}.attn:lse", f"{name}.input", compute_ns=125),
        ),
        "rest_ns": 3,
        "workspace_bytes": 11,
    }
    return Block(**{**fields, **changes})


def an_event(*uses: str, compute_ns: int = 1, held_bytes: int = 2) -> BackwardEvent:
    return BackwardEvent(uses=uses, compute_ns=compute_ns, held_bytes=held_bytes)


OUTSIDE = Outside(
    resident_bytes=1, turn_bytes=2, turn_ns=3, ends_bytes=4, ends_ns=5, constant_bytes=6
)


def a_timed_workload() -> Workload:
    blocks = tuple(a_timed_block(f"layers.{index}") for index in range(12))
    return Workload(model="Model", blocks=blocks, outside=OUTSIDE)


def timed_form_with(change: Callable[[dict[str, Any]], None]) -> str:
    form = cast(dict[str, Any], json.loads(a_timed_workload().to_json()))
    change(form)
    return json.dumps(form)


def test_a_call_counts_once_in_the_time_of_forward() -> None:
    block = a_timed_block("layers.0")
    assert block.forward_ns == 50 + 7 + 3
    assert block.backward_ns == 14 + 125


def test_a_workload_is_timed_if_each_block_and_the_rest_is() -> None:
    timed = a_timed_workload()
    assert timed.is_timed
    assert not replace(timed, outside=None).is_timed
    blocks = (*timed.blocks[:-1], replace(timed.blocks[-1], backward=()))
    assert not replace(timed, blocks=blocks).is_timed


def test_a_timed_workload_reads_back_equal_and_writes_the_same_bytes() -> None:
    text = a_timed_workload().to_json()
    assert Workload.from_json(text) == a_timed_workload()
    assert Workload.from_json(text).to_json() == text


def test_equal_blocks_share_a_class_and_others_do_not() -> None:
    workload = a_timed_workload()
    slower = replace(workload.blocks[5], rest_ns=4)
    blocks = (*workload.blocks[:5], slower, *workload.blocks[6:])
    form = json.loads(replace(workload, blocks=blocks).to_json())
    assert [block["class"] for block in form["blocks"]] == [0] * 5 + [1] + [0] * 6
    assert [shared["rest_ns"] for shared in form["classes"]] == [3, 4]


def test_names_are_local_to_the_block_in_a_class() -> None:
    form = json.loads(a_timed_workload().to_json())
    (shared,) = form["classes"]
    names = [activation["name"] for activation in shared["activations"]]
    assert names == [".input", ".attn:out", ".attn:lse", ".up"]
    assert shared["activations"][1]["group"] == ".attn"
    assert shared["activations"][3]["inputs"] == [".attn:out"]
    assert shared["backward"][1]["uses"] == [".attn:out", ".attn:lse", ".input"]
    assert "layers" not in json.dumps(shared)


@pytest.mark.parametrize("name", ["elsewhere", "layers.10.input", "layers.1", "layers.1_up"])
def test_a_name_that_is_not_below_its_block_is_written_in_full(name: str) -> None:
    workload = Workload(model="Model", blocks=(a_block("layers.1", an_activation(name)),))
    form = json.loads(workload.to_json())
    assert form["classes"][0]["activations"][0]["name"] == name
    assert Workload.from_json(workload.to_json()) == workload


@pytest.mark.parametrize("name", [":input", ".up", "up"])
def test_names_in_a_block_without_a_name_read_back(name: str) -> None:
    workload = Workload(model="Model", blocks=(a_block("", an_activation(name)),))
    assert Workload.from_json(workload.to_json()) == workload


def test_a_name_that_the_json_form_would_take_for_a_local_one_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        a_block("layers.1", an_activation(".up"))
    assert str(caught.value) == (
        "block 'layers.1': activation '.up' has the name or group '.up'; the JSON form would read "
        "it as 'layers.1.up'. Give a name that starts with neither '.' nor ':'."
    )
    with pytest.raises(PlanError, match="has the name or group ':attn'"):
        a_block("layers.1", an_activation("up", group=":attn"))


def test_a_backward_event_that_uses_what_is_not_saved_is_refused() -> None:
    block = a_workload().blocks[0]
    with pytest.raises(PlanError) as caught:
        replace(block, backward=(an_event("layers.0.down"),))
    assert str(caught.value) == (
        "block 'layers.0': a backward event uses 'layers.0.down', which is not a saved activation "
        "of the block; backward asks only for what autograd saved. Name one of those, or set its "
        "is_saved."
    )


def test_a_backward_event_that_uses_a_name_of_another_block_is_refused() -> None:
    def change(form: dict[str, Any]) -> None:
        first_class(form)["backward"][0].update(uses=["layers.1.up"])

    message = message_of(timed_form_with(change))
    assert message.startswith("block 'layers.0': a backward event uses 'layers.1.up', which is not")


@pytest.mark.parametrize("index", [-1, 1, 7])
def test_a_class_that_is_not_there_is_refused(index: int) -> None:
    message = message_of(timed_form_with(lambda form: form["blocks"][4].update({"class": index})))
    assert message == (
        f"blocks[4]: class is {index}; it must be one of the 1 entries of classes, counted from 0. "
        "See docs/formats.md."
    )


@pytest.mark.parametrize(
    ("change", "owner", "name"),
    [
        (lambda form: up(form).update(make_ns=-5), "activation 'layers.0.up'", "make_ns"),
        (lambda form: first_class(form).update(rest_ns=-5), "block 'layers.0'", "rest_ns"),
        (
            lambda form: first_class(form).update(workspace_bytes=-5),
            "block 'layers.0'",
            "workspace_bytes",
        ),
        (lambda form: event(form).update(compute_ns=-5), "a backward event", "compute_ns"),
        (lambda form: event(form).update(held_bytes=-5), "a backward event", "held_bytes"),
        (lambda form: event(form).update(gradient_bytes=-5), "a backward event", "gradient_bytes"),
        (lambda form: form["outside"].update(resident_bytes=-5), "outside", "resident_bytes"),
        (lambda form: form["outside"].update(turn_bytes=-5), "outside", "turn_bytes"),
        (lambda form: form["outside"].update(turn_ns=-5), "outside", "turn_ns"),
        (lambda form: form["outside"].update(ends_bytes=-5), "outside", "ends_bytes"),
        (lambda form: form["outside"].update(ends_ns=-5), "outside", "ends_ns"),
        (lambda form: form["outside"].update(constant_bytes=-5), "outside", "constant_bytes"),
    ],
)
def test_a_negative_time_or_size_is_refused(
    change: Callable[[dict[str, Any]], None], owner: str, name: str
) -> None:
    assert message_of(timed_form_with(change)) == (
        f"{owner} has {name} -5; times and sizes are 0 or more. Measure it again."
    )


def up(form: dict[str, Any]) -> dict[str, Any]:
    return first_class(form)["activations"][3]


def event(form: dict[str, Any]) -> dict[str, Any]:
    return first_class(form)["backward"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda form: form.pop("classes"), "workload has no field 'classes'; it is required."),
        (lambda form: form.pop("outside"), "workload has no field 'outside'; it is required."),
        (lambda form: form.update(outside=3), "outside is 3; it must be an object with named"),
        (lambda form: form["outside"].pop("turn_ns"), "outside has no field 'turn_ns'; it is"),
        (lambda form: form["outside"].update(turn=3), "outside: unknown field 'turn'; valid"),
        (lambda form: form["blocks"][3].pop("class"), "blocks[3] has no field 'class'; it is"),
        (lambda form: form["blocks"][3].update(rest_ns=1), "blocks[3]: unknown field 'rest_ns';"),
        (lambda form: form.update(classes=[3]), "classes[0] is 3; it must be an object with"),
        (lambda form: first_class(form).update(name="x"), "classes[0]: unknown field 'name';"),
        (lambda form: first_class(form).pop("rest_ns"), "classes[0] has no field 'rest_ns'; it"),
        (lambda form: first_class(form).pop("is_fused"), "classes[0] has no field 'is_fused'; it"),
        (
            lambda form: first_class(form).update(is_fused=1),
            "classes[0]: is_fused is 1; it must be",
        ),
        (lambda form: up(form).pop("make_ns"), "classes[0].activations[3] has no field 'make_ns'"),
        (lambda form: event(form).pop("gradient_bytes"), "classes[0].backward[0] has no field"),
        (lambda form: event(form).pop("uses"), "classes[0].backward[0] has no field 'uses'; it"),
        (lambda form: event(form).update(use=[]), "classes[0].backward[0]: unknown field 'use';"),
    ],
)
def test_a_missing_or_unknown_field_is_refused(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    assert message_of(timed_form_with(change)).startswith(message)


def test_a_fused_block_is_written_and_read_as_a_class_of_its_own() -> None:
    workload = a_timed_workload()
    fused = replace(workload.blocks[5], is_fused=True)
    workload = replace(workload, blocks=(*workload.blocks[:5], fused, *workload.blocks[6:]))
    form = json.loads(workload.to_json())
    assert [shared["is_fused"] for shared in form["classes"]] == [False, True]
    assert [block["class"] for block in form["blocks"]] == [0] * 5 + [1] + [0] * 6
    assert Workload.from_json(workload.to_json()) == workload
    assert workload.fingerprint == a_timed_workload().fingerprint


# -- gradients that a step makes -------------------------------------------------------------------


def a_workload_with_gradients() -> Workload:
    outside = replace(OUTSIDE, turn_gradient_bytes=500, ends_gradient_bytes=60)
    blocks = tuple(
        replace(
            a_timed_block(name),
            backward=tuple(
                replace(event, gradient_bytes=size)
                for event, size in zip(a_timed_block(name).backward, (7, 20), strict=True)
            ),
        )
        for name in ("layers.0", "layers.1")
    )
    return Workload(model="Model", blocks=blocks, outside=outside)


def test_gradients_that_a_step_makes_are_written_and_read() -> None:
    workload = a_workload_with_gradients()
    assert workload.gradient_bytes == 2 * (7 + 20) + 500 + 60
    assert replace(workload, outside=None).gradient_bytes == 2 * (7 + 20)
    assert Workload.from_json(workload.to_json()) == workload


def test_gradients_may_be_there_before_the_step() -> None:
    workload = a_workload_with_gradients()
    resident = workload.with_gradients_resident()
    assert resident.gradient_bytes == 0
    assert resident.outside == replace(OUTSIDE, resident_bytes=OUTSIDE.resident_bytes + 614)
    assert resident.blocks == (a_timed_block("layers.0"), a_timed_block("layers.1"))
    assert resident.with_gradients_resident() is resident
    without = replace(workload, outside=None)
    assert without.with_gradients_resident() is without


def version_2_form() -> dict[str, Any]:
    form = json.loads(a_workload_with_gradients().to_json())
    form["version"] = 2
    for name in ("turn_gradient_bytes", "ends_gradient_bytes"):
        del form["outside"][name]
    del first_class(form)["is_fused"], first_class(form)["store_ns_per_gib"]
    for read in first_class(form)["backward"]:
        del read["gradient_bytes"]
    return form


def test_in_a_file_of_version_2_all_gradients_are_resident() -> None:
    workload = Workload.from_json(json.dumps(version_2_form()))
    blocks = (a_timed_block("layers.0"), a_timed_block("layers.1"))
    assert workload == Workload(model="Model", blocks=blocks, outside=OUTSIDE)
    assert json.loads(workload.to_json())["version"] == 4


def test_in_a_file_of_version_3_storing_costs_no_compute_time() -> None:
    workload = a_workload_with_gradients()
    form = json.loads(workload.to_json())
    form["version"] = 3
    with_it = json.dumps(form)
    assert message_of(with_it).startswith("classes[0]: unknown field 'store_ns_per_gib'")
    assert first_class(form).pop("store_ns_per_gib") == 0
    assert Workload.from_json(json.dumps(form)) == workload


def test_what_storing_costs_goes_through_json_and_is_rounded_up() -> None:
    workload = a_workload_with_gradients()
    blocks = tuple(replace(block, store_ns_per_gib=2_500_000) for block in workload.blocks)
    stacked = replace(workload, blocks=blocks)
    assert Workload.from_json(stacked.to_json()) == stacked
    assert blocks[0].store_ns(2**30) == 2_500_000
    assert blocks[0].store_ns(1) == 1
    assert blocks[0].store_ns(0) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda form: event(form).update(gradient_bytes=1),
            "classes[0].backward[0]: unknown field 'gradient_bytes'",
        ),
        (
            lambda form: form["outside"].update(turn_gradient_bytes=1),
            "outside: unknown field 'turn_gradient_bytes'",
        ),
        (
            lambda form: first_class(form).update(is_fused=False),
            "classes[0]: unknown field 'is_fused'",
        ),
    ],
)
def test_a_file_of_version_2_has_the_fields_of_version_2_only(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    form = version_2_form()
    change(form)
    assert message_of(json.dumps(form)).startswith(message)
