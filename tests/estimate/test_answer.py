from dataclasses import replace

from ebbtide.catalog.models import MODELS
from ebbtide.estimate.answer import MEASURED_ERROR, make_answer
from ebbtide.estimate.setup import Degrees, Dtype, Setup
from ebbtide.estimate.strategies import Strategy
from tests.estimate.asking import ask

LLAMA = Setup(shape=replace(MODELS["llama-3-8b"], num_layers=2), context=1024, batch=1)
DEEPSEEK = Setup(
    shape=replace(MODELS["deepseek-v3-671b"], num_layers=4),
    context=1024,
    batch=1,
    degrees=Degrees(fsdp=4, ep=8, pp=2),
)


def test_a_layer_is_listed_by_name_and_its_bytes_are_what_is_saved() -> None:
    answer = make_answer(ask(LLAMA))
    assert list(answer.per_layer) == ["dense"]
    sizes = answer.per_layer["dense"]
    stream = 1024 * 4096 * 2
    assert sizes["input"] == sizes["residual"] == sizes["self_attn.q_proj"] == stream
    assert sizes["self_attn.k_proj"] == stream // 4
    assert sizes["mlp.product"] == 1024 * 14_336 * 2
    # 136.1 KiB a token: 12h + 4gh + 6f bytes, and 4 for each head.
    assert sum(sizes.values()) == 1024 * (12 * 4096 + 4 * 1024 + 6 * 14_336 + 4 * 32)


def test_kinds_of_layers_are_listed_from_all_stages() -> None:
    # Of four layers three are dense: the stages have two dense ones, and one of each.
    answer = make_answer(ask(DEEPSEEK, "gb200-nvl72"))
    assert list(answer.per_layer) == ["dense", "experts"]
    assert "mlp.gate_proj" in answer.per_layer["dense"]
    assert "mlp.experts.gate_proj" in answer.per_layer["experts"]


def test_assumptions_are_those_of_the_question() -> None:
    plain = make_answer(ask(LLAMA)).assumptions
    assert MEASURED_ERROR in plain
    assert "one device: no collectives" in plain
    assert any("products at 653 TFLOP/s" in text for text in plain)
    assert not any("expert" in text or "fp8" in text for text in plain)
    gpt2 = replace(LLAMA, shape=replace(MODELS["gpt2"], num_layers=2))
    assert not any("positions" in text for text in make_answer(ask(gpt2)).assumptions)
    longer = make_answer(ask(replace(gpt2, context=2048))).assumptions
    assert any("published with positions for 1024 tokens" in text for text in longer)
    fp8 = make_answer(ask(replace(LLAMA, dtype=Dtype.FP8))).assumptions
    assert any(text.startswith("fp8 makes products faster") for text in fp8)
    experts = make_answer(ask(DEEPSEEK, "vera-rubin")).assumptions
    assert any("every expert gets as many tokens" in text for text in experts)
    assert any("collectives at 1440 GB/s among 72 devices" in text for text in experts)
    assert any("peak" in text and "not confirmed" in text for text in experts)


def test_the_answer_has_a_row_for_each_strategy_and_the_whole_models_parameters() -> None:
    answer = make_answer(ask(DEEPSEEK, "gb200-nvl72"))
    assert [row.strategy for row in answer.rows] == list(Strategy)
    assert answer.num_parameters == DEEPSEEK.shape.num_parameters
    assert answer.peak_flops_per_s == 2500 * 10**12
