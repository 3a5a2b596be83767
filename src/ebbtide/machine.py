"""The Machine: what a device, its host and its disk can hold, and how fast they copy.

A Machine is made by a probe or taken from published figures. Bandwidths are what one rank gets
while all ranks of the node copy (design rule 12). The JSON form is in `docs/formats.md`.
"""

import json
from dataclasses import dataclass
from typing import Self

from ebbtide.errors import PlanError
from ebbtide.forms import read_form, read_int, read_text, refuse_negative, refuse_unknown_fields

MACHINE_FORMAT = "ebbtide-machine"
MACHINE_VERSION = 2

_SINCE_VERSION_2 = {"disk_write_bytes_per_day"}

ASSUMED_SLOWDOWN_PPM = 15_000
"""For machines whose `slowdown_ppm` is not measured: a matrix product ran 3 % slower beside copies
both ways (one H200, PCIe 5 x16), and half of that is assumed for each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device with its links and tiers.

    Raises:
        PlanError: A number is negative, `num_local_ranks` is not positive, or there is a tier
            without bandwidth.
    """

    name: str
    """For people, for example `h200-pcie5`."""
    device_bytes: int
    """Device memory that a program can use."""
    host_bytes: int
    """Host memory that all ranks of the node together may pin; 0: no host tier."""
    out_bytes_per_s: int
    """Device to host, this direction alone."""
    in_bytes_per_s: int
    """Host to device, this direction alone."""
    both_bytes_per_s: int
    """Sum of both directions while both are busy."""
    disk_bytes: int = 0
    """Disk space that this rank may use; 0: no disk tier."""
    disk_write_bytes_per_s: int = 0
    """Host to disk."""
    disk_read_bytes_per_s: int = 0
    """Disk to host."""
    disk_write_bytes_per_day: int = 0
    """Most bytes that this rank may write to disk in a day, for the disk's sake; 0: no limit."""
    slowdown_ppm: int = 0
    """Compute time lost to a copy that runs beside it, in millionths of the copy's time on the
    link: both want the device's memory."""
    num_local_ranks: int = 1
    """Ranks of the node that share `host_bytes`."""
    source: str = ""
    """Where the figures are from."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name not in ("name", "source"):
                refuse_negative(getattr(self, name), f"machine {self.name!r}", name)
        if self.num_local_ranks < 1:
            raise PlanError(f"machine {self.name!r} has 0 local ranks; this process is one.")
        for tier, needed in (
            ("host_bytes", ("out_bytes_per_s", "in_bytes_per_s", "both_bytes_per_s")),
            ("disk_bytes", ("disk_write_bytes_per_s", "disk_read_bytes_per_s")),
        ):
            for name in needed:
                if getattr(self, tier) and not getattr(self, name):
                    raise PlanError(
                        f"machine {self.name!r} has {tier} {getattr(self, tier)} but {name} 0; "
                        f"nothing can be moved there. Give the bandwidth, or set {tier} to 0."
                    )

    def slow_ns(self, num_bytes: int, bytes_per_s: int) -> int:
        """Return the compute time that copying so many bytes over the link costs, rounded up."""
        if not bytes_per_s:
            return 0
        return -(-num_bytes * 1000 * self.slowdown_ppm // bytes_per_s)

    @property
    def host_bytes_per_rank(self) -> int:
        """Host memory that one rank may pin."""
        return self.host_bytes // self.num_local_ranks

    def to_json(self) -> str:
        """Return the JSON form; equal machines give equal text, byte for byte."""
        form: dict[str, object] = {"format": MACHINE_FORMAT, "version": MACHINE_VERSION}
        form.update({name: getattr(self, name) for name in self.__dataclass_fields__})
        return json.dumps(form, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the JSON form that `to_json` writes.

        Raises:
            PlanError: The text is not JSON, not this format or version, lacks a field, has an
                unknown one or one of the wrong type, or breaks a rule of `Machine`.
        """
        record = read_form(text, form=MACHINE_FORMAT, version=MACHINE_VERSION)
        fields = set(cls.__dataclass_fields__)
        if record["version"] == 1:
            fields -= _SINCE_VERSION_2
        refuse_unknown_fields(record, {"format", "version", *fields}, where="machine")
        numbers = {
            name: read_int(record, name, where="machine") for name in fields - {"name", "source"}
        }
        return cls(
            name=read_text(record, "name", where="machine"),
            source=read_text(record, "source", where="machine"),
            **numbers,
        )
