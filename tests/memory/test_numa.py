"""The node of a GPU, and the system call that asks for pages from it."""

import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbtide.memory.numa import MBIND_NUMBERS, MPOL_PREFERRED, find_node, prefer_node
from ebbtide.memory.pages import HostPages

GPU = "0000:c1:00.0"


def machine(root: Path, node: str | None, *, num_nodes: int = 2) -> Path:
    """Write what Linux says of a machine with one GPU."""
    for index in range(num_nodes):
        (root / f"sys/devices/system/node/node{index}").mkdir(parents=True)
    (root / "sys/devices/system/node/online").write_text("0-1\n")
    if node is not None:
        device = root / "sys/bus/pci/devices" / GPU
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return root


def test_the_node_is_that_of_the_pci_device(tmp_path: Path) -> None:
    root = machine(tmp_path, "1")
    assert find_node(GPU, root) == 1
    assert find_node(GPU.upper(), root) == 1
    assert find_node("0000:c2:00.0", root) is None


@pytest.mark.parametrize("node", ["-1", "", "none", None])
def test_an_unknown_node_is_none(node: str | None, tmp_path: Path) -> None:
    assert find_node(GPU, machine(tmp_path, node)) is None


def test_where_there_is_one_node_none_is_preferred(tmp_path: Path) -> None:
    assert find_node(GPU, machine(tmp_path, "0", num_nodes=1)) is None


def test_a_system_without_such_folders_has_no_nodes(tmp_path: Path) -> None:
    assert find_node(GPU, tmp_path) is None


class Calls:
    """Notes system calls, and answers all alike."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, *arguments: Any) -> int:
        number, address, num_bytes, mode, mask, num_bits, flags = arguments
        assert isinstance(mask, ctypes.Array)
        words = [int(word) for word in mask]
        self.seen.append((number, address, num_bytes, mode, *words, num_bits, flags))
        return self.answer


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the call")
@pytest.mark.parametrize(
    ("node", "mask", "num_bits"),
    [(0, [1], 65), (1, [2], 65), (63, [2**63], 65), (64, [0, 1], 129), (130, [0, 0, 4], 193)],
)
def test_one_node_is_preferred_and_not_demanded(
    node: int, mask: list[int], num_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    calls = Calls(0)
    assert prefer_node(0x7F0000000000, 2**33, node, call=calls)
    wanted = (235, 0x7F0000000000, 2**33, MPOL_PREFERRED, *mask, num_bits, 0)
    assert calls.seen == [wanted]


def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert not prefer_node(4096, 4096, 0, call=Calls(-1))


def test_an_unknown_architecture_makes_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    calls = Calls(0)
    assert not prefer_node(4096, 4096, 0, call=calls)
    assert calls.seen == []


@pytest.mark.skipif(
    platform.machine() not in MBIND_NUMBERS or not os.path.exists("/proc/self/numa_maps"),
    reason="this system tells of no memory policies",
)
def test_the_kernel_takes_node_0_and_refuses_one_that_is_not_there() -> None:
    pages = HostPages(4 * 2**20, numa_node=0)
    assert pages.wishes.numa_node == 0
    pages.memory[:4096] = b"\x01" * 4096
    policies = [
        line.split()[1]
        for line in Path("/proc/self/numa_maps").read_text().splitlines()
        if int(line.split()[0], 16) == pages.address
    ]
    assert policies == ["prefer:0"]
    assert HostPages(4096, numa_node=1000).wishes.numa_node is None
