import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.catalog.config import read_config
from ebbtide.catalog.models import MODELS

# As the models' own files have them.
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "sliding_window": None,
    "vocab_size": 32000,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA_3_8B, "llama-3-8b"),
        (QWEN3_30B, "qwen3-30b-a3b"),
        (DEEPSEEK_V3, "deepseek-v3-671b"),
        (MIXTRAL, "mixtral-8x7b"),
        (GPT2, "gpt2"),
    ],
)
def test_a_published_file_is_the_model_of_the_catalog(
    tmp_path: Path, config: dict[str, Any], name: str
) -> None:
    shape = read_config(write(tmp_path, config))
    known = MODELS[name]
    assert replace(shape, name=known.name, source=known.source) == known


def test_a_window_and_biases_are_read(tmp_path: Path) -> None:
    mistral = read_config(
        write(tmp_path, {**LLAMA_3_8B, "model_type": "mistral", "sliding_window": 4096})
    )
    assert mistral.window == 4096
    qwen2 = read_config(write(tmp_path, {**LLAMA_3_8B, "model_type": "qwen2"}))
    assert qwen2.num_parameters == MODELS["llama-3-8b"].num_parameters + 32 * (4096 + 2 * 1024)


def test_biases_and_a_head_of_its_own_are_counted(tmp_path: Path) -> None:
    plain = MODELS["llama-3-8b"].num_parameters
    attention = read_config(write(tmp_path, {**LLAMA_3_8B, "attention_bias": True}))
    assert attention.num_parameters == plain + 32 * (4096 + 2 * 1024 + 4096)
    mlp = read_config(write(tmp_path, {**LLAMA_3_8B, "mlp_bias": True}))
    assert mlp.num_parameters == plain + 32 * (2 * 14_336 + 4096)
    untied = read_config(write(tmp_path, {**GPT2, "tie_word_embeddings": False}))
    assert untied.num_parameters == MODELS["gpt2"].num_parameters + 50_257 * 768


def test_a_window_of_some_layers_alone_is_refused_and_of_none_is_none(tmp_path: Path) -> None:
    config = {**LLAMA_3_8B, "model_type": "qwen2", "use_sliding_window": True,
              "sliding_window": 4096}  # fmt: skip
    assert read_config(write(tmp_path, {**config, "max_window_layers": 0})).window == 4096
    assert read_config(write(tmp_path, {**config, "max_window_layers": 32})).window == 0
    with pytest.raises(ValueError, match="max_window_layers 28 is not worked out, only 0"):
        read_config(write(tmp_path, {**config, "max_window_layers": 28}))


def test_a_mark_of_the_byte_order_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("\ufeff" + json.dumps(LLAMA_3_8B), encoding="utf-8")
    assert read_config(path).num_parameters == MODELS["llama-3-8b"].num_parameters


def test_names_are_printable_and_not_endless(tmp_path: Path) -> None:
    given = {**LLAMA_3_8B, "_name_or_path": "a\x1b[31m\n" + "b" * 100_000}
    name = read_config(write(tmp_path, given)).name
    assert name.startswith("a?[31m?bbb") and name.endswith("b...")
    assert len(name) == 80


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the file has more than 16.0 MiB"):
        read_config(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the experts"),
        ({**QWEN3_30B, "decoder_sparse_step": 2}, "decoder_sparse_step 2 is not worked out"),
        ({**QWEN3_30B, "mlp_only_layers": [3]}, "mlp_only_layers [3] is not worked out, only []"),
        ({**DEEPSEEK_V3, "moe_layer_freq": 2}, "moe_layer_freq 2 is not worked out, only 1"),
        ({**DEEPSEEK_V3, "first_k_dense_replace": 62}, "62 is more than num_hidden_layers 61"),
        ({**LLAMA_3_8B, "tie_word_embeddings": "yes"}, "it must be true or false"),
        ({**LLAMA_3_8B, "attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({**LLAMA_3_8B, "hidden_size": float("nan")}, "hidden_size is NaN; it must be a whole"),
        ({**LLAMA_3_8B, "hidden_size": 2**31}, "above 0 and below 2147483648"),
        ({**LLAMA_3_8B, "hidden_size": "x" * 9999}, 'hidden_size is "xxx'),
        ({**LLAMA_3_8B, "model_type": "gemma3"}, "unknown model_type 'gemma3'; valid names"),
        ({**LLAMA_3_8B, "model_type": "gemma3"}, "for example llama with num_hidden_layers, hid"),
        ({"hidden_size": 4096}, "unknown model_type 'None'"),
        ({"model_type": "llama", "hidden_size": 1}, "needs num_hidden_layers, intermediate_size,"),
        ({**LLAMA_3_8B, "hidden_size": -4096}, "hidden_size is -4096; it must be a whole number"),
        ({**LLAMA_3_8B, "hidden_size": "big"}, 'hidden_size is "big"; it must be a whole number'),
        ({**LLAMA_3_8B, "num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole"),
        ({**LLAMA_3_8B, "num_attention_heads": 31}, "num_attention_heads 31 does not divide by"),
        ([1, 2], "it must be an object with fields"),
    ],
)
def test_what_is_missing_or_wrong_is_named(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"^MODEL ") as caught:
        read_config(write(tmp_path, config))
    assert message in str(caught.value)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="it is not JSON"):
        read_config(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_config(tmp_path)
