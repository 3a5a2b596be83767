"""How fast GPUs of the catalog's machines reach one another: published links, and what is reached.

Two figures a machine: what one GPU sends in one direction to GPUs of its own domain (those that
NVLink, or a host, joins), and what its network card sends beyond it. What collectives reach of
them is a share that others measured. Known weaknesses: latency is left out, so that small
messages take longer; sums inside the switch (NVLink SHARP), which make all-reduce faster, are too.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

# Of NVLink's published rate in one direction: rings reach 240 of 300 GB/s on 8 A100 (a maintainer
# in NVIDIA/nccl issue 1712), and more with sums in the switch: 835 of 900 on 72 GB200
# (coreweave/nccl-tests pull request 43).
INNER_SHARE = 0.8
# Of a network card's: 46 to 48 of 50 GB/s (maintainers in NVIDIA/nccl-tests issues 267 and 290).
OUTER_SHARE = 0.94


@enum.unique
class Axis(enum.Enum):
    """Which ranks a collective joins, in the order in which ranks are laid out, nearest first."""

    TENSOR = "tp"
    CONTEXT = "cp"
    EXPERT = "ep"
    SHARDS = "fsdp"
    COPIES = "dp"
    STAGES = "pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """Ranks that stand so far apart."""

    stride: int
    """Devices from one to the next."""
    size: int
    """Of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What joins the GPUs of a machine, per GPU and direction."""

    domain: int
    """GPUs that the fast links join."""
    inner_bytes_per_s: int
    """Published, within a domain."""
    outer_bytes_per_s: int
    """Published, of one GPU's network card."""
    source: str
    """Where the figures are from."""

    @property
    def reached_inner_bytes_per_ns(self) -> float:
        """Of collectives within a domain."""
        return self.inner_bytes_per_s * INNER_SHARE / 1e9

    @property
    def reached_outer_bytes_per_ns(self) -> float:
        """Of one network card."""
        return self.outer_bytes_per_s * OUTER_SHARE / 1e9

    def ring_bytes_per_ns(self, group: Sequence[Dimension]) -> float:
        """Return how fast each rank sends in gathers and sums.

        Between domains, the cards of all ranks that a group has in one share the work.
        """
        inner, outer = self.reached_inner_bytes_per_ns, self.reached_outer_bytes_per_ns
        near = self._num_near(group)
        return inner if near == _size(group) else min(inner, near * outer)

    def exchange_bytes_per_ns(self, group: Sequence[Dimension]) -> float:
        """Return how fast each rank sends where each has something else for each other.

        Nothing is shared: what leaves the domain goes through a rank's own card.
        """
        inner, outer = self.reached_inner_bytes_per_ns, self.reached_outer_bytes_per_ns
        size, near = _size(group), self._num_near(group)
        if near == size:
            return inner
        return min(inner, outer * (size - 1) / (size - near))

    def _num_near(self, group: Sequence[Dimension]) -> int:
        """Count the ranks of a group in one domain."""
        return prod(min(d.size, max(1, self.domain // d.stride)) for d in group)


def _size(group: Sequence[Dimension]) -> int:
    return prod(d.size for d in group)


def _network(domain: int, inner: float, outer: float, source: str) -> Network:
    """Write rates in GB/s, of one direction."""
    return Network(
        domain=domain,
        inner_bytes_per_s=int(inner * 1e9),
        outer_bytes_per_s=int(outer * 1e9),
        source=source,
    )


NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "a100-pcie4": _network(
            8, 300.0, 25.0, "DGX A100 data sheet: NVLink 600 GB/s both ways, 200 Gb/s a GPU."
        ),
        "h100-pcie5": _network(
            8, 450.0, 50.0, "DGX H100 data sheet: NVLink 900 GB/s both ways, 400 Gb/s a GPU."
        ),
        "h200-pcie5": _network(
            8, 450.0, 50.0, "DGX H200 data sheet: NVLink 900 GB/s both ways, 400 Gb/s a GPU."
        ),
        "b200-pcie5": _network(
            8, 900.0, 50.0, "DGX B200 data sheet: NVLink 1.8 TB/s both ways, 400 Gb/s a GPU."
        ),
        "rtx4090": _network(
            8, 31.5, 12.5, "PCIe 4 x16 through the host; 8 a host and 100 Gb/s a GPU are assumed."
        ),
        "gh200": _network(1, 450.0, 50.0, "One GPU a board; 400 Gb/s a GPU is assumed."),
        "gb200-nvl72": _network(
            72, 900.0, 50.0, "GB200 NVL72 data sheet: 130 TB/s both ways a rack, 400 Gb/s a GPU."
        ),
        "gb300-nvl72": _network(
            72, 900.0, 100.0, "GB300 NVL72 data sheet: 130 TB/s both ways a rack, 800 Gb/s a GPU."
        ),
        "vera-rubin": _network(
            72, 1800.0, 200.0, "Announced: 3.6 TB/s both ways and 1.6 Tb/s a GPU; not confirmed."
        ),
    }
)
"""Name of the machine to its network; read-only."""
