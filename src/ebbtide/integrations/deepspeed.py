"""What a DeepSpeed configuration asks of activations, as arguments of `attach`.

    engine, *_ = deepspeed.initialize(model=model, config=config, ...)
    tide = attach(engine.module, **attach_arguments(config))

DeepSpeed is not imported: the configuration is read as it is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

SECTION: Final = "activation_checkpointing"

_HAS_NO_EQUAL: Final = {
    "partition_activations": "spreads block inputs over ranks and gathers them in backward",
    "contiguous_memory_optimization": "copies the parts of partitioned inputs into one buffer",
    "synchronize_checkpoint_boundary": "makes the host wait for the device at each checkpoint",
}
"""Settings of DeepSpeed's own checkpoint function, and what they make it do."""


def attach_arguments(config: Mapping[str, Any] | str | Path, **arguments: Any) -> dict[str, Any]:
    """Return the arguments of `attach` for an engine with this configuration.

    `activation_checkpointing.cpu_checkpointing` becomes the plan `offload-inputs`, which does what
    it does: blocks are recomputed, and their inputs wait in host memory. A configuration that does
    not ask for it adds nothing. DeepSpeed applies the section to calls of its own checkpoint
    function alone; these must be taken out of the model, or blocks would be recomputed twice.

    Args:
        config: What `deepspeed.initialize` is given: a dictionary, or the path of a JSON file.
        arguments: Of `attach`, all but the model; they are returned with what is added.

    Raises:
        ValueError: A setting has no equal, or decides the same as an argument. Both are named.
        OSError: The file cannot be read.
    """
    form = config
    if not isinstance(form, Mapping):
        form = json.loads(Path(form).read_text())
    section: Mapping[str, Any] = form.get(SECTION) or {}
    for name, what in _HAS_NO_EQUAL.items():
        if section.get(name):
            raise ValueError(
                f"{SECTION}.{name}=true {what}, and ebbtide's attach does nothing of the kind. Set "
                f"{name}=false; cpu_checkpointing=true keeps block inputs off the device."
            )
    if not section.get("cpu_checkpointing"):
        return dict(arguments)
    for name in ("plan", "budget"):
        value = arguments.get(name)
        if value is not None and value != "offload-inputs":
            raise ValueError(
                f"{SECTION}.cpu_checkpointing=true and {name}={value!r} both decide what becomes "
                f"of activations. Set cpu_checkpointing=false, or leave {name}= out, which gives "
                "the plan 'offload-inputs'."
            )
    return {**arguments, "plan": "offload-inputs"}
