"""What was found out about a machine, as frozen records; None or "" is what could not be told."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbtide.memory.limits import HostLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLink:
    """A PCIe link as it was negotiated, and what both ends could do."""

    generation: int | None = None
    """1 to 6."""
    width: int | None = None
    """Lanes."""
    most_generation: int | None = None
    """Of the device."""
    most_width: int | None = None
    """Of the device."""
    slot_generation: int | None = None
    """Most of the port above the device."""
    slot_width: int | None = None
    """Most of the port above the device."""
    is_of_copies: bool = False
    """Read while copies ran. At rest many GPUs take the link down to save power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciGpu:
    """A GPU that the system's PCI tables show; the process need not be able to use it."""

    address: str
    """Such as `0000:17:00.0`."""
    vendor: str
    """`NVIDIA` or `AMD`."""
    name: str
    """From the driver's tables."""
    link: PciLink
    numa_node: int | None
    """None on a machine of one node, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second of one GPU's link to pinned host memory."""

    out_bytes_per_s: int
    in_bytes_per_s: int
    both_bytes_per_s: int
    """Both directions together while both are busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that torch can use."""

    index: int
    """torch's number."""
    name: str
    pci_address: str
    device_bytes: int
    """All of its memory."""
    free_bytes: int
    """Of that, not taken by other programs."""
    uuid: str = ""
    """As torch gives it, without the `GPU-` that nvidia-smi sets before it."""
    pci: PciGpu | None = None
    """What the PCI tables have of it."""
    alone: Rates | None = None
    """While no other GPU copies."""
    together: Rates | None = None
    """While all GPUs that torch can use copy; with one GPU the same as `alone`."""
    refusal: str = ""
    """Why nothing, or less than was asked for, was pinned for the measurement."""
    c2c_bytes_per_s: int | None = None
    """What the driver says of a chip-to-chip link to the CPU, all of its links together."""
    nvlink_bytes_per_s: int | None = None
    """What the driver says of links to other GPUs, all active ones together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Memory and processors of the host, as far as this process may use them."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    """What programs could have without swapping."""
    limit: HostLimit | None = None
    """What leaves least to be pinned."""
    memlock_bytes: int | None = None
    """RLIMIT_MEMLOCK; None: no limit."""
    huge_pages: str = ""
    """Transparent huge pages: `always`, `madvise` or `never`."""
    node_cpus: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    """NUMA node to its processors; a node of memory alone has none."""
    cpus: frozenset[int] | None = None
    """Processors that this process may run on."""
    nodes: frozenset[int] | None = None
    """NUMA nodes that this process may have memory from."""
    load: float | None = None
    """Processes that wanted a processor, on average over the last minute before the survey."""
    is_wsl: bool = False
    """Windows Subsystem for Linux, which lets programs pin only a part of its memory."""
    driver: str = ""
    """Version of NVIDIA's driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A folder to evict to."""

    path: str
    file_system: str = ""
    """Such as `ext4`."""
    free_bytes: int | None = None
    cap_bytes: int | None = None
    """Most that the user wants there; None: not said."""
    is_direct: bool | None = None
    """Whether it takes requests that pass the page cache by (O_DIRECT)."""
    write_bytes_per_s: int | None = None
    read_bytes_per_s: int | None = None
    error: str = ""
    """Why it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What is installed, and the variables that change how it allocates and copies."""

    versions: Mapping[str, str]
    """Package to version; what is not installed is not there."""
    torch_build: str = ""
    """`CUDA 13.0`, `ROCm 6.4` or `CPU`."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables that are set, of those that matter here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that was found out."""

    pci_gpus: tuple[PciGpu, ...]
    """All that the system shows; in a container those of other containers as well."""
    gpus: tuple[Gpu, ...]
    """Those that torch can use."""
    host: Host
    disks: tuple[Disk, ...]
    software: Software
    unknown: tuple[str, ...] = ()
    """What could not be found out, and why: sentences for people."""
