"""Read what `nvidia-smi c2c -s` and `nvidia-smi nvlink -s` print: the speed of each link."""

import re
from fractions import Fraction
from typing import Final

NOT_AVAILABLE: Final = 3
"""How it ends where the GPU has nothing of what was asked for; its manual page says so."""

_GPU: Final = re.compile(r"^GPU \d+: .*\(UUID: (?:GPU-)?(?P<uuid>[0-9a-fA-F-]+)\)")
_LINK: Final = re.compile(r"^\s+(?:C2C )?Link \d+: (?P<speed>\d+(?:\.\d+)?) GB/s")


def read_speeds(text: str) -> dict[str, int]:
    """Return the UUID of each GPU, without `GPU-`, to its active links' bytes per second in all.

    A GPU without active links is left out, and so is what has another form.
    """
    speeds: dict[str, Fraction] = {}
    uuid = ""
    for line in text.splitlines():
        gpu, link = _GPU.match(line), _LINK.match(line)
        if gpu:
            uuid = gpu["uuid"]
        elif link and uuid:
            speeds[uuid] = speeds.get(uuid, Fraction(0)) + Fraction(link["speed"])
    return {uuid: int(speed * 10**9) for uuid, speed in speeds.items()}
