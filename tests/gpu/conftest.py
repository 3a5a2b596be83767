"""Marks every test of this folder `gpu`, and skips them all without a CUDA GPU."""

import importlib.util
import os
from pathlib import Path

import pytest

_HERE = Path(__file__).parent

# cuBLAS repeats its bits only with a workspace of its own, and reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Pytest hands over the items of the whole run, not those of this folder alone."""
    gpu_items = [item for item in items if item.path.is_relative_to(_HERE)]
    if not gpu_items:
        return
    has_gpu = _has_gpu()
    for item in gpu_items:
        item.add_marker(pytest.mark.gpu)
        if not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
