"""Two processes with different facts have one plan, and its gradients are right."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ebbtide.catalog.machines import find_machine
from ebbtide.jax.observe import Pace, Rates
from ebbtide.jax.processes import take_first, take_first_machine, take_first_pace

ROOT = Path(__file__).parents[2]


def test_a_process_that_is_alone_keeps_what_it_has() -> None:
    value = {"a": [1, 2.5, None]}
    assert take_first(value) is value
    machine = find_machine("h200-pcie5")
    assert take_first_machine(machine) == machine
    rates = Rates(flops_per_s=1.1e9, memory_bytes_per_s=3.3e9)
    pace = Pace(rates=rates, forward_ns=3, backward_ns=7)
    assert take_first_pace(pace) == pace


@pytest.mark.slow
def test_two_processes_have_process_0s_plan_and_the_plain_blocks_gradients() -> None:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.jax.processes", str(number), str(port)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        ends = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, ends, strict=True):
        assert process.returncode == 0, errors
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in ends)
    assert (first["processes"], first["devices"]) == (2, 4)
    assert first["plan"] == second["plan"]
    assert first["names"] == second["names"]
    # Process 0's rates make products dear; process 1's would recompute all of them.
    assert any("dot_general" in name for names in first["names"] for name in names)
    # A tanh that is made again may differ in its last bit, by where XLA fuses it.
    for answer in (first, second):
        assert answer["largest_difference"] <= 1e-6
