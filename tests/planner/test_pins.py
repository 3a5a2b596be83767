"""Patterns over activation names, and what is refused."""

import pytest

from ebbtide.errors import PlanError
from ebbtide.plan import Decision
from ebbtide.planner.pins import resolve_pins
from tests.corpus import CORPUS

KEEP, HOST, DISK, RECOMPUTE = Decision.KEEP, Decision.HOST, Decision.DISK, Decision.RECOMPUTE
WORKLOAD = CORPUS["llama-8b-x8/8k"]


def test_without_patterns_nothing_is_pinned() -> None:
    assert resolve_pins(None, WORKLOAD) == {}
    assert resolve_pins({}, WORKLOAD) == {}


def test_a_star_matches_that_activation_of_every_block() -> None:
    assert resolve_pins({"*.mlp.gate_proj": "HOST"}, WORKLOAD) == {
        f"model.layers.{index}.mlp.gate_proj": HOST for index in range(8)
    }


def test_patterns_are_those_of_a_shell() -> None:
    pins = resolve_pins({"model.layers.[0-2].self_attn.?_proj": KEEP}, WORKLOAD)
    assert pins == {
        f"model.layers.{index}.self_attn.{letter}_proj": KEEP
        for index in range(3)
        for letter in "qkvo"
    }


def test_a_later_pattern_wins() -> None:
    first, last = "model.layers.0.mlp.product", "model.layers.7.mlp.product"
    pins = resolve_pins({"*.mlp.product": RECOMPUTE, last: "KEEP"}, WORKLOAD)
    assert (pins[first], pins[last], len(pins)) == (RECOMPUTE, KEEP, 8)
    pins = resolve_pins({last: "KEEP", "*.mlp.product": "RECOMPUTE"}, WORKLOAD)
    assert pins[last] is RECOMPUTE


@pytest.mark.parametrize("given", ["DISK", "disk", "Disk", DISK])
def test_a_decision_may_be_named_in_any_case(given: str | Decision) -> None:
    name = "model.layers.3.residual"
    assert resolve_pins({name: given}, WORKLOAD) == {name: DISK}


def test_case_matters_in_names() -> None:
    with pytest.raises(PlanError, match="matches no activation"):
        resolve_pins({"*.MLP.product": KEEP}, WORKLOAD)


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(PlanError) as raised:
        resolve_pins({"model.layers.5.mlp.gate_prj": "KEEP"}, WORKLOAD)
    message = str(raised.value)
    assert message.startswith(
        "decide: the pattern 'model.layers.5.mlp.gate_prj' matches no activation of "
        "LlamaForCausalLM; the nearest are model.layers.5.mlp.gate_proj, "
    )
    # A model has hundreds.
    assert message.count("model.layers.") == 1 + 5


def test_an_unknown_decision_names_the_known_ones() -> None:
    with pytest.raises(PlanError) as raised:
        resolve_pins({"*.residual": "RECOMPUT"}, WORKLOAD)
    assert str(raised.value) == (
        "decide: pattern '*.residual': unknown decision 'RECOMPUT'; valid names, nearest first: "
        "RECOMPUTE, HOST, KEEP, DISK"
    )


def test_an_input_cannot_be_recomputed() -> None:
    with pytest.raises(PlanError) as raised:
        resolve_pins({"model.layers.0.input": "RECOMPUTE"}, WORKLOAD)
    assert str(raised.value) == (
        "decide: 'model.layers.0.input' cannot be recomputed: it matches kind input only, and "
        "inputs, random ops and unknown ops are never run again. Pin it to KEEP or HOST."
    )


def test_what_a_random_op_made_cannot_be_recomputed() -> None:
    name = "transformer.h.0.mlp.dropout:mask"
    with pytest.raises(PlanError, match=f"'{name}' cannot be recomputed: it matches kind random"):
        resolve_pins({name: RECOMPUTE}, CORPUS["gpt2/8k"])


def test_a_wide_pattern_recomputes_what_can_be_and_leaves_the_rest_free() -> None:
    pins = resolve_pins({"model.layers.0.*": RECOMPUTE}, WORKLOAD)
    block = WORKLOAD.blocks[0]
    assert pins == {a.name: RECOMPUTE for a in block.activations if a.is_replayable}
    assert "model.layers.0.input" not in pins


def test_a_pattern_of_which_nothing_can_be_recomputed_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'\*\.input' cannot be recomputed: it matches kind input"):
        resolve_pins({"*.input": RECOMPUTE}, WORKLOAD)


def test_the_outputs_of_one_call_are_all_recomputed_or_none() -> None:
    out, lse = "model.layers.0.self_attn:out", "model.layers.0.self_attn:lse"
    with pytest.raises(PlanError) as raised:
        resolve_pins({"*.self_attn:out": KEEP, "*.self_attn:lse": RECOMPUTE}, WORKLOAD)
    assert str(raised.value) == (
        f"decide: {out} and {lse} are made by one op call, and KEEP and RECOMPUTE were asked for; "
        "either all of a call's outputs are recomputed or none. Pin them alike."
    )
    # They may lie on different tiers, and a later pattern may set it right.
    assert resolve_pins({out: KEEP, lse: HOST}, WORKLOAD) == {out: KEEP, lse: HOST}
    assert resolve_pins({out: KEEP, lse: RECOMPUTE, "*.0.self_attn:*": RECOMPUTE}, WORKLOAD) == {
        out: RECOMPUTE,
        lse: RECOMPUTE,
    }
