"""What DeepSpeed's configuration asks for, as arguments of `attach`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ebbtide.integrations.deepspeed import attach_arguments


def config_with(**section: bool) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": section}


@pytest.mark.parametrize(
    "config", [{}, config_with(), config_with(cpu_checkpointing=False, profile=True)]
)
def test_a_configuration_that_asks_for_nothing_adds_nothing(config: dict[str, Any]) -> None:
    assert attach_arguments(config) == {}
    assert attach_arguments(config, budget="4GiB", host=1) == {"budget": "4GiB", "host": 1}


def test_inputs_in_host_memory_are_a_plan() -> None:
    config = config_with(cpu_checkpointing=True)
    assert attach_arguments(config) == {"plan": "offload-inputs"}
    assert attach_arguments(config, plan="offload-inputs", host="1GiB") == {
        "plan": "offload-inputs",
        "host": "1GiB",
    }


def test_a_configuration_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_with(cpu_checkpointing=True)))
    assert attach_arguments(file) == attach_arguments(str(file)) == {"plan": "offload-inputs"}


@pytest.mark.parametrize(("name", "value"), [("budget", "4GiB"), ("plan", "balanced")])
def test_two_that_decide_are_refused_by_name(name: str, value: str) -> None:
    message = f"activation_checkpointing.cpu_checkpointing=true and {name}='{value}' both decide"
    with pytest.raises(ValueError, match=re.escape(message)):
        attach_arguments(config_with(cpu_checkpointing=True), **{name: value})


@pytest.mark.parametrize(
    "name",
    [
        "partition_activations",
        "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary",
    ],
)
def test_what_has_no_equal_is_refused(name: str) -> None:
    message = f"activation_checkpointing.{name}=true .* ebbtide's attach .* Set {name}=false"
    with pytest.raises(ValueError, match=message):
        attach_arguments(config_with(cpu_checkpointing=True, **{name: True}))
