import copy
import json
import pickle
from collections.abc import Mapping
from typing import Any, cast

import pytest

from ebbtide.errors import PlanError
from ebbtide.plan import TURN_END, TURN_START, Decision, Plan
from ebbtide.workload import Activation, Block, OpKind, Workload


def a_plan(decisions: Mapping[str, Decision] | None = None, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "name": "mine",
        "model": "Model",
        "fingerprint": a_workload().fingerprint,
        "decisions": {"up": Decision.HOST, "act": Decision.RECOMPUTE, "input": Decision.KEEP}
        if decisions is None
        else decisions,
        "host_bytes": 30,
        "disk_bytes": 0,
        "max_out_bytes_in_flight": 64,
        "max_in_bytes_in_flight": 32,
    }
    return Plan(**{**fields, **changes})


def a_workload(*extra_names: str) -> Workload:
    names = ("input", "up", "act", *extra_names)
    return Workload(
        model="Model",
        blocks=(
            Block(
                name="layer",
                class_name="Layer",
                activations=tuple(
                    Activation(
                        name=name,
                        op="aten.mm",
                        kind=OpKind.MATMUL,
                        num_bytes=30,
                        inputs=(),
                        is_saved=True,
                        is_replayable=True,
                        group=name,
                    )
                    for name in names
                ),
            ),
        ),
    )


def form_with(**changes: object) -> str:
    form = cast(dict[str, Any], json.loads(a_plan().to_json()))
    form.update(changes)
    return json.dumps(form)


def message_of(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    return str(caught.value)


def test_a_decision_is_found_by_name() -> None:
    plan = a_plan()
    assert plan.decision("up") is Decision.HOST
    assert plan.decision("act") is Decision.RECOMPUTE
    assert plan.decision("down") is None


def test_decisions_are_sorted_and_do_not_change_with_the_mapping_that_was_passed() -> None:
    decisions = {"b": Decision.KEEP, "a": Decision.DISK}
    plan = a_plan(decisions)
    decisions["c"] = Decision.HOST
    assert list(plan.decisions.items()) == [("a", Decision.DISK), ("b", Decision.KEEP)]


def test_decisions_cannot_be_written() -> None:
    decisions = cast(dict[str, Decision], a_plan().decisions)
    with pytest.raises(TypeError, match="does not support item assignment"):
        decisions["up"] = Decision.KEEP


def test_a_plan_can_be_pickled_copied_and_hashed() -> None:
    plan = a_plan()
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert copy.deepcopy(plan) == plan
    assert len({plan, copy.deepcopy(plan)}) == 1


def test_plans_with_other_decisions_are_not_equal() -> None:
    assert a_plan({"up": Decision.HOST}) != a_plan({"up": Decision.KEEP})


def test_json_form_reads_back_equal_and_writes_the_same_bytes() -> None:
    text = a_plan().to_json()
    assert Plan.from_json(text) == a_plan()
    assert Plan.from_json(text).to_json() == text


def test_json_form_does_not_depend_on_the_order_of_decisions() -> None:
    items = list(a_plan().decisions.items())
    assert a_plan(dict(reversed(items))).to_json() == a_plan(dict(items)).to_json()


def test_json_form_is_this_text() -> None:
    plan = a_plan(
        {"up": Decision.HOST, "act": Decision.RECOMPUTE},
        release_at={"up": "act"},
        fetch_at={"up": TURN_END},
    )
    assert plan.to_json() == (
        "{\n"
        '  "bound_step_ns": 0,\n'
        '  "budget_bytes": 0,\n'
        '  "decisions": {\n'
        '    "act": "recompute",\n'
        '    "up": "host"\n'
        "  },\n"
        '  "disk_bytes": 0,\n'
        '  "fetch_at": {\n'
        '    "up": "<turn end>"\n'
        "  },\n"
        f'  "fingerprint": "{a_workload().fingerprint}",\n'
        '  "format": "ebbtide-plan",\n'
        '  "host_bytes": 30,\n'
        '  "max_in_bytes_in_flight": 32,\n'
        '  "max_out_bytes_in_flight": 64,\n'
        '  "model": "Model",\n'
        '  "name": "mine",\n'
        '  "peak_bytes": 0,\n'
        '  "predicted_step_ns": 0,\n'
        '  "release_at": {\n'
        '    "up": "act"\n'
        "  },\n"
        '  "version": 2\n'
        "}\n"
    )


def test_another_format_is_refused() -> None:
    assert message_of(a_workload().to_json()) == (
        "the file's format is 'ebbtide-workload'; this reader takes 'ebbtide-plan' only. "
        "Pass a file of that format."
    )


@pytest.mark.parametrize("version", [3, 0, "1", True, None])
def test_another_version_is_refused(version: object) -> None:
    assert message_of(form_with(version=version)) == (
        f"the file's version is {version!r}; this ebbtide reads versions 1 to 2 of 'ebbtide-plan' "
        "only. Write the file again with this ebbtide."
    )


def test_malformed_json_is_refused() -> None:
    assert message_of(a_plan().to_json()[:-3]).startswith("the text is not JSON (")


def test_an_activation_that_is_decided_twice_is_refused() -> None:
    text = a_plan().to_json().replace('"up": "host"', '"up": "host", "up": "disk"')
    assert "field 'up' is there twice" in message_of(text)


def test_an_unknown_decision_lists_the_valid_ones_nearest_first() -> None:
    assert message_of(form_with(decisions={"up": "hosts"})) == (
        "activation 'up': unknown decision 'hosts'; valid names, nearest first: "
        "host, recompute, disk, keep"
    )


@pytest.mark.parametrize(
    "field",
    [
        "host_bytes",
        "disk_bytes",
        "max_out_bytes_in_flight",
        "max_in_bytes_in_flight",
        "budget_bytes",
        "peak_bytes",
        "predicted_step_ns",
        "bound_step_ns",
    ],
)
def test_a_negative_number_is_refused(field: str) -> None:
    assert message_of(form_with(**{field: -1})) == (
        f"plan 'mine' has {field} -1; it must be 0 or more. Plan again."
    )


def test_an_unknown_field_is_refused() -> None:
    assert message_of(form_with(hostbytes=1)).startswith(
        "plan: unknown field 'hostbytes'; valid names, nearest first: host_bytes, "
    )


def test_decisions_that_are_no_object_are_refused() -> None:
    assert message_of(form_with(decisions=["up"])) == (
        'plan: decisions is ["up"]; it must be an object with named fields. See docs/formats.md.'
    )


def test_a_decision_that_is_no_text_is_refused() -> None:
    assert message_of(form_with(decisions={"up": 3})) == (
        "plan: decisions: up is 3; it must be a text. See docs/formats.md."
    )


def test_a_plan_fits_the_workload_that_it_was_made_for() -> None:
    a_plan().check_fits(a_workload())


def test_a_plan_for_another_model_is_refused_with_the_names_that_differ() -> None:
    decisions = {f"h.{index}.fc": Decision.HOST for index in range(5)}
    plan = a_plan(decisions, model="Other", fingerprint="00000000000000ff")
    workload = a_workload()
    with pytest.raises(PlanError) as caught:
        plan.check_fits(workload)
    assert str(caught.value) == (
        "plan 'mine' is for Other (fingerprint 00000000000000ff), but the workload is Model "
        f"(fingerprint {workload.fingerprint}): only the plan has h.0.fc, h.1.fc, h.2.fc and 2 "
        "more; the plan has no decision for input, up, act. A plan decides by activation name and "
        "holds for one model only. Make a plan for this workload, for example with "
        "ebbtide.planner.named_plan('balanced', workload)."
    )


def test_a_plan_without_a_decision_for_a_new_activation_names_it() -> None:
    with pytest.raises(PlanError, match=r"the plan has no decision for down\. A plan"):
        a_plan().check_fits(a_workload("down"))


def test_a_plan_edited_to_name_an_activation_that_is_not_there_is_refused() -> None:
    plan = a_plan({**a_plan().decisions, "typo": Decision.HOST})
    with pytest.raises(PlanError, match=r"only the plan has typo\. A plan"):
        plan.check_fits(a_workload())


def test_a_fingerprint_that_differs_in_order_alone_is_refused() -> None:
    with pytest.raises(PlanError, match="the order of activations or the class of a block differs"):
        a_plan(fingerprint="00000000000000ff").check_fits(a_workload())


VERSION_1 = """{
  "decisions": {
    "act": "recompute",
    "up": "host"
  },
  "disk_bytes": 0,
  "fingerprint": "00000000000000ff",
  "format": "ebbtide-plan",
  "host_bytes": 30,
  "max_in_bytes_in_flight": 32,
  "max_out_bytes_in_flight": 64,
  "model": "Model",
  "name": "mine",
  "version": 1
}
"""


def test_a_file_of_version_1_is_read_without_moments_and_predictions() -> None:
    plan = Plan.from_json(VERSION_1)
    assert plan == a_plan(
        {"up": Decision.HOST, "act": Decision.RECOMPUTE}, fingerprint="00000000000000ff"
    )
    assert (dict(plan.release_at), dict(plan.fetch_at)) == ({}, {})
    assert (plan.budget_bytes, plan.peak_bytes) == (0, 0)
    assert (plan.predicted_step_ns, plan.bound_step_ns) == (0, 0)


@pytest.mark.parametrize("field", ["release_at", "fetch_at", "budget_bytes", "bound_step_ns"])
def test_a_file_of_version_1_has_the_fields_of_version_1_only(field: str) -> None:
    text = VERSION_1.replace('"model"', f'"{field}": 0, "model"')
    assert message_of(text).startswith(f"plan: unknown field '{field}'; valid names, nearest")


@pytest.mark.parametrize(
    "field", ["decisions", "release_at", "fetch_at", "budget_bytes", "peak_bytes", "bound_step_ns"]
)
def test_a_file_of_version_2_lacks_no_field(field: str) -> None:
    form = json.loads(a_plan().to_json())
    del form[field]
    message = message_of(json.dumps(form))
    assert message == f"plan has no field '{field}'; it is required. See docs/formats.md."


def test_moments_and_predictions_read_back_equal() -> None:
    plan = a_plan(
        release_at={"up": TURN_START},
        fetch_at={"up": "act"},
        budget_bytes=4,
        peak_bytes=3,
        predicted_step_ns=2,
        bound_step_ns=1,
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


def with_moments(field: str, moments: Mapping[str, str]) -> Plan:
    changes: dict[str, Any] = {field: moments}
    return a_plan(**changes)


@pytest.mark.parametrize("field", ["release_at", "fetch_at"])
def test_moments_are_sorted_and_read_only(field: str) -> None:
    given = {"up": TURN_END, "act": TURN_START}
    plan = with_moments(field, given)
    given["input"] = "up"
    moments = cast(dict[str, str], getattr(plan, field))
    assert list(moments.items()) == [("act", TURN_START), ("up", TURN_END)]
    with pytest.raises(TypeError, match="does not support item assignment"):
        moments["up"] = "act"


@pytest.mark.parametrize("field", ["release_at", "fetch_at"])
def test_plans_with_other_moments_are_not_equal(field: str) -> None:
    starts, ends = {"up": TURN_START}, {"up": TURN_END}
    assert with_moments(field, starts) != with_moments(field, ends)
    assert hash(with_moments(field, starts)) == hash(with_moments(field, ends))


@pytest.mark.parametrize("field", ["release_at", "fetch_at"])
def test_a_moment_that_is_no_text_is_refused(field: str) -> None:
    assert message_of(form_with(**{field: {"up": 3}})) == (
        f"plan: {field}: up is 3; it must be a text. See docs/formats.md."
    )
    assert message_of(form_with(**{field: ["up"]})) == (
        f'plan: {field} is ["up"]; it must be an object with named fields. See docs/formats.md.'
    )
