"""Models by published shape: the figures of their configuration files.

Numbers of parameters are what the shapes add up to; the tests have them from the model cards or
from counting the parameters of the classes in transformers.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ebbtide.catalog.shapes import Experts, Family, Latents, Shape
from ebbtide.errors import PlanError
from ebbtide.naming import unknown_name_message


def _gpt2(name: str, num_layers: int, hidden: int, heads: int) -> Shape:
    return Shape(
        name=name,
        family=Family.GPT2,
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_width=hidden // heads,
        ffn=4 * hidden,
        vocab=50_257,
        num_positions=1024,
        is_tied=True,
        source=(
            "Radford et al., Language Models are Unsupervised Multitask Learners (2019); "
            f"config.json of openai-community/{name}."
        ),
    )


def _llama(
    name: str,
    num_layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    *,
    source: str,
    head_width: int = 0,
    is_tied: bool = False,
    has_head_norms: bool = False,
    experts: Experts | None = None,
) -> Shape:
    return Shape(
        name=name,
        family=Family.LLAMA,
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width or hidden // heads,
        ffn=ffn,
        vocab=vocab,
        is_tied=is_tied,
        has_head_norms=has_head_norms,
        experts=experts,
        source=source,
    )


_LLAMA_2 = "Touvron et al., 2307.09288; config.json of meta-llama/Llama-2-*-hf."
_LLAMA_3 = "Grattafiori et al., The Llama 3 Herd of Models, 2407.21783, table 3."
_QWEN3 = "Qwen3 Technical Report, 2505.09388, tables 1 and 2; config.json of Qwen/Qwen3-*."
_MISTRAL = "Jiang et al., 2310.06825; config.json of mistralai/Mistral-7B-v0.3."
_MIXTRAL = "Jiang et al., Mixtral of Experts, 2401.04088; config.json of mistralai/Mixtral-*."
_SMOLLM2 = "Allal et al., SmolLM2, 2502.02737; config.json of HuggingFaceTB/SmolLM2-*."


def _qwen3(
    name: str, num_layers: int, hidden: int, ffn: int, heads: int, *, is_tied: bool
) -> Shape:
    return _llama(
        name,
        num_layers,
        hidden,
        ffn,
        heads,
        8,
        151_936,
        head_width=128,
        is_tied=is_tied,
        has_head_norms=True,
        source=_QWEN3,
    )


_ALL: Iterable[Shape] = (
    _gpt2("gpt2", 12, 768, 12),
    _gpt2("gpt2-medium", 24, 1024, 16),
    _gpt2("gpt2-large", 36, 1280, 20),
    _gpt2("gpt2-xl", 48, 1600, 25),
    _llama("llama-2-7b", 32, 4096, 11_008, 32, 32, 32_000, source=_LLAMA_2),
    _llama("llama-2-13b", 40, 5120, 13_824, 40, 40, 32_000, source=_LLAMA_2),
    _llama("llama-2-70b", 80, 8192, 28_672, 64, 8, 32_000, source=_LLAMA_2),
    _llama("llama-3-8b", 32, 4096, 14_336, 32, 8, 128_256, source=_LLAMA_3),
    _llama("llama-3-70b", 80, 8192, 28_672, 64, 8, 128_256, source=_LLAMA_3),
    _llama("llama-3.1-8b", 32, 4096, 14_336, 32, 8, 128_256, source=_LLAMA_3),
    _llama("llama-3.1-70b", 80, 8192, 28_672, 64, 8, 128_256, source=_LLAMA_3),
    _llama("llama-3.1-405b", 126, 16_384, 53_248, 128, 8, 128_256, source=_LLAMA_3),
    _qwen3("qwen3-0.6b", 28, 1024, 3072, 16, is_tied=True),
    _qwen3("qwen3-1.7b", 28, 2048, 6144, 16, is_tied=True),
    _qwen3("qwen3-4b", 36, 2560, 9728, 32, is_tied=True),
    _qwen3("qwen3-8b", 36, 4096, 12_288, 32, is_tied=False),
    _qwen3("qwen3-14b", 40, 5120, 17_408, 40, is_tied=False),
    _qwen3("qwen3-32b", 64, 5120, 25_600, 64, is_tied=False),
    _llama(
        "qwen3-30b-a3b",
        48,
        2048,
        6144,
        32,
        4,
        151_936,
        head_width=128,
        has_head_norms=True,
        source=_QWEN3,
        experts=Experts(num_experts=128, num_routed=8, ffn=768),
    ),
    _llama("mistral-7b", 32, 4096, 14_336, 32, 8, 32_768, source=_MISTRAL),
    _llama(
        "mixtral-8x7b",
        32,
        4096,
        14_336,
        32,
        8,
        32_000,
        source=_MIXTRAL,
        experts=Experts(num_experts=8, num_routed=2, ffn=14_336),
    ),
    _llama(
        "mixtral-8x22b",
        56,
        6144,
        16_384,
        48,
        8,
        32_768,
        source=_MIXTRAL,
        experts=Experts(num_experts=8, num_routed=2, ffn=16_384),
    ),
    Shape(
        name="deepseek-v3-671b",
        family=Family.DEEPSEEK,
        num_layers=61,
        hidden=7168,
        heads=128,
        kv_heads=128,
        head_width=192,
        ffn=18_432,
        vocab=129_280,
        latents=Latents(query=1536, key_value=512, nope=128, rope=64, value=128),
        experts=Experts(
            num_experts=256,
            num_routed=8,
            ffn=2048,
            shared_ffn=2048,
            num_dense_layers=3,
            has_router_bias=True,
        ),
        source=(
            "DeepSeek-V3 Technical Report, 2412.19437, section 4.2; config.json of "
            "deepseek-ai/DeepSeek-V3. Without the layer for multi-token prediction."
        ),
    ),
    _llama("smollm2-135m", 30, 576, 1536, 9, 3, 49_152, is_tied=True, source=_SMOLLM2),
    _llama("smollm2-360m", 32, 960, 2560, 15, 5, 49_152, is_tied=True, source=_SMOLLM2),
    _llama("smollm2-1.7b", 24, 2048, 8192, 32, 32, 49_152, is_tied=True, source=_SMOLLM2),
)

MODELS: Mapping[str, Shape] = MappingProxyType({shape.name: shape for shape in _ALL})
"""Name to shape; read-only."""


def find_model(name: str) -> Shape:
    """Return the model of the catalog with this name.

    Raises:
        PlanError: There is none; the message lists the names, nearest first.
    """
    if name not in MODELS:
        raise PlanError(
            f"{unknown_name_message('model', name, MODELS)}. "
            "Name one of these, or give the path of a config.json."
        )
    return MODELS[name]
