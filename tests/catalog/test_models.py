import json
from typing import cast

import pytest

from ebbtide.catalog.models import MODELS, find_model
from ebbtide.catalog.shapes import Shape
from ebbtide.errors import PlanError

# As the model cards and counting the parameters of the classes in transformers give them.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    # With the routers' biases, which transformers counts as buffers.
    "deepseek-v3-671b": 671_026_419_200,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


def test_every_model_has_as_many_parameters_as_published() -> None:
    assert {name: shape.num_parameters for name, shape in MODELS.items()} == PARAMETERS


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_found_by_name_and_names_its_source(name: str) -> None:
    assert find_model(name) is MODELS[name]
    assert find_model(name).name == name
    assert len(find_model(name).source) > 30


def test_an_unknown_model_lists_the_known_ones_nearest_first() -> None:
    with pytest.raises(PlanError, match=r"unknown model 'llama-3.1-8B'.*first: llama-3.1-8b, "):
        find_model("llama-3.1-8B")


def test_the_catalog_is_read_only() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        cast(dict[str, Shape], MODELS)["mine"] = MODELS["gpt2"]


def test_the_active_parameters_of_experts_are_the_published_ones() -> None:
    # DeepSeek-V3: 37e9 active of 671e9; Qwen3-30B-A3B: 3.3e9 of 30.5e9; Mixtral: 12.9e9 of 46.7e9.
    for name, billions in (("deepseek-v3-671b", 37.5), ("qwen3-30b-a3b", 3.3),
                           ("mixtral-8x7b", 12.9)):  # fmt: skip
        shape = MODELS[name]
        assert shape.experts is not None
        experts = sum(shape.layer_parameters(i).experts for i in range(shape.num_layers))
        idle = experts * (1 - shape.experts.num_routed / shape.experts.num_experts)
        assert (shape.num_parameters - idle) / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_catalog_is_ascii() -> None:
    assert json.dumps([shape.source for shape in MODELS.values()]).isascii()
