"""Names of jax that are not documented: what is there, and what a jax without them is told."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ebbtide.errors import RuntimeStateError
from ebbtide.jax.internals import (
    bind,
    context_of,
    look_up,
    refuse_ignored_names,
    saved_residuals,
    scope_of,
)


@pytest.mark.parametrize("place", [("jax._src.ad_checkpoint", "no_such"), ("jax.no_such", "x")])
def test_a_jax_without_a_name_is_refused_with_it(place: tuple[str, str]) -> None:
    with pytest.raises(RuntimeStateError, match=rf"has no {place[0]}\.{place[1]}, .* Use jax"):
        look_up(*place)


def test_residuals_have_shapes_and_what_jax_says_of_them() -> None:
    def block(w: Any, x: Any) -> Any:
        return jnp.sin(x @ w)

    shapes = (jax.ShapeDtypeStruct((3, 5), jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.float32))
    found = saved_residuals(block, *shapes)
    assert {r.shape for r in found if r.is_argument} == {(3, 5), (2, 3)}
    (cosine,) = [r for r in found if not r.is_argument]
    assert (cosine.shape, cosine.dtype, cosine.is_on_host) == ((2, 5), "float32", False)


def test_an_equation_runs_again_in_its_scopes() -> None:
    def scoped(x: Any) -> Any:
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.sin(x) * 2.0

    jaxpr = jax.make_jaxpr(scoped)(1.0).jaxpr
    sine = jaxpr.eqns[0]
    assert scope_of(sine) == "outer/inner"
    with context_of(sine):
        (value,) = bind(sine, [jnp.float32(0.5)])
    assert float(value) == pytest.approx(float(np.sin(np.float32(0.5))))


def test_ignored_names_are_refused_with_the_switch() -> None:
    refuse_ignored_names()


def test_ignored_names_are_refused_also_where_the_switch_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ebbtide.jax.internals._are_names_honoured", lambda: False)
    with pytest.raises(RuntimeStateError, match=rf"ignored: jax {jax.__version__} does so"):
        refuse_ignored_names()
