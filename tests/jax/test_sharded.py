"""Names inside a shard_map on four devices: own process, since jax fixes their number at start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jax import blocks

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_block_over_four_devices_has_its_bits_and_its_residuals() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.jax.sharded"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    assert answer["devices"] == 4
    assert answer["differing"] == []
    assert answer["residuals"] == [
        ["input", True],
        ["mlp.tanh.0", True],
    ]
    # What one device holds of it.
    assert answer["bytes"] == blocks.B * blocks.T * blocks.F * 4 // 4
    assert len(answer["collectives"]) == 1
    assert "psum" in answer["collectives"][0]
