"""Checks of types while the tests run, and fixed seeds, for every test."""

import importlib.util
import random
import sys

import pytest


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# Before any test module imports ebbtide: the hook works on modules imported after it. It is
# beartype's own and not jaxtyping's, which cannot read `Self`; shapes written with jaxtyping
# are checked all the same, each on its own. Annotations must name what the module really
# imports, as a name that exists only under TYPE_CHECKING cannot be resolved, and a Protocol
# must be runtime_checkable. Optional, because the GPU tests run with whatever is there.
if _is_installed("beartype"):
    from beartype.claw import beartype_package

    beartype_package("ebbtide")

if _is_installed("hypothesis"):
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
    settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def fixed_seed() -> int:
    """Seed every random generator in use, and return the seed.

    numpy and torch are seeded only where a test module has imported them: the
    tests of the core must not be the ones that import torch.
    """
    seed = 20260
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed(seed)
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(seed)
    return seed
