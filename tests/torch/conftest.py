"""Few threads for small tensors; blocks follow scripts from the fourth step on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.torch.training import learn_at_once

# The tests run side by side on all cores: threads of one test would only be in the way of others.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def scripts_at_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take one recorded forward for a script, so that the last of a test's few steps follow it."""
    if request.node.get_closest_marker("own_scripts"):
        yield
        return
    with learn_at_once():
        yield
