"""A program that measures the links of all GPUs; `ebbtide doctor` starts it, as a driver may hang.

    python -m ebbtide.torch.link_survey

It writes one JSON object a line, as soon as it knows something: what torch is, each GPU, its link
alone, and its link while all of them copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from ebbtide.doctor.facts import PciLink
from ebbtide.doctor.system import read_link
from ebbtide.torch.devices.pinned import pci_address_of, pinned_memory_of
from ebbtide.torch.link import AbstractTrial, LinkTrial, Way, time_copies
from ebbtide.torch.probe import LINK_BYTES
from ebbtide.torch.tiers import take_what_there_is

Tell = Callable[[dict[str, object]], None]

# More would disturb a program that trains on the GPU meanwhile.
FREE_SHARE = 4
"""A measurement takes at most one part in so many of a GPU's free memory."""


def main() -> None:
    """Measure all GPUs that torch can use."""
    _tell({"torch": torch.__version__, "build": _build(), "num_gpus": torch.cuda.device_count()})
    if not torch.cuda.is_available():
        return
    with ExitStack() as held:
        trials: dict[int, AbstractTrial] = {}
        addresses: dict[int, str] = {}
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            try:
                addresses[index] = _describe(device, _tell)
                trial = _prepare(device, held, _tell)
            except RuntimeError as error:  # one that is broken, in use by another or full
                _tell({"gpu": index, "refusal": str(error).splitlines()[0]})
                continue
            if trial is not None:
                trials[index] = trial
        measure(trials, _tell, lambda index: read_link(addresses[index], is_of_copies=True))


def measure(
    trials: Mapping[int, AbstractTrial], tell: Tell, look: Callable[[int], PciLink]
) -> None:
    """Time each GPU alone, and then all at once where there are several.

    Args:
        trials: By the number of the GPU.
        tell: Called with what was found.
        look: Returns how a GPU is linked; called while it copies.
    """
    for index, trial in trials.items():
        links: list[PciLink] = []

        def see(index: int = index, links: list[PciLink] = links) -> None:
            links.append(look(index))

        rates = {
            f"{way.value}_bytes_per_s": time_copies([trial], way, while_copying=see)[0]
            for way in Way
        }
        # The last one: a link that was at rest needs some time to come up.
        tell({"gpu": index, "alone": rates, "link": asdict(links[-1])})
    if len(trials) < 2:
        return
    together = {way: time_copies(list(trials.values()), way) for way in Way}
    for number, index in enumerate(trials):
        tell(
            {
                "gpu": index,
                "together": {f"{way.value}_bytes_per_s": together[way][number] for way in Way},
            }
        )


def _describe(device: torch.device, tell: Tell) -> str:
    """Tell what a GPU is, and return its PCI address."""
    properties: Any = torch.cuda.get_device_properties(device)
    free_bytes, device_bytes = torch.cuda.mem_get_info(device)
    address = pci_address_of(device)
    tell(
        {
            "gpu": device.index,
            "name": properties.name,
            "uuid": str(properties.uuid),
            "pci_address": address,
            "device_bytes": device_bytes,
            "free_bytes": free_bytes,
        }
    )
    return address


def _prepare(device: torch.device, held: ExitStack, tell: Tell) -> AbstractTrial | None:
    free_bytes = torch.cuda.mem_get_info(device)[0]
    wanted_bytes = max(2, min(LINK_BYTES, free_bytes // FREE_SHARE))
    taken = take_what_there_is(pinned_memory_of(device).pin, wanted_bytes)
    if taken.refusal is not None:
        tell({"gpu": device.index, "refusal": str(taken.refusal)})
    if taken.region is None:
        return None
    held.callback(taken.region.close)
    num_bytes = taken.region.buffer.numel()
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return LinkTrial(memory, taken.region.buffer)


def _build() -> str:
    version: Any = torch.version
    if version.hip:
        return f"ROCm {version.hip}"
    return f"CUDA {version.cuda}" if version.cuda else "CPU"


def _tell(record: dict[str, object]) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
