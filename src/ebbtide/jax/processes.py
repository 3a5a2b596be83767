"""Several processes of one program decide on process 0: what it measured is what all plan with.

All processes must compile the same program, or their collectives wait for ever. Planning is pure,
so that equal facts give equal plans; each process would measure other times by itself.
"""

import json
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ebbtide.jax.observe import Pace, Rates
from ebbtide.machine import Machine


def take_first(value: Any) -> Any:
    """Return what process 0 gave. All processes must call it, in the same order.

    Args:
        value: What JSON can hold; only process 0's counts.
    """
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode()
    num_bytes = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    mine = np.zeros(num_bytes, np.uint8)
    if jax.process_index() == 0:
        mine[:] = np.frombuffer(text, np.uint8)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(mine))
    return json.loads(sent.astype(np.uint8).tobytes())


def take_first_machine(machine: Machine) -> Machine:
    """Return process 0's machine."""
    return Machine.from_json(take_first(machine.to_json()))


def take_first_pace(pace: Pace) -> Pace:
    """Return process 0's times."""
    form: dict[str, Any] = take_first(asdict(pace))
    rates = Rates(**form.pop("rates"))
    return Pace(rates=rates, **form)
