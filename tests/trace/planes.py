"""Write the wire format of an XSpace, as `jax.profiler.trace` does."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Stats = Mapping[str, str | int]


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def number_field(field_number: int, value: int) -> bytes:
    return varint(field_number << 3) + varint(value)


def bytes_field(field_number: int, value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return varint(field_number << 3 | 2) + varint(len(value)) + value


@dataclass(slots=True)
class Plane:
    """One plane with its tables of names."""

    name: str
    lines: list[bytes] = field(default_factory=list[bytes])
    events: dict[str, int] = field(default_factory=dict[str, int])
    stats: dict[str, int] = field(default_factory=dict[str, int])

    def add_line(self, name: str, start_ns: int, *events: tuple[str, int, int, Stats]) -> None:
        """Add a line; events have offset and duration in picoseconds."""
        out = bytes_field(2, name) + number_field(3, start_ns)
        for event_name, offset_ps, duration_ps, stats in events:
            out += bytes_field(4, self._event(event_name, offset_ps, duration_ps, stats))
        self.lines.append(out)

    def _event(self, name: str, offset_ps: int, duration_ps: int, stats: Stats) -> bytes:
        known = self.events.setdefault(name, len(self.events) + 1)
        out = number_field(1, known) + number_field(2, offset_ps) + number_field(3, duration_ps)
        for key, value in stats.items():
            stat = number_field(1, self.stats.setdefault(key, len(self.stats) + 1))
            if isinstance(value, int):
                stat += number_field(4, value)
            elif key == "hlo_op":
                # Texts that come often are kept once, among the names of the statistics.
                stat += number_field(7, self.stats.setdefault(value, len(self.stats) + 1))
            else:
                stat += bytes_field(5, value)
            out += bytes_field(4, stat)
        return out

    def to_bytes(self) -> bytes:
        out = bytes_field(2, self.name)
        for line in self.lines:
            out += bytes_field(3, line)
        for number, table in ((4, self.events), (5, self.stats)):
            for name, key in table.items():
                metadata = number_field(1, key) + bytes_field(2, name)
                out += bytes_field(number, number_field(1, key) + bytes_field(2, metadata))
        return out


@dataclass(frozen=True, slots=True)
class Programs:
    """The plane of the compiled programs: an `HloProto` for each number."""

    protos: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        out = bytes_field(2, "/host:metadata")
        for key, (program, proto) in enumerate(self.protos.items(), 1):
            stats = bytes_field(5, number_field(1, 2) + bytes_field(6, proto))
            stats += bytes_field(5, number_field(1, 1) + number_field(3, program))
            metadata = number_field(1, key) + bytes_field(2, f"jit_loss({program})") + stats
            out += bytes_field(4, number_field(1, key) + bytes_field(2, metadata))
        for key, name in enumerate(("program_id", "Hlo Proto"), 1):
            metadata = number_field(1, key) + bytes_field(2, name)
            out += bytes_field(5, number_field(1, key) + bytes_field(2, metadata))
        return out


def space(*planes: Plane | Programs) -> bytes:
    out = b"".join(bytes_field(1, plane.to_bytes()) for plane in planes)
    return out + bytes_field(4, "host")
