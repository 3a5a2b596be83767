import pytest

from ebbtide.catalog.form import Form, Implementation
from ebbtide.catalog.layers import make_layer
from ebbtide.catalog.maxtext import MAXTEXT_NAMES, maxtext_name, resolve_names
from ebbtide.catalog.models import MODELS


def names_of(model: str, implementation: Implementation = Implementation.FUSED) -> set[str]:
    form = Form(tokens=16, context=16, implementation=implementation)
    layers = (0, MODELS[model].num_layers - 1)
    return {
        name
        for layer in layers
        for call in make_layer(MODELS[model], layer, form).calls
        for name in call.names
    }


def test_every_name_of_maxtext_is_an_activation_of_some_model() -> None:
    have = set[str]().union(*(names_of(m) for m in ("gpt2", "llama-3-8b", "deepseek-v3-671b")))
    have |= names_of("llama-3-8b", Implementation.EAGER)
    assert {name for ours in MAXTEXT_NAMES.values() for name in ours} <= have
    assert [name for name, ours in MAXTEXT_NAMES.items() if not have & set(ours)] == []


@pytest.mark.parametrize(
    ("model", "name", "ours"),
    [
        ("llama-3-8b", "query_proj", {".self_attn.q_proj"}),
        ("llama-3-8b", "context", {".self_attn:out", ".self_attn:lse"}),
        ("llama-3-8b", "decoder_layer_input", {".input"}),
        ("gpt2", "qkv_proj", {".attn.c_attn"}),
        ("deepseek-v3-671b", "query_proj", {".self_attn.q_b_proj"}),
        ("deepseek-v3-671b", "kv_wa_proj", {".self_attn.kv_a_proj"}),
        ("deepseek-v3-671b", "moe_mlpwi_0", {".mlp.experts.gate_proj"}),
        ("deepseek-v3-671b", "mlpwi_0", {".mlp.gate_proj", ".mlp.shared_experts.gate_proj"}),
        ("llama-3-8b", "mlp.product", {".mlp.product"}),
    ],
)
def test_a_name_is_these_of_ours(model: str, name: str, ours: set[str]) -> None:
    assert resolve_names([name], names_of(model)) == ours


def test_op_by_op_the_query_is_named_after_its_rotation() -> None:
    have = names_of("llama-3-8b", Implementation.EAGER)
    assert resolve_names(["query_proj"], have) == {".self_attn.q_proj:rotary"}
    assert resolve_names(["self_attn.q_proj"], have) == {".self_attn.q_proj"}


def test_a_name_that_the_model_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"--offload engram: the model's layers have no such"):
        resolve_names(["engram"], names_of("llama-3-8b"))
    with pytest.raises(ValueError, match=r"unknown name 'quer_proj'.*first: query_proj,"):
        resolve_names(["quer_proj"], names_of("llama-3-8b"))


def test_ours_are_named_in_maxtexts_words() -> None:
    assert maxtext_name(".mlp.experts.down_proj") == "moe_mlpwo"
    assert maxtext_name(".mlp.product") == ""
