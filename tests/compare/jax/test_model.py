"""A language model as functions of its parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ebbtide.compare.jax.layers import AttentionKind
from ebbtide.compare.jax.model import SPREAD, LanguageModel, Params, count_params, shapes_of_one
from ebbtide.compare.jax.shapes import choose_shape, count_parameters

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    shape = choose_shape("llama-tiny-shape", 2)
    return LanguageModel(shape, attention=AttentionKind.REFERENCE, dtype=jnp.float32)


def test_weights_are_drawn_by_the_seed_and_are_as_many_as_the_shape_says(
    model: LanguageModel,
) -> None:
    params = model.draw_params(3)
    assert count_params(params) == count_parameters(model.shape)
    again, other = model.draw_params(3), model.draw_params(4)
    first, second, third = (jax.tree.leaves(p) for p in (params, again, other))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, third, strict=True))
    kernel = np.asarray(params["layers"]["mlp"]["gate"]["kernel"])
    assert kernel.std() == pytest.approx(SPREAD, rel=0.05)
    assert np.all(np.asarray(params["layers"]["mlp_norm"]["scale"]) == 1)


def test_what_is_described_is_what_is_drawn(model: LanguageModel) -> None:
    drawn = jax.tree.map(lambda a: (a.shape, str(a.dtype)), model.draw_params(0))
    described = jax.tree.map(lambda a: (a.shape, str(a.dtype)), model.describe_params())
    assert drawn == described
    one = shapes_of_one(model.describe_params()["layers"])
    assert all(
        (2, *a.shape) == b.shape
        for a, b in zip(
            jax.tree.leaves(one), jax.tree.leaves(model.describe_params()["layers"]), strict=True
        )
    )


def test_the_loss_is_of_the_next_token(model: LanguageModel) -> None:
    params = model.draw_params(0)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, model.shape.vocab_size, (2, 8)))

    def run(params: Params, ids: Any) -> tuple[Any, Any]:
        blocks = model.plain_blocks
        return model.write_logits(blocks, params, ids), model.find_loss(blocks, params, ids)

    logits, loss = jax.jit(run)(params, ids)
    assert logits.shape == (2, 8, model.shape.vocab_size)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], axis=-1)
    assert float(loss) == pytest.approx(-float(chosen.mean()), rel=1e-5)
    assert float(loss) == pytest.approx(np.log(model.shape.vocab_size), rel=0.02)
