"""What every row shares is resolved once: model, windows, device, facts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ebbtide.compare.jax.prepare import find_jax_encoder, find_jax_model, prepare_jax_setup
from tests.compare.jax.test_request import REQUEST


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "tide.txt"
    path.write_text("the tide goes out and comes back. " * 100, encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_setup_has_windows_for_every_step_and_the_facts(text: Path, tmp_path: Path) -> None:
    request = replace(REQUEST, text=text, context=16, batch=2, steps=3, device="cpu")
    setup = prepare_jax_setup(request, tmp_path)
    tokens = np.load(setup.tokens)
    # One warm-up step and three counted ones, of two sequences each.
    assert tokens["train"].shape == (2 * (1 + 3), 16)
    content = text.read_bytes()
    assert tokens["train"].flatten().tolist() == list(content[: 8 * 16])
    assert tokens["held_out"].shape == (1, 16)
    facts = setup.facts
    assert (facts.framework, facts.context, facts.batch, facts.steps) == ("jax", 16, 2, 3)
    assert (facts.dtype, facts.held_out_tokens) == ("float32", 16)
    assert facts.state_bytes == 4 * 4 * facts.parameters
    assert "on a CPU what is offloaded stays" in facts.memory_meaning
    assert setup.host_bytes is None and not setup.device.is_gpu
    with pytest.raises(ValueError, match="--host 1GiB: on a CPU the host's memory"):
        prepare_jax_setup(replace(request, host="1GiB"), tmp_path)
    with pytest.raises(ValueError, match=r"--context 10000000: the model .* positions; give"):
        prepare_jax_setup(replace(request, context=10_000_000), tmp_path)


def test_a_model_is_a_shape_with_layers_or_a_folder_without(tmp_path: Path) -> None:
    source = find_jax_model("llama-tiny-shape", 2)
    assert (source.name, source.layers, source.folder) == ("llama-tiny-shape", 2, "")
    assert source.title.endswith("2 layers, random weights")
    (tmp_path / "mine").mkdir()
    folder = find_jax_model(str(tmp_path / "mine"), None)
    assert (folder.name, folder.title) == ("", "mine")
    assert folder.folder == str((tmp_path / "mine").resolve())
    with pytest.raises(ValueError, match=r"--layers 2 was given with --model .*; leave --layers"):
        find_jax_model(str(tmp_path / "mine"), 2)


def test_without_a_tokenizer_text_is_bytes() -> None:
    source = find_jax_model("llama-tiny-shape", 2)
    encode, title = find_jax_encoder(source, 100)
    assert encode("az") == [97, 22]
    assert title == "byte level (ids are UTF-8 bytes modulo 100)"
    encode, title = find_jax_encoder(source, 300)
    assert encode("az") == [97, 122]
    assert title == "byte level (ids are UTF-8 bytes)"
