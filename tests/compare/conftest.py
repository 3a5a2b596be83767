"""A model small enough to train in every test, and a text for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TINY_POSITIONS = 512


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of four blocks and 256 byte-sized tokens."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            max_position_embeddings=TINY_POSITIONS,
        )
    )
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with 16,000 characters of ASCII."""
    lines = [f"{number}: the tide goes out and comes back." for number in range(1000)]
    path = tmp_path_factory.mktemp("texts") / "tide.txt"
    path.write_text("\n".join(lines)[:16_000], encoding="utf-8")
    return path


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Models this small take several times as long when threads wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(num_threads)
