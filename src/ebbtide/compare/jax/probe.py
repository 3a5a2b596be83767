"""What device jax has, asked in a process of its own: `python -m ebbtide.compare.jax.probe`.

jax takes most of a GPU when it first looks at it, so the process that starts the rows must not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ebbtide.compare.processes import extract_reason, make_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxDevice:
    """The first device of a process."""

    platform: str
    """`cpu` or `gpu`."""
    kind: str
    """The device's name."""
    versions: dict[str, str]
    """Of jax, jaxlib and what the platform says of itself."""

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.platform == "gpu"


def select_device(name: str | None) -> dict[str, str]:
    """Return the variables that let jax see the device called `name`.

    Raises:
        ValueError: The name is none of a device.
    """
    if name is None:
        return {}
    kind, colon, index = name.partition(":")
    if name == "cpu":
        return {"JAX_PLATFORMS": "cpu"}
    if kind != "cuda" or (colon and not index.isdecimal()):
        raise ValueError(f"--device {name}: unknown device; give cpu, cuda or cuda:N")
    chosen = {"JAX_PLATFORMS": "cuda"}
    return {**chosen, "CUDA_VISIBLE_DEVICES": index} if colon else chosen


def probe_device(name: str | None, variables: Mapping[str, str]) -> JaxDevice:
    """Ask jax in a process of its own.

    Args:
        name: `--device`, for the message.
        variables: What `select_device` returned.

    Raises:
        ValueError: jax does not start with it.
    """
    finished = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        env={**make_environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise ValueError(
            f"--device {name or '(none given)'}: jax does not start "
            f"({extract_reason(finished.stderr)}); give --device cpu, or install jax[cuda12] or "
            "jax[cuda13] for a GPU"
        )
    return JaxDevice(**json.loads(finished.stdout.splitlines()[-1]))


def main() -> None:
    """Print the device as one line of JSON."""
    import jax
    import jaxlib

    device = jax.local_devices()[0]
    found = JaxDevice(
        platform=jax.default_backend(),
        kind=device.device_kind,
        versions={
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "platform": " ".join(device.client.platform_version.split()),
        },
    )
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
