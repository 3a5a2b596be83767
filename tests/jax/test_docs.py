"""The programs on the page about jax run, and do what the page says."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"


def programs() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def test_the_programs_of_the_page_run_one_after_another() -> None:
    names: dict[str, Any] = {}
    by_hand, alone, with_budget, attention = programs()
    exec(by_hand, names)
    first = names["grads"]
    exec(alone, names)
    assert np.array_equal(names["on_host"], names["x"])
    exec(with_budget, names)
    tide = names["tide"]
    assert not tide.keeps_everything
    assert tide.named_policy().names
    assert {"layer_input", "wide"} <= {value.name for value in tide.observation.values}
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(names["grads"]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    exec(attention, names)
    assert callable(names["attend"])
