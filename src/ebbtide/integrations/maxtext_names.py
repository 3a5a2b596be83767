"""Which values MaxText names in which decoder, and what its presets do with them.

Read in MaxText 0.2.5 (`layers/` and `models/`, each `checkpoint_name`; `configs/types.py`, the
list that `remat_policy: custom` reads; `layers/nnx_decoders.py`, the presets). A name that a
decoder does not give is ignored there without a word (AI-Hypercomputer/maxtext#4990).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self, TypeVar

from ebbtide.errors import PlanError
from ebbtide.naming import unknown_name_message

Setting = TypeVar("Setting", str, int, bool)

LAYER_INPUT = "decoder_layer_input"
"""The carry of the scan over layers. It is kept or offloaded, never recomputed."""

KEYS = (
    LAYER_INPUT,
    "indexer_cutoff_threshold",
    "context",
    "mlpwi",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
    "moe_mlpwi_0",
    "moe_mlpwi_1",
    "moe_mlpwo",
    "moe_x_sorted",
    "moe_routing_maps",
    "query_proj",
    "key_proj",
    "value_proj",
    "kv_proj",
    "qkv_proj",
    "out_proj",
    "query_wa_proj",
    "kv_wa_proj",
    "mla_q",
    "mla_kv",
    "attention_out",
)
"""What `remat_policy: custom` reads."""

DEAD_KEYS = frozenset({"engram"})
"""In MaxText's configuration, and read by nothing."""

INNER_NAMES: Mapping[str, str] = MappingProxyType(
    {"moe_mlpwi_0": "mlpwi_0", "moe_mlpwo": "mlpwo"},
)
"""Names of experts to the name that the same value has as well, inside."""

_QKV = ("query_proj", "key_proj", "value_proj", "kv_proj")
_DOTS_EXCEPT_MLP = (*_QKV, "qkv_proj", "out_proj")
_MINIMAL = (*_DOTS_EXCEPT_MLP, "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo")

SAVING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "full": (),
        "minimal": _MINIMAL,
        "minimal_with_context": (*_MINIMAL, "context"),
        "minimal_flash": (*_MINIMAL, "context"),
        "minimal_with_quantization": _MINIMAL,
        "minimal_with_context_and_quantization": (*_MINIMAL, "context"),
        "save_dot_with_context_except_mlp": (*_DOTS_EXCEPT_MLP, "context"),
        "save_dot_except_mlpwi": (*_DOTS_EXCEPT_MLP, "mlpwo"),
        "save_dot_except_mlp": _DOTS_EXCEPT_MLP,
        "save_qkv_proj": (*_QKV, "qkv_proj"),
        "save_out_proj": ("out_proj",),
    }
)
"""Presets that keep names on the device, and recompute all else."""

# The first does not name the fused projection: with `fused_qkv` it offloads nothing.
OFFLOADING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv_proj_offloaded": _QKV, "minimal_offloaded": _MINIMAL}
)
"""Presets that offload names, and recompute all else."""

DECODERS = (
    "default",
    "llama2",
    "mistral",
    "mixtral",
    "deepseek",
    "deepseek4",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_small",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_custom_moe",
    "qwen3_next",
    "qwen3_5",
    "gpt3",
    "gpt_oss",
    "simple",
    "simple_mlp",
    "llama4",
    "olmo3",
    "envy",
)
"""What `decoder_block` may be."""

_NAMELESS = frozenset({"simple", "simple_mlp"})
_WITHOUT_LAYER_INPUT = _NAMELESS | {"qwen3_next", "qwen3_5"}

# With experts these have no dense layer and no shared expert that is a dense MLP.
_EXPERTS_ALONE = frozenset({"mixtral", "qwen3_moe", "qwen3_custom_moe", "gpt_oss"})
_MAY_HAVE_EXPERTS = _EXPERTS_ALONE | {
    *("deepseek", "deepseek4", "llama4", "gemma4", "qwen3_next", "qwen3_5", "envy"),
}

# The kernels of a GPU whose residuals, output and log-sum-exp alike, are named `context`.
_NAMING_KERNELS = frozenset({"cudnn_flash_te", "cudnn_flash_jax"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTextModel:
    """The settings on which it depends what a decoder names. Defaults are MaxText's.

    Raises:
        PlanError: `decoder_block` is not one of `DECODERS`.
    """

    decoder_block: str = "llama2"
    """The kind of layer."""
    attention: str = "autoselected"
    """The attention kernel."""
    attention_type: str = "global"
    """`mla` and `compressed` have names of their own."""
    hardware: str = "tpu"
    """On a TPU the splash kernel names its residuals."""
    fused_qkv: bool = False
    """Query, key and value are one product."""
    fused_mlp: bool = False
    """Gate and up are one product."""
    num_mlp_activations: int = 2
    """Length of `mlp_activations`; with one the MLP has no gate."""
    num_experts: int = 1
    """More than one: a mixture of experts, where the decoder has it."""
    sparse_matmul: bool = True
    """Experts by ragged products; without, by dense ones, which also name `mlpwi_1`."""
    q_lora_rank: int = 0
    """MLA: more than 0, if queries have a low rank."""
    use_indexer: bool = False
    """MLA with sparse attention."""

    def __post_init__(self) -> None:
        if self.decoder_block not in DECODERS:
            raise PlanError(unknown_name_message("decoder_block", self.decoder_block, DECODERS))

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Read the settings from a MaxText configuration; what is left out is MaxText's default.

        A `model_name` is not looked up: give the model's own settings as well.

        Raises:
            PlanError: A setting has the wrong type, or the decoder is unknown.
        """
        activations = config.get("mlp_activations", ["silu", "linear"])
        if not isinstance(activations, list):
            raise PlanError(
                f"mlp_activations is {activations!r}; it must be a list such as [silu, linear]."
            )
        return cls(
            decoder_block=_read(config, "decoder_block", "llama2"),
            attention=_read(config, "attention", "autoselected"),
            attention_type=_read(config, "attention_type", "global"),
            hardware=_read(config, "hardware", "tpu"),
            fused_qkv=_read(config, "fused_qkv", False),
            fused_mlp=_read(config, "fused_mlp", False),
            num_mlp_activations=len(activations),
            num_experts=_read(config, "num_experts", 1),
            sparse_matmul=_read(config, "sparse_matmul", True),
            q_lora_rank=_read(config, "q_lora_rank", 0),
            use_indexer=_read(config, "use_indexer", False),
        )

    @property
    def has_experts(self) -> bool:
        """Whether there are layers with experts."""
        return self.num_experts > 1 and self.decoder_block in _MAY_HAVE_EXPERTS

    @property
    def names(self) -> frozenset[str]:
        """Every name that some layer of the model gives to a value."""
        if self.decoder_block in _NAMELESS:
            return frozenset()
        return frozenset(
            {
                *(() if self.decoder_block in _WITHOUT_LAYER_INPUT else (LAYER_INPUT,)),
                *self._attention_names(),
                *self._mlp_names(),
                *self._expert_names(),
            }
        )

    def _attention_names(self) -> set[str]:
        names = {"attention_out", "out_proj"}
        is_splash = self.hardware == "tpu" and self.attention in ("autoselected", "flash")
        if is_splash or self.attention in _NAMING_KERNELS:
            names.add("context")
        if self.attention_type == "mla":
            names |= {"kv_wa_proj", "mla_kv", "query_proj", "key_proj", "value_proj"}
            names |= {"query_wa_proj", "mla_q"} if self.q_lora_rank > 0 else set()
            names |= {"indexer_cutoff_threshold"} if self.use_indexer else set()
        elif self.attention_type == "compressed" or self.decoder_block == "deepseek4":
            names |= {"query_proj", "kv_proj"}
        elif self.fused_qkv:
            names.add("qkv_proj")
        else:
            names |= {"query_proj", "key_proj", "value_proj"}
        if self.decoder_block == "gpt3":
            names.discard("attention_out")
        return names

    def _mlp_names(self) -> set[str]:
        if self.has_experts and self.decoder_block in _EXPERTS_ALONE:
            return set()
        if self.fused_mlp or self.num_mlp_activations == 1:
            return {"mlpwi", "mlpwo"}
        return {"mlpwi_0", "mlpwi_1", "mlpwo"}

    def _expert_names(self) -> set[str]:
        if not self.has_experts:
            return set()
        names = {"moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", *INNER_NAMES.values()}
        return names | ({"moe_x_sorted", "moe_routing_maps"} if self.sparse_matmul else {"mlpwi_1"})


def _read(config: Mapping[str, object], name: str, default: Setting) -> Setting:
    value = config.get(name, default)
    kind = type(default)
    if type(value) is not kind:
        raise PlanError(f"{name} is {value!r}; MaxText wants a value such as {default!r} there.")
    return value
