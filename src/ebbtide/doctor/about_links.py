"""Findings about the links of GPUs, and where the GPUs are."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from ebbtide.doctor.facts import Facts, Gpu, Host, PciLink, Rates
from ebbtide.doctor.finding import Code, Finding, Severity

# Bits that one lane carries a second in one direction, by generation, with what encodes them:
# 8 bits in 10 up to generation 2, 128 in 130 up to 5, 242 bytes of data in 256 in 6.
LANE_BITS_PER_S: Final = {
    1: Fraction(2_500_000_000 * 8, 10),
    2: Fraction(5_000_000_000 * 8, 10),
    3: Fraction(8_000_000_000 * 128, 130),
    4: Fraction(16_000_000_000 * 128, 130),
    5: Fraction(32_000_000_000 * 128, 130),
    6: Fraction(64_000_000_000 * 242, 256),
}

SLOW_SHARE: Final = Fraction(7, 10)
"""Of what the lanes carry. Headers of packets take the rest: an H200 on PCIe 5 x16 got 0.88 (55.3
of 63.0 GB/s, measured), an A100 on PCIe 4 x16 0.79 (published: NVIDIA/nvbandwidth issue 53)."""

SHARED_SHARE: Final = Fraction(3, 4)
"""Of the rate alone. Two H200 behind one uplink got 0.50 (measured); less than a quarter lost may
be chance, since a GPU that starts late copies alone for a part."""

BOTH_SHARE: Final = Fraction(5, 4)
"""Of the faster direction: below it both ways at once gain next to nothing. H200: 1.82 (measured);
A100: 1.44 (published)."""

TRUSTED_SHARE: Final = Fraction(21, 20)
"""Of what the lanes carry. A rate above it shows that the tables are not of the link that copies:
virtual machines make them up, and a chip-to-chip link is not in them."""


def find_about_links(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with the links of the GPUs that torch can use, or else of all."""
    if not facts.gpus:
        for shown in facts.pci_gpus:
            yield from _negotiated(f"a GPU of {shown.vendor}", shown.address, shown.link)
    for gpu in facts.gpus:
        link = None if gpu.pci is None else gpu.pci.link
        if link is not None and is_of_copies(gpu, link):
            yield from _negotiated(f"GPU {gpu.index}", gpu.pci_address, link)
            yield from _slow(gpu, link)
        if gpu.alone is not None:
            yield from _one_way(gpu, gpu.alone)
            if gpu.together is not None:
                yield from _shared(gpu, gpu.alone, gpu.together)
        yield from _far(gpu, facts.host)


def ceiling_bytes_per_s(generation: int | None, width: int | None) -> int | None:
    """Return what the lanes carry in one direction; None if one of the two is not known."""
    if generation is None or width is None:
        return None
    return int(LANE_BITS_PER_S[generation] * width / 8)


def is_of_copies(gpu: Gpu, link: PciLink) -> bool:
    """Return whether copies of the GPU go over the PCIe link, as far as can be told."""
    ceiling = ceiling_bytes_per_s(link.generation, link.width)
    if gpu.c2c_bytes_per_s is not None:
        return False
    if ceiling is None or gpu.alone is None or not link.is_of_copies:
        return True
    return _best(gpu.alone) <= ceiling * TRUSTED_SHARE


def _negotiated(name: str, address: str, link: PciLink) -> Iterator[Finding]:
    width_could = _least(link.most_width, link.slot_width)
    generation_could = _least(link.most_generation, link.slot_generation)
    is_narrow = link.width is not None and width_could is not None and link.width < width_could
    # At rest the generation says nothing: GPUs take it down to save power.
    is_low = (
        link.is_of_copies
        and link.generation is not None
        and generation_could is not None
        and link.generation < generation_could
    )
    if is_narrow or is_low:
        yield Finding(
            code=Code.NARROW_LINK,
            severity=Severity.SERIOUS,
            what=f"the link of {name} runs below what the GPU and its slot can do",
            evidence=(
                f"{address} runs at {_name(link.generation, link.width)}, and both ends "
                f"can do {_name(generation_could, width_could)}"
            ),
            advice=(
                "Seat the card and its riser or cable anew, look in the firmware's settings for "
                "the slot's speed and for lanes that it shares with other slots (bifurcation), and "
                "in the kernel's log for corrected PCIe errors."
            ),
        )
    is_small = [
        slot is not None and most is not None and slot < most
        for slot, most in (
            (link.slot_width, link.most_width),
            (link.slot_generation, link.most_generation),
        )
    ]
    if any(is_small):
        yield Finding(
            code=Code.SMALL_SLOT,
            severity=Severity.SERIOUS,
            what=f"the slot of {name} carries less than the GPU could",
            evidence=(
                f"{address} could do {_name(link.most_generation, link.most_width)}, and "
                f"the port above it {_name(link.slot_generation, link.slot_width)}"
            ),
            advice=(
                "Move the card to a slot with more lanes or a newer generation, if there is one. "
                "Plans that are made for this machine's measured link recompute more instead."
            ),
        )


def _slow(gpu: Gpu, link: PciLink) -> Iterator[Finding]:
    ceiling = ceiling_bytes_per_s(link.generation, link.width)
    if gpu.alone is None or ceiling is None or not link.is_of_copies:
        return
    slow = [
        f"{way} {_gb(rate)} GB/s ({100 * rate // ceiling} %)"
        for way, rate in (("out", gpu.alone.out_bytes_per_s), ("in", gpu.alone.in_bytes_per_s))
        if rate < ceiling * SLOW_SHARE
    ]
    if slow:
        yield Finding(
            code=Code.SLOW_LINK,
            severity=Severity.SERIOUS,
            what=f"GPU {gpu.index} copies far below what its link carries",
            evidence=(
                f"{' and '.join(slow)} of the {_gb(ceiling)} GB/s that "
                f"{_name(link.generation, link.width)} carries each way"
            ),
            advice=(
                "Look whether the process runs on the GPU's NUMA node, whether other programs copy "
                "or train now, and whether the host's memory has all its channels filled. In a "
                "virtual machine ask for one with the GPU's PCIe switch and its IOMMU passed "
                "through."
            ),
        )


def _shared(gpu: Gpu, alone: Rates, together: Rates) -> Iterator[Finding]:
    pairs = {
        "out": (alone.out_bytes_per_s, together.out_bytes_per_s),
        "in": (alone.in_bytes_per_s, together.in_bytes_per_s),
        "both ways": (alone.both_bytes_per_s, together.both_bytes_per_s),
    }
    shared = [
        f"{way} {_gb(all_rate)} of {_gb(rate)}"
        for way, (rate, all_rate) in pairs.items()
        if all_rate < rate * SHARED_SHARE
    ]
    if shared:
        yield Finding(
            code=Code.SHARED_UPLINK,
            severity=Severity.SERIOUS,
            what=f"GPU {gpu.index} shares its way to host memory with other GPUs",
            evidence=f"GB/s while all GPUs copy, of those alone: {', '.join(shared)}",
            advice=(
                "Plan with the lower figures, as a Machine written by --out has them, and "
                "`attach(budget=...)` under torchrun. With fewer ranks than GPUs, take GPUs that "
                "do not share (CUDA_VISIBLE_DEVICES; `nvidia-smi topo -m` shows the switches)."
            ),
        )


def _one_way(gpu: Gpu, alone: Rates) -> Iterator[Finding]:
    if alone.both_bytes_per_s < _best(alone) * BOTH_SHARE:
        yield Finding(
            code=Code.ONE_WAY_LINK,
            severity=Severity.NOTE,
            what=f"both directions of GPU {gpu.index} at once are hardly faster than one",
            evidence=(
                f"out {_gb(alone.out_bytes_per_s)}, in {_gb(alone.in_bytes_per_s)}, both together "
                f"{_gb(alone.both_bytes_per_s)} GB/s"
            ),
            advice="Nothing: a budget's plan knows the figure. Named plans do not.",
        )


def _far(gpu: Gpu, host: Host) -> Iterator[Finding]:
    node = None if gpu.pci is None else gpu.pci.numa_node
    if node is None:
        return
    near = host.node_cpus.get(node, frozenset())
    reasons: list[str] = []
    if near and host.cpus is not None and not near & host.cpus:
        reasons.append(f"none of the node's processors ({_list(near)})")
    if host.nodes is not None and node not in host.nodes:
        reasons.append("none of the node's memory")
    if reasons:
        yield Finding(
            code=Code.FAR_NODE,
            severity=Severity.SERIOUS,
            what=f"this process is kept away from the NUMA node of GPU {gpu.index}",
            evidence=(
                f"{gpu.pci_address} is on node {node}, and this process may use "
                f"{' and '.join(reasons)}; it may run on {_list(host.cpus or frozenset())}"
            ),
            advice=(
                f"Start the rank of this GPU there: `numactl --cpunodebind={node} "
                f"--preferred={node} COMMAND`, `--bind-to` of the launcher, or another cpuset of "
                "the container. Copies from the far node share the link between processors."
            ),
        )


def _best(rates: Rates) -> int:
    return max(rates.out_bytes_per_s, rates.in_bytes_per_s)


def _least(one: int | None, other: int | None) -> int | None:
    known = [number for number in (one, other) if number is not None]
    return min(known, default=None)


def _name(generation: int | None, width: int | None) -> str:
    return f"PCIe {generation or '?'} x{width or '?'}"


def _gb(bytes_per_s: int) -> str:
    return f"{bytes_per_s / 1e9:.1f}"


def _list(numbers: frozenset[int]) -> str:
    """Write numbers as the kernel does: 0-3,8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs) or "none"
