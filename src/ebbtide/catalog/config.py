"""A model's shape from the `config.json` that Hugging Face models come with."""

import json
from pathlib import Path
from typing import cast

from ebbtide.catalog.shapes import Experts, Family, Latents, Shape
from ebbtide.files import read_small_text
from ebbtide.naming import plain_name, shorten, unknown_name_message

_LLAMA_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)
FIELDS = {
    "gpt2": ("n_layer", "n_embd", "n_head", "vocab_size"),
    "llama": _LLAMA_FIELDS,
    "mistral": _LLAMA_FIELDS,
    "qwen2": _LLAMA_FIELDS,
    "qwen3": _LLAMA_FIELDS,
    "mixtral": (*_LLAMA_FIELDS, "num_local_experts", "num_experts_per_tok"),
    "qwen3_moe": (*_LLAMA_FIELDS, "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "deepseek_v3": (
        *_LLAMA_FIELDS,
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ),
}
"""What each family's file must have, by `model_type`."""

_MOST = 2**31
"""No field of a real file is as large."""

_MOST_LAYERS = 100_000
"""Layers are gone through one by one."""

_MOST_FILE_BYTES = 16 * 2**20
"""Real files have some kB."""


def read_config(path: Path) -> Shape:
    """Return the shape that a `config.json` describes.

    Raises:
        ValueError: The file cannot be read, its family is not worked out, or a field is missing
            or not a positive whole number; the message says which, and what to give.
    """
    try:
        value = cast(object, json.loads(read_small_text(path, _MOST_FILE_BYTES)))
    except OSError as error:
        raise ValueError(
            f"MODEL {path}: the file cannot be read ({error.strerror}); give an existing file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"MODEL {path}: it is not JSON ({error}); give a config.json") from error
    if not isinstance(value, dict):
        raise ValueError(f"MODEL {path}: it must be an object with fields; give a config.json")
    return _Reader(cast(dict[str, object], value), path).read()


class _Reader:
    def __init__(self, config: dict[str, object], path: Path) -> None:
        self._config, self._path = config, path

    def read(self) -> Shape:
        kind = self._config.get("model_type")
        if not isinstance(kind, str) or kind not in FIELDS:
            given = unknown_name_message("model_type", plain_name(str(kind)), FIELDS)
            raise ValueError(
                f"MODEL {self._path}: {given}. If its layers are built as those of one of them, "
                "give a file with that model_type and its fields, for example llama with "
                f"{', '.join(_LLAMA_FIELDS)}"
            )
        layers = FIELDS[kind][0]
        missing = [name for name in FIELDS[kind] if self._config.get(name) is None]
        if missing:
            raise ValueError(
                f"MODEL {self._path}: a file of {kind} needs {', '.join(missing)} as well; add "
                "them to the file"
            )
        if self._int(layers) > _MOST_LAYERS:
            raise ValueError(
                f"MODEL {self._path}: {layers} is {self._int(layers)}; it must be at most "
                f"{_MOST_LAYERS}. Correct the file"
            )
        return self._gpt2() if kind == "gpt2" else self._llama(kind)

    def _gpt2(self) -> Shape:
        hidden, heads = self._int("n_embd"), self._int("n_head")
        self._refuse_ragged("n_embd", hidden, "n_head", heads)
        return Shape(
            name=self._name,
            family=Family.GPT2,
            num_layers=self._int("n_layer"),
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_width=hidden // heads,
            ffn=self._int("n_inner", 4 * hidden),
            vocab=self._int("vocab_size"),
            num_positions=self._int("n_positions", 1024),
            is_tied=self._bool("tie_word_embeddings", True),
            source=f"{self._path}",
        )

    def _llama(self, kind: str) -> Shape:
        hidden, heads = self._int("hidden_size"), self._int("num_attention_heads")
        kv_heads = self._int("num_key_value_heads", heads)
        self._refuse_ragged("num_attention_heads", heads, "num_key_value_heads", kv_heads)
        latents = None
        if kind == "deepseek_v3":
            latents = Latents(
                query=self._int("q_lora_rank"),
                key_value=self._int("kv_lora_rank"),
                nope=self._int("qk_nope_head_dim"),
                rope=self._int("qk_rope_head_dim"),
                value=self._int("v_head_dim"),
            )
            head_width = latents.nope + latents.rope
        else:
            head_width = self._int("head_dim", 0)
            if not head_width:
                self._refuse_ragged("hidden_size", hidden, "num_attention_heads", heads)
                head_width = hidden // heads
        has_biases = kind in ("llama", "qwen3", "qwen3_moe") and self._bool("attention_bias", False)
        return Shape(
            name=self._name,
            family=Family.DEEPSEEK if kind == "deepseek_v3" else Family.LLAMA,
            num_layers=self._int("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            ffn=self._int("intermediate_size"),
            vocab=self._int("vocab_size"),
            is_tied=self._bool("tie_word_embeddings", False),
            has_head_norms=kind in ("qwen3", "qwen3_moe"),
            has_qkv_bias=kind == "qwen2" or has_biases,
            has_output_bias=has_biases,
            has_mlp_bias=kind == "llama" and self._bool("mlp_bias", False),
            window=self._window(kind),
            latents=latents,
            experts=self._experts(kind),
            source=f"{self._path}",
        )

    def _window(self, kind: str) -> int:
        if kind in ("qwen2", "qwen3", "qwen3_moe"):
            if not self._bool("use_sliding_window", False):
                return 0
            # So many first layers see everything.
            num_full = self._int("max_window_layers", 0)
            if num_full >= self._int("num_hidden_layers"):
                return 0
            self._refuse_other("max_window_layers", 0)
        if kind in ("llama", "deepseek_v3"):
            return 0
        return self._int("sliding_window", 0)

    def _experts(self, kind: str) -> Experts | None:
        experts = self._read_experts(kind)
        if experts is None:
            return None
        self._refuse_other("decoder_sparse_step", 1)
        self._refuse_other("mlp_only_layers", [])
        self._refuse_other("moe_layer_freq", 1)
        self._refuse_more("num_experts_per_tok", experts.num_routed, "the experts of a layer,",
                          experts.num_experts)  # fmt: skip
        self._refuse_more("first_k_dense_replace", experts.num_dense_layers, "num_hidden_layers",
                          self._int("num_hidden_layers"))  # fmt: skip
        return experts

    def _read_experts(self, kind: str) -> Experts | None:
        if kind == "mixtral":
            return Experts(
                num_experts=self._int("num_local_experts"),
                num_routed=self._int("num_experts_per_tok"),
                ffn=self._int("intermediate_size"),
            )
        if kind == "qwen3_moe":
            return Experts(
                num_experts=self._int("num_experts"),
                num_routed=self._int("num_experts_per_tok"),
                ffn=self._int("moe_intermediate_size"),
            )
        if kind != "deepseek_v3":
            return None
        ffn = self._int("moe_intermediate_size")
        return Experts(
            num_experts=self._int("n_routed_experts"),
            num_routed=self._int("num_experts_per_tok"),
            ffn=ffn,
            shared_ffn=ffn * self._int("n_shared_experts", 0),
            num_dense_layers=self._int("first_k_dense_replace", 0),
            has_router_bias=True,
        )

    @property
    def _name(self) -> str:
        given = self._config.get("_name_or_path")
        return plain_name(given if isinstance(given, str) and given else self._path.stem)

    def _int(self, name: str, default: int | None = None) -> int:
        value = self._config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
            if value == 0 and default == 0:
                return 0
            raise ValueError(
                f"MODEL {self._path}: {name} is {_shown(value)}; it must be a whole number "
                f"above 0 and below {_MOST}. Correct the file"
            )
        return value

    def _bool(self, name: str, default: bool) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(
                f"MODEL {self._path}: {name} is {_shown(value)}; it must be true or "
                "false. Correct the file"
            )
        return value

    def _refuse_other(self, name: str, *worked_out: object) -> None:
        """Refuse a field that changes which layers have what, unless it changes nothing."""
        value = self._config.get(name)
        if value is not None and value not in worked_out:
            raise ValueError(
                f"MODEL {self._path}: {name} {_shown(value)} is not worked out, "
                f"only {json.dumps(worked_out[0])}; leave it out to have all layers alike"
            )

    def _refuse_more(self, name: str, number: int, than: str, most: int) -> None:
        if number > most:
            raise ValueError(
                f"MODEL {self._path}: {name} {number} is more than {than} {most}; correct the file"
            )

    def _refuse_ragged(self, name: str, number: int, by: str, divisor: int) -> None:
        if number % divisor:
            raise ValueError(
                f"MODEL {self._path}: {name} {number} does not divide by {by} {divisor}; correct "
                "the file"
            )


def _shown(value: object) -> str:
    try:
        return shorten(json.dumps(value))
    except RecursionError:
        return f"{type(value).__name__} of many in each other"
